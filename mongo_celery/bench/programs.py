"""
The loops that are measured, or that feed a worker: `python -m mongo_celery.bench.programs NAME COUNT`.

Each rests after COUNT events, until it is ended. They are written as people write them, without tricks.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from bson import json_util
from celery import chain
from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery.bench.payload import event_text
from mongo_celery.bench.raw_app import first, only, second, setting
from mongo_celery.bench.stopwatch import Stopwatch


def publish_tasks(count: int) -> None:
    """One task an event."""
    event = event_text()
    for _ in range(count):
        only.delay(event)


def publish_chains(count: int) -> None:
    """A chain of two tasks an event: a handler's, and one that would save the token."""
    event = event_text()
    token = json_util.loads(event)["_id"]["_data"]
    for _ in range(count):
        chain(first.si(event), second.si(token)).apply_async()


def watch_delay(count: int) -> None:
    """The naive loop: watch, and start a task."""
    with _orders().watch(start_at_operation_time=setting.timestamp) as stream:
        for _ in range(count):
            only.delay(json_util.dumps(next(stream)))


def watch_loop(count: int) -> None:
    """The handler inline, and the token saved after each change, so that nothing is lost."""
    started = Stopwatch(setting.clock, "started")
    ended = Stopwatch(setting.clock, "ended")
    orders = _orders()
    tokens = orders.database.get_collection("tokens", write_concern=WriteConcern("majority"))
    with orders.watch(start_at_operation_time=setting.timestamp) as stream:
        for _ in range(count):
            event = next(stream)
            started.lap()
            tokens.update_one({"_id": "orders"}, {"$set": {"token": event["_id"]}}, upsert=True)
            ended.lap()


def raw_stream(count: int) -> None:
    """Only reading."""
    started = Stopwatch(setting.clock, "started")
    with _orders().watch(start_at_operation_time=setting.timestamp) as stream:
        for _ in range(count):
            next(stream)
            started.lap()


def _orders() -> Collection[dict[str, Any]]:
    client: MongoClient[dict[str, Any]] = MongoClient(setting.mongo_url)
    return client[setting.database]["orders"]


PROGRAMS: dict[str, Callable[[int], None]] = {
    program.__name__: program for program in (publish_tasks, publish_chains, watch_delay, watch_loop, raw_stream)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](int(sys.argv[2]))
    signal.pause()  # the bench still wants to know how much processor time it took
