"""
Writers of every kind and sweepers on an outbox, that are killed and frozen all the time, until so much was written.

`python -m tests.acceptance.outbox_soak SEED ENTRIES KEY...`, in the surroundings of `outbox_project`. Documents and
tasks are as there: each document lists in `ns` what was written to it, and each write carries one task per number.
A write is repeated until it is answered; its filter, or a duplicate `_id`, keeps a repetition from writing twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo import ReplaceOne, UpdateOne, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, DuplicateKeyError, PyMongoError

from mongo_celery import STORED_ID, transactional
from mongo_celery.errors import TransactionTimeoutError
from tests.acceptance.outbox_project import POINTS, client, effect, fork, import_all, items, listen_to_nothing, say

Document = dict[str, Any]
Keys = Sequence[str]

WRITERS = 3
SWEEPERS = 2
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.02
_AGAIN_SECONDS = 0.05
_ALONE_MANY = 3
_BULK_MANY = 40
_LIFE_SECONDS = (0.5, 8.0)
_POINTS_MAX = 400
_SWEEP_SECONDS = (0.01, 0.3)
_FREEZES_PER_SECOND = 0.3
_FROZEN_SECONDS = (0.2, 7.0)
"""Longer than a claim, so that some wake up when others have their documents."""


# -- kinds of writes -------------------------------------------------------------------------------


def _unwritten(key: str, n: str) -> Document:
    return {"_id": key, "ns": {"$ne": n}}


def _push(*ns: str) -> Document:
    return {"$push": {"ns": {"$each": list(ns)}}}


def _tasks(key: str, *ns: str) -> list[Any]:
    return [effect.s(key, n) for n in ns]


def _numbers(n: str) -> list[str]:
    return [f"{n}.{place}" for place in range(_ALONE_MANY)]


def _update(chance: random.Random, keys: Keys, n: str) -> None:
    key, ns = chance.choice(keys), _numbers(n)
    items.update_one(_unwritten(key, ns[0]), _push(*ns), tasks=_tasks(key, *ns))


def _find_one_and_update(chance: random.Random, keys: Keys, n: str) -> None:
    key = chance.choice(keys)
    items.find_one_and_update(_unwritten(key, n), _push(n), tasks=_tasks(key, n))


def _insert(_chance: random.Random, _keys: Keys, n: str) -> None:
    key, ns = f"new {n}", _numbers(n)
    with contextlib.suppress(DuplicateKeyError):  # by an attempt whose answer was lost
        items.insert_one({"_id": key, "ns": ns}, tasks=_tasks(key, *ns))


def _user() -> Collection[Document]:
    """The collection as its owner may open it: what a majority does not have yet counts as written."""
    return items.collection.with_options(write_concern=WriteConcern(1))


def _operators(chance: random.Random, keys: Keys, n: str) -> None:
    """Half of them without a hint, so that the flag has to do."""
    key = chance.choice(keys)
    _user().update_one(_unwritten(key, n), items.with_tasks(_push(n), _tasks(key, n)))
    if chance.random() < 0.5:
        items.dispatch(key)


def _replacement(chance: random.Random, keys: Keys, n: str) -> None:
    key, done = chance.choice(keys), 0
    while not done:
        ns = (items.collection.find_one({"_id": key}, {"ns": 1}) or {}).get("ns", [])
        if n in ns:
            return
        replace = ReplaceOne({"_id": key, "ns": ns}, {"ns": [*ns, n]})
        done = _user().bulk_write([items.with_tasks(replace, _tasks(key, n))]).matched_count


def _many(chance: random.Random, keys: Keys, n: str) -> None:
    """The same entry in each document, which the relay binds to its own."""
    chosen = chance.sample(list(keys), min(_BULK_MANY, len(keys)))
    unwritten = {"_id": {"$in": chosen}, "ns": {"$ne": n}}
    if chance.random() < 0.5:
        items.update_many(unwritten, _push(n), tasks=[effect.s(STORED_ID, n)])
    else:
        _user().update_many(unwritten, items.with_tasks(_push(n), [effect.s(STORED_ID, n)]))


def _bulk(chance: random.Random, keys: Keys, n: str) -> None:
    chosen = chance.sample(list(keys), min(_BULK_MANY, len(keys)))
    requests = [items.with_tasks(UpdateOne(_unwritten(key, n), _push(n)), _tasks(key, n)) for key in chosen]
    _user().bulk_write(requests, ordered=chance.random() < 0.5)
    items.dispatch(*chosen)


def _transaction(chance: random.Random, keys: Keys, n: str) -> None:
    chosen = chance.sample(list(keys), 2)

    def write(session: Any) -> None:
        for key in chosen:
            items.update_one(_unwritten(key, n), _push(n), tasks=_tasks(key, n), session=session)

    transactional(client, timeout=20).run(write)


KINDS: dict[Callable[[random.Random, Keys, str], object], int] = {
    _update: 10,
    _find_one_and_update: 4,
    _insert: 4,
    _transaction: 1,
    _operators: 6,
    _replacement: 1,
    _many: 2,
    _bulk: 2,
}
"""How often."""


# -- processes -------------------------------------------------------------------------------------


def _doom(chance: random.Random) -> None:
    """Choose this process's end: at some point of its own, or by the clock, in the middle of whatever it does."""
    seconds = chance.uniform(*_LIFE_SECONDS)
    if chance.random() < 0.5:
        POINTS.arm(chance.randint(1, _POINTS_MAX), signal.SIGKILL, "soak")
    else:
        listen_to_nothing()
    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM's default action is death


