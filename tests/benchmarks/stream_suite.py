"""The bridge's change stream: how fast the server passes what nobody watches, by the number of sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, WriteConcern

from mongo_celery.bench.payload import present_time
from mongo_celery.bench.stage import BenchError, Scene, Stage
from mongo_celery.bridge.stream.filter import Filter
from mongo_celery.bridge.stream.source import Scope, Selector, Source, make_scope
from mongo_celery.mongo.oplog import time_of_token
from tests.benchmarks.readings import RATE, Tables, reading
from tests.benchmarks.sizes import Sizes

SOURCES = (1, 10, 60, 200)
"""How many collections, or databases, are watched."""

_NEIGHBOUR = "neighbour"
_BATCH = 5000
_PADDING = "x" * 100
_REFERENCE = "plain_in"
_STALL_SECONDS = 120.0


def run_stream(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    """Measure the stream beside a neighbour's writes, from the first to the last of them."""
    scanned = []
    client: MongoClient[Any]
    with (
        stage.scene("stream") as scene,
        MongoClient(stage.mongo_url, document_class=RawBSONDocument) as client,
    ):
        start = present_time(stage.client)
        watched = _fill(scene, sizes.scanned, announce)
        end = present_time(stage.client)
        scene.data[_NEIGHBOUR].insert_one({})  # a stream has passed a time only when something comes behind it
        for count in SOURCES:
            scopes = _scopes(scene.setting.database, scene.setting.state_database, count)
            rates: dict[str, list[float]] = {name: [] for name in scopes}
            for number in range(sizes.rounds):
                for name, found in rates.items():
                    announce(f"{name} of {count}, round {number + 1} of {sizes.rounds}")
                    seconds = _read(client, scopes[name], start, end, watched)
                    found.append(sizes.scanned / seconds)
            for name, found in rates.items():
                beside = None if name == _REFERENCE else (f"{_REFERENCE}_{count}", rates[_REFERENCE])
                scanned.append(reading(f"{name}_{count}", RATE, found, beside))
    return {f"Oplog entries that a stream passes per second, {sizes.scanned:,} of a neighbour": scanned}


def _fill(scene: Scene, entries: int, announce: Callable[[str], None]) -> int:
    """Writes of a neighbour, with a watched one now and then; how many of the latter."""
    neighbour = scene.data.get_collection(_NEIGHBOUR, write_concern=WriteConcern(1))
    firsts = range(0, entries, _BATCH)
    for first in firsts:
        announce(f"{first} of {entries} entries of a neighbour")
        numbers = range(first, min(first + _BATCH, entries))
        neighbour.insert_many([{"_id": number, "text": _PADDING} for number in numbers], ordered=False)
        scene.data[_name(0)].insert_one({"_id": first})
    return len(firsts)


def _scopes(database: str, state_database: str, count: int) -> Mapping[str, Scope]:
    """
    The streams to compare. Each sees the first collection of the database; none sees the neighbour.

    `plain_in` is the plainest that a person would write.
    """
    names = [_name(number) for number in range(count)]
    databases = [database, *(f"{database}-{number}" for number in range(1, count))]
    return {
        _REFERENCE: Scope(database, None, ({"$match": {"ns.coll": {"$in": names}}},), {}),
        "bridge": _of_bridge([Source(database, name) for name in names], state_database),
        "bridge_databases": _of_bridge([Source(each, _name(0)) for each in databases], state_database),
        "bridge_whole": _of_bridge(
            [Source(database, names[0]), *(Source(each, None) for each in databases[1:])], state_database
        ),
    }


def _of_bridge(sources: Sequence[Source], state_database: str) -> Scope:
    """The stream of a bridge with one handler for each source."""
    selectors = [Selector(f"handler_{number}", (source,), Filter()) for number, source in enumerate(sources)]
    return make_scope(selectors, state_database=state_database)


def _read(client: MongoClient[Any], scope: Scope, start: Timestamp, end: Timestamp, watched: int) -> float:
    """Seconds from opening a stream until it has passed the end."""
    began, seen = time.monotonic(), 0
    with scope.find_target(client).watch(
        list(scope.pipeline), start_at_operation_time=start, max_await_time_ms=1
    ) as stream:
        while time.monotonic() - began < _STALL_SECONDS:
            if stream.try_next() is not None:
                seen += 1
                continue
            place = time_of_token(stream.resume_token, None)
            if place is not None and place >= end:
                if seen != watched:
                    raise BenchError(f"a stream of {watched} watched changes has shown {seen}.")
                return time.monotonic() - began
    raise BenchError(f"a stream has not passed the neighbour's writes within {_STALL_SECONDS:.0f} s.")


def _name(number: int) -> str:
    return f"watched_{number:03}"
