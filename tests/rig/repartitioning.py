"""Terms that repartition, on real state: a stream of hand-made events, and workers that are played by the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bson
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.change import read_token, wrap_event
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.repartitioning import Repartitioning
from mongo_celery.bridge.listener.snapshotting import Snapshotting
from mongo_celery.bridge.listener.starts import read_starts
from mongo_celery.bridge.listener.storing import Storing
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import Layout, parse_layout, parse_name
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.worker.envelope import Run
from tests.fixtures.samples import event, mark, token_data
from tests.rig.partition import claim_run
from tests.rig.term import TermRig, begin_term

Document = dict[str, Any]

NAME = "record"
KEYS = 10
_START = Timestamp(1, 1)


def change(number: int) -> ChangeEvent:
    """The event with this place in the stream, of one of ten keys in turn."""
    key = {"_id": number % KEYS, "region": number % 3}
    raw = bson.encode(event("insert", _id={"_data": token_data(number)}, documentKey=key))
    return ChangeEvent(mark(number), wrap_event(raw), raw)


def number_of(data: str) -> int:
    return int(data[10:18], 16)


def region(found: Mapping[str, Any]) -> Any:
    """A partition rule: the key's region."""
    return found["documentKey"]["region"]


class SwitchingTerm:
    """
    One term, which repartitions handlers whose options ask for it.

    Args:
        handled: takes the numbers of events as workers handle them.
    """

    def __init__(self, rig: TermRig, events: Sequence[ChangeEvent], handled: list[tuple[str, int]]) -> None:
        self.rig = rig
        self.handled = handled
        self.takeover = rig.take_over()
        for name in self.takeover.documents:
            rig.store.subscriptions.pin(name, rig.version, _START, None)
        starts = read_starts(rig.store, list(self.takeover.documents), rig.version)
        marks = {name: start.watermark for name, start in starts.items()}
        self.led = {each.name: each for each in rig.led(self.takeover, marks)}
        self.watermarks = Watermarks(rig.store, rig.renewal, "the fingerprint", dict)
        self.housekeeping = Housekeeping()
        self.storing = Storing(rig.wiring, self.led, rig.version, lambda _: 0.0, self.housekeeping)
        snapshots = Snapshotting(rig.wiring, self.led, rig.version, lambda: None)
        self.repartitioning = Repartitioning(rig.wiring, self.watermarks, self.storing, snapshots)
        self._replace(self.repartitioning.begin(self.led, self.takeover))
        self.events, self.read_to = events, min((each.window.seen for each in self.led.values()), default="")
        self.now = time.monotonic()

    @property
    def waits(self) -> dict[str, str]:
        return {each["subscription"]: each["waits"] for each in self.repartitioning.report()}

    def _replace(self, moved: Iterable[Subscription]) -> None:
        for subscription in moved:
            self.led[subscription.name] = subscription

    def observe(self) -> None:
        for subscription in self.led.values():
            ids = [partition.partition_id for partition in subscription.partitions.values()]
            for image in self.rig.store.partitions.look(ids, self.storing.session):
                subscription.observe(image, time.monotonic())

    def turn(self) -> None:
        """One turn of the leading thread, two seconds later than the one before, without a worker."""
        self.now += 2.0
        for each in [each for each in self.events if each.mark.data > self.read_to]:
            self.read_to = each.mark.data
            for subscription in self.led.values():
                subscription.ingest_item(each)
        self.observe()
        self._replace(self.repartitioning.turn(self.now))
        if self.repartitioning.wants_reading(self.now):
            self.read_to = min(each.window.seen for each in self.led.values())
            self.repartitioning.resume_reading(self.now)
        self.storing.turn(self.now, at_end=True)

    def work(self, name: str = NAME, *, most: int = 1_000_000) -> None:
        """Let workers handle what is due, a run of each partition at most."""
        for dispatch in list(self.led[name].due(time.monotonic()))[:most]:
            self.handle(dispatch.run)

    def claim(self, run: Run) -> Claim | None:
        """Claim a run as a worker does; None where it is refused."""
        return claim_run(self.rig.store, run)

    def handle(self, run: Run) -> bool:
        """Handle a run and commit it; False where its claim is refused."""
        claim = self.claim(run)
        if claim is None:
            return False
        self.end(claim, run)
        return True

    def end(self, claim: Claim, run: Run) -> None:
        tokens = run.stored or [read_token(raw)["_data"] for raw in run.changes]
        self.handled += [(run.subscription, number_of(token)) for token in tokens]
        assert self.rig.store.claims.handle(claim, claim.last, {"_data": tokens[-1]})
        assert self.rig.store.claims.commit(claim.partition_id, claim.first)

    def runs(self, name: str = NAME) -> dict[int, Run]:
        self.turn()
        return {dispatch.run.index: dispatch.run for dispatch in self.led[name].due(time.monotonic())}

    def finish(self, turns: int = 200, *, is_done: Callable[[], bool] | None = None) -> None:
        """Turn and work until every handler has its partitions and nothing is left to do."""
        for _ in range(turns):
            self.turn()
            for name in self.led:
                self.work(name)
            idle = all(not each.window.count and not each.backlogs for each in self.led.values())
            read = not self.events or self.read_to >= self.events[-1].mark.data
            if is_done() if is_done is not None else idle and read and not self.waits:
                self.observe()
                return
        raise AssertionError(f"not done: {self.waits}")


@dataclass
class TermsOfShop:
    """
    A bridge whose terms follow each other, with one stream.

    Attributes:
        handled: the names of handlers and the numbers of events that they were given, in order.
    """

    client: MongoClient[Document]
    database: str
    events: list[ChangeEvent] = field(default_factory=list)
    handled: list[tuple[str, int]] = field(default_factory=list)

    def write(self, *numbers: int) -> None:
        self.events += map(change, numbers)

    def begin(self, partitions: int, *names: str, **options: Any) -> SwitchingTerm:
        rig = begin_term(self.client, self.database, partitions, names or (NAME,), **options)
        return SwitchingTerm(rig, self.events, self.handled)

    def numbers(self, name: str = NAME) -> list[int]:
        return [number for handler, number in self.handled if handler == name]

    def check(self, name: str = NAME) -> None:
        """Assert that each event was handled once, those of a key in order."""
        numbers = self.numbers(name)
        assert sorted(numbers) == [number_of(each.mark.data) for each in self.events]
        for key in range(KEYS):
            mine = [number for number in numbers if number % KEYS == key]
            assert mine == sorted(mine)

    def in_force(self, term: SwitchingTerm, name: str = NAME) -> Layout:
        (document,) = [each for each in term.rig.store.subscriptions.read_all() if parse_name(each) == name]
        return parse_layout(document)

    def images(self, term: SwitchingTerm, name: str = NAME) -> dict[int, Image]:
        found = term.rig.store.partitions.of({name: self.in_force(term, name).term})
        return {image.index: image for image in found}

    def partitionings(self, name: str = NAME) -> set[int]:
        """The partitionings of which anything is there: partitions, or stored changes."""
        ids = [
            str(each["_id"])
            for collection in ("partitions", "backlog")
            for each in self.client[self.database][collection].find({}, {"_id": 1})
        ]
        return {int(each.split("/")[2]) for each in ids if each.split("/")[1] == name}
