"""
Guarded writes to single documents by `_id`. Only this module decides why a write matched nothing.

A guarded write without a match is never taken for success. Reasons, in this order:

1. the document's stamp is newer: `StaleFencingTokenError`
2. there is no document, but its tombstone is newer: the same error
3. there is no document: an upsert creates it (see `tombstones`), other writes leave it to the user
4. the stamp allows the write: the user's other conditions do not match, or another execution changed the partitioning
   between the two statements of an operator update. With conditions, the write is tried once more, then the user
   handles it. By `_id` alone it must match eventually, so it is tried up to `ATTEMPTS` times.

An upsert's E11000 on `_id` means that the document was created meanwhile, or does not match the user's conditions. The
stamp decides, because a newer execution may have created it. Otherwise case 4 applies: executions with equal tokens can
also race, and others may alternately delete and create the document. On another index it is the user's error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pymongo import ReadPreference, ReplaceOne, UpdateOne, WriteConcern
from pymongo.errors import BulkWriteError, DuplicateKeyError
from pymongo.read_concern import ReadConcern
from pymongo.results import BulkWriteResult, UpdateResult

from mongo_celery.bridge.fenced.fence import FIELD, Fence, Origin, merge
from mongo_celery.bridge.fenced.pending import KEPT_FILLING, PendingTasks
from mongo_celery.bridge.fenced.tombstones import Stamps, Tombstones, read_stamps
from mongo_celery.mongo.steps import AnyCollection, Session, Steps, transact
from mongo_celery.mongo.verdicts import is_duplicate_id
from mongo_celery.mongo.writes import Body, Replacement, Target, single_error

ATTEMPTS = 10
"""Most attempts of one write. Each miss means that a rival's write succeeded meanwhile."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FencedUpdate:
    """
    `update_one` and `replace_one`. One command contains both statements of an operator update.

    Args:
        body: the user's update.
        options: arguments of a statement (hint, array filters, collation).
        command: arguments of the command as a whole (let, comment, bypass_document_validation).
        kept: fields of outboxes. A write that drops fields leaves these unchanged.
    """

    body: Body
    options: Mapping[str, Any] = field(default_factory=dict)
    command: Mapping[str, Any] = field(default_factory=dict)
    kept: Sequence[str] = ()

    def statements(self, fence: Fence, target: Target) -> list[UpdateOne]:
        """Return the guarded statements. At most one matches."""
        return [
            UpdateOne(target.where(guard), self.body.build_update(stamp, kept=self.kept), **self.options)
            for guard, stamp in fence.list_guards(self.body)
        ]

    def insertion(self, target: Target, stamps: Stamps) -> UpdateOne | ReplaceOne[Any]:
        """Return the statement that creates the document."""
        kind = ReplaceOne if isinstance(self.body, Replacement) else UpdateOne
        return kind(
            target.insert_only_filter(), self.body.insertion({FIELD: dict(stamps)}), upsert=True, **self.options
        )

    def attempt(self, into: Any, fence: Fence, target: Target, session: Session | None) -> Steps[Any]:
        """Write to the document if it exists and the guard matches. Return None if nothing matched."""
        result = yield from self._write_all(into, self.statements(fence, target), session)
        return make_result(result.matched_count, result.modified_count) if result.matched_count else None

    def insert(self, into: Any, creations: Sequence[Creation], session: Session | None) -> Steps[list[Any]]:
        """Create documents with their stamps. E11000 on `_id` if one exists."""
        statements = [write.insertion(target, stamps) for write, target, stamps in creations]
        written = yield from self._write_all(into, statements, session)
        upserted = written.upserted_ids or {}
        return [make_result(1, 0, upserted=upserted[place]) for place in range(len(creations))]

    def _write_all(
        self, into: Any, statements: Sequence[UpdateOne | ReplaceOne[Any]], session: Session | None
    ) -> Steps[BulkWriteResult]:
        """Run statements in one command. Raise errors like a single write."""
        try:
            result: BulkWriteResult = yield into.bulk_write(statements, session=session, **self.command)
        except BulkWriteError as error:
            raise single_error(error) from error
        return result


