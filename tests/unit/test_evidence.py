"""What follows from what the broker says and from what other runs do, on hand-made times and answers."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, cast

import pytest
from celery import Celery

from mongo_celery.bridge.listener import evidence
from mongo_celery.bridge.listener.evidence import BrokerWatch, Lane, MessageEvidence, Sighting
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.broker.occupancy import Occupancy, occupancy_of
from tests.fixtures.process import wait_for
from tests.fixtures.samples import image
from tests.unit.test_subscription import PARTITIONS, subscription

TASK = "shop.handle"
SENT = 1000.0
GRACE = 8.0  # of the trackers of `subscription`
NOTHING = Occupancy(0, taken={})
QUEUES = [f"shop.{index}" for index in range(PARTITIONS)]


class Told:
    """A watch that was told what to say."""

    def __init__(self) -> None:
        self.sightings: dict[str, Sighting] = {}
        self.returned_at = float("-inf")
        self.asked: Collection[str] = ()

    def ask(self, queues: Collection[str]) -> None:
        self.asked = queues

    def say(self, at: float, occupancy: Occupancy, *queues: str) -> None:
        self.sightings = {queue: Sighting(at, at + 0.01, occupancy) for queue in queues or QUEUES}


class Scene:
    """One handler with a run out in each partition."""

    def __init__(self, **options: Any) -> None:
        self.watch = Told()
        self.led = subscription(**options)
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        made = BridgeOptions(name="shop", partitions=PARTITIONS, **options)
        self.evidence = MessageEvidence(self.app, made, cast("BrokerWatch", self.watch))
        self.others: list[Subscription] = []
        for tracker in self.led.trackers.values():
            tracker.sent(SENT)

    def weigh(self, now: float, read_at: float | None = None, **options: Any) -> bool:
        return self.evidence.weigh([self.led, *self.others], now if read_at is None else read_at, now, **options)

    @property
    def repeated(self) -> list[int]:
        """Partitions whose change is to be dispatched again."""
        return [index for index, tracker in self.led.trackers.items() if tracker.outstanding is None]

    def look(self, now: float) -> None:
        """Read all partitions: nobody has claimed anything."""
        for index, tracker in self.led.trackers.items():
            tracker.observe(image(index=index), now)

    def taken(self, index: int, now: float) -> None:
        """A run is seen to be claimed."""
        claim = {"owner": "a", "first": 1, "last": 1, "ttl": 10_000, "until": "later"}
        self.led.trackers[index].observe(image(index=index, fence=11, claim=claim, live=True), now)


def test_nothing_is_asked_while_nothing_is_overdue() -> None:
    """A healthy bridge asks its broker nothing."""
    scene = Scene()
    scene.weigh(SENT + 1)
    assert not scene.watch.asked
    scene.weigh(SENT + 3)
    assert scene.watch.asked == set(QUEUES)


def test_the_broker_is_asked_while_publishing_fails_also_with_nothing_out() -> None:
    """I14: its return is a sign by itself, and what is due is published at once."""
    scene = Scene()
    for tracker in scene.led.trackers.values():
        tracker.repeat(SENT)
    assert not scene.weigh(SENT + 1, broker_down=True)
    assert scene.watch.asked
    scene.watch.returned_at = SENT + 1.5
    assert scene.weigh(SENT + 2, broker_down=True)
    assert not scene.weigh(SENT + 3, broker_down=True), "once"


def test_what_two_sightings_do_not_find_is_sent_again() -> None:
    """I14: one is not enough, for a message may be on its way from the queue to a worker."""
    scene = Scene()
    scene.watch.say(SENT + 2, NOTHING)
    scene.weigh(SENT + 2.5)
    scene.weigh(SENT + 2.9)
    assert scene.repeated == []
    scene.watch.say(SENT + 3, NOTHING)
    scene.weigh(SENT + 3.5)
    assert scene.repeated == [0, 1, 2, 3]


def test_an_image_from_before_the_first_sighting_proves_nothing() -> None:
    """P6: the message may have been taken and done in between."""
    scene = Scene()
    scene.watch.say(SENT + 2, NOTHING)
    scene.weigh(SENT + 2.5)
    scene.watch.say(SENT + 3, NOTHING)
    scene.weigh(SENT + 3.5, read_at=SENT + 2)
    assert scene.repeated == []


def test_a_sighting_from_before_the_dispatch_says_nothing() -> None:
    """The queue was empty, of course."""
    scene = Scene()
    scene.watch.say(SENT - 2, NOTHING)
    scene.weigh(SENT + 2.5)
    scene.watch.say(SENT - 1, NOTHING)
    scene.weigh(SENT + 3.5)
    assert scene.repeated == []


@pytest.mark.parametrize(
    "occupancy",
    [Occupancy(1, taken={}), Occupancy(0, taken={TASK: 1}), Occupancy(0), Occupancy(0, consumers=1)],
    ids=["waits", "a worker has it", "unknown", "a consumer may have it"],
)
def test_what_waits_or_may_be_with_a_worker_is_not_taken_for_lost(occupancy: Occupancy) -> None:
    """I14: a duplicate spends the tokens of a rate limit."""
    scene = Scene()
    for second in range(2, 6):
        scene.watch.say(SENT + second, occupancy)
        scene.weigh(SENT + second + 0.5)
    assert scene.repeated == []


def test_a_message_that_waits_in_its_queue_is_not_sent_again_by_the_grace_either() -> None:
    """I14: the clock does not run while it is known to wait; it begins when it has left the queue."""
    scene = Scene()
    for second in range(2, 60):
        scene.watch.say(SENT + second, Occupancy(1, taken={}))
        scene.weigh(SENT + second + 0.5)
        scene.look(SENT + second + 0.6)
    assert scene.repeated == []
    scene.watch.say(SENT + 60, Occupancy(0, taken={TASK: 1}))
    scene.weigh(SENT + 60.5)
    scene.look(SENT + 59 + GRACE)
    assert scene.repeated == []
    scene.look(SENT + 59.1 + GRACE)
    assert scene.repeated == [0, 1, 2, 3]


def test_a_message_that_was_overtaken_in_its_queue_does_not_wait_there() -> None:
    """P8: others keep the queue from being empty, and must not hide a loss for ever."""
    scene = Scene(queues=1)
    late = scene.led.trackers[3]
    late.repeat(SENT + 1)
    late.sent(SENT + 1)
    scene.taken(3, SENT + 2)
    for second in (2, 3):
        scene.watch.say(SENT + second, Occupancy(5, taken={TASK: 1}), "shop.0")
        scene.weigh(SENT + second + 0.5)
    assert scene.repeated == [0, 1, 2], "the worker's only message of the task is the one that runs"


def test_progress_of_what_was_sent_before_is_a_sign_of_life_and_of_what_was_sent_later_is_none() -> None:
    """I14: the turn comes nearer, as with a rate limit; there are finitely many in front, so it comes."""
    scene = Scene()
    last = scene.led.trackers[3]
    last.repeat(SENT + 1)
    last.sent(SENT + 1)
    scene.taken(0, SENT + 5)
    scene.weigh(SENT + 5)
    scene.taken(3, SENT + 6)
    scene.weigh(SENT + 6)
    for index in (1, 2):
        tracker = scene.led.trackers[index]
        tracker.observe(image(index=index), SENT + 4.9 + GRACE)
        assert tracker.outstanding is not None
        tracker.observe(image(index=index), SENT + 5.1 + GRACE)
        assert tracker.outstanding is None, "counted from the one in front, not from the one behind"


def test_what_is_lost_again_and_again_is_tried_for_one_partition_until_one_is_taken() -> None:
    """I14: workers without the handler's code drop every message, and say so in their log each time."""
    scene = Scene()
    now = SENT
    for tracker in scene.led.trackers.values():
        tracker.repeat(now)
        tracker.sent(now)

    def lose() -> list[int]:
        nonlocal now
        for _ in range(2):
            now += 1
            scene.watch.say(now, NOTHING)
            scene.weigh(now + 0.5)
        return scene.repeated

    now += 2
    assert lose() == [0]
    scene.led.trackers[0].sent(now + 0.5)
    assert lose() in ([], [1]), "no sooner than after some seconds"
    scene.led.trackers[0].observe(image(fence=11, claim=None), now + 0.5)
    lose()
    assert scene.repeated == [0, 1, 2, 3]


