"""
Builds that are broken on purpose: each takes one rule away, in the started processes and nowhere else.

The name of the build to be is in the environment; `BROKEN` says which there are. For each, `directed` has a plan that
shows what it does, within a minute or so. A test may break its own process instead (`integration/test_conformance.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from pymongo import WriteConcern
from pymongo.collection import Collection

from mongo_celery.bridge.listener.chunks import Chunk, ChunkReader
from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.state import claims
from mongo_celery.bridge.state.backlog import Backlog, StoredChange
from mongo_celery.bridge.state.leases import Leases
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.window import Queue, Window
from mongo_celery.bridge.worker.subject import RunSubject
from mongo_celery.mongo.table import Table
from tests.chaos.facts import Plan, Step
from tests.chaos.setting import HARMLESS, HOT, PARTITIONS, POISON, keys_in, partition_of

_AHEAD = timedelta(hours=1)
_LATE_SECONDS = 2.0
_BEHIND_EVERYTHING = "Z"
"""Sorts after every resume token."""


Replace = Callable[[Any, str, Any], None]
"""Puts something in the place of an attribute: `setattr`, or that of a test."""


def apply(name: str, replace: Replace = setattr) -> None:
    """Break this process as told; nothing for an empty name."""
    if name:
        BROKEN[name](replace)


def _remove_gate(replace: Replace) -> None:
    """Whoever asks for a claim gets it."""
    find_and_update = Table.find_and_update_unretried

    def ungated(self: Table, guard: Mapping[str, Any], change: Any, fields: Mapping[str, Any]) -> Any:
        return find_and_update(self, {"_id": guard["_id"]}, change, fields)

    replace(Table, "find_and_update_unretried", ungated)


def _commit_out_of_order(replace: Replace) -> None:
    """Whoever says that a change is handled is believed, however late."""
    update = Table.update_unretried

    def believing(self: Table, guard: Mapping[str, Any], change: Any, *concern: Any) -> bool:
        is_outcome = isinstance(change, dict) and "handled" in change.get("$set", {})
        is_commit = change == [{"$set": claims.COMMIT}]
        names = {"_id", "handled"} if is_commit else {"_id"} if is_outcome else set(guard)
        return update(self, {name: guard[name] for name in names}, change, *concern)

    replace(Table, "update_unretried", believing)


def _keep_fence(replace: Replace) -> None:
    """A claim does not raise the fence."""
    replace(claims, "next_number", lambda field: {"$add": [f"${field}", 0]})


def _watermark_as_maximum(replace: Replace) -> None:
    """A watermark is the last thing that is done, whatever lies before it."""
    complete = Window.complete

    def furthest(self: Window, queue: Queue, data: str) -> int:
        done = [change.mark for change in queue.changes if change.mark.data <= data]
        finished = complete(self, queue, data)
        if done and (self.watermark is None or self.watermark.data < done[-1].data):
            self.watermark = done[-1]
        return finished

    replace(Window, "complete", furthest)


def _remove_sweep(replace: Replace) -> None:
    """What was dispatched once is never dispatched again."""
    replace(Partition, "repeat", lambda *_: None)


def _lease_of_one(replace: Replace) -> None:
    """The lease is written with w:1."""
    make = Leases.__init__

    def of_one(self: Leases, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        make(self, collection.with_options(write_concern=WriteConcern(1)), bridge, ttl)

    replace(Leases, "__init__", of_one)


def _clients_clock(replace: Replace) -> None:
    """Expiries are judged by the clock of the process, and one listener's is an hour ahead."""
    ahead = _AHEAD if os.environ.get("CHAOS_ROLE") == "listener-1" else timedelta()
    find_and_update = Table.find_and_update

    def mine(value: Any) -> Any:
        if value == "$$NOW":
            return datetime.now(UTC) + ahead
        if isinstance(value, Mapping):
            return {name: inner if name == "$literal" else mine(inner) for name, inner in value.items()}
        return [mine(each) for each in value] if isinstance(value, list | tuple) else value

    def by_my_clock(self: Table, guard: Mapping[str, Any], change: Any) -> dict[str, Any] | None:
        return find_and_update(self, mine(guard), mine(change))

    replace(Table, "find_and_update", by_my_clock)


def _mark_before_insert(replace: Replace) -> None:
    """Changes are stored some time after it was said that they are."""
    insert, mark = Backlog.insert, Partitions.mark_stored
    waiting: list[tuple[Any, ...]] = []

    def later(
        self: Backlog, partition_id: str, changes: Iterable[StoredChange], term: int, session: Any = None
    ) -> None:
        del session  # a timer's thread cannot share it
        waiting.append((self, partition_id, list(changes), term))

    def first(self: Partitions, *arguments: Any) -> bool:
        marked = mark(self, *arguments)
        while waiting:
            threading.Timer(_LATE_SECONDS, insert, waiting.pop()).start()
        return marked

    replace(Backlog, "insert", later)
    replace(Partitions, "mark_stored", first)


