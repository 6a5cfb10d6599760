"""One change stream over everything that a test does, turned into the facts of `tests/chaos/history.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.chaos.history import Dropped, Effect, Fact, Kept, Led, Started, Stored, Wrote

Document = dict[str, Any]
NUMBERS = ("term", "fencingToken", "committed")


class Watcher:
    """
    Reads, from its creation on, the data, the sink and the bridge's state in the order of the oplog.

    Args:
        client: of the replica set that has them all.
        names: what the names of the three databases begin with.
    """

    def __init__(self, client: MongoClient[Document], names: str) -> None:
        self.history: list[Fact] = []
        self._client = client
        self._names = names
        self._stopping = threading.Event()
        self._after: dict[str, Any] = {"start_at_operation_time": client.admin.command("ping")["operationTime"]}
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        databases = [f"{self._names}_{part}" for part in ("data", "state", "sink")]
        while not self._stopping.is_set():
            try:
                with self._client.watch(
                    [{"$match": {"ns.db": {"$in": databases}}}], max_await_time_ms=100, **self._after
                ) as stream:
                    while not self._stopping.is_set():
                        event = stream.try_next()
                        self._after = {"start_after": stream.resume_token}
                        if event is not None:
                            self.history += facts_of(event)
            except PyMongoError:
                continue  # a step-down: from the same place again


def facts_of(event: Mapping[str, Any]) -> Iterator[Fact]:
    """The facts in one change event."""
    at = event["wallTime"].timestamp()
    part = event["ns"]["db"].rpartition("_")[2]
    if event["operationType"] in {"drop", "dropDatabase"}:
        if part == "state":
            yield Dropped(at)
        return
    changed = _changed(event)
    name = event["ns"]["coll"]
    if part == "data" and name == "items" and "n" in changed:
        yield Wrote(event["documentKey"]["_id"], changed["n"], event["_id"]["_data"], at)
    elif part == "sink" and name == "starts":
        who = {name: changed[name] for name in ("handler", "key", "n", "fence")}
        yield Started(**who, at=at)
    elif part == "sink" and name == "registers":
        for effect in _pushed(changed):
            names = ("handler", "key", "n", "fence", "partition", "generation", "place")
            yield Effect(**{name: effect[name] for name in names}, at=at)
    elif part == "state":
        yield from _of_state(name, event["documentKey"]["_id"], changed, at)
        if name == "backlog" and event["operationType"] == "insert":
            _, handler, _, _, place, *_ = event["documentKey"]["_id"].split("/")
            yield Kept(handler, place)


def _of_state(collection: str, document_id: str, changed: Mapping[str, Any], at: float) -> Iterator[Fact]:
    if collection == "leases" and changed.get("listenerId") and changed.get("term"):
        yield Led(changed["listenerId"], changed["term"], at)
    place = changed.get("resumeToken._data") or (changed.get("resumeToken") or {}).get("_data") or ""
    numbers = {name: changed[name] for name in NUMBERS if changed.get(name)}
    if not place and not numbers:
        return
    passed = None
    if collection == "handlers" and place and "startAtOperationTime" not in changed:
        passed = document_id.partition("/")[2]
    yield Stored(f"{collection}/{document_id}", place, numbers, passed, at)


def _changed(event: Mapping[str, Any]) -> Mapping[str, Any]:
    if event["operationType"] == "update":
        fields: Mapping[str, Any] = event["updateDescription"]["updatedFields"]
        return fields
    return event.get("fullDocument") or {}


def _pushed(changed: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name, value in changed.items():
        if name == "log":
            yield from value
        elif name.startswith("log."):
            yield value
