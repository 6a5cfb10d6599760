"""
What a stream lets pass and what it passes over: a neighbour's writes, however many sources there are; events of all
kinds; and what lies before a resume token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import pytest
from bson import Timestamp
from pymongo import MongoClient, WriteConcern

from mongo_celery.mongo.oplog import operation_time
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]

APP = "tests.acceptance.isolation.scan_project"
QUIET = 60
_QUICK: Document = {"partitions": 2, "lease_ttl": 2, "claim_ttl": 2, "dispatch_grace": 1.5}
_BATCH = 400


class ScanRig:
    """A bridge of `scan_project`, and a neighbour in the database that it watches."""

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        self.names = f"scan_{uuid4().hex[:10]}"
        self.client = client
        self.data = client[f"{self.names}_data"]
        self.state = client[f"{self.names}_state"]
        self.facts = client[f"{self.names}_facts"]
        self._neighbour = self.data.get_collection("neighbour", write_concern=WriteConcern(1))
        self._processes = processes
        self._environment = {"SCAN_NAMES": self.names, "SCAN_MONGO": url, "SCAN_BROKER": broker}

    def listener(self, *, quiet: int = 0, **options: Any) -> ProjectProcess:
        """Start a listener, and wait until it reads."""
        started = self._start("listener", quiet, options)
        started.wait_for_output("reading from")
        return started

    def refused(self, **options: Any) -> ProjectProcess:
        """Start a listener that ends by itself."""
        started = self._start("listener", 0, options)
        assert started.wait() != 0
        return started

    def worker(self, **options: Any) -> ProjectProcess:
        """Start a worker, and wait until it consumes."""
        started = self._start("worker", 0, options, "-c", "2", "--without-gossip", "--without-mingle")
        started.wait_for_output(r" ready\.")
        return started

    def _start(self, command: str, quiet: int, options: Document, *arguments: str) -> ProjectProcess:
        given = {"SCAN_QUIET": str(quiet), "SCAN_OPTIONS": json.dumps({**_QUICK, **options})}
        return self._processes.celery(
            APP, command, "-l", "INFO", *arguments, name=command, environment={**self._environment, **given}
        )

    def disturb(self, entries: int) -> Timestamp:
        """Write so many entries in the neighbour's collection; the time of the last."""
        for _ in range(0, entries, _BATCH):
            self._neighbour.insert_many([{"text": "x" * 100} for _ in range(_BATCH)], ordered=False)
        return operation_time(self.client)

    def wait_passed(self, time: Timestamp, count: int) -> None:
        """Wait until the watermarks of so many subscriptions have passed a time."""

        def passed() -> bool:
            return self.state["handlers"].count_documents({"clusterTime": {"$gte": time}}) >= count

        wait_for(passed, message=lambda: f"{count} watermarks pass {time}; the lowest is at {self.lowest()}")

    def lowest(self) -> Timestamp | None:
        """The smallest watermark that is stored."""
        found = self.state["handlers"].find_one(sort=[("clusterTime", 1)])
        return found["clusterTime"] if found else None

    def end(self) -> None:
        self._processes.__exit__()
        for database in (self.data, self.state, self.facts):
            empty(self.client, database)


@pytest.fixture
def rig(processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str) -> Iterator[ScanRig]:
    """Give a bridge, not yet started."""
    made = ScanRig(processes, mongo_client, mongo_url, redis_url)
    yield made
    made.end()


def test_the_watermarks_of_quiet_handlers_pass_a_neighbours_writes(rig: ScanRig) -> None:
    """I3: what lies before the first read, and what is written meanwhile; no change is read, and every place moves."""
    rig.data["quiet_000"].insert_one({"_id": "before the start"})
    start = operation_time(rig.client)
    before = rig.disturb(20_000)
    listener = rig.listener(quiet=QUIET, start_from=_token_behind(start))
    rig.wait_passed(before, QUIET)

    last = rig.disturb(20_000)

    rig.disturb(_BATCH)  # a time is passed when something lies behind it
    rig.wait_passed(last, QUIET)
    assert listener.terminate() == 0


def _token_behind(time: Timestamp) -> Document:
    """As a quiet stream gives it, of a place behind everything that happened until now."""
    return {"_data": f"82{time.time:08X}{time.inc + 1:08X}2B0229296E04"}


class Noise:
    """A neighbour that writes steadily until its `with` block ends."""

    def __init__(self, rig: ScanRig, per_second: int) -> None:
        self._rig = rig
        self._pause = _BATCH / per_second
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noise", daemon=True)
        self.written = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def wait_for(self, entries: int) -> Timestamp:
        """Wait until so many entries are written; the time of the last."""
        wait_for(lambda: self.written >= entries)
        return operation_time(self._rig.client)

    def _run(self) -> None:
        while not self._stopping.wait(self._pause):
            self._rig.disturb(_BATCH)
            self.written += _BATCH


