"""
The document's change and its entries as one atomic write.

Where the document's `_id` is known the write also claims the document, if no relay holds it: then the writer
publishes what it has just written without asking again. A filter on other fields is resolved to an `_id`
first, because only an update by `_id` can tell "full" and "held by a relay" from "no such document".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DocumentTooLarge, DuplicateKeyError, OperationFailure, WriteError
from pymongo.results import UpdateResult

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox import pending
from mongo_celery.outbox.entries import FIELD, Entry

Document = dict[str, Any]

_ROUNDS = 10
"""How often a document may change between being found and being written before the outcome is given up."""

_TOO_LARGE = {10334, 17419, 17420}  # BSONObjectTooLarge, and the updates' own numbers
_BAD_VALUE = 2  # what an insert says to the same
_OPTIONS = ("array_filters", "collation", "hint", "let", "comment")


NOT_PINNED = object()
"""No `_id` is known; `None` may be somebody's."""


@dataclass(frozen=True, slots=True)
class Written:
    """
    A write that was acknowledged by a majority.

    Attributes:
        document_id: `_id` of the document; None where none matched.
        matched: whether a document was there before.
        upserted: whether the write created the document.
        events: what is pending in it now, if it is claimed by the writer.
        owner: of the claim.
        claimed_at: the monotonic clock before the claim was sent.
        document: what the user asked to be returned.
    """

    document_id: object = None
    matched: bool = False
    upserted: bool = False
    events: Sequence[Mapping[str, Any]] | None = None
    owner: ObjectId | None = None
    claimed_at: float = 0.0
    document: Any = None

    def result(self) -> UpdateResult:
        """As PyMongo's `update_one` gives it; an update that adds entries always modifies."""
        raw: Document = {"n": int(self.matched or self.upserted), "nModified": int(self.matched), "ok": 1.0}
        if self.upserted:
            raw |= {"upserted": self.document_id, "updatedExisting": False}
        else:
            raw["updatedExisting"] = self.matched
        return UpdateResult(raw, acknowledged=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """
    What the user wants done to one document.

    Attributes:
        filter: which document.
        update: operators or a pipeline; None for a replacement.
        replacement: the new document; None for an update.
        upsert: whether to create it.
        sort: which one if several match.
        projection: of the document that is returned; only with `return_document`.
        return_document: whether the user wants it before or after the change; None for neither.
        options: further options of PyMongo's `find_one_and_update`.
    """

    filter: Mapping[str, Any]
    update: pending.Update | None = None
    replacement: Mapping[str, Any] | None = None
    upsert: bool = False
    sort: Any = None
    projection: Any = None
    return_document: bool | None = None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        unknown = set(self.options) - set(_OPTIONS)
        if unknown:
            raise TypeError(f"unexpected options {sorted(unknown)}; an outbox's writes take {', '.join(_OPTIONS)}.")

    def with_entries(self, entries: Sequence[Entry], claim: tuple[ObjectId, float] | None, new_id: object) -> Any:
        """The change and the entries as one update."""
        if self.replacement is not None:
            return pending.replacement_with_entries(self.replacement, entries, claim, new_id)
        assert self.update is not None
        return pending.with_entries(self.update, entries, claim)


class Writer:
    """
    Writes to one collection.

    Args:
        collection: the user's, with its own codec options, and majority writes.
        max_pending: how many entries a document may hold.
        claim_ttl: seconds for which the writer holds a document to deliver what it wrote.
    """

    def __init__(self, collection: Collection[Any], *, max_pending: int, claim_ttl: float) -> None:
        self.collection = collection
        self._max_pending = max_pending
        self._claim_ttl = claim_ttl

    def change(
        self, change: Change, entries: Sequence[Entry], *, session: ClientSession | None, claim: bool
    ) -> Written:
        """
        Write a change and its entries to the one document that the filter finds.

        Args:
            change: what to do.
            entries: at least one.
            session: of the user; inside a transaction nothing is claimed.
            claim: whether to claim the document for delivery.

        Raises:
            OutboxRefusedError: too many entries would wait, or the document would be larger than 16 MB.
        """
        self._refuse_more_than_ever(entries)
        with size_errors(self.collection.full_name):
            for _ in range(_ROUNDS):
                document_id = self._find(change, session)
                if document_id is NOT_PINNED:
                    if not change.upsert:
                        return Written()
                    try:
                        return self._upsert(change, entries, session)
                    except DuplicateKeyError as error:
                        if not _is_own_id(error):
                            raise
                        continue  # somebody else created it meanwhile
                written = self._update(change, document_id, entries, session=session, claim=claim)
                if written is not None:
                    return written
                self._refuse_full(document_id, entries, session)
        raise OutboxRefusedError(
            f"a document of {self.collection.full_name} changed {_ROUNDS} times between being found and being "
            "written; use a filter on _id, or repeat the write.",
        )

    def _find(self, change: Change, session: ClientSession | None) -> object:
        """The `_id` of the document that the filter means; from the filter itself where it says so."""
        pinned = pinned_id(change.filter)
        if pinned is not NOT_PINNED and not change.upsert:
            return pinned
        found = self.collection.find_one(
            change.filter,
            {"_id": 1},
            sort=change.sort,
            session=session,
            **{name: change.options[name] for name in ("collation", "hint", "let") if name in change.options},
        )
        return NOT_PINNED if found is None else found["_id"]

    def _update(
        self,
        change: Change,
        document_id: object,
        entries: Sequence[Entry],
        *,
        session: ClientSession | None,
        claim: bool,
    ) -> Written | None:
        """Update by `_id`; None where the filter no longer matches it, or it is full."""
        room = pending.room_for(entries, self._max_pending)
        if claim:
            owner, now = ObjectId(), time.monotonic()
            free = [room, {"$expr": {"$and": [pending.FREE, pending.DUE]}}]
            document = self._write(change, document_id, entries, free, (owner, self._claim_ttl), session)
            if document is not None:
                return Written(document_id, True, False, document[FIELD]["events"], owner, now)
        document = self._write(change, document_id, entries, [room], None, session)
        if document is None:
            gone = pinned_id(change.filter) is not NOT_PINNED and not self._there(change, session)
            return Written() if gone else None
        return Written(document_id, matched=True, document=document)

    def _write(
        self,
        change: Change,
        document_id: object,
        entries: Sequence[Entry],
        conditions: Sequence[Document],
        claim: tuple[ObjectId, float] | None,
        session: ClientSession | None,
    ) -> Any:
        asked = change.return_document is not None
        return self.collection.find_one_and_update(
            guarded(change.filter, document_id, conditions),
            change.with_entries(entries, claim, document_id),
            projection=change.projection if asked else {FIELD: 1},
            return_document=bool(change.return_document) if asked else ReturnDocument.AFTER,
            session=session,
            **change.options,
        )

    def _upsert(self, change: Change, entries: Sequence[Entry], session: ClientSession | None) -> Written:
        """Create the document; if another writer is faster, this is an update like any other."""
        pinned = pinned_id(change.filter)
        new_id = ObjectId() if pinned is NOT_PINNED else pinned
        update = change.with_entries(entries, None, new_id)
        if pinned is NOT_PINNED and change.replacement is None:
            if isinstance(update, dict):
                new_id = update.get("$set", {}).get("_id") or update.setdefault("$setOnInsert", {}).setdefault(
                    "_id", new_id
                )
            else:
                update = [*update, {"$set": {"_id": {"$ifNull": ["$_id", {"$literal": new_id}]}}}]
        before = self.collection.find_one_and_update(
            change.filter,
            update,
            projection=change.projection if change.return_document is not None else {"_id": 1},
            upsert=True,
            session=session,
            return_document=bool(change.return_document),
            **change.options,
        )
        if change.return_document is not None:
            return Written(new_id, upserted=True, document=before)
        return Written(new_id, upserted=True) if before is None else Written(before["_id"], matched=True)

    def insertion(
        self, document: Mapping[str, Any], entries: Sequence[Entry], *, claim: bool
    ) -> tuple[Document, Written]:
        """A new document with its entries, and how it will stand when it has been inserted."""
        self._refuse_more_than_ever(entries)
        owner, now = ObjectId() if claim else pending.NOBODY, time.monotonic()
        field = pending.new_field(entries, owner, self._claim_ttl, datetime.now(UTC))
        whole = {**document, FIELD: field}
        if not claim:
            return whole, Written(document["_id"], matched=True)
        return whole, Written(document["_id"], matched=True, events=field["events"], owner=owner, claimed_at=now)

    def refuse_full_documents(self, added: Mapping[Any, int], session: ClientSession | None) -> None:
        """
        Look whether documents have room for so many more entries.

        Raises:
            OutboxRefusedError: one of them has not.
        """
        found = self.collection.find({"_id": {"$in": list(added)}}, {f"{FIELD}.count": 1}, session=session)
        counts = {document["_id"]: document.get(FIELD, {}).get("count", 0) for document in found}
        for document_id, count in added.items():
            self._refuse_beyond(document_id, counts.get(document_id, 0), count)

    def _there(self, change: Change, session: ClientSession | None) -> bool:
        return self.collection.find_one(change.filter, {"_id": 1}, session=session) is not None

    def _refuse_more_than_ever(self, entries: Sequence[Entry]) -> None:
        if len(entries) > self._max_pending:
            raise OutboxRefusedError(
                f"{len(entries)} entries are more than one document may hold: max_pending={self._max_pending}.",
            )

    def _refuse_full(self, document_id: object, entries: Sequence[Entry], session: ClientSession | None) -> None:
        document = self.collection.find_one({"_id": document_id}, {f"{FIELD}.count": 1}, session=session)
        self._refuse_beyond(document_id, (document or {}).get(FIELD, {}).get("count", 0), len(entries))

    def _refuse_beyond(self, document_id: object, count: int, added: int) -> None:
        if count + added > self._max_pending:
            raise OutboxRefusedError(
                f"document {document_id!r} of {self.collection.full_name} has {count} pending entries, and "
                f"max_pending={self._max_pending}; nothing was written. Look why they are not delivered: "
                "celery -A app outbox status.",
                document=document_id,
                pending=count,
            )


def pinned_id(filter: Mapping[str, Any]) -> object:  # noqa: A002 - PyMongo's word
    """The `_id` that a filter demands by equality, or `NOT_PINNED`."""
    if "_id" not in filter:
        return NOT_PINNED
    wanted = filter["_id"]
    if isinstance(wanted, Mapping) and any(str(key).startswith("$") for key in wanted):
        return wanted["$eq"] if set(wanted) == {"$eq"} else NOT_PINNED
    return wanted


def guarded(filter: Mapping[str, Any], document_id: object, conditions: Sequence[Document]) -> Document:  # noqa: A002
    """The user's filter, narrowed to one document and further conditions; array filters for `$` stay on top."""
    extra = [*conditions]
    if "_id" in filter and pinned_id(filter) is NOT_PINNED:
        extra.append({"_id": filter["_id"]})
    return {**filter, "_id": document_id, "$and": [*filter.get("$and", ()), *extra]}


class size_errors:  # noqa: N801 - reads as a phrase
    """Say in our words that a document would be larger than 16 MB."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        code = error.code if isinstance(error, (OperationFailure, WriteError)) else None
        inserted = code == _BAD_VALUE and "too large" in str(error)
        if isinstance(error, DocumentTooLarge) or code in _TOO_LARGE or inserted:
            raise OutboxRefusedError(
                f"the document with its entries would be larger than 16 MB; nothing was written to {self._namespace}. "
                "Pass ids instead of values to the tasks, or keep less in the document.",
            ) from error


def _is_own_id(error: DuplicateKeyError) -> bool:
    return set((error.details or {}).get("keyPattern", {})) == {"_id"}