def test_a_consumer_that_arrives_has_what_no_longer_waits_sent_again() -> None:
    """I14: RabbitMQ counts consumers, and does not say what they have."""
    scene = Scene()
    scene.watch.say(SENT + 2, Occupancy(0, consumers=1))
    scene.weigh(SENT + 2.5)
    scene.watch.say(SENT + 3, Occupancy(0, consumers=2), "shop.2")
    scene.weigh(SENT + 3.5)
    assert scene.repeated == [2]


def test_without_consumers_and_messages_the_message_is_lost() -> None:
    """I14: as RabbitMQ shows a queue that was emptied while all workers were away."""
    scene = Scene()
    for second in (2, 3):
        scene.watch.say(SENT + second, Occupancy(0, consumers=0))
        scene.weigh(SENT + second + 0.5)
    assert scene.repeated == [0, 1, 2, 3]


def test_a_lane_knows_who_was_taken_before_and_after() -> None:
    """By the time of dispatch; what was dispatched at once counts as in front."""
    lane = Lane([(3.0, 13.0), (1.0, 15.0), (2.0, 12.0)])
    assert lane.progress_before(0.5) == float("-inf")
    assert lane.progress_before(1.0) == 15.0
    assert lane.progress_before(9.0) == 15.0
    assert lane.has_passed(2.9)
    assert not lane.has_passed(3.0)
    assert not Lane([]).has_passed(0.0)


def test_a_watch_that_ends_takes_no_connection_from_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: a connection that is pulled away counts as an outage, and its return as a sign of life for all."""
    monkeypatch.setattr(evidence, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(evidence, "_ASK_SECONDS", 0.01)
    watch = BrokerWatch(Celery("shop", broker="memory://", set_as_current=False))
    released: list[Any] = []
    used: list[tuple[Any, threading.Thread]] = []
    main, release = threading.current_thread(), evidence._release

    class AskedAtTheEnd(threading.Condition):
        """Somebody asks again at the moment at which the thread has decided to end."""

        is_left = False

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)  # type: ignore[arg-type]
            if threading.current_thread() is not main and watch._thread is None and not self.is_left:
                self.is_left, watch.sightings = True, {}
                watch.ask({"shop.0"})
                wait_for(lambda: watch.sightings)

    def release_and_note(connection: Any) -> None:
        release(connection)
        released.append(connection)

    def use_and_note(connection: Any, queues: Collection[str]) -> Any:
        used.append((connection, threading.current_thread()))
        return occupancy_of(connection, queues)

    monkeypatch.setattr(evidence, "_release", release_and_note)
    monkeypatch.setattr(evidence, "occupancy_of", use_and_note)
    watch._changed = AskedAtTheEnd()
    try:
        watch.ask({"shop.0"})
        wait_for(lambda: watch.sightings)
        watch.ask(())
        wait_for(lambda: released)
        assert len({thread for _, thread in used}) == 2
        assert len({thread for connection, thread in used if connection is released[0]}) == 1
        assert watch.returned_at == float("-inf")
    finally:
        watch.close()
