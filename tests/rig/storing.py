"""Terms that store changes: what is read, run and committed in them is said by the test, step by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery.bridge.change import read_token, wrap_event
from mongo_celery.bridge.existing import make_token
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.partition import Step
from mongo_celery.bridge.listener.storing import AGAIN, Storing
from mongo_celery.bridge.listener.takeover import list_partitioning_terms
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.raw_event import EVENT_TYPES
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.errors import LeaseLostError
from tests.fixtures.mongo import sparse
from tests.fixtures.process import wait_for
from tests.fixtures.samples import event, mark, token_data
from tests.rig.partition import claim_run
from tests.rig.term import TermRig, begin_term

Document = dict[str, Any]

PARTITIONS = 2
STREAM = "the fingerprint"
_TURNS = 20
_LATER = 1.1


def key_of(index: int) -> int:
    return next(key for key in itertools.count() if partition_hash(["shop", "orders", key]) % PARTITIONS == index)


def change(number: int, index: int = 0, padding: int = 0) -> ChangeEvent:
    document = event("insert", documentKey={"_id": key_of(index)}, fullDocument={"n": number, "padding": "x" * padding})
    raw = bson.encode({**document, "_id": {"_data": token_data(number)}})
    return ChangeEvent(mark(number), RawBSONDocument(raw, EVENT_TYPES), raw)


def row(number: int, after: int, index: int = 0) -> ChangeEvent:
    """An existing document of a snapshot, behind every change up to a place."""
    time_ = mark(after).cluster_time
    assert time_ is not None
    data = make_token(time_, 1, number)
    document = event("snapshot", documentKey={"_id": key_of(index)}, fullDocument={"n": number})
    raw = bson.encode({**document, "_id": {"_data": data}})
    return ChangeEvent(Mark({"_data": data}, data, time_), wrap_event(raw), raw)


def number_of(raw: bytes) -> int:
    found: int = bson.decode(raw)["fullDocument"]["n"]
    return found


class RefusedError(Exception):
    """A worker may not begin what it was sent."""


class StoringTerm:
    """
    One term over one subscription, from its take-over on, and over others that get nothing.

    Attributes:
        all: all subscriptions, by name.
        ran: places of the changes that workers have run, in order.
        share: of the oplog's window that lies behind the subscription.
    """

    def __init__(self, client: MongoClient[Document], database: str, marks: Mark | None, **options: Any) -> None:
        self.rig: TermRig = begin_term(client, database, PARTITIONS, **options)
        self.takeover = self.rig.take_over()
        stored = self.takeover.documents["record"].get("resumeToken")
        at = Mark(stored, stored["_data"], None) if stored else marks
        self.led, *idle = self.rig.led(self.takeover, {"record": at})
        self.share = 0.0
        self.housekeeping = Housekeeping()
        self.all = {each.name: each for each in (self.led, *idle)}
        self.storing = Storing(self.rig.wiring, self.all, self.rig.version, lambda _: self.share, self.housekeeping)
        self.housekeeping.start()
        self.watermarks = Watermarks(self.rig.store, self.rig.renewal, STREAM, dict)
        self.ran: list[int] = []
        self._later = 0.0

    # -- what the listener does --------------------------------------------------------------------

    def read(self, *numbers: int, index: int = 0, padding: int = 0) -> None:
        for number in numbers:
            self.led.ingest_item(change(number, index, padding))

    def append(self, *numbers: int, after: int, index: int = 0) -> None:
        """Append existing documents, as a snapshot does."""
        rows = [self.led.admission.admit_existing(row(number, after, index)) for number in numbers]
        assert self.led.append(rows)

    def pass_over(self, number: int) -> None:
        """Take in a place at which nothing is owed."""
        self.led.ingest_item(mark(number))

    def look(self) -> None:
        """Read all partitions; LeaseLostError where a later term has them."""
        found = self.rig.store.partitions.of(list_partitioning_terms(self.takeover.layouts), self.storing.session)
        for image in found:
            if self.all[image.subscription].observe(image, time.monotonic()) is Step.SUPERSEDED:
                raise LeaseLostError

    def turn(self, later: float = 0.0) -> None:
        """Let so much time pass, look, and do what is due."""
        self._later += later
        self.look()
        self.storing.turn(time.monotonic() + self._later, at_end=False)

    def turn_until(self, condition: Callable[[], object], later: float = _LATER) -> None:
        def turned() -> object:
            self.turn(later)
            return condition()

        wait_for(turned, message=lambda: f"stored {self.stored()}, {self.image()}, {self.storing.report()}")

    def store(self, index: int = 0) -> bool:
        partition = self.led.partitions[index]
        while partition.queue:
            if not self.storing.store(self.led, partition, AGAIN if partition.must_store_again else "halted"):
                return False
        return True

    def in_memory(self) -> list[StoredChange]:
        backlog = self.led.partitions[0].backlog
        assert backlog is not None, "it runs from stored changes"
        return list(backlog.ahead)

    def dispatch(self) -> list[Run]:
        found = []
        for dispatch in self.led.due(time.monotonic()):
            dispatch.partition.note_sent(time.monotonic())
            found.append(self.loaded(dispatch.run))
        return found

    def loaded(self, run: Run) -> Run:
        """A run as a worker has it: with the bytes of what is stored."""
        found = self.rig.store.backlog.fetch(run.partition_id, run.stored) if run.stored else {}
        return replace(run, changes=[found[token].raw for token in run.stored if token in found]) if run.stored else run

    def flush(self) -> str | None:
        """Store the watermark; how far it is."""
        self.watermarks.store([self.led], time.monotonic())
        document = sparse(self.rig.database["handlers"]).find_one({"_id": "shop/record"}) or {}
        token = document["resumeToken"]
        return token["_data"] if token else None

    def close(self) -> None:
        self.housekeeping.stop()
        self.storing.close()

    # -- what workers do ---------------------------------------------------------------------------

    def claim(self, run: Run) -> Claim:
        claim = claim_run(self.rig.store, run)
        if claim is None:
            raise RefusedError(f"somebody else has run {run.first}, or does")
        return claim

    def run(self, run: Run) -> None:
        claim = self.claim(run)
        self.ran += map(number_of, run.changes)
        assert self.rig.store.claims.handle(claim, run.last, read_token(run.changes[-1]))
        assert self.rig.store.claims.commit(run.partition_id, run.first)

    def halt(self, run: Run) -> None:
        assert self.rig.store.claims.halt(self.claim(run), read_token(run.changes[0]), "key", "as asked")

    def retry(self, index: int = 0) -> None:
        assert self.rig.store.partitions.retry(self.image(index))

    def work(self, *, until: int, later: float = 0.0) -> list[int]:
        """Run everything up to a place; all that ran in this term."""

        def done() -> bool:
            for _ in range(_TURNS):
                self.turn(later)
                for run in self.dispatch():
                    self.run(run)
                    if self.ran[-1] >= until:
                        return True
            return False

        wait_for(done, message=lambda: f"ran {self.ran}, stored {self.stored()}, {self.image()}")
        self.look()
        return self.ran

    # -- what there is -----------------------------------------------------------------------------

    @property
    def documents(self) -> Collection[Document]:
        return self.rig.database["backlog"]

    def partition_id(self, index: int = 0) -> str:
        return self.led.partitions[index].partition_id

    def stored(self, index: int = 0) -> list[int]:
        found = self.rig.store.backlog.read(self.partition_id(index), "", "9", 1_000_000)
        return [number_of(each.raw) for each in found]

    def image(self, index: int = 0) -> Image:
        return self.rig.store.partitions.look([self.partition_id(index)])[0]

    def marked(self, index: int = 0) -> str | None:
        spilled = self.image(index).stored
        return spilled["to"] if spilled else None

    @property
    def watermark(self) -> str | None:
        found = self.led.window.watermark
        return found.data if found else None


def terms(client: MongoClient[Document], database: str) -> Iterator[Callable[..., StoringTerm]]:
    begun: list[StoringTerm] = []

    def begin(marks: Mark | None = None, **options: Any) -> StoringTerm:
        begun.append(StoringTerm(client, database, marks, **options))
        return begun[-1]

    yield begin
    for term in begun:
        term.close()
