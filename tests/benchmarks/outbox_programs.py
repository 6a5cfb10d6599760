"""The measured processes of the outbox's suite: `python -m tests.benchmarks.outbox_programs NAME ARGUMENT...`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mongo_celery import STORED_ID
from mongo_celery.bench.payload import make_order
from mongo_celery.bench.stopwatch import Stopwatch
from tests.benchmarks.answers import answer
from tests.benchmarks.outbox_app import orders, outbox, send_receipt, setting

_MANY = 10
_WARM_UP = 5
_THREADS = 4
_BATCH = 1000


def writes(rounds: str, count: str) -> None:
    """
    Seconds for one write of each kind with what follows it, in short turns, so that no kind has a better moment.

    One thread, as in a web process that serves one request.
    """
    kinds, progress = _kinds(int(count) * int(rounds) + _WARM_UP), Stopwatch(setting.clock, "progress")
    for _ in range(_WARM_UP):
        for write in kinds.values():
            write()
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(int(rounds)):
        names = list(kinds)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            write, began = kinds[name], time.perf_counter()
            for _ in range(int(count)):
                write()
            found[name].append((time.perf_counter() - began) / int(count))
            progress.lap()
    answer(setting, found)


def _kinds(updates: int) -> dict[str, Callable[[], object]]:
    collection = orders()
    at_once, later = outbox(collection), outbox(collection, at_once=False)
    there = [make_order(number) for number in range(updates)]
    collection.insert_many(there)
    documents = {kind: iter(there) for kind in ("delay", "outbox", "later")}
    change = {"$set": {"paid": True}, "$inc": {"number": 1}}

    def receipts(document: dict[str, Any], count: int = 1) -> list[Any]:
        return [send_receipt.s(str(document["_id"])) for _ in range(count)]

    def insert_delay(count: int = 1) -> None:
        document = make_order(0)
        collection.insert_one(document)
        for _ in range(count):
            send_receipt.delay(str(document["_id"]))

    def insert_outbox(count: int = 1) -> None:
        document = make_order(0)
        at_once.insert_one(document, tasks=receipts(document, count))

    def insert_later() -> None:
        document = make_order(0)
        later.insert_one(document, tasks=receipts(document))

    def update_delay() -> None:
        document = next(documents["delay"])
        collection.update_one({"_id": document["_id"]}, change)
        send_receipt.delay(str(document["_id"]))

    def update_outbox() -> None:
        document = next(documents["outbox"])
        at_once.update_one({"_id": document["_id"]}, change, tasks=receipts(document))

    def update_later() -> None:
        document = next(documents["later"])
        later.update_one({"_id": document["_id"]}, change, tasks=receipts(document))

    return {
        "insert_delay": insert_delay,
        "insert_outbox": insert_outbox,
        "insert_later": insert_later,
        "update_delay": update_delay,
        "update_outbox": update_outbox,
        "update_later": update_later,
        "insert_10_delays": lambda: insert_delay(_MANY),
        "insert_10_outbox": lambda: insert_outbox(_MANY),
    }


def sweep(count: str, per_document: str) -> None:
    """Entries per second of a sweep, and of plain `delay()` in the same process."""
    entries, each = int(count), int(per_document)
    box = outbox(orders(), at_once=False)
    _leave_pending(box, _WARM_UP, 1)
    box.sweep(older_than=0)  # makes the index and the connections
    send_receipt.delay("")
    _leave_pending(box, entries // each, each)
    began = time.perf_counter()
    delivery = box.sweep(older_than=0, limit=entries)
    swept = time.perf_counter() - began
    assert delivery.dispatched == entries // each * each, delivery
    began = time.perf_counter()
    for number in range(entries):
        send_receipt.delay(str(number))
    answer(setting, {"sweep": delivery.dispatched / swept, "delay": entries / (time.perf_counter() - began)})


def _leave_pending(box: Any, documents: int, each: int) -> None:
    """Write documents whose entries nobody dispatches but a sweep."""
    for first in range(0, documents, _BATCH):
        batch = [make_order(number) for number in range(first, min(first + _BATCH, documents))]
        box.insert_many(batch, tasks=[send_receipt.s(STORED_ID) for _ in range(each)], ordered=False)


def leave(count: str) -> None:
    """Leave so many documents with one entry each to others."""
    _leave_pending(outbox(orders(), at_once=False), int(count), 1)
    answer(setting, {})


def write_on() -> None:
    """Write orders with tasks in several threads until somebody ends it."""
    box, written = outbox(orders()), Stopwatch(setting.clock, "written")
    lock = threading.Lock()

    def go_on() -> None:
        while True:
            document = make_order(0)
            box.insert_one(document, tasks=[send_receipt.s(str(document["_id"]))])
            with lock:
                written.lap()

    for _ in range(_THREADS - 1):
        threading.Thread(target=go_on, daemon=True).start()
    go_on()


PROGRAMS: dict[str, Callable[..., None]] = {program.__name__: program for program in (writes, sweep, leave, write_on)}


def main(arguments: Sequence[str]) -> None:
    """Run one of them."""
    PROGRAMS[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
