"""
Many guarded writes in few commands: `bulk_write` and `update_many`.

Requests become batches in which every `_id` occurs once, so the batches keep the user's order on each document. A batch
is one bulk command. MongoDB counts matches, but does not name the matched documents. So if the count is short, the
batch's stamps are read once, and each document is judged by its own stamp (see `documents`):

=======================================  ==============================================================
stamp                                    reaction
=======================================  ==============================================================
newer                                    `StaleFencingTokenError`, after the batch. Admitted writes stay
no document, an upsert                   created: the whole batch in one transaction, otherwise one by one
no document, no upsert                   tombstone newer: stale. Otherwise the user handles it
own                                      done, now or by an earlier write of this execution
older, but not matched                   tried alone
=======================================  ==============================================================

Consecutive deletes are one transaction, all or none. If one is stale, they run one by one, so that earlier ones are
done. A filter other than plain equality on `_id` runs alone, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from pymongo.errors import BulkWriteError, OperationFailure, WriteError
from pymongo.results import DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.documents import Documents, FencedUpdate
from mongo_celery.bridge.fenced.tombstones import Stamps, read_stamps
from mongo_celery.errors import OutboxRefusedError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.steps import Session, Steps
from mongo_celery.mongo.writes import COUNTS, Target

BATCH = 500
"""Most documents in one command, and in one transaction of creations."""


@dataclass(frozen=True, slots=True)
class BulkStep:
    """One request, its place in the user's list, and its write for running it alone."""

    place: int
    act: Callable[[], Steps[Any]]


@dataclass(frozen=True, slots=True)
class BulkUpdate(BulkStep):
    """One update of one document. It can join a batch."""

    target: Target
    write: FencedUpdate
    upsert: bool


@dataclass(frozen=True, slots=True)
class BulkDelete(BulkStep):
    """One delete of one document. It can join a batch."""

    target: Target


StepT = TypeVar("StepT", BulkUpdate, BulkDelete)


