"""
Terms that read what exists: a real stream, real state, and the leader's own turns, one by one.

What the listener would publish is run at once, by the claims of a worker: so a test says what happens between any two
turns, and nothing waits for a broker.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bson
from bson.codec_options import CodecOptions
from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Bridge
from mongo_celery.bridge.change import decode_event, read_token
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.leader import Leader
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import begin_term
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.raw_event import EVENT_TYPES
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.envelope import Run
from tests.fixtures.process import wait_for
from tests.fixtures.samples import IDENTITY
from tests.rig.partition import claim_run
from tests.rig.term import KilledError

Document = dict[str, Any]

PARTITIONS = 2
TTL = 20.0
HANDLER = "copy"


@dataclass(frozen=True)
class Seen:
    operation: str
    key: Any
    value: int | None
    token: str


@dataclass
class SnapshotWorld:
    client: MongoClient[Document]
    url: str
    state: str
    data: str
    name: str = "orders"
    seen: list[Seen] = field(default_factory=list)
    copy: dict[bytes, int | None] = field(default_factory=dict)
    terms: list[SnapshotTerm] = field(default_factory=list)

    @property
    def orders(self) -> Collection[Document]:
        return self.client[self.data][self.name].with_options(codec_options=_LENIENT)

    @property
    def source(self) -> str:
        return f"{self.data}.{self.name}"

    @property
    def records(self) -> list[Document]:
        return list(self.client[self.state]["snapshots"].with_options(codec_options=_LENIENT_TIMES).find())

    @property
    def record(self) -> Document:
        (found,) = self.records
        return found

    def term(self, **options: Any) -> SnapshotTerm:
        """The next term, whatever the one before is doing."""
        self.terms.append(SnapshotTerm(self, options))
        return self.terms[-1]

    def write(self, key: Any, value: int) -> None:
        if value < 0:
            self.orders.delete_one({"_id": key})
        else:
            self.orders.update_one({"_id": key}, {"$set": {"v": value}}, upsert=True)

    def handled(self, event: Mapping[str, Any]) -> None:
        """What the handler does: a copy; of what was looked up, and is gone since, nothing."""
        if "documentKey" not in event:
            return  # a move
        document, key = event.get("fullDocument"), event["documentKey"]["_id"]
        value = None if document is None else document.get("v")
        self.seen.append(Seen(event["operationType"], key, value, event["_id"]["_data"]))
        self.copy[_name(key)] = value

    def snapshots_of(self, key: Any) -> int:
        return sum(each.operation == "snapshot" and _name(each.key) == _name(key) for each in self.seen)

    def is_equal(self) -> bool:
        there = {_name(each["_id"]): each.get("v") for each in self.orders.find()}
        return there == {key: value for key, value in self.copy.items() if value is not None or key in there}

    def judge(self) -> None:
        """Copies are equal, and no key ever went back."""
        assert self.is_equal(), (self.seen, list(self.orders.find()))
        last: dict[bytes, int] = {}
        for each in self.seen:
            if each.value is not None:
                name = _name(each.key)
                assert each.value >= last.get(name, 0), (each, self.seen)
                last[name] = each.value


class SnapshotTerm:
    """
    One term's leader, and a worker beside it.

    Attributes:
        failing: keys whose handler fails for good.
        postponing: keys whose handler asks for a retry in an hour.
        works: whether what is due is run.
        is_killed: set where a test has killed it.
        has_begun: whether it has taken over.
    """

    leader: _Stepped

    def __init__(self, world: SnapshotWorld, options: Mapping[str, Any]) -> None:
        self.world = world
        self.failing: list[Any] = []
        self.postponing: list[Any] = []
        self.works = True
        self.is_killed = threading.Event()
        self.has_begun = False
        given = {"partitions": PARTITIONS, "lease_ttl": TTL, "claim_ttl": TTL, "start_from": "snapshot", **options}
        arguments = {
            name: given.pop(name) for name in ("match", "operations", "fields", "partition_by") if name in given
        }
        sources = given.pop("sources", (world.source,))
        app = Celery("shop", broker="memory://", set_as_current=False)
        self.bridge = Bridge(app, world.url, name="shop", database=world.state, autodiscover=False, **given)
        self.bridge.on_change(*sources, name=HANDLER, **arguments)(_handler)

    @property
    def wiring(self) -> Wiring:
        return self.bridge.wiring

    def begin(self) -> SnapshotTerm:
        self.leader = _Stepped(self, self.wiring, _renewal(self.world, self.wiring))
        self.has_begun = True
        self.leader._begin()
        return self

    def step(self) -> None:
        if self.is_killed.is_set():
            raise KilledError
        self.leader.turn()

    def until(self, condition: Callable[[], object], each: Callable[[], object] | None = None) -> None:
        def turned() -> object:
            if each is not None:
                each()
            self.step()
            return condition()

        wait_for(turned, message=lambda: f"{self.world.records}, {self.images()}, {self.world.seen[-5:]}")

    def finish(self, each: Callable[[], object] | None = None) -> None:
        self.until(lambda: self.world.records and all(one["state"] == "done" for one in self.world.records), each)
        self.until(self.world.is_equal)

    def images(self) -> list[Image]:
        return [partition.image for led in self.leader.subscriptions.values() for partition in led.partitions.values()]

    def close(self) -> None:
        if self.has_begun:
            self.leader.intake.stop()
            self.leader.snapshots.thread.close()
            self.leader._storing.close()
        self.wiring.client.close()

    def run(self, run: Run) -> None:
        """Claim, handle and commit a run; or fail at its first change."""
        claims, backlog = self.wiring.store.claims, self.wiring.store.backlog
        claim = claim_run(self.wiring.store, run)
        if claim is None:
            return
        changes: Sequence[bytes] = run.changes
        if run.stored:
            found = backlog.fetch(run.partition_id, run.stored)
            changes = [found[token].raw for token in run.stored]
        first = decode_event(changes[0]) if changes[0] else {}
        if run.refusal is not None or _key_of(first) in self.failing:
            assert claims.halt(claim, run.token or read_token(changes[0]), "key", "as asked")
            return
        if _key_of(first) in self.postponing:
            assert claims.park(claim, delay=3600.0, not_before=None, error="later")
            return
        done = list(itertools.takewhile(lambda raw: _key_of(decode_event(raw)) not in self.failing, changes))
        for raw in done:
            self.world.handled(bson.decode(raw, _LENIENT))
        assert claims.handle(claim, run.first + len(done) - 1, read_token(done[-1]))
        claims.commit(run.partition_id, run.first)


class _Stepped(Leader):
    """A leader whose runs are run where they would be published."""

    def __init__(self, term: SnapshotTerm, wiring: Wiring, renewal: Renewal) -> None:
        selectors, scope = wiring.stream()
        activity = Activity(wiring.name, [each.name for each in wiring.handlers], TTL)
        led = list(zip(wiring.handlers, selectors, strict=True))
        beginning = begin_term(wiring, renewal, led, wiring.handlers)
        super().__init__(wiring, renewal, beginning, scope, threading.Event(), "halt", activity)
        self._term = term

    def _dispatch(self) -> None:
        now = time.monotonic()
        for subscription in self.subscriptions.values():
            if not self._term.works:
                return
            for dispatch in list(subscription.due(now)):
                dispatch.partition.note_sent(now)
                self._term.run(dispatch.run)
        self.poller.due_at = self.poller.times.polled_at = 0.0


def _renewal(world: SnapshotWorld, wiring: Wiring) -> Renewal:
    leases = wiring.store.leases
    leases.ensure()
    world.client[world.state]["leases"].update_one({"_id": "shop"}, {"$set": {"expiresAt": None}})
    term = leases.acquire(IDENTITY)
    assert term is not None, "the lease has lapsed"
    return Renewal(leases, wiring.store.signing, term, TTL)


def _handler(_change: Any) -> None:
    """A handler."""


def _key_of(event: Mapping[str, Any]) -> Any:
    return event.get("documentKey", {}).get("_id")


_LENIENT: Any = EVENT_TYPES.with_options(document_class=dict)
_LENIENT_TIMES: Any = CodecOptions(unicode_decode_error_handler="replace")


def _name(key: Any) -> bytes:
    return bytes(bson.encode({"": key}, codec_options=_LENIENT))


def keys_of(index: int, world: SnapshotWorld, count: int) -> list[int]:
    found = (key for key in itertools.count() if partition_hash([world.data, world.name, key]) % PARTITIONS == index)
    return list(itertools.islice(found, count))


def worlds(client: MongoClient[Document], url: str, state: str, data: str) -> Iterator[SnapshotWorld]:
    world = SnapshotWorld(client, url, state, data)
    yield world
    for term in world.terms:
        term.close()
