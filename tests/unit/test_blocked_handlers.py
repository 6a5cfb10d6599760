"""Which handlers are reported as blocked, from images and the monotonic time alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mongo_celery.bridge.listener.blocked import LAG_SECONDS, RETRYING_SECONDS, BlockedHandlers
from mongo_celery.bridge.listener.subscription import Subscription
from tests.fixtures.samples import image
from tests.fixtures.subscriptions import change, subscription

HALTED = image(state="halted", head={"at": None, "key": "k", "resumeToken": {"_data": "82"}}, error="ValueError: no")
RETRYING = image(due_in=9.0)
WAITING = image(waiting={"since": datetime.now(UTC), "cause": "no primary", "count": 1}, due_in=1.0)
RUNNING = image(claim={"owner": "a", "last": 1}, live=True, fencing_token=11)


class Watch:
    """A handler whose first partition has one change, and what is reported about it."""

    def __init__(self) -> None:
        self.handlers = BlockedHandlers()
        self.subscription: Subscription = subscription()
        self.subscription.ingest_item(change(1))
        self.now = 1000.0

    def look(self, seen: Any, seconds: float = 0.0) -> list[tuple[str, int, int]]:
        self.now += seconds
        self.subscription.partitions[seen.index].observe(seen, self.now)
        found = self.handlers.find_new([self.subscription], self.now)
        return [(each["state"], each["partition"], each["partitions"]) for each in found]


def test_it_is_reported_once_after_the_time_and_again_after_it_has_ended() -> None:
    watch = Watch()
    assert watch.look(HALTED) == []
    assert watch.look(HALTED, LAG_SECONDS - 1) == []
    assert watch.look(HALTED, 1) == [("halted", 0, 1)]
    assert watch.look(HALTED, LAG_SECONDS) == []
    assert watch.look(image(committed=1), 1) == []
    assert watch.look(replace(HALTED, committed=1), 1) == []
    assert watch.look(replace(HALTED, committed=1), LAG_SECONDS) == [("halted", 0, 1)]


def test_attempts_of_the_same_change_end_no_block() -> None:
    """A retrying change is reported after an hour in all, whatever its attempts, and not once for each."""
    watch = Watch()
    found = []
    for _ in range(3 * RETRYING_SECONDS // 600):
        found += watch.look(RETRYING, 590)
        watch.subscription.partitions[0].note_sent(watch.now)
        found += watch.look(RUNNING, 10)
        watch.subscription.partitions[0].in_flight = None
    assert found == [("retrying", 0, 1)]


def test_an_outage_is_reported_like_a_halt_but_neither_work_nor_a_pause_without_changes() -> None:
    for seen, state in ((WAITING, "waiting"), (RUNNING, None), (image(), None)):
        watch = Watch()
        watch.look(seen)
        assert [each[0] for each in watch.look(seen, LAG_SECONDS)] == [state] * (state is not None)
    watch = Watch()
    watch.subscription.partitions[0].delayed_until = watch.now + 3600.0
    watch.look(image())
    assert watch.look(image(), RETRYING_SECONDS) == [], "its handler wants the delay"
    watch = Watch()
    paused = image(index=2, state="paused")
    watch.look(paused)
    assert watch.look(paused, RETRYING_SECONDS) == []