@pytest.mark.slow
def test_the_watermarks_keep_up_with_4000_writes_a_second(rig: ScanRig) -> None:
    """I3: each is stored before the neighbour has written ten seconds more, for two minutes."""
    rig.listener(quiet=QUIET, start_from="now")
    with Noise(rig, 4000) as noise:
        for reached in range(40_000, 480_000, 40_000):
            place = noise.wait_for(reached)
            noise.wait_for(reached + 40_000)
            lowest = rig.lowest()
            assert lowest is not None
            assert lowest >= place, f"behind by {noise.written - reached} entries and more"


def test_every_kind_of_event_reaches_the_handler_that_asks_for_all(rig: ScanRig) -> None:
    """Also those that only `show_expanded_events` shows; what a handler gets of them has names."""
    rig.data.create_collection("orders")
    rig.listener(start_from="now", show_expanded_events=True)
    orders = rig.data["orders"]
    orders.insert_one({"_id": 1})
    orders.create_index("total", name="by_total")
    orders.drop_index("by_total")
    rig.data.command("collMod", "orders", validationLevel="moderate")
    rig.data.create_collection("seen", viewOn="orders")
    orders.rename("archive")
    rig.data["archive"].drop()
    rig.client.drop_database(rig.data)
    rig.worker(show_expanded_events=True)

    found = wait_for(lambda: _complete(rig))

    assert {each["operation"] for each in found if each["description"]} >= {"create", "createIndexes", "modify"}
    assert all(each["uuid"] for each in found if each["operation"] in {"insert", "createIndexes", "rename"})
    (renamed,) = (each for each in found if each["operation"] == "rename")
    assert (renamed["namespace"], renamed["to"]) == (f"{rig.data.name}.orders", "archive")


def _complete(rig: ScanRig) -> list[Document]:
    """The recorded events in their order, once the last has come and all kinds are there."""
    found = list(rig.facts["events"].find().sort("_id"))
    wanted = {"insert", "createIndexes", "dropIndexes", "modify", "create", "rename", "drop", "dropDatabase"}
    return found if wanted <= {each["operation"] for each in found} else []


def test_a_stream_of_an_older_version_goes_on_without_a_gap_or_a_repetition(rig: ScanRig) -> None:
    """P1: its token is not used, since another pipeline may not find it; the stream is opened once at its time."""
    orders = rig.data["orders"]
    rig.worker(start_from="now")
    first = rig.listener(start_from="now")
    orders.insert_many([{"_id": number} for number in range(3)])
    wait_for(lambda: rig.facts["events"].count_documents({}) >= 3)
    rig.wait_passed(operation_time(rig.client), 1)
    assert first.terminate() == 0
    stored = rig.state["handlers"].find_one()
    assert stored is not None
    rig.state["handlers"].update_one({"_id": stored["_id"]}, {"$set": {"fingerprint": "of another stream"}})
    orders.insert_many([{"_id": number} for number in range(3, 6)])

    second = rig.listener(start_from="now")

    wait_for(lambda: rig.facts["events"].count_documents({}) >= 6)
    assert second.terminate() == 0
    assert {each["key"]: each["times"] for each in rig.facts["events"].find()} == dict.fromkeys(range(6), 1)
    again = rig.state["handlers"].find_one()
    assert again is not None
    assert again["fingerprint"] == stored["fingerprint"]


def test_a_resume_token_is_a_start(rig: ScanRig) -> None:
    """P1: what is behind its change is delivered, and nothing before: not even what happened at the same time."""
    orders = rig.data["orders"]
    with rig.data.watch() as stream, rig.client.start_session() as session:
        with session.start_transaction():
            for number in range(4):  # four changes of one cluster time
                orders.insert_one({"_id": number}, session=session)
        tokens = [next(stream)["_id"] for _ in range(4)]
    orders.insert_one({"_id": "later"})
    rig.listener(start_from=tokens[1])
    rig.worker(start_from=tokens[1])

    wait_for(lambda: rig.facts["events"].count_documents({}) >= 3)
    assert {each["key"] for each in rig.facts["events"].find()} == {2, 3, "later"}


def test_a_resume_token_of_another_cluster_ends_with_one_sentence(rig: ScanRig) -> None:
    """P9: opened ahead of the cluster's time, the stream would pass over everything until then."""
    ended = rig.refused(start_from={"_data": "82FFFFFFFF000000012B0229296E04"})
    assert "lies ahead of the cluster's time: the token is from another cluster" in ended.text
    assert "Traceback" not in ended.text
