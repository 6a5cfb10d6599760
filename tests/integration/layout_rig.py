"""Terms that change a layout, on real state: a stream of hand-made events, and everything else as it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.change import event_of
from mongo_celery.bridge.listener.leftovers import Leftovers
from mongo_celery.bridge.listener.relayout import Relayouts
from mongo_celery.bridge.listener.spilling import Spilling
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.bridge.partitioning import document_hash
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.spill import StoredChange
from mongo_celery.bridge.state.subscriptions import Layout, layout_in, name_in
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.mongo.verdicts import Concern
from tests.fixtures.samples import event, mark, token_data
from tests.integration.term_rig import TermRig, begin_term

Document = dict[str, Any]

NAME = "record"
KEYS = 10
STREAM = "the fingerprint"
_START = Timestamp(1, 1)
CONCERN = Concern("the state", "read")


def change(number: int, *, has_region: bool = True) -> ChangeEvent:
    """The event with this place in the stream, of one of ten keys in turn."""
    key = {"_id": number % KEYS, **({"region": number % 3} if has_region else {})}
    raw = bson.encode(event("insert", _id={"_data": token_data(number)}, documentKey=key))
    return ChangeEvent(mark(number), event_of(raw), raw)


def number_of(data: str) -> int:
    """The number of an event, by the comparable part of its token."""
    return int(data[10:18], 16)


def region(found: Mapping[str, Any]) -> Any:
    """A partition rule: the key's region; it fails where there is none."""
    return found["documentKey"]["region"]


@dataclass
class Stream:
    """The events that a term reads, up to an end."""

    events: Sequence[ChangeEvent]
    at: str = ""

    @property
    def at_end(self) -> bool:
        return not self.events or self.at >= self.events[-1].mark.data

    def read(self, subscriptions: Iterable[Subscription], most: int = 1_000_000) -> None:
        """Hand over the next events."""
        for each in [each for each in self.events if each.mark.data > self.at][:most]:
            self.at = each.mark.data
            for subscription in subscriptions:
                subscription.take_in(each)


class LayoutTerm:
    """
    One term, which changes the layouts that its options do not ask for.

    Args:
        rig: the term.
        events: the stream.
    """

    def __init__(self, rig: TermRig, events: Sequence[ChangeEvent]) -> None:
        self.rig = rig
        self.takeover = rig.take_over()
        for name in self.takeover.documents:
            rig.store.subscriptions.pin(name, rig.version, _START, None)
        marks = {}
        for document in rig.store.subscriptions.read_all():
            token = document["resumeToken"]
            marks[name_in(document)] = mark(number_of(token["_data"])) if token else None
        self.led = {each.name: each for each in rig.led(self.takeover, marks)}
        self.watermarks = Watermarks(rig.store, rig.renewal, STREAM, dict)
        self.spilling = Spilling(rig.store, rig.options, CONCERN, lambda _: 0.0)
        self.spilling.begin(self.led, rig.version)
        self.leftovers = Leftovers(rig.store, rig.version)
        self.relayouts = self._begin()
        self.stream = Stream(events, min((each.window.seen for each in self.led.values()), default=""))
        self.now = time.monotonic()

    def _begin(self) -> Relayouts:
        relayouts = Relayouts(self.rig.store, self.rig.options, CONCERN, self.watermarks, self.spilling)
        relayouts.begin(self.led, self.takeover)
        return relayouts

    def lose_history(self, name: str = NAME) -> None:
        """As it is judged before anything is read."""
        self.led[name].lost = True
        self.led[name].is_moving = False
        self.relayouts = self._begin()

    @property
    def waits(self) -> list[str]:
        """What each subscription on its way waits for."""
        return [each["waits"] for each in self.relayouts.report()]

    def turn(self) -> None:
        """One turn of the leading thread, a second later than the one before."""
        self.now += 2.0
        self.stream.read(self.led.values())
        for tracker in [tracker for each in self.led.values() for tracker in each.trackers.values()]:
            for image in self.rig.store.partitions.look([tracker.partition_id]):
                self.led[image.subscription].observe(image, time.monotonic())
        for subscription in self.relayouts.turn(self.now, at_end=self.stream.at_end):
            self.led[subscription.name] = subscription
        if self.relayouts.wants_reading(self.now):
            self.stream.at = min(each.window.seen for each in self.led.values())
            self.relayouts.reads_again(self.now)

    def finish(self, turns: int = 50) -> None:
        """Go on until every layout is in force, and the stream is read."""
        for _ in range(turns):
            self.turn()
            if not self.relayouts.report() and not self.relayouts.wants_reading(self.now + 2) and self.stream.at_end:
                return
        raise AssertionError(f"not done: {self.relayouts.report()}")

    def clean(self) -> None:
        """Remove what is left of other layouts."""
        self.leftovers.look_again()
        in_force = {name: each.plan.layout.generation for name, each in self.led.items() if not each.is_moving}
        for _ in range(300):
            self.now += 1.0
            self.leftovers.remove(in_force, self.now)


