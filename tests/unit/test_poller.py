"""When the next look is due, in simulated time: on real partitions, without what is read."""

from __future__ import annotations

import pytest

from mongo_celery.bridge.listener.poller import BUSY_SECONDS, SWEEP_SECONDS, PollTimes

START = 1000.0
SOON = 0.005


def pause(*out: int, taken: tuple[float, ...] = (), idle: float = 0.0) -> float:
    """The pause behind a failed reading, with runs out of each handler; those before took so long."""
    times = PollTimes()
    for number, seconds in enumerate(taken):
        for _ in range(50):
            times.note_end(str(number), START - seconds, START)
    times.moved_at = START
    times.polled_at = times.swept_at = START + idle
    return times.next_poll_time({str(number): count for number, count in enumerate(out) if count}) - START - idle


def test_with_nothing_out_only_the_sweep_is_due() -> None:
    """An idle bridge costs one reading a second."""
    assert pause(0, 0) == pytest.approx(SWEEP_SECONDS)


def test_a_single_run_is_looked_at_soon_and_then_more_and_more_seldom() -> None:
    """A quick handler is seen to have ended at once; a slow one costs four looks a second at most."""
    assert pause(1) == pytest.approx(SOON)
    assert pause(1, taken=(5.0,)) == pytest.approx(SOON), "however long others took"
    assert pause(1, idle=0.3) == pytest.approx(0.1), "a quarter of the time since, when it is over"
    assert pause(1, idle=100.0) == pytest.approx(0.25)


def test_while_much_is_out_a_look_waits_for_a_part_of_what_a_run_takes() -> None:
    """Workers have enough to do meanwhile. The quickest handler with something out decides."""
    assert pause(14) == pytest.approx(BUSY_SECONDS)
    assert pause(14, taken=(0.2,)) == pytest.approx(0.05)
    assert pause(14, taken=(90.0,)) == pytest.approx(0.1)
    assert pause(14, 14, taken=(0.3, 0.2)) == pytest.approx(0.05)
    assert pause(14, 0, taken=(0.3, 0.2)) == pytest.approx(0.075)
    assert pause(14, taken=(0.2,), idle=100.0) == pytest.approx(0.25), "nothing moves"
    assert pause(14, 14, taken=(0.4,)) == pytest.approx(BUSY_SECONDS), "of the other nothing is known yet"