def _removal_above_committed(replace: Replace) -> None:
    """A removal takes whatever is stored of the partition."""
    remove = Backlog.remove

    def everything(self: Backlog, partition_id: str, committed: str, passed: str, term: int) -> Iterator[int]:
        del passed
        everywhere = committed and _BEHIND_EVERYTHING
        return remove(self, partition_id, everywhere, everywhere, term)

    replace(Backlog, "remove", everything)


def _keep_changed_documents(replace: Replace) -> None:
    """A document of a snapshot is given although its key was changed while it was read."""
    answer = ChunkReader._answer

    def late(self: ChunkReader, chunk: Chunk, command: dict[str, Any]) -> Any:
        found = answer(self, chunk, command)
        threading.Event().wait(_LATE_SECONDS / 4)
        return found

    replace(ChunkReader, "_answer", late)
    replace(Chunk, "note", lambda *_: None)


def _pass_parked(replace: Replace) -> None:
    """A change is handled although its key is parked."""
    replace(RunSubject, "is_parked", lambda *_: False)


def _pass_whole_list(replace: Replace) -> None:
    """Of a list that fails in its middle all is recorded as done."""
    reach = RunSubject.reach

    def reach_end(self: RunSubject, _end: int) -> tuple[int, dict[str, object]]:
        return reach(self, len(self.run.changes))

    replace(RunSubject, "reach", reach_end)


BROKEN: Mapping[str, Callable[[Replace], None]] = {
    "gate removed": _remove_gate,
    "commit out of order": _commit_out_of_order,
    "fence not raised": _keep_fence,
    "watermark as maximum": _watermark_as_maximum,
    "sweep removed": _remove_sweep,
    "w:1 lease": _lease_of_one,
    "client's clock": _clients_clock,
    "mark before insert": _mark_before_insert,
    "removal above committed": _removal_above_committed,
    "snapshot row kept": _keep_changed_documents,
    "parked key passed": _pass_parked,
    "failed list passed": _pass_whole_list,
}

_SPILLS = (
    Step(4.0, "person: pause", where="quick", partition=0),
    Step(16.0, "person: resume", where="quick", partition=0),
    Step(18.0, "kill listener"),
)


def _burst(at: float, where: str) -> Step:
    return Step(at, "person: burst", where=where, key=HOT)


def _linger() -> Iterator[Step]:
    """A change of each partition whose handler stands still behind its effect."""
    for partition in range(PARTITIONS):
        key = next(keys_in("quick", partition, HARMLESS))
        yield Step(5.0, "poison: lingers", where="quick", partition=partition, key=key)


def _fail_in_lists() -> Iterator[Step]:
    """A key that fails, in the middle of a list of the hot key: they share a partition."""
    partition = partition_of("listed", HOT)
    for n, key in enumerate(islice(keys_in("listed", partition, f"{POISON}raises"), 4)):
        poison = Step(2.2 + 3 * n, "poison: raises", where="listed", partition=partition, key=key)
        yield from (_burst(2.0 + 3 * n, "listed"), poison, _burst(2.4 + 3 * n, "listed"))


_SHOWS: Mapping[str, tuple[float, int, Iterable[Step]]] = {
    "gate removed": (15.0, 1, [Step(at, "repeat messages", lasts=2.0) for at in (3.0, 6.0, 9.0, 12.0)]),
    "commit out of order": (48.0, 1, [  # the second one has the lingering changes
        Step(3.0, "freeze worker", lasts=7.0), *_linger(), Step(10.5, "freeze worker", lasts=35.0, choice=0.9),
    ]),
    "fence not raised": (20.0, 1, [
        _burst(3.0, "slow"), Step(4.0, "kill worker"), Step(6.0, "freeze worker", lasts=7.0, choice=0.9),
        Step(14.0, "kill worker", choice=0.9), Step(17.0, "kill worker"),
    ]),
    "watermark as maximum": (10.0, 1, [_burst(2.0, "slow")]),
    "sweep removed": (12.0, 1, [
        _burst(2.0, "slow"), Step(3.0, "kill worker"), Step(3.1, "kill worker", choice=0.9), Step(4.5, "flush redis"),
    ]),
    "w:1 lease": (15.0, 3, [Step(3.0, "take back a lease")]),
    "client's clock": (26.0, 1, [Step(at, "kill listener") for at in (3.0, 8.0, 13.0, 18.0, 22.0)]),  # soon both
    "mark before insert": (22.0, 1, _SPILLS),
    "removal above committed": (22.0, 1, _SPILLS),
    "snapshot row kept": (20.0, 1, [
        step for at in range(2, 18, 2) for step in (Step(at, "snapshot", choice=0.65), _burst(at + 0.1, "quick"))
    ]),
    "parked key passed": (16.0, 1, [
        Step(2.0, "poison: raises", where="parking", key=HOT), _burst(2.5, "parking"),
        Step(5.0, "person: discard a letter", where="parking"), _burst(7.0, "parking"),
        Step(10.0, "person: replay letters", where="parking"),
    ]),
    "failed list passed": (18.0, 1, [*_fail_in_lists()]),
}  # fmt: skip


def directed(name: str) -> Plan:
    """A plan that shows what a broken build does; with a sound build it shows nothing."""
    seconds, members, steps = _SHOWS[name]
    return Plan(name, seconds, members, tuple(steps))
