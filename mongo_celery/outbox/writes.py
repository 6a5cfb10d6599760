"""
What the user writes to a document, and its entries, as one atomic write.

Where the filter pins the document's `_id`, the update has the condition that there is room. With another filter
PyMongo's own choice of a document stands: no condition of ours may lead it to another, or make an upsert create a
second one. So an upsert is resolved to an `_id` first, and where `sort` chooses, the chosen one is looked at before the
write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from bson import ObjectId
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, OperationFailure
from pymongo.read_concern import ReadConcern

from mongo_celery.command_line import ANY_APP
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, id_key
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import Code, is_duplicate_id, is_too_large
from mongo_celery.mongo.writes import build_target
from mongo_celery.outbox.document_write import DocumentWrite, Written
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import PendingField

Document = dict[str, Any]
MakeEntries = Callable[[Any], Sequence[Entry]]

_SECONDS = 10.0
"""How long a document may keep changing between being found and being written before the outcome is given up."""

_CONDITIONS_MAX = 100
"""Filters of a bulk write that are looked at together."""

_PAUSES = Pauses(first=0.02, longest=0.02, jitter=1.0)
_FINDING = ("collation", "hint", "let")
"""Options of a write that also say which document it means."""


@dataclass(frozen=True, slots=True)
class Added:
    """
    Entries that a request of a bulk write is to bring to one document.

    Attributes:
        count: how many.
        document_id: `_id` of the document, or `NO_ID`.
        filter: which document, where its `_id` is not known.
        found_by: what else says which.
    """

    count: int
    document_id: Any = NO_ID
    filter: Mapping[str, Any] = dataclass_field(default_factory=dict)
    found_by: Mapping[str, Any] = dataclass_field(default_factory=dict)


class Writer:
    """
    Writes to one collection.

    Args:
        collection: the user's, with its own codec options, and majority writes.
        field: in which entries wait.
        max_pending: how many entries a document may hold.
    """

    def __init__(self, collection: Collection[Any], field: PendingField, *, max_pending: int) -> None:
        self.collection = collection
        self.field = field
        # Read as updates see it: a document that a majority does not have yet is there all the same.
        self._latest = collection.with_options(read_concern=ReadConcern("local"))
        self._max_pending = max_pending

    def write(self, write: DocumentWrite, entries: Sequence[Entry], *, session: ClientSession | None) -> Written:
        """
        Write to the one document that the filter finds.

        Args:
            write: what to do.
            entries: at least one.
            session: of the user.

        Raises:
            OutboxRefusedError: too many entries would wait, or the document would be larger than 16 MB.
        """
        self.refuse_more_than_ever(entries)
        if write.upsert:
            return self._upserted(write, lambda _: entries, None, session)
        with explained_refusals(self.collection.full_name, self.field.name):
            if write.pinned is not NO_ID:
                written = self._update(write, write.pinned, entries, session)
                return Written() if written is None else written
            if write.sort is not None:
                self._refuse_full_first(write, entries, session)
                return self._update_any(write, entries, write.filter, session)
            return self._update_one_with_room(write, entries, session)

    def upsert_of_new_id(self, write: DocumentWrite, make: MakeEntries, *, session: ClientSession | None) -> Written:
        """
        An upsert whose entries are made of the `_id`, where neither filter nor update says anything of it.

        The `_id` of a document that is created is chosen here. So the creation only ever inserts: it cannot end as an
        update of a document that somebody else has created, with entries that name another.

        Args:
            write: what to do.
            make: gives the entries for an `_id`.
            session: of the user.

        Raises:
            OutboxRefusedError: as of `write`.
        """
        return self._upserted(write, make, ObjectId(), session)

    def _upserted(
        self,
        write: DocumentWrite,
        make: MakeEntries,
        new_id: ObjectId | None,
        session: ClientSession | None,
    ) -> Written:
        deadline, creations = time.monotonic() + _SECONDS, 0
        with explained_refusals(self.collection.full_name, self.field.name):
            while time.monotonic() < deadline:
                document_id = self._find(write, session)
                if document_id is not NO_ID:
                    written = self._update(write, document_id, make(document_id), session)
                else:
                    creations += 1
                    entries = make(new_id)
                    self.refuse_more_than_ever(entries)
                    written = self._create_unless_there(write, entries, new_id, session, again=creations == 1)
                if written is not None:
                    return written
                time.sleep(_PAUSES.nth())
        raise self._kept_changing()

    def _find(self, write: DocumentWrite, session: ClientSession | None) -> Any:
        """The `_id` of the document that the filter means, as an update would see it."""
        found = self._found(write, {"_id": 1}, session)
        return NO_ID if found is None else found["_id"]

    def _found(self, write: DocumentWrite, shown: Document, session: ClientSession | None) -> Any:
        return self._latest.find_one(write.filter, shown, sort=write.sort, session=session, **_alike(write))

    def _update(
        self,
        write: DocumentWrite,
        document_id: object,
        entries: Sequence[Entry],
        session: ClientSession | None,
    ) -> Written | None:
        """Update by `_id`; None where the filter does not match it."""
        target, deadline = build_target(write.filter, document_id), time.monotonic() + _SECONDS
        room = self.field.room_for(len(entries), self._max_pending)
        while time.monotonic() < deadline:
            document = self._updated(write, target.where(room), entries, session)
            if document is not None:
                return Written(document_id, matched=True, document=document)
            there = {"_id": {"$eq": document_id}, **target.rest}
            if self._latest.find_one(there, {"_id": 1}, session=session, **_alike(write)) is None:
                return None
            self._refuse_full(document_id, entries, session)
        raise self._kept_changing()

    def _updated(
        self,
        write: DocumentWrite,
        where: Mapping[str, Any],
        entries: Sequence[Entry],
        session: ClientSession | None,
    ) -> Any:
        """The document that the user asked for, or anything if he did not; None where there was none to update."""
        update = write.with_entries(self.field, entries)
        if write.return_document is None:
            result = self.collection.update_one(where, update, session=session, **write.options)
            return result if result.matched_count else None
        return self.collection.find_one_and_update(
            where,
            update,
            projection=write.projection,
            return_document=bool(write.return_document),
            session=session,
            **write.options,
        )

    def _update_one_with_room(
        self, write: DocumentWrite, entries: Sequence[Entry], session: ClientSession | None
    ) -> Written:
        """Update whichever document the filter finds; a full one is passed over for another."""
        room, deadline = self.field.room_for(len(entries), self._max_pending), time.monotonic() + _SECONDS
        where = {**write.filter, "$and": [*write.filter.get("$and", ()), room]}
        while time.monotonic() < deadline:
            written = self._update_any(write, entries, where, session)
            if written.matched:
                return written
            document_id = self._find(write, session)
            if document_id is NO_ID:
                return Written()
            self._refuse_full(document_id, entries, session)
            time.sleep(_PAUSES.nth())
        raise self._kept_changing()

    def _update_any(
        self,
        write: DocumentWrite,
        entries: Sequence[Entry],
        where: Mapping[str, Any],
        session: ClientSession | None,
    ) -> Written:
        """Update the document that the server chooses, and learn which it was."""
        asked = write.return_document is not None
        document = self.collection.find_one_and_update(
            where,
            write.with_entries(self.field, entries),
            projection=write.projection if asked else {"_id": 1},
            sort=write.sort,
            return_document=bool(write.return_document),
            session=session,
            **write.options,
        )
        if document is None:
            return Written()
        return Written(document["_id"] if write.shows_id else NO_ID, matched=True, document=document)

    def _create_unless_there(
        self,
        write: DocumentWrite,
        entries: Sequence[Entry],
        new_id: ObjectId | None,
        session: ClientSession | None,
        *,
        again: bool,
    ) -> Written | None:
        """Create the document; None if somebody else has created it meanwhile, and it may be looked for again."""
        try:
            return self._create(write, entries, new_id, session)
        except DuplicateKeyError as error:
            # Twice: it is there, and the filter does not match it. PyMongo says no more than this either.
            there = is_duplicate_id(error) or new_id is not None
            if not again or not there or (session is not None and session.in_transaction):
                raise
            return None

    def _create(
        self, write: DocumentWrite, entries: Sequence[Entry], new_id: ObjectId | None, session: ClientSession | None
    ) -> Written:
        """The upsert of a document that was not there; without an `_id` of ours it may yet be an update."""
        where, update = write.filter, write.with_entries(self.field, entries)
        if new_id is not None:
            where = {**where, "$nor": [*where.get("$nor", ()), {}]}
            update = _creating(update, new_id)
        if write.return_document is None:
            result = self.collection.update_one(where, update, upsert=True, session=session, **write.options)
            if "upserted" in (result.raw_result or {}):
                return Written(result.upserted_id, upserted=True)
            return Written(write.pinned, matched=True)
        document = self.collection.find_one_and_update(
            where,
            update,
            projection=write.projection,
            upsert=True,
            session=session,
            return_document=bool(write.return_document),
            **write.options,
        )
        known = write.pinned if new_id is None else new_id
        document_id = document["_id"] if document is not None and write.shows_id else known
        return Written(document_id, upserted=True, document=document)

    def insert(
        self, document: Mapping[str, Any], entries: Sequence[Entry], *, session: ClientSession | None, **options: Any
    ) -> Written:
        """Insert a new document with its entries; errors as of `write`."""
        self.refuse_more_than_ever(entries)
        whole = {**document, self.field.name: self.field.new_field(entries)}
        with explained_refusals(self.collection.full_name, self.field.name):
            self.collection.insert_one(whole, session=session, **options)
        return Written(document["_id"], matched=True)

    def refuse_full_documents(self, added: Sequence[Added], session: ClientSession | None) -> None:
        """
        Look whether documents have room for more entries.

        Args:
            added: what each request of a bulk write is to bring.
            session: of the user.

        Raises:
            OutboxRefusedError: one of them has not.
        """
        codec = self.collection.codec_options
        sums: dict[Hashable, int] = {}
        ids: dict[Hashable, Any] = {}
        looks = self._may_fill(added, session)
        for each in added:
            document_id = each.document_id
            if document_id is NO_ID:
                found = (
                    self._latest.find_one(each.filter, {"_id": 1}, session=session, **each.found_by) if looks else None
                )
                if found is None:
                    continue
                document_id = found["_id"]
            key = id_key(document_id, codec)
            sums[key], ids[key] = sums.get(key, 0) + each.count, document_id
        if not ids:
            return
        # Those with room for what one of them gets at most have room: hardly any is ever read.
        nearly = {self.field.count: {"$gt": self._max_pending - max(sums.values(), default=0)}}
        shown = {self.field.count: 1}
        for found in self._latest.find({"_id": {"$in": [*ids.values()]}, **nearly}, shown, session=session):
            key = id_key(found["_id"], codec)
            self._refuse_beyond(found["_id"], self.field.count_in(found), sums.get(key, 0))
        for key, count in sums.items():
            self._refuse_beyond(ids[key], 0, count)

    def _may_fill(self, added: Sequence[Added], session: ClientSession | None) -> bool:
        """
        Whether a document that a filter means could become too full by all entries together.

        Hardly any ever could: one look through the outbox's index, in place of one for each filter.
        """
        conditions = [each for each in added if each.document_id is NO_ID]
        left = self._max_pending - sum(each.count for each in added)
        if left < 0 or any(_stands_alone(each.filter) for each in conditions):
            return bool(conditions)
        alike: list[tuple[Document, list[Mapping[str, Any]]]] = []
        for each in conditions:
            options = {name: each.found_by[name] for name in ("collation", "let") if name in each.found_by}
            if not alike or alike[-1][0] != options or len(alike[-1][1]) == _CONDITIONS_MAX:
                alike.append((options, []))
            alike[-1][1].append(each.filter)
        for options, filters in alike:
            where = {self.field.count: {"$gt": left}, "$or": filters}
            if self._latest.find_one(where, {"_id": 1}, session=session, **options) is not None:
                return True
        return False

    def refuse_full_among(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        count: int,
        session: ClientSession | None,
        **options: Any,
    ) -> None:
        """
        Look whether all documents of a filter have room for so many entries.

        Raises:
            OutboxRefusedError: one of them has not.
        """
        full = {self.field.count: {"$gt": self._max_pending - count}}
        where = {**filter, "$and": [*filter.get("$and", ()), full]}
        found = self._latest.find_one(where, {self.field.count: 1}, session=session, **options)
        if found is not None:
            self._refuse_beyond(found["_id"], self.field.count_in(found), count)

    def refuse_more_than_ever(self, entries: Sequence[Entry]) -> None:
        """Refuse more entries than any document may hold."""
        if len(entries) > self._max_pending:
            raise OutboxRefusedError(
                f"{len(entries)} entries are more than one document may hold: max_pending={self._max_pending}.",
            )

    def _refuse_full_first(self, write: DocumentWrite, entries: Sequence[Entry], session: ClientSession | None) -> None:
        """Refuse where the document that the user's order puts first has no room; a moment later it may be another."""
        found = self._found(write, {self.field.count: 1}, session)
        if found is not None:
            self._refuse_beyond(found["_id"], self.field.count_in(found), len(entries))

    def _refuse_full(self, document_id: object, entries: Sequence[Entry], session: ClientSession | None) -> None:
        document = self._latest.find_one({"_id": document_id}, {self.field.count: 1}, session=session)
        self._refuse_beyond(document_id, self.field.count_in(document or {}), len(entries))

    def _refuse_beyond(self, document_id: object, count: int, added: int) -> None:
        if count + added > self._max_pending:
            raise OutboxRefusedError(
                f"document {document_id!r} of {self.collection.full_name} has {count} pending entries, and "
                f"max_pending={self._max_pending}; nothing was written. Look why they are not delivered: "
                f"{ANY_APP.celery('outbox', 'status')}.",
                document=document_id,
                pending=count,
            )

    def _kept_changing(self) -> OutboxRefusedError:
        return OutboxRefusedError(
            f"a document of {self.collection.full_name} kept changing for {_SECONDS:.0f} s between being found and "
            "being written; use a filter on _id, or repeat the write.",
        )