@dataclass(frozen=True, slots=True)
class FencedFindAndUpdate(FencedUpdate):
    """`find_one_and_update`. An operator update may need a second statement, which is a second command."""

    def attempt(self, into: Any, fence: Fence, target: Target, session: Session | None) -> Steps[Any]:
        """Attempt the write, as in `FencedUpdate`."""
        for guard, stamp in fence.list_guards(self.body):
            update = self.body.build_update(stamp, kept=self.kept)
            found = yield into.find_one_and_update(target.where(guard), update, session=session, **self.options)
            if found is not None:
                return found
        return None

    def insert(self, into: Any, creations: Sequence[Creation], session: Session | None) -> Steps[list[Any]]:
        """Create one document, as in `FencedUpdate`."""
        [(_, target, stamps)] = creations
        body = self.body.insertion({FIELD: dict(stamps)})
        where = target.insert_only_filter()
        return [(yield into.find_one_and_update(where, body, upsert=True, session=session, **self.options))]


Creation = tuple[FencedUpdate, Target, Stamps]


class Documents:
    """
    The documents of one collection under one fence, as steps (`mongo.steps`).

    Args:
        collection: the target. Writes use majority and reads use the primary, whatever its settings.
        fence: the execution's right to write.
        pending: the outbox entries in the documents.
        origin_of: returns the change that a document is written for, if the execution has several.
    """

    def __init__(
        self,
        collection: AnyCollection,
        fence: Fence,
        pending: PendingTasks,
        origin_of: Callable[[Any], Origin | None] | None,
    ) -> None:
        self.collection: Any = collection.with_options(
            write_concern=WriteConcern("majority"), read_preference=ReadPreference.PRIMARY
        )
        self.fence = fence
        self.tombstones = Tombstones(self.collection)
        self.pending = pending
        self._origin_of = origin_of

    def make_fence(self, document_id: Any, body: Body | None = None) -> Fence:
        """Return the fence for writing one document with this body, or for deleting it without a body."""
        origin = self.fence.origin if self._origin_of is None else self._origin_of(document_id)
        if body is not None and not body.overwrites:
            origin = None
        return self.fence if origin is self.fence.origin else replace(self.fence, origin=origin)

    def write(self, write: FencedUpdate, target: Target, *, upsert: bool, session: Session | None) -> Steps[Any]:
        """Do `write` and return its result, or None if nothing matched. Raise if the target's stamp is newer."""
        duplicate: DuplicateKeyError | None = None
        fence, is_inside = self.make_fence(target.id, write.body), session is not None and session.in_transaction
        for attempt in range(ATTEMPTS):
            outcome = yield from write.attempt(self.collection, fence, target, session)
            if outcome is not None:
                return outcome
            if upsert:
                try:
                    return (yield from self.create([(write, target)], session))[0]
                except DuplicateKeyError as error:
                    if not is_duplicate_id(error):
                        raise
                    duplicate = error
                # E11000 ends a user's transaction on the server: no read or retry is possible there.
                yield from self.check_existing(target.id, fence, None if is_inside else session)
                if is_inside:
                    break
            elif not (yield from self.check_existing(target.id, fence, session)):
                return None
            if target.rest and attempt:
                break
        if duplicate is not None:
            raise duplicate
        return None

    def check_existing(self, document_id: Any, fence: Fence, session: Session | None) -> Steps[bool]:
        """
        Return True if the document exists.

        Raises:
            StaleFencingTokenError, OutdatedChangeError: the document or its tombstone has a newer stamp.
        """
        [stamps] = yield from read_stamps(self.collection, [document_id], session, bare={})
        exists = stamps is not None
        if not exists:
            [stamps] = yield from self.tombstones.read([document_id], session)
        self.require_fresh(document_id, fence, stamps)
        return exists

    def require_fresh(self, document_id: Any, fence: Fence, stamps: Stamps | None) -> None:
        """Raise if `stamps` are newer than the fence."""
        fence.demand(stamps, namespace=self.collection.full_name, document_id=document_id)

    def create(self, wanted: Sequence[tuple[FencedUpdate, Target]], session: Session | None) -> Steps[list[Any]]:
        """Create documents with the stamps of their tombstones, all or none. Raise if one is newer."""
        tombstones, ids = self.tombstones, [target.id for _, target in wanted]
        fences = [self.make_fence(target.id, write.body) for write, target in wanted]
        if session is not None and session.in_transaction and any(fence.origin for fence in fences):
            # Check before E11000 ends the transaction: a handler may skip an older change.
            present = yield from read_stamps(self.collection, ids, session, bare={})
            for found in zip(ids, fences, present, strict=True):
                self.require_fresh(*found)

        def body(inside: Session) -> Steps[list[Any]]:
            creations, slots = [], (yield from tombstones.take_slots(ids, inside))
            for (write, target), fence, buried in zip(wanted, fences, slots, strict=True):
                self.require_fresh(target.id, fence, buried)
                creations.append((write, target, fence.stamp(buried)))
            results = yield from wanted[0][0].insert(self.collection, creations, inside)
            yield from tombstones.settle_slots([(i, None) for i in ids], inside)
            return results

        return (yield from self._atomically(body, session))

    def delete(self, target: Target, session: Session | None, **options: Any) -> Steps[int]:
        """
        Delete the document and leave a tombstone, even if there was none. Return the number of deleted documents.

        Raises:
            OutboxRefusedError: its pending entries cannot be delivered first.
        """
        for _ in range(ATTEMPTS):
            count = yield from self._delete(target, session, options)
            if count or not (yield from self.pending.deliver(target, session)):
                return count
        raise self.pending.make_refusal(target.id, KEPT_FILLING)

    def _delete(self, target: Target, session: Session | None, options: Mapping[str, Any]) -> Steps[int]:
        tombstones, fence = self.tombstones, self.make_fence(target.id)
        where = target.where(fence.guard(), *self.pending.none_pending)

        def body(inside: Session) -> Steps[int]:
            [buried] = yield from tombstones.take_slots([target.id], inside)
            self.require_fresh(target.id, fence, buried)
            removed = yield self.collection.find_one_and_delete(where, {FIELD: 1}, session=inside, **options)
            if removed is not None:
                current = removed.get(FIELD)
            else:
                [current] = yield from read_stamps(self.collection, [target.id], inside, bare={})
                self.require_fresh(target.id, fence, current)
            # Admitted but not matched: the user's conditions, or a pending entry. The tombstone stays.
            is_kept = removed is None and current is not None
            left = buried if is_kept else fence.stamp(merge(buried, current))
            yield from tombstones.settle_slots([(target.id, left)], inside)
            return int(removed is not None)

        return (yield from self._atomically(body, session))

    def delete_all(self, ids: Sequence[Any], session: Session | None) -> Steps[int]:
        """
        Delete several documents in one transaction, all or none, with tombstones. Return the number of
        deleted ones.
        """
        tombstones = self.tombstones
        fences = [self.make_fence(document_id) for document_id in ids]

        def body(inside: Session) -> Steps[int]:
            buried = yield from tombstones.take_slots(ids, inside)
            current = yield from read_stamps(self.collection, ids, inside, bare={})
            for document_id, fence, *stamps in zip(ids, fences, buried, current, strict=True):
                for each in stamps:
                    self.require_fresh(document_id, fence, each)
            there = {"_id": {"$in": [i for i, stamps in zip(ids, current, strict=True) if stamps is not None]}}
            yield from self.pending.refuse_any(there, inside)
            count = 0
            if there["_id"]["$in"]:
                count = (yield self.collection.delete_many(there, session=inside)).deleted_count
            left = [fence.stamp(merge(*stamps)) for fence, *stamps in zip(fences, buried, current, strict=True)]
            yield from tombstones.settle_slots([*zip(ids, left, strict=True)], inside)
            return count

        return (yield from self._atomically(body, session))

    def _atomically(self, body: Callable[[Any], Steps[T]], session: Session | None) -> Steps[T]:
        """Run a body in a new transaction, or in the open one."""
        yield from self.tombstones.prepare()
        if session is not None and session.in_transaction:
            return (yield from body(session))
        concerns = ReadConcern("snapshot"), WriteConcern("majority"), ReadPreference.PRIMARY
        result: T = yield transact(self.collection.database.client, session, body, *concerns)
        return result


def make_result(matched: int, modified: int, **upserted: Any) -> UpdateResult:
    """Return PyMongo's result of an update."""
    return UpdateResult({"n": matched, "nModified": modified, "ok": 1.0, **upserted}, acknowledged=True)
