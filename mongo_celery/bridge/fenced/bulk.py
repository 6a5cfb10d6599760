"""
Many guarded writes in few commands: `bulk_write` and `update_many`.

Requests become batches in which every `_id` occurs once, so that the order between batches is the user's
order on each document. A batch is one bulk command. MongoDB counts matches but does not say whose; so if
the count is short, the stamps of the batch are read once and each document is judged by its own (see
`documents`):

=======================================  ==============================================================
stamp                                    reaction
=======================================  ==============================================================
newer                                    `StaleFencingTokenError`, after the batch; what was admitted stays
no document, an upsert                   created: first all of the batch in one transaction, else one by one
no document, no upsert                   tombstone newer: stale; else the user's matter
mine                                     done, now or by an earlier write of this execution
older, yet not matched                   tried alone
=======================================  ==============================================================

Deletes that follow each other are one transaction, all or none; where one of them is stale they run one by one, so that
what stands before it is done. Whatever is not plain equality on `_id` runs one by one, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pymongo import UpdateOne
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, OperationFailure, WriteError
from pymongo.results import DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.documents import Documents, FencedUpdate
from mongo_celery.bridge.fenced.tombstones import stamps_of
from mongo_celery.errors import OutboxRefusedError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.writes import COUNTS, Target, as_bulk_error

BATCH = 500
"""Most documents in one command, and in one transaction of creations."""


@dataclass(frozen=True, slots=True)
class BulkItem:
    """One update of one document, by its place in the user's list."""

    place: int
    write: FencedUpdate
    target: Target
    upsert: bool


@dataclass(frozen=True, slots=True)
class BulkDelete:
    """One delete of one document, by its place in the user's list."""

    place: int
    target: Target


ItemT = TypeVar("ItemT", BulkItem, BulkDelete)


def batches(items: Iterable[ItemT], documents: Documents) -> Iterator[list[ItemT]]:
    """Runs of `items` in which no `_id` repeats, up to `BATCH` long."""
    batch: list[ItemT] = []
    seen: set[Any] = set()
    for item in items:
        key = id_key(item.target.id, documents.collection.codec_options)
        if batch and (key in seen or len(batch) == BATCH):
            yield batch
            batch, seen = [], set()
        batch.append(item)
        seen.add(key)
    if batch:
        yield batch


def run(
    documents: Documents,
    batch: Sequence[BulkItem],
    command: Mapping[str, Any],
    session: ClientSession | None,
    *,
    ordered: bool = True,
) -> list[tuple[int, UpdateResult]]:
    """
    Do one batch: the results, by place (those of the common command summed under the batch's first place).

    Raises:
        StaleFencingTokenError: a document, or its tombstone, is stamped newer.
        BulkWriteError: a write failed; its indexes are places in the user's list.
    """
    statements: list[UpdateOne] = []
    places: list[int] = []
    for item in batch:
        edits = item.write.statements(documents.fence_for(item.target.id, item.write.body), item.target)
        statements += edits
        places += [item.place] * len(edits)
    try:
        result = documents.collection.bulk_write(statements, ordered=ordered, session=session, **command)
    except BulkWriteError as error:
        for detail in error.details.get("writeErrors", []):
            detail["index"] = places[detail["index"]]
        if session is None or not session.in_transaction:  # else nothing of it is left
            _settle_tried(documents, batch, command, session, error, ordered=ordered)
        raise
    common = UpdateResult({"n": result.matched_count, "nModified": result.modified_count, "ok": 1.0}, True)
    rest = [] if result.matched_count == len(batch) else _settle_misses(documents, batch, command, session)
    return [(batch[0].place, common), *rest]


def _settle_tried(
    documents: Documents,
    batch: Sequence[BulkItem],
    command: Mapping[str, Any],
    session: ClientSession | None,
    error: BulkWriteError,
    *,
    ordered: bool,
) -> None:
    """As PyMongo: what stands before the first error is done, of an unordered bulk write all that has not failed."""
    details: dict[str, Any] = error.details  # type: ignore[assignment] # the driver makes a plain one
    failed = {detail["index"] for detail in details.get("writeErrors", [])}
    first = min(failed, default=0)
    tried = [item for item in batch if (item.place < first if ordered else item.place not in failed)]
    if not failed or details["nMatched"] >= len(tried):
        return
    tally = Tally()
    try:
        for place, result in _settle_misses(documents, tried, command, session):
            tally.add(place, result)
    except BulkWriteError as other:
        if ordered:  # it stands before the one that was met first
            raise
        tally.fail(other)
    for name in (*COUNTS, "upserted", "writeErrors"):
        details[name] += tally.details[name]


