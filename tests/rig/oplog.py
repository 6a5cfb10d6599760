"""All that a deployment wrote, started, stored and did, in the one order that no clock and no process can dispute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.database import Database

from tests.rig.history import Dropped, Effect, Fact, Kept, Led, Started, Stored, Wrote

Document = dict[str, Any]
_NUMBERS = ("term", "fencingToken", "committed")
_WHERE = ("handler", "key", "n", "fence", "partition", "partitioning", "seq")
_END = "end_of_reading"


def follow(
    client: MongoClient[Document], since: Timestamp, *names: str, without: Sequence[str] = ()
) -> Iterator[Mapping[str, Any]]:
    """Give all events of some databases from a time to this moment, without some fields."""
    marks = client[names[0]][_END]
    end = marks.insert_one({}).inserted_id
    wanted: list[Document] = [{"$match": {"ns.db": {"$in": names}}}, *([{"$unset": [*without]}] if without else [])]
    with client.watch(wanted, start_at_operation_time=since) as stream:
        for event in stream:
            if event.get("documentKey", {}).get("_id") == end:
                break
            yield event
    marks.drop()


def read_oplog(
    client: MongoClient[Document],
    since: Timestamp,
    *,
    data: Database[Document],
    state: Database[Document],
    facts: Database[Document],
) -> Iterator[Fact]:
    parts = {data.name: "data", state.name: "state", facts.name: "facts"}
    reading = _Reading()
    for event in follow(client, since, *parts):
        part = parts[event["ns"]["db"]]
        if "documentKey" in event:
            yield from reading.read(part, event)
        elif part == "state" and event["operationType"] == "dropDatabase":
            yield Dropped(event["wallTime"].timestamp())


class _Reading:
    """From events to facts. What is stored counts once it is marked, as for the watermark."""

    def __init__(self) -> None:
        self._stored: dict[str, set[str]] = {}
        self._marks: dict[str, str] = {}

    def read(self, part: str, event: Mapping[str, Any]) -> Iterator[Fact]:
        collection, where = event["ns"]["coll"], str(event["documentKey"]["_id"])
        at = event["wallTime"].timestamp()
        changed = event.get("fullDocument") or event.get("updateDescription", {}).get("updatedFields", {})
        if part == "state" and collection == "backlog" and event["operationType"] == "insert":
            partition, _, place = where.rpartition("/")
            self._stored.setdefault(partition, set()).add(place)
            yield from self._kept(partition)
        elif part == "state":
            yield from self._read_state(collection, where, changed, at)
        elif part == "facts" and collection == "start":
            yield Started(**{name: changed[name] for name in (*_WHERE, "retries", "pid")}, at=at)
        elif part == "data" and collection == "sink":
            yield from _effects(changed, at)
        elif part == "data" and "n" in changed:
            yield Wrote(where, changed["n"], event["_id"]["_data"], at, collection)

    def _read_state(self, collection: str, where: str, changed: Mapping[str, Any], at: float) -> Iterator[Fact]:
        if collection == "leases" and changed.get("listenerId") and changed.get("term"):
            yield Led(changed["listenerId"], changed["term"], at)
        mark = _value(changed, "stored", "to")
        if collection == "partitions" and mark:
            self._marks[where] = mark
            yield from self._kept(where)
        place = _value(changed, "resumeToken", "_data")
        numbers = {name: changed[name] for name in _NUMBERS if changed.get(name)}
        if collection in {"leases", "handlers", "partitions"} and (place or numbers):
            is_passed = collection == "handlers" and place and "startAtOperationTime" not in changed
            yield Stored(f"{collection}/{where}", place, numbers, where.partition("/")[2] if is_passed else None, at)

    def _kept(self, partition: str) -> Iterator[Fact]:
        marked = {place for place in self._stored.get(partition, ()) if place <= self._marks.get(partition, "")}
        self._stored.setdefault(partition, set()).difference_update(marked)
        for place in marked:
            yield Kept(partition.split("/")[1], place)


def _value(changed: Mapping[str, Any], name: str, inner: str) -> str:
    """Return a part of an embedded document, which an update has replaced, or has changed alone."""
    found = changed.get(name)
    return str((found or {}).get(inner, "") if name in changed else changed.get(f"{name}.{inner}", ""))


def _effects(changed: Mapping[str, Any], at: float) -> Iterator[Effect]:
    for path, value in changed.items():
        if path.partition(".")[0] == "effects":
            for each in value if isinstance(value, list) else [value]:
                yield Effect(**{name: each[name] for name in _WHERE}, at=at)
