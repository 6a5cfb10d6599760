"""The measured processes of the suite `outbox`: `python -m tests.benchmarks.outbox_programs NAME ARGUMENT...`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import redis
from pymongo import MongoClient, UpdateOne, WriteConcern
from pymongo.collection import Collection

from mongo_celery import STORED_ID, Outbox
from mongo_celery.bench.payload import make_order
from mongo_celery.bench.setting import BenchSetting, make_app
from mongo_celery.bench.stopwatch import Stopwatch, cpu_seconds
from tests.benchmarks.answers import answer

_LOOK_SECONDS = 0.02
_SETTLE_SECONDS_MAX = 60.0
_WARM_UP = 20
_BATCH = 5000
_CHANGE = {"$set": {"paid": True}, "$inc": {"number": 1}}

Found = dict[str, list[float]]

setting = BenchSetting.from_environment()
app = make_app(setting)


@app.task(ignore_result=True, name="bench.send_receipt")
def send_receipt(order: str) -> None:
    del order


def orders(number: int = 0) -> Collection[dict[str, Any]]:
    """A collection, as an application opens it that wants to be sure of its writes."""
    name = f"orders_{number}" if number else "orders"
    return _client()[setting.database].get_collection(name, write_concern=WriteConcern("majority"))


def outbox(collection: Collection[dict[str, Any]], **options: Any) -> Outbox:
    """An outbox for it; the suite sweeps by itself."""
    given = {"database": setting.state_database, "sweep_every": None, **setting.bridge, **options}
    return Outbox(app, collection, **given)


@cache
def _client() -> MongoClient[dict[str, Any]]:
    return MongoClient(setting.mongo_url)


class Writers:
    """
    Each way to write, with what follows it: a plain way, and a way through the outbox.

    Args:
        size: messages of a write: of one document each, or all of one document.
    """

    def __init__(self, size: int) -> None:
        self.collection = orders()
        self.outbox = outbox(self.collection)
        self.sent = 0
        self._broker: Any = redis.Redis.from_url(setting.redis_url)
        self._size = size
        self._there = self._documents()
        self._hot = next(self._there)

    def _documents(self) -> Iterator[Any]:
        """Yield the `_id`s of documents that no other write has had."""
        while True:
            documents = [make_order(number) for number in range(_BATCH)]
            self.collection.insert_many(documents)
            yield from (document["_id"] for document in documents)

    def ways(self, kind: str) -> dict[str, Callable[[], None]]:
        kinds: dict[str, tuple[Callable[[], None], ...]] = {
            "single": (self.insert_plain, self.insert_outbox, self.update_plain, self.update_outbox),
            "bulk": (
                self.insert_many_plain, self.insert_many_outbox, self.update_many_plain, self.update_many_outbox,
            ),
            "hot": (self.hot_plain, self.hot_outbox),
        }  # fmt: skip
        return {way.__name__: way for way in kinds[kind]}

    def insert_plain(self) -> None:
        document = make_order(0)
        self.collection.insert_one(document)
        send_receipt.delay(str(document["_id"]))

    def insert_outbox(self) -> None:
        document = make_order(0)
        self.outbox.insert_one(document, tasks=[send_receipt.s(str(document["_id"]))])

    def update_plain(self) -> None:
        _id = next(self._there)
        self.collection.update_one({"_id": _id}, _CHANGE)
        send_receipt.delay(str(_id))

    def update_outbox(self) -> None:
        _id = next(self._there)
        self.outbox.update_one({"_id": _id}, _CHANGE, tasks=[send_receipt.s(str(_id))])

    def insert_many_plain(self) -> None:
        documents = [make_order(0) for _ in range(self._size)]
        self.collection.insert_many(documents)
        for document in documents:
            send_receipt.delay(str(document["_id"]))

    def insert_many_outbox(self) -> None:
        documents = [make_order(0) for _ in range(self._size)]
        self.outbox.insert_many(documents, tasks=[send_receipt.s(STORED_ID)])

    def update_many_plain(self) -> None:
        ids = [next(self._there) for _ in range(self._size)]
        self.collection.bulk_write([UpdateOne({"_id": _id}, _CHANGE) for _id in ids])
        for _id in ids:
            send_receipt.delay(str(_id))

    def update_many_outbox(self) -> None:
        ids = [next(self._there) for _ in range(self._size)]
        self.outbox.update_many({"_id": {"$in": ids}}, _CHANGE, tasks=[send_receipt.s(STORED_ID)])

    def hot_plain(self) -> None:
        self.collection.update_one({"_id": self._hot}, _CHANGE)
        for _ in range(self._size):
            send_receipt.delay(str(self._hot))

    def hot_outbox(self) -> None:
        tasks = [send_receipt.s(str(self._hot)) for _ in range(self._size)]
        self.outbox.update_one({"_id": self._hot}, _CHANGE, tasks=tasks)

    def settle(self) -> None:
        """Wait until the broker has every message, and no document an entry."""
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        while self._broker.llen(setting.name) < self.sent or self._pending():
            assert time.monotonic() < deadline, f"{self._pending()} documents were not delivered"
            time.sleep(_LOOK_SECONDS)

    def _pending(self) -> int:
        return self.collection.count_documents({"pendingEvents.count": {"$gt": 0}})


def costs(kind: str, rounds: str, count: str, size: str, threads: str, *servers: str) -> None:
    """
    Measure seconds of the caller, and processor seconds of all processes, of one write in each way.

    The ways take turns, and each begins when everything of the one before has arrived.

    Args:
        count: writes of each way in a turn, by each thread.
        size: messages of a write.
        servers: pids of those whose processor time counts, beside this process's.
    """
    writers, pids = Writers(int(size)), [os.getpid(), *map(int, servers)]
    progress, together = Stopwatch(setting.clock, "progress"), int(threads)
    ways = writers.ways(kind)
    for write in ways.values():
        for _ in range(max(_WARM_UP // int(size), 1)):
            write()
            writers.sent += int(size)
    writers.settle()
    caller: Found = {name: [] for name in ways}
    used: Found = {name: [] for name in ways}
    writes = together * int(count)
    for number in range(int(rounds)):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = cpu_seconds(pids)
            seconds = _take_turn(ways[name], int(count), together)
            writers.sent += writes * int(size)
            writers.settle()
            caller[name].append(seconds)
            used[name].append((cpu_seconds(pids) - before) / writes)
            progress.lap()
    answer(setting, {"caller": caller, "cpu": used})


def _take_turn(write: Callable[[], None], count: int, threads: int) -> float:
    inside: list[float] = []

    def turn() -> None:
        for _ in range(count):
            began = time.perf_counter()
            write()
            inside.append(time.perf_counter() - began)

    others = [threading.Thread(target=turn) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    turn()
    for thread in others:
        thread.join()
    return sum(inside) / len(inside)


def held_back(rounds: str, documents: str, due: str) -> None:
    """
    Measure seconds of a sweep that finds a few due documents: alone, and among many that are held back.

    Args:
        rounds: how many sweeps of each kind.
        documents: held back, by a task that no process knows.
        due: documents that each sweep delivers.
    """
    collection, found = orders(), Found(sweep_alone=[], sweep_among_held_back=[])
    swept, progress = outbox(collection, at_once=False), Stopwatch(setting.clock, "progress")

    def sweep() -> float:
        swept.insert_many([make_order(0) for _ in range(int(due))], tasks=[send_receipt.s(STORED_ID)])
        began = time.perf_counter()
        delivery = swept.sweep(older_than=0)
        seconds = time.perf_counter() - began
        assert delivery.dispatched == int(due), delivery
        return seconds

    sweep()
    found["sweep_alone"] = [sweep() for _ in range(int(rounds))]
    swept.insert_one({"_id": "held"}, tasks=[app.signature("bench.unknown")])
    swept.sweep(older_than=0)
    pending = (collection.find_one({"_id": "held"}) or {})["pendingEvents"]
    pending["claim"]["until"] = datetime.now(UTC) + timedelta(hours=1)
    for first in range(0, int(documents), _BATCH):
        numbers = range(first, min(first + _BATCH, int(documents)))
        collection.insert_many([{"_id": number, "pendingEvents": pending} for number in numbers], ordered=False)
        progress.lap()
    sweep()
    found["sweep_among_held_back"] = [sweep() for _ in range(int(rounds))]
    answer(setting, {"seconds": found})


PROGRAMS: dict[str, Callable[..., None]] = {each.__name__: each for each in (costs, held_back)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