def _settle_misses(
    documents: Documents, batch: Sequence[BulkItem], command: Mapping[str, Any], session: ClientSession | None
) -> list[tuple[int, UpdateResult]]:
    found = stamps_of(documents.collection, [item.target.id for item in batch], session, bare={})
    for item, stamps in zip(batch, found, strict=True):
        documents.require_fresh(item.target.id, documents.fence_for(item.target.id, item.write.body), stamps)
    absent = [item for item, stamps in zip(batch, found, strict=True) if stamps is None]
    again = [
        item
        for item, stamps in zip(batch, found, strict=True)
        if stamps is not None and not documents.fence.has_token(stamps)
    ]
    _check_tombstones(documents, [item for item in absent if not item.upsert], session)
    new = [item for item in absent if item.upsert]
    results = _create(documents, new, command, session)
    if results is None:
        results, again = [], sorted([*new, *again], key=lambda item: item.place)
    return results + [_alone(documents, item, session) for item in again]


def _check_tombstones(documents: Documents, items: Sequence[BulkItem], session: ClientSession | None) -> None:
    if items and documents.tombstones is not None:
        ids = [item.target.id for item in items]
        for item, stamps in zip(items, documents.tombstones.read(ids, session), strict=True):
            documents.require_fresh(item.target.id, documents.fence_for(item.target.id, item.write.body), stamps)


def _create(
    documents: Documents, items: Sequence[BulkItem], command: Mapping[str, Any], session: ClientSession | None
) -> list[tuple[int, UpdateResult]] | None:
    """Create documents, all of them together; None where that cannot be, and each is to be tried alone."""
    if not items:
        return []
    if documents.tombstones is not None:
        try:
            results = documents.create_all([(item.write, item.target) for item in items], command, session)
            return [(item.place, result) for item, result in zip(items, results, strict=True)]
        except WriteError:
            # The transaction has left nothing behind, so each may be tried alone. Inside
            # the user's own transaction that is over, too, and the error is its end.
            if session is not None and session.in_transaction:
                raise
    return None


def _alone(documents: Documents, item: BulkItem, session: ClientSession | None) -> tuple[int, UpdateResult]:
    try:
        return item.place, documents.write(item.write, item.target, upsert=item.upsert, session=session)
    except WriteError as error:
        raise as_bulk_error(error, item.place) from error


class Tally:
    """The sum of a bulk write's results, in the shape that PyMongo's own result wraps."""

    def __init__(self) -> None:
        self.details: dict[str, Any] = {
            **dict.fromkeys(COUNTS, 0),
            "upserted": [],
            "writeErrors": [],
            "writeConcernErrors": [],
        }

    def add(self, place: int, result: UpdateResult) -> None:
        """Count one result."""
        raw = result.raw_result or {}
        if result.did_upsert:
            self.details["nUpserted"] += 1
            self.details["upserted"].append({"index": place, "_id": raw["upserted"]})
        else:
            self.details["nMatched"] += result.matched_count
            self.details["nModified"] += result.modified_count

    def fail(self, error: BulkWriteError) -> None:
        """Count what a failed command did, and keep its errors."""
        for name in COUNTS:
            self.details[name] += error.details.get(name, 0)
        for name in ("writeErrors", "writeConcernErrors"):
            self.details[name] += error.details.get(name, [])

    def close(self) -> dict[str, Any]:
        """
        The details.

        Raises:
            BulkWriteError: at least one write failed.
        """
        if self.details["writeErrors"] or self.details["writeConcernErrors"]:
            raise BulkWriteError(self.details)
        return self.details


Alone = Callable[[Tally], None]
"""A request that is no part of a batch."""


def alone(place: int, act: Callable[[], UpdateResult | DeleteResult]) -> Alone:
    """A step that runs `act`, which is one request with a result of its own."""

    def step(tally: Tally) -> None:
        try:
            result = act()
        except WriteError as error:
            raise as_bulk_error(error, place) from error
        if isinstance(result, DeleteResult):
            tally.details["nRemoved"] += result.deleted_count
        else:
            tally.add(place, result)

    return step


def deletes(documents: Documents, batch: Sequence[BulkDelete], session: ClientSession | None) -> Alone:
    """
    A step that deletes what a batch names.

    Where a document, or its tombstone, is stamped newer it raises StaleFencingTokenError or OutdatedChangeError, and
    OutboxRefusedError where what is pending in one cannot be delivered first; what stands before is done.
    """

    def step(tally: Tally) -> None:
        if len(batch) > 1 and documents.tombstones is not None:
            try:
                tally.details["nRemoved"] += documents.delete_all([item.target.id for item in batch], session)
            except (StaleFencingTokenError, OutdatedChangeError, OutboxRefusedError, OperationFailure):
                # As of creations: nothing of it is left, so each may be tried alone, but in the user's transaction.
                if session is not None and session.in_transaction:
                    raise
            else:
                return
        for item in batch:
            tally.details["nRemoved"] += _deleted(documents, item, session)

    return step


def _deleted(documents: Documents, item: BulkDelete, session: ClientSession | None) -> int:
    try:
        return documents.delete(item.target, session)
    except WriteError as error:
        raise as_bulk_error(error, item.place) from error
