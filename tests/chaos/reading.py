"""
From the events of the run's own databases to the facts of its history.

The events of a cluster are in one order that no clock and no process can dispute. Documents of the state are followed
from event to event, since an update says only what it has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.mongo.oplog import operation_time
from tests.chaos.facts import (
    Brought,
    Changed,
    Charged,
    Fact,
    Let,
    Parked,
    Waited,
    Where,
)
from tests.chaos.setting import BRIDGE, DATA, FACTS, FLOWS, SINK, STATE, partition_of
from tests.rig.conformance import LARGE, Recording, document_after
from tests.rig.history import Due, Effect, Led, SetAside, Started, Wrote

Event = Mapping[str, Any]
Document = dict[str, Any]


class Reading:
    """
    Takes in events in their order.

    Attributes:
        history: the facts so far.
    """

    def __init__(self) -> None:
        self.history: list[Fact] = []
        self._documents: dict[tuple[str, str, Any], Document] = {}
        self._dues: dict[tuple[str, str], Due] = {}
        self._executions: set[tuple[Any, ...]] = set()

    def take(self, event: Event) -> list[Fact]:
        found = list(self._facts(event))
        self.history += found
        return found

    def _facts(self, event: Event) -> Iterator[Fact]:
        if event["operationType"] not in {"insert", "update", "replace", "delete"}:
            return
        before, after = self._follow(event)
        at = event["wallTime"].timestamp()
        match event["ns"]:
            case {"db": database, "coll": collection} if database == DATA and collection == SINK:
                yield from _effect(before, after, at)
            case {"db": database, "coll": collection} if database == DATA:
                yield from self._wrote(event, collection, after, at)
            case {"db": database, "coll": "start"} if database == FACTS:
                yield from self._started(after["fact"], at)
            case {"db": database, "coll": "brought"} if database == FACTS:
                fact = after["fact"]
                due = Due(fact["handler"], fact["key"], fact["n"])
                yield Brought((fact["handler"], fact["partition"]), due, after["place"], at)
            case {"db": database, "coll": collection} if database == STATE:
                yield from self._state(collection, event, before, after, at)

    def _follow(self, event: Event) -> tuple[Document, Document]:
        """A document before and after the event; empty where there is none."""
        where = event["ns"]["db"], event["ns"]["coll"], str(event["documentKey"]["_id"])
        before = self._documents.get(where, {})
        after = document_after(before, event) or {}
        if event["operationType"] == "delete":
            self._documents.pop(where, None)
        elif event["ns"]["db"] in {STATE, DATA} and event["ns"]["coll"] not in {"backlog", "dead_letters"}:
            self._documents[where] = after
        return before, after

    def _started(self, fact: Document, at: float) -> Iterator[Fact]:
        """One that repeats its transaction, as the driver asks, has not started again."""
        started = Started(**fact, at=at)
        execution = started.handler, started.partition, started.seq, started.fence
        if not FLOWS[started.handler].transactional or execution not in self._executions:
            self._executions.add(execution)
            yield started

    def _wrote(self, event: Event, collection: str, after: Document, at: float) -> Iterator[Fact]:
        key, place = str(event["documentKey"]["_id"]), event["_id"]["_data"]
        if "n" in after:
            self._dues[collection, place] = Due(collection, key, after["n"])
            yield Wrote(key, after["n"], place, at, collection)

    def _state(self, collection: str, event: Event, before: Document, after: Document, at: float) -> Iterator[Fact]:
        where = str(event["documentKey"]["_id"])
        if collection == "partitions" and after:
            yield from self._partition(where, before, after, at)
        elif collection == "leases" and where == BRIDGE and after:
            yield from _lease(before, after, at)
        elif collection == "dead_letters" and event["operationType"] == "delete":
            yield from self._let(where)
        elif collection == "dead_letters" and "fullDocument" in event:
            yield from self._aside(after["handler"], after["resumeToken"]["_data"], parks="parked" in after)

    def _aside(self, subscription: str, place: str, *, parks: bool = False) -> Iterator[Fact]:
        due = self._dues.get((subscription, place))
        if due is not None:
            yield Parked(due) if parks else SetAside(due)

    def _let(self, letter: str) -> Iterator[Fact]:
        _, subscription, place = letter.split("/")
        due = self._dues.get((subscription, place))
        if due is not None:
            yield Let(due)

    def _partition(self, where: str, before: Document, after: Document, at: float) -> Iterator[Fact]:
        partition = _partition(where)
        head = _place(before, "halted")
        if head and head == _place(after) and before.get("committed", 0) < after["committed"]:
            yield from self._aside(partition[0], head)  # a person has skipped it
        if before.get("state", "flowing") != after["state"]:
            yield Changed(partition, after["state"], _place(after, "halted"), at)
        counts = [(document.get("retry") or {}).get(name, 0) for document in (before, after) for name in _COUNTS]
        if counts[2] > counts[0] or counts[3] > counts[1]:
            yield Charged(partition, _place(after), counts[2], counts[3], at)
        if _waits(after) > _waits(before):
            yield Waited(partition, at)


_COUNTS = "count", "crashes"


def _place(document: Document, field: str = "") -> str:
    found = document.get(field) if field else document
    token = (found or {}).get("resumeToken") or {}
    return str(token.get("_data", ""))


def _waits(document: Document) -> int:
    """How often in a row its first change has met an outage."""
    waiting = (document.get("retry") or {}).get("waiting") or {}
    return int(waiting.get("count", 0))


def _partition(where: str) -> Where:
    _, subscription, _, index = where.split("/")[:4]
    return subscription, int(index)


def _effect(before: Document, after: Document, at: float) -> Iterator[Fact]:
    if after.get("last") != before.get("last"):
        yield Effect(**after["last"], at=at)


def _lease(before: Document, after: Document, at: float) -> Iterator[Fact]:
    if after["term"] != before.get("term") and after.get("listenerId") is not None:
        yield Led(after["listenerId"], after["term"], at)


_AGAIN_SECONDS = 0.2
_AWAIT_MILLISECONDS = 300
_END = "end of the run"


class Following:
    """
    Follows a run from now on, through whatever happens to its servers.

    Args:
        url: of the servers, without any network that faults befall.

    Attributes:
        reading: what was read, and
        recording: the writes of the bridge's state. Both are only of use after `end`.
    """

    def __init__(self, url: str) -> None:
        self.reading = Reading()
        self.recording = Recording()
        self._client: MongoClient[dict[str, Any]] = MongoClient(
            url,
            appname="chaos-following",
            serverSelectionTimeoutMS=5000,
            connectTimeoutMS=2000,
            tz_aware=True,
            unicode_decode_error_handler="replace",
            datetime_conversion="DATETIME_AUTO",
        )
        self._start: Timestamp = operation_time(self._client)
        self._open: set[Due] = set()
        self._seen: set[Due] = set()
        self._failure: Exception | None = None
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="chaos-following", daemon=True)
        self._thread.start()

    def backlog(self) -> int:
        return len(self._open)

    def open(self, acknowledged: list[Due]) -> set[Due]:
        """
        What of these writes is not done yet, or not seen.

        Raises:
            Exception: whatever has ended the reading.
        """
        if self._failure is not None:
            raise self._failure
        with self._guard:
            return self._open | {due for due in acknowledged if due not in self._seen}

    def end(self, seconds: float) -> list[Fact]:
        """
        Read up to now, and stop; the history.

        Raises:
            TimeoutError: that took longer than it may.
        """
        self._client[FACTS]["end"].insert_one({"_id": _END})
        if self._failure is not None:
            raise self._failure
        if not self._ended.wait(seconds):
            raise TimeoutError(f"The history could not be read within {seconds:.0f} s: is the server busy?")
        self._thread.join()
        self._client.close()
        self.recording.end()
        return self.reading.history

    def _follow(self) -> None:
        token = None
        wanted: list[dict[str, Any]] = [{"$match": {"ns.db": {"$in": [DATA, STATE, FACTS]}}}, {"$unset": LARGE}]
        while not self._ended.is_set():
            place: dict[str, Any] = (
                {"start_at_operation_time": self._start} if token is None else {"resume_after": token}
            )
            try:
                with self._client.watch(wanted, max_await_time_ms=_AWAIT_MILLISECONDS, **place) as stream:
                    while not self._ended.is_set():
                        event = stream.try_next()
                        token = stream.resume_token
                        if event is not None:
                            self._take(event)
            except PyMongoError:
                self._pause.wait(_AGAIN_SECONDS)
            except Exception as error:  # noqa: BLE001 - told to whoever asks
                self._failure = error
                return

    def _take(self, event: dict[str, Any]) -> None:
        if event["ns"] == {"db": FACTS, "coll": "end"}:
            self._ended.set()
            return
        if event["ns"]["db"] == STATE:
            self.recording.take(event)
        with self._guard:
            for fact in self.reading.take(event):
                if isinstance(fact, Wrote):
                    due = Due(fact.handler or "", fact.key, fact.n)
                    where = f"{BRIDGE}/{due.handler}", partition_of(due.handler, due.key)
                    self.recording.note_change(*where, fact.place)
                    self._open.add(due)
                    self._seen.add(due)
                elif isinstance(fact, Effect | SetAside | Let):
                    self._open.discard(fact.due)
