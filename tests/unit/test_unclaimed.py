"""The rule for unclaimed runs, on hand-made times and answers of the broker."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest
from celery import Celery

from mongo_celery.bridge.listener import unclaimed
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.unclaimed import BrokerAnswer, BrokerWatch, UnclaimedRuns
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.broker.occupancy import Occupancy
from tests.fixtures.process import wait_for
from tests.fixtures.samples import image
from tests.fixtures.subscriptions import PARTITIONS, subscription

TASK = "shop.handle"
SENT = 1000.0
GRACE = 8.0  # of the partitions of `subscription`
NOTHING = Occupancy(0, unacknowledged=frozenset())
QUEUES = [f"shop.{index}" for index in range(PARTITIONS)]
ALL = list(range(PARTITIONS))


class FixedWatch:
    answer: BrokerAnswer | None = None
    returned_at = float("-inf")

    def watch(self, _queues: Collection[str]) -> None:
        """Ask nothing."""

    def set_answer(self, at: float, occupancy: Occupancy) -> None:
        self.answer = BrokerAnswer(at, at + 0.01, dict.fromkeys(QUEUES, occupancy))


class Scene:
    def __init__(self) -> None:
        self.watch = FixedWatch()
        self.led = subscription()
        options = BridgeOptions(name="shop", partitions=PARTITIONS)
        app = Celery("shop", broker="memory://", set_as_current=False)
        self.runs = UnclaimedRuns(app, options, Housekeeping(), cast("BrokerWatch", self.watch))
        for partition in self.led.partitions.values():
            partition.note_sent(SENT)

    def check(self, now: float, read_at: float | None = None) -> None:
        self.runs.check([self.led], now if read_at is None else read_at, now)

    @property
    def repeated(self) -> list[int]:
        return [index for index, partition in self.led.partitions.items() if partition.in_flight is None]

    def read(self, now: float) -> None:
        for index in self.led.partitions:
            self.led.observe(image(index=index), now)


ANSWERS: dict[str, tuple[float, float, Occupancy, list[int]]] = {
    "lost": (SENT + 2, SENT + 2.5, NOTHING, ALL),
    "no consumer, and no message": (SENT + 2, SENT + 2.5, Occupancy(0, consumers=0), ALL),
    "waits": (SENT + 2, SENT + 2.5, Occupancy(1, unacknowledged=frozenset()), []),
    "a worker has it": (SENT + 2, SENT + 2.5, Occupancy(0, unacknowledged={TASK}), []),
    "a consumer may have it": (SENT + 2, SENT + 2.5, Occupancy(0, consumers=1), []),
    "unknown": (SENT + 2, SENT + 2.5, Occupancy(0), []),
    "asked before it was sent": (SENT - 2, SENT + 2.5, NOTHING, []),
    "asked before it was overdue": (SENT + 1.9, SENT + 2.5, NOTHING, []),
    "partitions read before the answer": (SENT + 2, SENT + 2, NOTHING, []),
}


@pytest.mark.parametrize(("asked_at", "read_at", "occupancy", "expected"), ANSWERS.values(), ids=ANSWERS.keys())
def test_a_message_that_the_broker_does_not_have_is_sent_again(
    asked_at: float, read_at: float, occupancy: Occupancy, expected: list[int]
) -> None:
    """P6: and no other: what was read before the answer may have been taken and done in between."""
    scene = Scene()
    scene.watch.set_answer(asked_at, occupancy)
    scene.check(SENT + 3, read_at)
    assert scene.repeated == expected
    scene.read(SENT + GRACE)
    assert scene.repeated == ([] if occupancy.waiting else ALL), "the grace decides about all others"


def test_a_message_waits_its_turn_until_one_that_was_sent_later_is_taken() -> None:
    """P8: duplicates would lengthen a full queue; and a full queue hides no loss for ever."""
    scene = Scene()
    for second in range(2, 60):
        scene.watch.set_answer(SENT + second, Occupancy(5))
        scene.check(SENT + second + 0.5)
        scene.read(SENT + second + 0.6)
    assert scene.repeated == []
    for partition in list(scene.led.partitions.values())[:2]:
        partition.taken_sent_at = SENT + 1
    scene.watch.set_answer(SENT + 60, Occupancy(5))
    scene.check(SENT + 60.5)
    scene.read(SENT + 60 + GRACE - 0.9)
    assert scene.repeated == [0, 1], "of these queues a later one was taken"
    scene.watch.set_answer(SENT + 901, Occupancy(5))
    scene.check(SENT + 901.5)
    scene.read(SENT + 902)
    assert scene.repeated == ALL


def test_a_run_that_is_lost_again_waits_twice_as_long_and_at_most_the_grace() -> None:
    """I14: workers without the handler's code drop each message, with an error in their log."""
    scene = Scene()
    partition, now = scene.led.partitions[0], SENT
    pauses: list[float] = []
    grace = BridgeOptions(name="shop").grace
    while len(pauses) < 4:
        now += 0.25
        scene.watch.set_answer(now - 0.1, NOTHING)
        scene.check(now)
        if partition.in_flight is None:
            pauses.append(now)
            partition.note_sent(now)
    waited = [after - before for before, after in zip([SENT, *pauses], pauses, strict=False)]
    assert waited == pytest.approx([2, 4, grace, grace], abs=0.5)
    scene.watch.returned_at = now
    scene.check(now + 1)
    assert partition.repeats == 0, "a worker came: the next one is not awaited for long"


def test_queues_that_no_worker_consumes_are_logged_once_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P16: the workers are asked again and again meanwhile."""
    monkeypatch.setattr(unclaimed, "_WORKERS_ANSWER_SECONDS", 0.01)
    scene = Scene()
    for times in (1, 2):
        scene.check(SENT + 200 * times)
        for _ in range(3):
            scene.runs.ask_workers()
        assert [getattr(each, "event", "") for each in caplog.records].count("queues_unconsumed") == times
        for partition in scene.led.partitions.values():
            partition.taken_at = SENT + 200 * times + 100
        scene.check(SENT + 200 * times + 100)
        assert scene.runs.report() is None


def test_a_watch_notices_that_the_broker_or_a_consumer_returns(make_redis: Any) -> None:
    """P17: a real Redis that ends and starts again; and RabbitMQ's number of consumers, which Redis has not."""
    server = make_redis()
    housekeeping = Housekeeping()
    watch = BrokerWatch(Celery("shop", broker=server.url, set_as_current=False), housekeeping)
    housekeeping.start()
    try:
        watch.watch({"shop.0"})
        wait_for(lambda: watch.answer)
        assert watch.returned_at == float("-inf")
        server.kill()
        wait_for(lambda: watch.answer is None)
        server.restart()
        wait_for(lambda: watch.answer)
        assert watch.returned_at > float("-inf")
    finally:
        housekeeping.stop()
    counts = [[1, 1], [0, 1], [0, 2], [0, 2]]
    found = [watch._has_more_consumers({"a": Occupancy(0, a), "b": Occupancy(0, b)}) for a, b in counts]
    assert found == [False, False, True, False]
