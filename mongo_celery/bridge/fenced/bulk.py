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
from itertools import groupby
from typing import Any, TypeVar

from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, OperationFailure, WriteError
from pymongo.results import DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.documents import Documents, FencedUpdate
from mongo_celery.bridge.fenced.tombstones import Stamps, read_stamps
from mongo_celery.errors import OutboxRefusedError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.writes import COUNTS, Target

BATCH = 500
"""Most documents in one command, and in one transaction of creations."""


@dataclass(frozen=True, slots=True)
class BulkStep:
    """One request, by its place in the user's list, and what does it alone."""

    place: int
    act: Callable[[], UpdateResult | DeleteResult | None]


@dataclass(frozen=True, slots=True)
class BulkUpdate(BulkStep):
    """One update of one document, which can be part of a batch."""

    target: Target
    write: FencedUpdate
    upsert: bool


@dataclass(frozen=True, slots=True)
class BulkDelete(BulkStep):
    """One delete of one document, which can be part of a batch."""

    target: Target


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
        self._details: dict[str, Any] = {
            **dict.fromkeys(COUNTS, 0),
            "upserted": [],
            "writeErrors": [],
            "writeConcernErrors": [],
        }
        self._documents = documents
        self._command = command
        self._session = session
        self._ordered = ordered

    def run(self, steps: Iterable[BulkStep]) -> dict[str, Any]:
        """
        Do steps in their order, those of one kind in batches, and return the details.

        Raises:
            StaleFencingTokenError, OutdatedChangeError: a document, or its tombstone, is stamped newer.
            OutboxRefusedError: what is pending in a document cannot be delivered before its delete.
            BulkWriteError: at least one write failed. Its indexes are places in the user's list.
        """
        ways: dict[type, Callable[[Any], None]] = {BulkUpdate: self._update, BulkDelete: self._delete}
        for kind, found in groupby(steps, type):
            group: Any = found
            for batch in self._batches(group) if kind in ways else [group]:
                ways.get(kind, self._try_alone)(batch)
                if self._has_ended:
                    raise BulkWriteError(self._details)
        if self._has_failed:
            raise BulkWriteError(self._details)
        return self._details

    @property
    def _has_failed(self) -> bool:
        return bool(self._details["writeErrors"] or self._details["writeConcernErrors"])

    @property
    def _has_ended(self) -> bool:
        return self._ordered and self._has_failed

    @property
    def _is_in_transaction(self) -> bool:
        return self._session is not None and self._session.in_transaction

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

    def _try_alone(self, steps: Iterable[BulkStep]) -> None:
        """Do steps one by one, and keep their errors."""
        details = self._details
        for step in steps:
            try:
                result = step.act()
            except WriteError as error:
                known = error.details or {}
                details["writeErrors"].append({**known, "index": step.place, "code": error.code, "errmsg": str(error)})
            except BulkWriteError as error:  # of an `UpdateMany`
                self._count(error.details)
                details["writeErrors"] += [{**each, "index": step.place} for each in error.details["writeErrors"]]
            else:
                self._add(step, result)
            if self._has_ended:
                return

    # -- updates -----------------------------------------------------------------------------------

    def _update(self, batch: Sequence[BulkUpdate]) -> None:
        documents, statements, steps = self._documents, [], list[int]()
        for at, step in enumerate(batch):
            guarded = step.write.statements(documents.make_fence(step.target.id, step.write.body), step.target)
            statements += guarded
            steps += [at] * len(guarded)
        is_over = False
        try:
            done: Any = documents.collection.bulk_write(
                statements, ordered=self._ordered, session=self._session, **self._command
            ).bulk_api_result
        except BulkWriteError as error:
            done, is_over = error.details, self._is_in_transaction  # then nothing of it is left
        self._count(done)
        # As PyMongo: what is before the first error is done, of an unordered bulk write all that has not failed.
        failed = {steps[each["index"]]: each for each in done["writeErrors"]}
        end = min(failed, default=len(batch)) if self._ordered else len(batch)
        tried = [step for at, step in enumerate(batch[:end]) if at not in failed]
        if done["nMatched"] < len(tried) and not is_over:
            self._settle_misses(tried)
        if not self._has_ended:  # else by one that stands before
            self._details["writeErrors"] += [{**each, "index": batch[at].place} for at, each in failed.items()]

    def _settle_misses(self, batch: Sequence[BulkUpdate]) -> None:
        documents, session = self._documents, self._session
        found = [
            *zip(
                batch,
                read_stamps(documents.collection, [step.target.id for step in batch], session, bare={}),
                strict=True,
            )
        ]
        self._require_fresh(found)
        absent = [step for step, stamps in found if stamps is None]
        again = [step for step, stamps in found if stamps is not None and not documents.fence.has_token(stamps)]
        gone = [step for step in absent if not step.upsert]
        if gone:
            self._require_fresh(
                zip(gone, documents.tombstones.read([step.target.id for step in gone], session), strict=True)
            )
        new = [step for step in absent if step.upsert]
        if new and not self._create(new):
            again = sorted([*new, *again], key=lambda step: step.place)
        self._try_alone(again)

    def _require_fresh(self, found: Iterable[tuple[BulkUpdate, Stamps | None]]) -> None:
        for step, stamps in found:
            fence = self._documents.make_fence(step.target.id, step.write.body)
            self._documents.require_fresh(step.target.id, fence, stamps)

    def _create(self, steps: Sequence[BulkUpdate]) -> bool:
        """Create documents, all of them together. Return False if that cannot be, and each is to be tried alone."""
        try:
            results = self._documents.create([(step.write, step.target) for step in steps], self._session)
        except WriteError:
            # The transaction has left nothing behind, so each may be tried alone. Inside
            # the user's own transaction that is over, too, and the error is its end.
            if self._is_in_transaction:
                raise
            return False
        for step, result in zip(steps, results, strict=True):
            self._add(step, result)
        return True

    # -- deletes -----------------------------------------------------------------------------------

    def _delete(self, batch: Sequence[BulkDelete]) -> None:
        if len(batch) > 1:
            ids = [step.target.id for step in batch]
            try:
                self._details["nRemoved"] += self._documents.delete_all(ids, self._session)
            except (StaleFencingTokenError, OutdatedChangeError, OutboxRefusedError, OperationFailure):
                # As of creations: nothing of it is left, so each may be tried alone, but in the user's transaction.
                if self._is_in_transaction:
                    raise
            else:
                return
        self._try_alone(batch)

    # -- results -----------------------------------------------------------------------------------

    def _add(self, step: BulkStep, result: UpdateResult | DeleteResult | None) -> None:
        """Count the result of one step. None if it matched nothing."""
        if result is None:
            return
        raw: Any = result.raw_result or {}
        if isinstance(result, DeleteResult):
            self._details["nRemoved"] += result.deleted_count
        elif result.did_upsert:
            self._details["nUpserted"] += 1
            self._details["upserted"].append({"index": step.place, "_id": raw["upserted"]})
        else:
            self._details["nMatched"] += result.matched_count
            self._details["nModified"] += result.modified_count

    def _count(self, done: Mapping[str, Any]) -> None:
        """Count what a whole command did."""
        for name in (*COUNTS, "writeConcernErrors"):
            self._details[name] += done[name]