class BulkWrite:
    """
    Many writes, and the sum of their results in the form of PyMongo's result. Its methods are steps (`mongo.steps`).

    Args:
        documents: the target.
        command: arguments of each command as a whole.
        session: the session for the writes.
        ordered: True to stop at the first error.
    """

    def __init__(
        self, documents: Documents, command: Mapping[str, Any], session: Session | None, *, ordered: bool = True
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

    def run(self, steps: Iterable[BulkStep]) -> Steps[dict[str, Any]]:
        """
        Run steps in order, in batches of one kind, and return the sum of the results.

        Raises:
            StaleFencingTokenError, OutdatedChangeError: a document or its tombstone has a newer stamp.
            OutboxRefusedError: pending entries of a document cannot be delivered before its delete.
            BulkWriteError: at least one write failed. Indexes refer to the user's list.
        """
        ways: dict[type, Callable[[Any], Steps[None]]] = {BulkUpdate: self._update, BulkDelete: self._delete}
        for kind, found in groupby(steps, type):
            group: Any = found
            for batch in self._batches(group) if kind in ways else [group]:
                yield from ways.get(kind, self._try_alone)(batch)
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
        """Yield runs of steps in which no `_id` repeats, up to `BATCH` long."""
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

    def _try_alone(self, steps: Iterable[BulkStep]) -> Steps[None]:
        """Run steps one by one. Collect their errors."""
        details = self._details
        for step in steps:
            try:
                result = yield from step.act()
            except WriteError as error:
                known = error.details or {}
                details["writeErrors"].append({**known, "index": step.place, "code": error.code, "errmsg": str(error)})
            except BulkWriteError as error:  # from an `UpdateMany`
                self._count(error.details)
                details["writeErrors"] += [{**each, "index": step.place} for each in error.details["writeErrors"]]
            else:
                self._add(step, result)
            if self._has_ended:
                return

    # -- updates -----------------------------------------------------------------------------------

    def _update(self, batch: Sequence[BulkUpdate]) -> Steps[None]:
        documents, statements, steps = self._documents, [], list[int]()
        for at, step in enumerate(batch):
            guarded = step.write.statements(documents.make_fence(step.target.id, step.write.body), step.target)
            statements += guarded
            steps += [at] * len(guarded)
        is_over = False
        try:
            written = yield documents.collection.bulk_write(
                statements, ordered=self._ordered, session=self._session, **self._command
            )
            done: Any = written.bulk_api_result
        except BulkWriteError as error:
            done, is_over = error.details, self._is_in_transaction  # then nothing of it is left
        self._count(done)
        # As in PyMongo, writes before the first error are done or, if unordered, all writes without an error.
        failed = {steps[each["index"]]: each for each in done["writeErrors"]}
        end = min(failed, default=len(batch)) if self._ordered else len(batch)
        tried = [step for at, step in enumerate(batch[:end]) if at not in failed]
        if done["nMatched"] < len(tried) and not is_over:
            yield from self._settle_misses(tried)
        if not self._has_ended:  # otherwise an earlier error ended it
            self._details["writeErrors"] += [{**each, "index": batch[at].place} for at, each in failed.items()]

    def _settle_misses(self, batch: Sequence[BulkUpdate]) -> Steps[None]:
        documents, session = self._documents, self._session
        ids = [step.target.id for step in batch]
        present = yield from read_stamps(documents.collection, ids, session, bare={})
        found = [*zip(batch, present, strict=True)]
        self._require_fresh(found)
        absent = [step for step, stamps in found if stamps is None]
        again = [step for step, stamps in found if stamps is not None and not documents.fence.has_token(stamps)]
        gone = [step for step in absent if not step.upsert]
        if gone:
            buried = yield from documents.tombstones.read([step.target.id for step in gone], session)
            self._require_fresh(zip(gone, buried, strict=True))
        new = [step for step in absent if step.upsert]
        if new and not (yield from self._create(new)):
            again = sorted([*new, *again], key=lambda step: step.place)
        yield from self._try_alone(again)

    def _require_fresh(self, found: Iterable[tuple[BulkUpdate, Stamps | None]]) -> None:
        for step, stamps in found:
            fence = self._documents.make_fence(step.target.id, step.write.body)
            self._documents.require_fresh(step.target.id, fence, stamps)

    def _create(self, steps: Sequence[BulkUpdate]) -> Steps[bool]:
        """Create documents in one transaction. Return False if each must be created alone instead."""
        try:
            results = yield from self._documents.create([(step.write, step.target) for step in steps], self._session)
        except WriteError:
            # The transaction left nothing behind, so each may be tried alone. Inside the user's own transaction, which
            # has also ended, raise the error.
            if self._is_in_transaction:
                raise
            return False
        for step, result in zip(steps, results, strict=True):
            self._add(step, result)
        return True

    # -- deletes -----------------------------------------------------------------------------------

    def _delete(self, batch: Sequence[BulkDelete]) -> Steps[None]:
        if len(batch) > 1:
            ids = [step.target.id for step in batch]
            try:
                self._details["nRemoved"] += yield from self._documents.delete_all(ids, self._session)
            except (StaleFencingTokenError, OutdatedChangeError, OutboxRefusedError, OperationFailure):
                # As for creations: nothing is left, so each may be tried alone, except in the user's transaction.
                if self._is_in_transaction:
                    raise
            else:
                return
        yield from self._try_alone(batch)

    # -- results -----------------------------------------------------------------------------------

    def _add(self, step: BulkStep, result: UpdateResult | DeleteResult | None) -> None:
        """Count the result of one step. The result is None if the step matched nothing."""
        if result is None:
            return
        raw: Any = result.raw_result or {}
        if isinstance(result, DeleteResult):
            self._details["nRemoved"] += result.deleted_count
        elif "upserted" in raw:
            self._details["nUpserted"] += 1
            self._details["upserted"].append({"index": step.place, "_id": raw["upserted"]})
        else:
            self._details["nMatched"] += result.matched_count
            self._details["nModified"] += result.modified_count

    def _count(self, done: Mapping[str, Any]) -> None:
        """Count the result of a whole command."""
        for name in (*COUNTS, "writeConcernErrors"):
            self._details[name] += done[name]
