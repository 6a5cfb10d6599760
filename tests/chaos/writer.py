"""The writer: one thread that writes to all flows, all the time, and knows nothing of the bridge."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, WriteConcern
from pymongo.errors import DuplicateKeyError, PyMongoError

from tests.chaos.facts import Step
from tests.chaos.setting import BROKEN_TEXT, DATA, FLOWS, HOT, MESSAGE_BYTES_MAX, OWNERLESS, Flow, keys_of
from tests.rig.history import Due

_BURST = 40
_BACKLOG = 200
_MARK = "????"
_AGAIN_SECONDS = 0.2
_YEAR_20000 = DatetimeMS(568_971_820_800_000)
_LINGERING = 0.05
_FAILING = 0.06
"""How many of the changes whose key may be parked fail at times, and until all is cured."""


class Writer:
    """
    Writes until it is told to stop: every write again and again until a majority has it.

    Args:
        url: of the servers, without any network that faults befall.
        seed: for the order of keys.
        backlog: tells how much is written and not done; the writer goes slower where that is much.

    Attributes:
        acknowledged: what a majority has, in the order of each key.
    """

    def __init__(self, url: str, seed: int | str, backlog: Callable[[], int]) -> None:
        self.acknowledged: list[Due] = []
        self._backlog = backlog
        self._client: MongoClient[dict[str, Any]] = MongoClient(
            url, appname="chaos-writer", serverSelectionTimeoutMS=3000, connectTimeoutMS=2000
        )
        self._data = self._client.get_database(DATA, write_concern=WriteConcern("majority"))
        self._chance = random.Random(f"writer/{seed}")
        self._numbers: dict[tuple[str, str], int] = {}
        self._bursts: list[str] = []
        self._poison: list[Step] = []
        self._pause = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="chaos-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def burst(self, flow: str) -> None:
        """Write many changes of a flow's hot key at once."""
        self._bursts.append(flow)

    def poison(self, step: Step) -> None:
        self._poison.append(step)

    def _write_on(self) -> None:
        due = {name: time.monotonic() for name in FLOWS}
        while not self._stopping.is_set() or self._poison:
            self._write_ordered()
            now = time.monotonic()
            slower = max(self._backlog() / _BACKLOG, 1.0)
            for name, at in due.items():
                if at <= now:
                    due[name] = max(at, now - 1.0) + slower / FLOWS[name].rate  # what was missed is missed
                    self._write(name, self._key(FLOWS[name]))
            self._stopping.wait(max(min(due.values()) - time.monotonic(), 0.001))

    def _key(self, flow: Flow) -> str:
        return HOT if self._chance.random() < flow.hot else self._chance.choice(keys_of(flow))

    def _write_ordered(self) -> None:
        while self._bursts:
            flow = self._bursts.pop(0)
            for _ in range(_BURST):
                self._write(flow, HOT)
        while self._poison:
            step = self._poison.pop(0)
            self._write(step.where, step.key, **_poisoned(step))

    def _write(self, flow: str, key: str, **fields: Any) -> None:
        n = self._numbers[flow, key] = self._numbers.get((flow, key), 0) + 1
        document = {"_id": key, "n": n, **fields}
        if FLOWS[flow].owned and not key.startswith(OWNERLESS):
            document["owner"] = key
        if self._chance.random() < _LINGERING:
            document["lingers"] = 1.0
        if FLOWS[flow].parks and self._chance.random() < _FAILING:
            document["poison"] = "raises at times"
        while True:
            try:
                self._put(flow, document)
            except PyMongoError:
                self._pause.wait(_AGAIN_SECONDS)
            else:
                self.acknowledged.append(Due(flow, key, n))
                return

    def _put(self, flow: str, document: dict[str, Any]) -> None:
        """The same document again is no change: the server notices."""
        collection = self._data[flow]
        if BROKEN_TEXT not in document["_id"]:
            collection.replace_one({"_id": document["_id"]}, document, upsert=True)
            return
        wire = bson.encode({**document, "_id": document["_id"].replace(BROKEN_TEXT, _MARK)})
        try:
            collection.insert_one(RawBSONDocument(wire.replace(_MARK.encode(), b"\xff\xfe\x80\xff")))
        except DuplicateKeyError:
            return  # the answer before was lost


def _poisoned(step: Step) -> dict[str, Any]:
    name = step.does.partition(": ")[2]
    match name:
        case "huge":
            return {"text": "x" * 3 * MESSAGE_BYTES_MAX}
        case "year 20000":
            return {"due": _YEAR_20000, "written": datetime.now(UTC)}
        case "broken UTF-8" | "no partition":
            return {}
        case "lingers":
            return {"lingers": 8.0}
        case _:
            return {"poison": name}
