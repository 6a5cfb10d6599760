"""What a listener counts of its own work, from images of partitions; and whether it is said to be alive."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mongo_celery.bridge.listener import activity as module
from mongo_celery.bridge.listener.activity import Activity, HandlerActivity
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from mongo_celery.bridge.worker.envelope import Run
from tests.fixtures.samples import image

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
RUN = Run("shop", "summarise", 0, 0, 1, 1, 1)


def sent(count: int) -> tuple[HandlerActivity, Partition]:
    """A partition to which a run of so many changes was sent at 100."""
    partition = Partition("shop/summarise/0/0", image(), 1, GracePeriods(15.0, 5.0), 99.0)
    partition.note_sent(100.0, count)
    return HandlerActivity(), partition


def ran(last: int, took: int = 300, claimed: float = 0.0, committed: float = 0.5) -> dict[str, Any]:
    """What a commit leaves: claimed and committed so many seconds after noon, the handler in milliseconds."""
    return {
        "last": last,
        "took": took,
        "claimed": NOON + timedelta(seconds=claimed),
        "at": NOON + timedelta(seconds=committed),
    }


def test_a_run_is_measured_by_one_clock_at_a_time() -> None:
    """Sent at 100 and read at 101 by mine; claimed 0.6 s before it was read, by the server's."""
    seen, partition = sent(1)
    seen.observe(partition, image(committed=1, ran=ran(1), read_at=NOON + timedelta(seconds=0.6)), 101.0)
    assert seen.committed == 1
    assert seen.handler.sum == pytest.approx(0.3)
    assert seen.commit.sum == pytest.approx(0.2)
    assert seen.claim.sum == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("sent_at", "is_finding"),
    [([0, 1, 2, 30, 50], True), ([0, 1, 2, 3, 59], False), ([0, 50], False), ([30, 50], False), ([], False)],
    ids=["in each period", "in two of them", "in two", "the first one is over", "never"],
)
def test_runs_that_are_sent_again_all_the_time_are_a_finding(sent_at: list[float], is_finding: bool) -> None:
    """P16: one worker of several claims nothing, so others take the same runs some seconds later."""
    seen, partition = sent(1)
    for now in (5.0, 25.0, 45.0):
        seen.note_sent(RUN, 1000.0 + now, partition)
    partition.is_repeated = True
    for now in sent_at:
        seen.note_sent(RUN, 1000.0 + now, partition)
    assert seen.is_sending_again(1061.0) == is_finding


def test_a_listener_is_ready_while_it_leads_or_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not ready before it has reached its servers. It is alive unless its loop stalls without a known rest."""
    activity = Activity("shop", [], 15.0)
    found = [activity.is_ready]
    for step in (activity.note_standby, activity.note_term_begin, lambda: activity.note_failure(60.0)):
        step()
        found.append(activity.is_ready)
    assert found == [False, True, True, False]
    monkeypatch.setattr(module, "STALLED_SECONDS", -math.inf)
    resting = Activity("shop", [], -1.0)
    resting.note_turn(60.0)
    alive = [each.is_alive for each in (activity, resting, Activity("shop", [], -1.0))]
    assert alive == [True, True, False]
