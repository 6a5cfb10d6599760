"""The measured processes of the outbox's costs: `python -m tests.benchmarks.outbox_cost_programs NAME ARGUMENT...`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from pymongo import UpdateOne
from pymongo.collection import Collection

from mongo_celery import STORED_ID
from mongo_celery.bench.payload import make_order
from mongo_celery.bench.stopwatch import Stopwatch
from mongo_celery.bench.usage import cpu_seconds
from tests.benchmarks.answers import answer, await_sign
from tests.benchmarks.outbox_app import app, orders, outbox, send_receipt, setting

_APART_SECONDS = 0.015
_LOOK_SECONDS = 0.02
_SETTLE_SECONDS_MAX = 60.0
_WARM_UP = 20
_FIELD = "pendingEvents"
_CHANGE = {"$set": {"paid": True}, "$inc": {"number": 1}}

Found = dict[str, list[float]]


class Writers:
    """Each way to write, with what follows it; a plain way and ways through the outbox of the same name."""

    def __init__(self, updates: int, size: int) -> None:
        self.collection = orders()
        self.outbox = outbox(self.collection)
        self.outbox.backing.relay  # noqa: B018 - makes the index, which is none of a write's cost
        self._broker: Any = redis.Redis.from_url(setting.redis_url)
        self._sent = 0
        self._size = size
        self._there = self._documents(updates)

    def _documents(self, count: int) -> Iterator[Any]:
        """The `_id`s of documents that no other write has had."""
        while True:
            documents = [make_order(number) for number in range(min(count, 5000))]
            self.collection.insert_many(documents)
            yield from (document["_id"] for document in documents)

    def ways(self) -> dict[str, Callable[[], None]]:
        """By name."""
        if self._size > 1:
            return {"plain": self._plain_bulk, "outbox": self._outbox_bulk, "operators": self._operators_bulk}
        return {
            "insert_plain": self._plain_insert,
            "insert_outbox": self._outbox_insert,
            "update_plain": self._plain_update,
            "update_outbox": self._outbox_update,
        }

    def _plain_insert(self) -> None:
        document = make_order(0)
        self.collection.insert_one(document)
        send_receipt.delay(str(document["_id"]))
        self._sent += 1

    def _outbox_insert(self) -> None:
        document = make_order(0)
        self.outbox.insert_one(document, tasks=[send_receipt.s(str(document["_id"]))])
        self._sent += 1

    def _plain_update(self) -> None:
        _id = next(self._there)
        self.collection.update_one({"_id": _id}, _CHANGE)
        send_receipt.delay(str(_id))
        self._sent += 1

    def _outbox_update(self) -> None:
        _id = next(self._there)
        self.outbox.update_one({"_id": _id}, _CHANGE, tasks=[send_receipt.s(str(_id))])
        self._sent += 1

    def _plain_bulk(self) -> None:
        ids = [next(self._there) for _ in range(self._size)]
        self.collection.bulk_write([UpdateOne({"_id": _id}, _CHANGE) for _id in ids])
        for _id in ids:
            send_receipt.delay(str(_id))
        self._sent += len(ids)

    def _outbox_bulk(self) -> None:
        ids = [next(self._there) for _ in range(self._size)]
        self.outbox.update_many({"_id": {"$in": ids}}, _CHANGE, tasks=[send_receipt.s(STORED_ID)])
        self._sent += len(ids)

    def _operators_bulk(self) -> None:
        ids = [next(self._there) for _ in range(self._size)]
        requests = [self.outbox.with_tasks(UpdateOne({"_id": _id}, _CHANGE), [send_receipt.s(str(_id))]) for _id in ids]
        self.collection.bulk_write(requests)
        self.outbox.dispatch(*ids)
        self._sent += len(ids)

    def settle(self) -> None:
        """Wait until the broker has every message, and no document an entry."""
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        while self._broker.llen(setting.name) < self._sent or _pending(self.collection):
            assert time.monotonic() < deadline, f"{_pending(self.collection)} documents were not delivered"
            time.sleep(_LOOK_SECONDS)


def _pending(collection: Collection[Any]) -> int:
    return collection.count_documents({f"{_FIELD}.count": {"$gt": 0}})


def costs(rounds: str, count: str, size: str, paced: str, *servers: str) -> None:
    """
    Seconds of the caller, and processor seconds of all processes, of one write in each way.

    The ways take turns, and each begins when everything of the one before has arrived.

    Args:
        rounds: how many turns.
        count: writes of each way in a turn.
        size: documents of a write.
        paced: `1` for writes that are 15 ms apart.
        servers: pids of those whose processor time counts, beside this process's.
    """
    writers = Writers(int(rounds) * int(count) * int(size) * 3 + _WARM_UP * int(size), int(size))
    progress, pids = Stopwatch(setting.clock, "progress"), [os.getpid(), *map(int, servers)]
    ways = writers.ways()
    for write in ways.values():
        for _ in range(max(_WARM_UP // int(size), 1)):
            write()
    writers.settle()
    caller: Found = {name: [] for name in ways}
    used: Found = {name: [] for name in ways}
    for number in range(int(rounds)):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = cpu_seconds(pids)
            caller[name].append(_turn(ways[name], int(count), pause=_APART_SECONDS if paced == "1" else 0.0))
            writers.settle()
            used[name].append((cpu_seconds(pids) - before) / int(count))
            progress.lap()
    answer(setting, {"caller": caller, "cpu": used})


def _turn(write: Callable[[], None], count: int, *, pause: float) -> float:
    """Seconds of one write, the mean of some."""
    inside = 0.0
    for _ in range(count):
        began = time.perf_counter()
        write()
        inside += time.perf_counter() - began
        if pause:
            time.sleep(pause)
    return inside / count


def hot(way: str, threads: str, count: str, _id: str) -> None:
    """Seconds of each write to one document, by several threads of this process, which begin with others."""
    collection = orders()
    box = outbox(collection)
    box.backing.relay  # noqa: B018 - makes the index
    send_receipt.delay("")

    def plain(number: int) -> None:
        collection.update_one({"_id": _id}, {"$inc": {"number": 1}})
        send_receipt.delay(str(number))

    def through_outbox(number: int) -> None:
        box.update_one({"_id": _id}, {"$inc": {"number": 1}}, tasks=[send_receipt.s(str(number))])

    write = {"plain": plain, "outbox": through_outbox}[way]
    await_sign(setting)
    seconds = _in_threads(int(threads), lambda: _seconds_of(write, int(count)))
    answer(setting, {"seconds": seconds})


def _seconds_of(write: Callable[[int], None], count: int) -> list[float]:
    found = []
    for number in range(count):
        began = time.perf_counter()
        write(number)
        found.append(time.perf_counter() - began)
    return found


def _in_threads(count: int, job: Callable[[], list[float]]) -> list[float]:
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.extend(job())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def frozen(rounds: str, threads: str, count: str, broker: str) -> None:
    """
    Seconds of each insert while the broker does not answer: alone, and through an outbox; in turns.

    Who starts this freezes the broker after the sign that it is ready, and thaws it after the answer.
    """
    app.conf.update(broker_url=broker)
    collection = orders()
    box = outbox(collection)
    box.insert_one(make_order(0), tasks=[send_receipt.s("")])

    def alone(_number: int) -> None:
        collection.insert_one(make_order(0))

    def through_outbox(number: int) -> None:
        box.insert_one(make_order(0), tasks=[send_receipt.s(str(number))])

    await_sign(setting)
    found: Found = {"alone": [], "outbox": []}
    for _ in range(int(rounds)):
        for name, write in (("alone", alone), ("outbox", through_outbox)):
            found[name] += _in_threads(int(threads), lambda write=write: _seconds_of(write, int(count)))  # type: ignore[misc]
    answer(setting, found)
    while True:  # the outbox of this process delivers when the broker is back
        time.sleep(_LOOK_SECONDS)


PROGRAMS: dict[str, Callable[..., None]] = {program.__name__: program for program in (costs, hot, frozen)}


def main(arguments: Sequence[str]) -> None:
    """Run one of them."""
    PROGRAMS[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
