"""
What the user writes to a document, and its entries, as one atomic write.

Where the document's `_id` is known the write also claims the document, if no relay holds it: then the writer
publishes what it has just written without asking again. A filter on other fields finds its document by itself, as
PyMongo's does; with `sort` or `upsert` it is resolved to an `_id` first, because only an update by `_id` can tell
"full" and "held by a relay" from "no such document".
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, id_key
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_duplicate_id, is_too_large
from mongo_celery.mongo.writes import narrowed
from mongo_celery.outbox import pending
from mongo_celery.outbox.document_write import DocumentWrite, Written, names_id
from mongo_celery.outbox.entries import FIELD, Entry

Document = dict[str, Any]

_FIELD = pending.PendingField()

_SECONDS = 10.0
"""How long a document may keep changing between being found and being written before the outcome is given up."""

_PAUSES = Pauses(first=0.02, longest=0.02, jitter=1.0)
_FINDING = ("collation", "hint", "let")
"""Options of a write that also say which document it means."""


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
        # Read as updates see it: a document that a majority does not have yet is there all the same.
        self._latest = collection.with_options(read_concern=ReadConcern("local"))
        self._max_pending = max_pending
        self._claim_ttl = claim_ttl

    def write(
        self, write: DocumentWrite, entries: Sequence[Entry], *, session: ClientSession | None, claim: bool
    ) -> Written:
        """
        Write to the one document that the filter finds.

        Args:
            write: what to do.
            entries: at least one.
            session: of the user; inside a transaction nothing is claimed.
            claim: whether to claim the document for delivery.

        Raises:
            OutboxRefusedError: too many entries would wait, or the document would be larger than 16 MB.
        """
        self._refuse_more_than_ever(entries)
        deadline, upserts = time.monotonic() + _SECONDS, 0
        with _size_errors(self.collection.full_name):
            while time.monotonic() < deadline:
                if write.pinned is NO_ID and not write.upsert and write.sort is None and write.shows_id:
                    written = self._update_any(write, entries, session)
                else:
                    document_id = self._find(write, session)
                    if document_id is not NO_ID:
                        written = self._update(write, document_id, entries, session=session, claim=claim)
                    elif not write.upsert:
                        return Written()
                    else:
                        upserts += 1
                        written = self._upsert_unless_there(write, entries, session, again=upserts == 1)
                if written is not None:
                    return written
                time.sleep(_PAUSES.nth())
        raise OutboxRefusedError(
            f"a document of {self.collection.full_name} kept changing for {_SECONDS:.0f} s between being found and "
            "being written; use a filter on _id, or repeat the write.",
        )

    def _find(self, write: DocumentWrite, session: ClientSession | None) -> object:
        """The `_id` of the document that the filter means; from the filter itself where it says so."""
        if write.pinned is not NO_ID and not write.upsert:
            return write.pinned
        found = self._latest.find_one(
            write.filter,
            {"_id": 1},
            sort=write.sort,
            session=session,
            **{name: write.options[name] for name in _FINDING if name in write.options},
        )
        return NO_ID if found is None else found["_id"]

    def _update(
        self,
        write: DocumentWrite,
        document_id: object,
        entries: Sequence[Entry],
        *,
        session: ClientSession | None,
        claim: bool,
    ) -> Written | None:
        """Update by `_id`; None where the filter no longer matches it."""
        room = _FIELD.room_for(len(entries), self._max_pending)
        if claim:
            owner, now = ObjectId(), time.monotonic()
            free = [room, {"$expr": {"$and": [pending.FREE, pending.DUE]}}]
            document = self._update_by_id(write, document_id, entries, free, (owner, self._claim_ttl), session)
            if document is not None:
                return Written(document["_id"], True, False, document[FIELD]["events"], owner, now)
        document = self._update_by_id(write, document_id, entries, [room], None, session)
        if document is not None:
            return Written(document_id, matched=True, document=document)
        pinned = write.pinned is not NO_ID and not write.upsert  # an upsert looks again, and then creates it
        if pinned and self._matching(write, session) is NO_ID:
            return Written()
        self._refuse_full(document_id, entries, session)
        return None

    def _update_any(
        self, write: DocumentWrite, entries: Sequence[Entry], session: ClientSession | None
    ) -> Written | None:
        """Update whichever document the filter finds; a full one is passed over for another."""
        room = _FIELD.room_for(len(entries), self._max_pending)
        asked = write.return_document is not None
        document = self.collection.find_one_and_update(
            {**write.filter, "$and": [*write.filter.get("$and", ()), room]},
            write.with_entries(entries, None),
            projection=write.projection if asked else {"_id": 1},
            return_document=bool(write.return_document) if asked else ReturnDocument.AFTER,
            session=session,
            **write.options,
        )
        if document is not None:
            return Written(document["_id"], matched=True, document=document)
        document_id = self._matching(write, session)
        if document_id is NO_ID:
            return Written()
        self._refuse_full(document_id, entries, session)
        return None

    def _update_by_id(
        self,
        write: DocumentWrite,
        document_id: object,
        entries: Sequence[Entry],
        conditions: Sequence[Document],
        claim: tuple[ObjectId, float] | None,
        session: ClientSession | None,
    ) -> Any:
        asked = write.return_document is not None
        return self.collection.find_one_and_update(
            narrowed(write.filter, document_id).where(*conditions),
            write.with_entries(entries, claim),
            projection=write.projection if asked else {FIELD: 1},
            return_document=bool(write.return_document) if asked else ReturnDocument.AFTER,
            session=session,
            **write.options,
        )

    def _upsert_unless_there(
        self, write: DocumentWrite, entries: Sequence[Entry], session: ClientSession | None, *, again: bool
    ) -> Written | None:
        """Create the document; None if somebody else has created it meanwhile, and it may be looked for again."""
        try:
            return self._upsert(write, entries, session)
        except DuplicateKeyError as error:
            # Twice: it is there, and the filter does not match it. PyMongo says no more than this either.
            if not again or not is_duplicate_id(error) or (session is not None and session.in_transaction):
                raise
            return None

    def _upsert(self, write: DocumentWrite, entries: Sequence[Entry], session: ClientSession | None) -> Written:
        """Create the document; if another writer is faster, this is an update like any other."""
        new_id = ObjectId()
        update = write.with_entries(entries, None)
        known = write.pinned
        if known is NO_ID and write.replacement is None and not names_id(write):
            known = new_id
            if isinstance(update, dict):
                update.setdefault("$setOnInsert", {})["_id"] = new_id
            else:
                update = [*update, {"$set": {"_id": {"$ifNull": ["$_id", {"$literal": new_id}]}}}]
        if write.return_document is None:
            result = self.collection.update_one(write.filter, update, upsert=True, session=session, **write.options)
            if "upserted" in (result.raw_result or {}):
                return Written(result.upserted_id, upserted=True)
            return Written(write.pinned, matched=True)
        document = self.collection.find_one_and_update(
            write.filter,
            update,
            projection=write.projection,
            upsert=True,
            session=session,
            return_document=bool(write.return_document),
            **write.options,
        )
        document_id = known if document is None or not write.shows_id else document["_id"]
        return Written(document_id, upserted=True, document=document)

    def insert(
        self,
        document: Mapping[str, Any],
        entries: Sequence[Entry],
        *,
        session: ClientSession | None,
        claim: bool,
        **options: Any,
    ) -> Written:
        """Insert a new document with its entries; errors as of `write`."""
        whole, written = self.insertion(document, entries, claim=claim)
        with _size_errors(self.collection.full_name):
            self.collection.insert_one(whole, session=session, **options)
        return written

    def insertion(
        self, document: Mapping[str, Any], entries: Sequence[Entry], *, claim: bool
    ) -> tuple[Document, Written]:
        """A new document with its entries, and how it will stand when it has been inserted."""
        self._refuse_more_than_ever(entries)
        owner, now = ObjectId(), time.monotonic()
        field = _FIELD.new_field(entries, (owner, self._claim_ttl) if claim else None, datetime.now(UTC))
        whole = {**document, FIELD: field}
        if not claim:
            return whole, Written(document["_id"], matched=True)
        return whole, Written(document["_id"], matched=True, events=field["events"], owner=owner, claimed_at=now)

    def refuse_full_documents(
        self, added: Sequence[tuple[Any, Mapping[str, Any] | None, int]], session: ClientSession | None
    ) -> None:
        """
        Look whether documents have room for more entries.

        Args:
            added: an `_id`, or the filter where the `_id` is not known, and how many entries it is to bring.
            session: of the user.

        Raises:
            OutboxRefusedError: one of them has not.
        """
        shown = {f"{FIELD}.count": 1}
        codec = self.collection.codec_options
        sums: dict[Hashable, int] = {}
        there: dict[Hashable, tuple[Any, int]] = {}
        for document_id, condition, count in added:
            if condition is not None:
                found = self._latest.find_one(condition, shown, session=session)
                if found is None:
                    continue
                document_id = found["_id"]  # noqa: PLW2901
                there[id_key(document_id, codec)] = document_id, _FIELD.count_in(found)
            key = id_key(document_id, codec)
            sums[key] = sums.get(key, 0) + count
        ids = [document_id for document_id, condition, _ in added if condition is None]
        for found in self._latest.find({"_id": {"$in": ids}}, shown, session=session) if ids else ():
            there[id_key(found["_id"], codec)] = found["_id"], _FIELD.count_in(found)
        for key, (document_id, count) in there.items():
            self._refuse_beyond(document_id, count, sums.get(key, 0))

    def _matching(self, write: DocumentWrite, session: ClientSession | None) -> object:
        alike = {name: write.options[name] for name in _FINDING if name in write.options}
        found = self._latest.find_one(write.filter, {"_id": 1}, session=session, **alike)
        return NO_ID if found is None else found["_id"]

    def _refuse_more_than_ever(self, entries: Sequence[Entry]) -> None:
        if len(entries) > self._max_pending:
            raise OutboxRefusedError(
                f"{len(entries)} entries are more than one document may hold: max_pending={self._max_pending}.",
            )

    def _refuse_full(self, document_id: object, entries: Sequence[Entry], session: ClientSession | None) -> None:
        document = self._latest.find_one({"_id": document_id}, {f"{FIELD}.count": 1}, session=session)
        self._refuse_beyond(document_id, _FIELD.count_in(document or {}), len(entries))

    def _refuse_beyond(self, document_id: object, count: int, added: int) -> None:
        if count + added > self._max_pending:
            raise OutboxRefusedError(
                f"document {document_id!r} of {self.collection.full_name} has {count} pending entries, and "
                f"max_pending={self._max_pending}; nothing was written. Look why they are not delivered: "
                "celery -A app outbox status.",
                document=document_id,
                pending=count,
            )


@contextmanager
def _size_errors(namespace: str) -> Iterator[None]:
    """Say in our words that a document would be larger than 16 MB."""
    try:
        yield
    except Exception as error:
        if not is_too_large(error):
            raise
        raise OutboxRefusedError(
            f"the document with its entries would be larger than 16 MB; nothing was written to {namespace}. "
            "Pass ids instead of values to the tasks, or keep less in the document.",
        ) from error
