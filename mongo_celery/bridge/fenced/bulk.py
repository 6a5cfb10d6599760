"""
Many guarded writes in few commands: `bulk_write` and `update_many`.

Requests become batches in which every `_id` occurs once, so that the order between batches is the user's
order on each document. A batch is one bulk command. MongoDB counts matches but does not say whose. So if
the count is short, the stamps of the batch are read once and each document is judged by its own (see
`documents`):

=======================================  ==============================================================
stamp                                    reaction
=======================================  ==============================================================
newer                                    `StaleFencingTokenError`, after the batch. What was admitted stays
no document, an upsert                   created: first all of the batch in one transaction, else one by one
no document, no upsert                   tombstone newer: stale. Else the user's matter
mine                                     done, now or by an earlier write of this execution
older, yet not matched                   tried alone
=======================================  ==============================================================

Deletes that follow each other are one transaction, all or none. Where one of them is stale they run one by one, so that
what stands before it is done. Whatever is not plain equality on `_id` runs one by one, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, OperationFailure, WriteError
from pymongo.results import UpdateResult

from mongo_celery.bridge.fenced.documents import Documents, FencedUpdate
from mongo_celery.bridge.fenced.tombstones import Stamps, read_stamps
from mongo_celery.errors import OutboxRefusedError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.writes import COUNTS, Target, as_bulk_error

BATCH = 500
"""Most documents in one command, and in one transaction of creations."""


@dataclass(frozen=True, slots=True)
class BulkUpdate:
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


@dataclass(frozen=True, slots=True)
class BulkSingle:
    """One request that is no part of a batch, by its place in the user's list. A delete returns a number."""

    place: int
    act: Callable[[], UpdateResult | int]


Step = BulkUpdate | BulkDelete | BulkSingle
StepT = TypeVar("StepT", BulkUpdate, BulkDelete)


