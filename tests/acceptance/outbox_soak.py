"""
Writers of many kinds and sweepers on an outbox, until they are killed.

`python -m tests.acceptance.outbox_soak write SEED KEY...`, or `sweep`, in the surroundings of `outbox_project`, whose
documents and tasks these are. A write is repeated until it is answered. Its filter, or a duplicate `_id`, keeps a
repetition from writing twice.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pymongo import UpdateOne, WriteConcern
from pymongo.errors import BulkWriteError, DuplicateKeyError, PyMongoError

from mongo_celery import STORED_ID, transactional
from mongo_celery.errors import TransactionTimeoutError
from tests.acceptance.outbox_project import client, effect, import_all, items, listen_to_nothing

Document = dict[str, Any]
Keys = Sequence[str]

_AGAIN_SECONDS = 0.05
_MANY = 40


def _unwritten(key: str, n: str) -> Document:
    return {"_id": key, "ns": {"$ne": n}}


def _push(*ns: str) -> Document:
    return {"$push": {"ns": {"$each": list(ns)}}}


def _tasks(key: str, *ns: str) -> list[Any]:
    return [effect.s(key, n) for n in ns]


def _update(chance: random.Random, keys: Keys, n: str) -> None:
    key, ns = chance.choice(keys), [f"{n}.0", f"{n}.1"]
    items.update_one(_unwritten(key, ns[0]), _push(*ns), tasks=_tasks(key, *ns))


def _insert(_chance: random.Random, _keys: Keys, n: str) -> None:
    with contextlib.suppress(DuplicateKeyError):  # by an attempt whose answer was lost
        items.insert_one({"_id": f"new {n}", "ns": [n]}, tasks=_tasks(f"new {n}", n))


def _many(chance: random.Random, keys: Keys, n: str) -> None:
    """The same entry in each document, which the relay binds to its own."""
    unwritten = {"_id": {"$in": chance.sample(list(keys), _MANY)}, "ns": {"$ne": n}}
    items.update_many(unwritten, _push(n), tasks=[effect.s(STORED_ID, n)])


def _bulk(chance: random.Random, keys: Keys, n: str) -> None:
    """By the collection as its owner may open it: what a majority does not have yet counts as written."""
    chosen = chance.sample(list(keys), _MANY)
    requests = [items.with_tasks(UpdateOne(_unwritten(key, n), _push(n)), _tasks(key, n)) for key in chosen]
    items.collection.with_options(write_concern=WriteConcern(1)).bulk_write(requests, ordered=False)
    items.dispatch(*chosen[::2])  # for the others the flag has to do


def _transaction(chance: random.Random, keys: Keys, n: str) -> None:
    chosen = chance.sample(list(keys), 2)

    def write(session: Any) -> None:
        for key in chosen:
            items.update_one(_unwritten(key, n), _push(n), tasks=_tasks(key, n), session=session)

    transactional(client, timeout=20).run(write)


KINDS: dict[Callable[[random.Random, Keys, str], object], int] = {
    _update: 14, _insert: 6, _transaction: 1, _many: 2, _bulk: 2,
}  # fmt: skip
"""How often."""


def _write_on(seed: int, keys: Keys) -> None:
    chance = random.Random(seed)
    for number in itertools.count():
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        state = chance.getstate()
        while True:
            chance.setstate(state)  # a repetition writes the same to the same documents
            try:
                kind(chance, keys, f"{seed}.{number}")
            except (PyMongoError, TransactionTimeoutError) as error:
                if isinstance(error, BulkWriteError) and (error.details or {}).get("writeErrors"):
                    raise
                time.sleep(_AGAIN_SECONDS)
            else:
                break


def _sweep_on(seed: int, _keys: Keys) -> None:
    chance = random.Random(seed)
    while True:
        with contextlib.suppress(PyMongoError):
            items.sweep(older_than=chance.choice([0.01, 0.5]))
        time.sleep(chance.uniform(0.01, 0.3))


if __name__ == "__main__":
    import_all()
    listen_to_nothing()
    {"write": _write_on, "sweep": _sweep_on}[sys.argv[1]](int(sys.argv[2]), sys.argv[3:])
