"""Reading the run's history from the oplog while it runs, through a change stream of the runner's own."""

from __future__ import annotations

import threading
from typing import Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.mongo.oplog import operation_time
from tests.chaos.facts import Fact, Let
from tests.chaos.reading import Reading
from tests.chaos.setting import BRIDGE, DATA, FACTS, STATE, partition_of
from tests.rig.conformance import LARGE, Recording
from tests.rig.history import Due, Effect, SetAside, Wrote

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
        """How many changes are written and not done."""
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