class BulkWrite:
    """
    Many writes, and the sum of their results in the shape that PyMongo's own result wraps.

    Args:
        documents: the target.
        command: arguments of each whole command.
        session: to write with.
        ordered: whether the first error ends it.
    """

    def __init__(
        self, documents: Documents, command: Mapping[str, Any], session: ClientSession | None, *, ordered: bool = True
    ) -> None:
        self.details: dict[str, Any] = {
            **dict.fromkeys(COUNTS, 0),
            "upserted": [],
            "writeErrors": [],
            "writeConcernErrors": [],
        }
        self._documents = documents
        self._command = command
        self._session = session
        self._ordered = ordered

    def run(self, steps: Iterable[Step]) -> None:
        """
        Do steps in their order, those of one kind in batches.

        Raises:
            StaleFencingTokenError, OutdatedChangeError: a document, or its tombstone, is stamped newer.
            OutboxRefusedError: what is pending in a document cannot be delivered before its delete.
        """
        for kind, found in groupby(steps, type):
            group: Any = found
            for batch in ([step] for step in group) if kind is BulkSingle else self._batches(group):
                try:
                    if kind is BulkUpdate:
                        self._update(batch)
                    elif kind is BulkDelete:
                        self._delete(batch)
                    else:
                        self._run_single(batch[0])
                except BulkWriteError as error:
                    self._fail(error)
                    if self._ordered:
                        return

    def close(self) -> dict[str, Any]:
        """
        Return the details.

        Raises:
            BulkWriteError: at least one write failed. Its indexes are places in the user's list.
        """
        if self.details["writeErrors"] or self.details["writeConcernErrors"]:
            raise BulkWriteError(self.details)
        return self.details

    def _batches(self, steps: Iterable[StepT]) -> Iterator[list[StepT]]:
        """Give runs of steps in which no `_id` repeats, up to `BATCH` long."""
        batch: list[StepT] = []
        seen: set[Any] = set()
        for step in steps:
            key = id_key(step.target.id, self._documents.collection.codec_options)
            if batch and (key in seen or len(batch) == BATCH):
                yield batch
                batch, seen = [], set()
            batch.append(step)
            seen.add(key)
        if batch:
            yield batch

    @property
    def _is_in_transaction(self) -> bool:
        return self._session is not None and self._session.in_transaction

    # -- updates -----------------------------------------------------------------------------------

    def _update(self, batch: Sequence[BulkUpdate]) -> None:
        documents, statements, places = self._documents, [], list[int]()
        for step in batch:
            guarded = step.write.statements(documents.make_fence(step.target.id, step.write.body), step.target)
            statements += guarded
            places += [step.place] * len(guarded)
        try:
            result = documents.collection.bulk_write(
                statements, ordered=self._ordered, session=self._session, **self._command
            )
        except BulkWriteError as error:
            for detail in error.details.get("writeErrors", []):
                detail["index"] = places[detail["index"]]
            if not self._is_in_transaction:  # else nothing of it is left
                self._settle_tried(batch, error)
            raise
        self.details["nMatched"] += result.matched_count
        self.details["nModified"] += result.modified_count
        if result.matched_count < len(batch):
            self._settle_misses(batch)

    def _settle_tried(self, batch: Sequence[BulkUpdate], error: BulkWriteError) -> None:
        """As PyMongo: what is before the first error is done, of an unordered bulk write all that has not failed."""
        details: dict[str, Any] = error.details  # type: ignore[assignment] # the driver makes a plain one
        failed = {detail["index"] for detail in details.get("writeErrors", [])}
        first = min(failed, default=0)
        tried = [step for step in batch if (step.place < first if self._ordered else step.place not in failed)]
        if not failed or details["nMatched"] >= len(tried):
            return
        again = BulkWrite(self._documents, self._command, self._session)
        try:
            again._settle_misses(tried)
        except BulkWriteError as other:
            if self._ordered:  # it is before the one that was met first
                raise
            again._fail(other)
        for name in (*COUNTS, "upserted", "writeErrors"):
            details[name] += again.details[name]

    def _settle_misses(self, batch: Sequence[BulkUpdate]) -> None:
        documents, session = self._documents, self._session
        found = [*zip(batch, read_stamps(documents.collection, _ids(batch), session, bare={}), strict=True)]
        self._require_fresh(found)
        absent = [step for step, stamps in found if stamps is None]
        again = [step for step, stamps in found if stamps is not None and not documents.fence.has_token(stamps)]
        gone = [step for step in absent if not step.upsert]
        if gone and documents.tombstones is not None:
            self._require_fresh(zip(gone, documents.tombstones.read(_ids(gone), session), strict=True))
        new = [step for step in absent if step.upsert]
        if new and not self._create(new):
            again = sorted([*new, *again], key=lambda step: step.place)
        for step in again:
            act = partial(documents.write, step.write, step.target, upsert=step.upsert, session=session)
            self._run_single(BulkSingle(step.place, act))

    def _require_fresh(self, found: Iterable[tuple[BulkUpdate, Stamps | None]]) -> None:
        for step, stamps in found:
            fence = self._documents.make_fence(step.target.id, step.write.body)
            self._documents.require_fresh(step.target.id, fence, stamps)

    def _create(self, steps: Sequence[BulkUpdate]) -> bool:
        """Create documents, all of them together. Return False if that cannot be, and each is to be tried alone."""
        if self._documents.tombstones is None:
            return False
        wanted = [(step.write, step.target) for step in steps]
        try:
            results = self._documents.create_all(wanted, self._command, self._session)
        except WriteError:
            # The transaction has left nothing behind, so each may be tried alone. Inside
            # the user's own transaction that is over, too, and the error is its end.
            if self._is_in_transaction:
                raise
            return False
        for step, result in zip(steps, results, strict=True):
            self._add(step.place, result)
        return True

    # -- deletes, and all others -------------------------------------------------------------------

    def _delete(self, batch: Sequence[BulkDelete]) -> None:
        documents, session = self._documents, self._session
        if len(batch) > 1 and documents.tombstones is not None:
            try:
                self.details["nRemoved"] += documents.delete_all([step.target.id for step in batch], session)
            except (StaleFencingTokenError, OutdatedChangeError, OutboxRefusedError, OperationFailure):
                # As of creations: nothing of it is left, so each may be tried alone, but in the user's transaction.
                if self._is_in_transaction:
                    raise
            else:
                return
        for step in batch:
            self._run_single(BulkSingle(step.place, partial(documents.delete, step.target, session)))

    def _run_single(self, step: BulkSingle) -> None:
        try:
            result = step.act()
        except WriteError as error:
            raise as_bulk_error(error, step.place) from error
        if isinstance(result, int):
            self.details["nRemoved"] += result
        else:
            self._add(step.place, result)

    # -- results -----------------------------------------------------------------------------------

    def _add(self, place: int, result: UpdateResult) -> None:
        """Count one result."""
        raw = result.raw_result or {}
        if result.did_upsert:
            self.details["nUpserted"] += 1
            self.details["upserted"].append({"index": place, "_id": raw["upserted"]})
        else:
            self.details["nMatched"] += result.matched_count
            self.details["nModified"] += result.modified_count

    def _fail(self, error: BulkWriteError) -> None:
        """Count what a failed command did, and keep its errors."""
        for name in (*COUNTS, "writeErrors", "writeConcernErrors"):
            self.details[name] += error.details.get(name, [] if name.startswith("write") else 0)


def _ids(steps: Iterable[BulkUpdate]) -> list[Any]:
    return [step.target.id for step in steps]