class Shop:
    """A bridge whose terms follow each other, with one stream."""

    def __init__(self, client: MongoClient[Document], database: str) -> None:
        self.client = client
        self.database = database
        self.events: list[ChangeEvent] = []

    def write(self, *numbers: int, has_region: bool = True) -> None:
        """Add events to the stream."""
        self.events += [change(number, has_region=has_region) for number in numbers]

    def begin(self, partitions: int, *names: str, **options: Any) -> LayoutTerm:
        """A term with so many partitions."""
        return LayoutTerm(begin_term(self.client, self.database, partitions, names or (NAME,), **options), self.events)

    # -- what workers do ---------------------------------------------------------------------------

    def changes_of(self, term: LayoutTerm, index: int, name: str = NAME) -> list[ChangeEvent]:
        """All events of a partition under the term's layout."""
        layout = term.led[name].plan.layout
        return [each for each in self.events if document_hash(each.document) % layout.partitions == index]

    def claim(self, term: LayoutTerm, index: int, first: int, last: int | None = None, name: str = NAME) -> Any:
        """Claim changes of a partition, by their numbers there."""
        one = self.changes_of(term, index, name)[first - 1]
        claim = term.rig.store.claims.take(
            term.rig.partition_id(name, index),
            owner=f"{name}-{index}-{first}",
            version=term.rig.version,
            first=first,
            last=last or first,
            token=one.mark.data,
        )
        assert claim is not None, "it may run"
        return claim

    def done(self, term: LayoutTerm, claim: Any, index: int, name: str = NAME) -> set[int]:
        """Let a claimed run succeed; the numbers of its events."""
        run = self.changes_of(term, index, name)[claim.first - 1 : claim.last]
        assert term.rig.store.claims.handle(claim, claim.last, run[-1].mark.token)
        assert term.rig.store.claims.commit(claim.partition_id, claim.first)
        return {number_of(each.mark.data) for each in run}

    def run(self, term: LayoutTerm, index: int, count: int, name: str = NAME) -> set[int]:
        """Commit the first changes of a partition; the numbers of the events."""
        return self.done(term, self.claim(term, index, 1, count, name), index, name)

    def halt(self, term: LayoutTerm, index: int, first: int) -> int:
        """Let a change fail for good; the number of its event."""
        one = self.changes_of(term, index)[first - 1]
        claim = self.claim(term, index, first)
        assert term.rig.store.claims.halt(claim, one.mark.token, f"key {index}", "ValueError: no")
        return number_of(one.mark.data)

    def park(self, term: LayoutTerm, index: int, first: int, delay: float = 3600) -> int:
        """Let a change ask for a retry later; the number of its event."""
        one = self.changes_of(term, index)[first - 1]
        claim = self.claim(term, index, first)
        assert term.rig.store.claims.park(claim, delay=delay, not_before=None, error="ConnectionError: later")
        return number_of(one.mark.data)

    def pause(self, term: LayoutTerm, *indexes: int) -> None:
        """Let no new claim begin in some partitions."""
        layout = term.led[NAME].plan.layout
        for image in term.rig.store.partitions.of({NAME: layout.generation}):
            if image.index in indexes:
                assert term.rig.store.partitions.pause(image, layout.generation)

    # -- what is found -----------------------------------------------------------------------------

    def in_force(self, term: LayoutTerm, name: str = NAME) -> tuple[Layout, Document]:
        """The layout in force, and the subscription."""
        (document,) = [each for each in term.rig.store.subscriptions.read_all() if name_in(each) == name]
        layout = layout_in(document)
        assert layout is not None, "it was led"
        return layout, document

    def images(self, term: LayoutTerm, name: str = NAME) -> dict[int, Image]:
        """The partitions in force."""
        layout, _ = self.in_force(term, name)
        return {image.index: image for image in term.rig.store.partitions.of({name: layout.generation})}

    def stored(self, term: LayoutTerm, index: int, name: str = NAME) -> list[StoredChange]:
        """What a partition in force will run from what is stored."""
        image = self.images(term, name)[index]
        until = image.spilled["to"] if image.spilled is not None else ""
        where = term.rig.partition_id(name, index)
        if until <= image.data:
            return []
        return term.rig.store.spill.read(where, image.data, until, limit=100_000, max_bytes=1 << 30)

    def remaining(self, term: LayoutTerm, name: str = NAME) -> list[int]:
        """
        The numbers of all events that are yet to run, each as often as it will.

        What is stored and lies behind the watermark too is read again, stored again, and runs once.
        """
        layout, document = self.in_force(term, name)
        watermark = document["resumeToken"]["_data"] if document["resumeToken"] else ""
        images = self.images(term, name)
        assert sorted(images) == list(range(layout.partitions))
        found: list[int] = []
        for index, image in images.items():
            stored = self.stored(term, index, name)
            numbers = [number_of(each.data) for each in stored]
            assert numbers == sorted(numbers)
            assert all(each.hash % layout.partitions == index for each in stored)
            assert (image.spilled is None) == (not stored)
            if image.spilled is not None:
                assert image.spilled["to"] == stored[-1].data, "or it would never be over"
            behind = [each for each in self.events if each.mark.data > max(watermark, image.data)]
            mine = [each for each in behind if document_hash(each.document) % layout.partitions == index]
            found += {*numbers, *(number_of(each.mark.data) for each in mine)}
        return sorted(found)

    def generations(self, name: str = NAME) -> set[int]:
        """The generations of which anything is there: partitions, or stored changes."""
        ids = [
            str(each["_id"])
            for collection in ("partitions", "spill")
            for each in self.client[self.database][collection].find({}, {"_id": 1})
        ]
        return {int(each.split("/")[2]) for each in ids if each.split("/")[1] == name}
