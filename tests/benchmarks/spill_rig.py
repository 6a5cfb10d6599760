"""One scene of the spill's suite: a partition that stands, the others beside it, and what is stored of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bson import Timestamp
from pymongo import MongoClient, ReplaceOne

from mongo_celery.bench.payload import present_time
from mongo_celery.bench.stage import Scene, pause
from mongo_celery.bridge.partitioning import partition_hash
from tests.benchmarks.spill_app import CURED

Document = dict[str, Any]

PARTITIONS = 16
SPILL_APP = "tests.benchmarks.spill_app"
_BATCH = 500
_HEX = "0123456789abcdef"


class SpillRig:
    """
    The processes and documents of one scene.

    The first partition is the one that stands, or has the hot document; keys of the others come in turns.

    Attributes:
        listener: the one that was started last.
        written: how many changes were written for the others, and for the one that stands.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.others, self.standing = scene.laps("others"), scene.laps("standing")
        self.written = {"others": 0, "standing": 0}
        self._began: Timestamp | None = None
        self._database = scene.setting.database
        self._pads: dict[int, str] = {}
        self._stands = self._key(0, 0)

    # -- processes ---------------------------------------------------------------------------------

    def start(self, act: str | None = None) -> None:
        """Start a worker and a listener; each other partition was fed once, and the one that stands does so."""
        self.scene.worker(SPILL_APP)
        self.listen()
        if act is not None:
            self.write([self.document("standing", act=act)])
            self.scene.wait("a partition that stands", lambda: self.stands)
        self.write(self.document("others", key=key) for key in self.keys(PARTITIONS - 1))
        self.await_others()

    def listen(self) -> None:
        """Start a listener, and wait until it leads."""
        before = self.scene.lease().get("term", 0)
        self.listener = self.scene.listener(SPILL_APP)
        self.scene.wait("a listener to lead", lambda: self._leads(before))

    def _leads(self, before: int) -> bool:
        lease = self.scene.lease()
        return bool(lease.get("state") == "leading" and lease["term"] > before)

    def stop_listening(self) -> None:
        """End the listener regularly."""
        self.scene.stop(self.listener)

    def cure(self) -> None:
        """Let what stands go on, as an operator does."""
        (Path(self.scene.setting.clock) / CURED).touch()
        done = self.scene.program("celery", "-A", SPILL_APP, "changes", "retry", "--yes")
        self.scene.wait("the command", lambda: done.returncode is not None)
        self.scene.stop(done)

    # -- writing -----------------------------------------------------------------------------------

    def keys(self, count: int) -> list[str]:
        """Keys of the other partitions, in turns."""
        found = (self._key(1 + number % (PARTITIONS - 1), number // (PARTITIONS - 1)) for number in range(count))
        return list(found)

    def _key(self, index: int, number: int) -> str:
        fitting = (
            key
            for key in (f"{number}-{each}" for each in itertools.count())
            if partition_hash([self._database, "orders", key]) % PARTITIONS == index
        )
        return next(fitting)

    def document(self, of: str, *, key: str | None = None, padding: int = 300, **fields: Any) -> Document:
        """A document; the key of what stands where none is given."""
        self.written[of] += 1
        stands = {"stands": True} if of == "standing" else {}
        name = self._stands if key is None else key
        return {"_id": name, "n": self.written[of], "padding": self._pad(padding), **stands, **fields}

    def _pad(self, size: int) -> str:
        """Text that can be compressed to somewhat more than a half."""
        if size not in self._pads:
            state, digits = 1, []
            for _ in range(size):
                state = state * 48271 % 0x7FFFFFFF
                digits.append(_HEX[state & 15])
            self._pads[size] = "".join(digits)
        return self._pads[size]

    def load(self, beside: int, standing: int, *, keys: int = 150, **fields: Any) -> Iterator[Document]:
        """So many changes of the others, with those of what stands spread evenly among them."""
        names = itertools.cycle(self.keys(keys))
        count = beside + standing
        for number in range(count):
            if (number + 1) * standing // count > number * standing // count:
                yield self.document("standing", **fields)
            else:
                yield self.document("others", key=next(names), **fields)

    def write(self, documents: Iterable[Document]) -> None:
        """Write changes in this order; each carries all of its document."""
        if self._began is None:
            self._began = present_time(self._client)
        left = iter(documents)
        while batch := list(itertools.islice(left, _BATCH)):
            self.scene.orders.bulk_write([ReplaceOne({"_id": each["_id"]}, each, upsert=True) for each in batch])

    # -- looking -----------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """Whether a partition is halted or parked."""
        query = {"$or": [{"state": "halted"}, {"retry": {"$ne": None}}]}
        return self.scene.state["partitions"].find_one(query, {"_id": 1}) is not None

    @property
    def stored(self) -> int:
        """How many documents are stored now."""
        return self.scene.state["backlog"].estimated_document_count()

    @property
    def inserted(self) -> int:
        """How many documents were ever stored, as the oplog tells."""
        namespace = f"{self.scene.setting.state_database}.backlog"
        query = {"ts": {"$gte": self._began}, "ns": namespace, "op": "i"}
        return self._client["local"]["oplog.rs"].count_documents(query)

    @property
    def watermark(self) -> Timestamp:
        """Time of the stored watermark."""
        found = self.scene.state["handlers"].find_one() or {}
        return found.get("clusterTime") or Timestamp(0, 0)

    @property
    def report(self) -> Document:
        """What the listener says of itself."""
        found: Document = self.scene.lease().get("report") or {}
        return found

    @property
    def _client(self) -> MongoClient[Document]:
        return self.scene.data.client

    # -- waiting -----------------------------------------------------------------------------------

    def await_others(self) -> None:
        """Wait until all changes of the others have started."""
        owed = self.written["others"]
        self.scene.wait("the others", lambda: self.others.count() >= owed, self.others.count)

    def await_standing(self) -> None:
        """Wait until all changes of what stood have started."""
        owed = self.written["standing"]
        self.scene.wait("what stood", lambda: self.standing.count() >= owed, self.standing.count)

    def await_stored(self, count: int) -> None:
        """Wait until so many changes are stored."""
        while self.stored < count:  # looked at seldom: this is measured
            self.scene.check()
            pause(0.1)

    def await_removed(self) -> None:
        """Wait until nothing is stored any more."""
        self.scene.wait("an empty spill", lambda: not self.stored, lambda: self.stored)