def _stands_alone(condition: Mapping[str, Any]) -> bool:
    """Whether a filter may contain what the server refuses beside others: a text search, or a distance."""
    return any(word in repr(condition) for word in ("$text", "$near"))


def _alike(write: DocumentWrite) -> dict[str, Any]:
    return {name: write.options[name] for name in _FINDING if name in write.options}


def _creating(update: Any, new_id: ObjectId) -> Any:
    """The update of an upsert that is to create a document of this `_id`."""
    if isinstance(update, Mapping):
        return {**update, "$setOnInsert": {**update.get("$setOnInsert", {}), "_id": new_id}}
    return [*update, {"$set": {"_id": new_id}}]


@contextmanager
def explained_refusals(namespace: str, field: str, otherwise: str = "nothing was written") -> Iterator[None]:
    """Say in our words why the server refuses a document: larger than 16 MB, or with a value where entries belong."""
    try:
        yield
    except Exception as error:
        if is_too_large(error):
            raise OutboxRefusedError(
                f"the document with its entries would be larger than 16 MB; {otherwise} to {namespace}. Pass ids "
                "instead of values to the tasks, or keep less in the document.",
            ) from error
        if isinstance(error, OperationFailure) and error.code == Code.PathNotViable and field in str(error):
            raise OutboxRefusedError(
                f"{field} of a document of {namespace} is no document, as where an ODM has written null; {otherwise}. "
                f'Remove it there: update_many({{"{field}": {{"$type": "null"}}}}, {{"$unset": {{"{field}": 1}}}}).',
            ) from error
        raise