def _write_on(seed: int, keys: Keys) -> None:
    chance = random.Random(seed)
    _doom(chance)
    for number in itertools.count():
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        state, n = chance.getstate(), f"{seed}.{number}"
        while True:
            chance.setstate(state)  # a repetition writes the same to the same documents
            try:
                kind(chance, keys, n)
            except (PyMongoError, TransactionTimeoutError) as error:
                if isinstance(error, BulkWriteError) and not _is_transient(error):
                    raise
                time.sleep(_AGAIN_SECONDS)
            else:
                break


def _is_transient(error: BulkWriteError) -> bool:
    """Whether a bulk failed for its surroundings: a step-down, and not a refusal of a request."""
    details = error.details or {}
    return not any(each.get("code") in (9, 40, 11000) for each in details.get("writeErrors", ()))


def _sweep_on(seed: int, _keys: Keys) -> None:
    chance = random.Random(seed)
    _doom(chance)
    while True:
        with contextlib.suppress(PyMongoError):
            items.sweep(older_than=chance.choice([0.01, 0.5]))
        time.sleep(chance.uniform(*_SWEEP_SECONDS))


@dataclass
class Crowd:
    """The processes of a soak."""

    seed: int
    keys: Keys
    deaths: int = 0
    freezes: int = 0
    _jobs: dict[int, Callable[[int, Keys], None]] = field(default_factory=dict)
    _frozen: dict[int, float] = field(default_factory=dict)

    def start(self, job: Callable[[int, Keys], None]) -> None:
        """One more process, with a seed of its own."""
        self.seed += 1
        self._jobs[fork(lambda seed=self.seed: self._run(job, seed))] = job  # type: ignore[misc]

    def _run(self, job: Callable[[int, Keys], None], seed: int) -> None:
        """A job that ends with the process that looks after it, also while it is frozen."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        job(seed, self.keys)

    def look_after(self, chance: random.Random) -> None:
        """Replace who has died, wake who has slept enough, and freeze somebody now and then."""
        for pid in list(self._jobs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert os.WIFSIGNALED(status), f"a process of the soak ended with {status}"
                self.deaths += 1
                self._frozen.pop(pid, None)
                self.start(self._jobs.pop(pid))
        for pid in [pid for pid, until in self._frozen.items() if until < time.monotonic()]:
            del self._frozen[pid]
            os.kill(pid, signal.SIGCONT)
        if chance.random() < _FREEZES_PER_SECOND * _LOOK_SECONDS:
            pid = chance.choice(list(self._jobs))
            os.kill(pid, signal.SIGSTOP)
            self._frozen[pid] = time.monotonic() + chance.uniform(*_FROZEN_SECONDS)
            self.freezes += 1

    def end(self) -> None:
        """Kill all: what they leave behind is the sweep's."""
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._jobs.clear()


def written() -> int:
    """How many entries there have been, as far as the server says so."""
    with contextlib.suppress(PyMongoError):
        total = {"$group": {"_id": None, "n": {"$sum": {"$size": "$ns"}}}}
        return int(next(items.collection.aggregate([total]))["n"])
    return 0


def main(seed: str, entries: str, *keys: str) -> None:
    """Run until so many entries were written; say how many processes have died and were frozen."""
    import_all()
    crowd, chance = Crowd(int(seed) * 1000, keys), random.Random(int(seed))
    for job in (*[_write_on] * WRITERS, *[_sweep_on] * SWEEPERS):
        crowd.start(job)
    while written() < int(entries):
        for _ in range(round(1 / _LOOK_SECONDS)):
            crowd.look_after(chance)
            time.sleep(_LOOK_SECONDS)
    crowd.end()
    say(f"deaths {crowd.deaths} freezes {crowd.freezes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
