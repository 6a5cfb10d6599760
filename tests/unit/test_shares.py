"""Whose changes are stored, and whose are left to the buffer: P12, and a normal backlog that costs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest

from mongo_celery.bridge.listener.partition import GracePeriods, Partition, Rejection
from mongo_celery.bridge.listener.shares import Share, Since, Starvation, reason_of, standing_of, victim
from mongo_celery.bridge.listener.stock import Stock
from mongo_celery.bridge.state.spill import Amount
from tests.fixtures.samples import image

BOUND = 1000
HOT, QUIET, NEW = ("record", 0), ("record", 1), ("record", 2)


def share(size: int = 100, count: int = 1, index: int = 0, **fields: Any) -> Share:
    """What a partition has of the buffer."""
    return Share(("record", index), size, count, **fields)


def make_partition(rejected: bool = False, **changes: Any) -> Partition:
    """A partition that is as said."""
    found = Partition("shop/record/0/0", image(**changes), 1, GracePeriods(8.0, 3.0), 0.0)
    if rejected:
        found.note_rejected(Rejection("a", 1, "too large", datetime.now(UTC), 1, 1.0))
    return found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"holds": True}, None),
        ({"stands": "halted"}, None),
        ({"stands": "halted", "holds": True}, "halted"),
        ({"stands": "halted", "spilled": True, "age": 0.5}, None),
        ({"stands": "halted", "spilled": True, "age": 1.0}, "halted"),
        ({"stands": "halted", "spilled": True, "is_tail": True}, "halted"),
        ({"spilled": True, "holds": True, "age": 99.0}, None),
        ({"spilled": True, "is_tail": True}, None),
        ({"holds": True, "at_risk": True}, "oplog"),
        ({"holds": True, "at_risk": True, "spilled": True}, "oplog"),
        ({"at_risk": True}, None),
        ({"undeliverable": True}, "undeliverable"),
        ({"spilled": True, "blocks": True}, "read again"),
        ({"count": 0, "stands": "halted", "holds": True, "at_risk": True}, None),
    ],
)
def test_what_is_stored_whatever_the_others_need(fields: dict[str, Any], reason: str | None) -> None:
    """P13: what stands and holds the watermark, or holds it too far back. A partition that only flows is left."""
    assert reason_of(share(**fields), eager=False) == reason


def test_while_reading_on_helps_the_tail_of_what_is_stored_is_stored() -> None:
    """Nothing else is: what was not stored before waits until somebody starves."""
    assert reason_of(share(spilled=True, is_tail=True), eager=True) == "starving"
    assert reason_of(share(spilled=True), eager=True) is None
    assert reason_of(share(is_tail=True), eager=True) is None


def test_what_stands_leaves_a_full_buffer_wherever_the_watermark_is() -> None:
    """P12: else heads of any size, behind one that waits for a worker, keep the stream from being read."""
    assert reason_of(share(stands="rejected"), eager=False, pressed=True) == "rejected"
    assert reason_of(share(at_risk=True), eager=False, pressed=True) is None


def test_the_victim_is_the_largest_above_half_of_an_equal_share() -> None:
    """A buffer that all share alike has none with less than that."""
    assert victim([share(300), share(600, index=1), share(0, 0, index=2)], BOUND) == share(600, index=1)
    assert victim([share(249), share(250, index=1)], BOUND) is None
    assert victim([], BOUND) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"state": "halted"}, "halted"),
        ({"state": "paused"}, "paused"),
        ({"due_in": 5.0}, "parked"),
        ({"waiting": {"since": None, "cause": "OSError", "count": 1}}, "waiting"),
        ({"claim": {"owner": "a"}, "live": True}, "running"),
        ({"rejected": True}, "rejected"),
    ],
)
def test_what_stands_is_what_no_further_worker_would_run(changes: dict[str, Any], why: str | None) -> None:
    """P12: a partition that only waits for a worker is plain backlog, however long."""
    assert standing_of(make_partition(**changes)) == why


def test_since_counts_from_the_last_change() -> None:
    """What moves begins anew."""
    since = Since()
    assert [since.seconds(HOT, what, now) for what, now in ((1, 5.0), (1, 8.0), (2, 9.0), (2, 11.0))] == [0, 3, 0, 2]


# Who starves


def full(one: Starvation, now: float, fed: Iterable[tuple[str, int]] = (HOT,), size: int = BOUND) -> list[Any]:
    """The buffer is full of the hot partition; who starves."""
    busy = set(fed)
    one.observe(busy, {key: key != NEW for key in (QUIET, NEW) if key not in busy}, size, now)
    return one.starving()


def test_one_that_was_fed_before_starves_after_two_seconds_of_a_full_buffer() -> None:
    """P12: however long it had nothing to do before, since the stream may have had nothing for it."""
    one = Starvation(BOUND)
    assert full(one, 0.0, size=BOUND // 2) == full(one, 100.0) == full(one, 101.9) == []
    assert full(one, 102.0) == [QUIET], "the new one was never fed"
    assert full(one, 102.1, fed=(HOT, QUIET)) == []


def test_a_buffer_that_was_half_empty_is_not_full_for_long_enough() -> None:
    """Between full and half empty it counts as full: it is full again with the next change that is read."""
    one = Starvation(BOUND)
    assert full(one, 0.0) == full(one, 1.5, size=BOUND // 2) == []
    assert full(one, 2.0) == [QUIET]
    one = Starvation(BOUND)
    assert full(one, 0.0) == full(one, 1.5, size=BOUND // 2 - 1) == full(one, 2.0) == full(one, 3.9) == []
    assert full(one, 4.0) == [QUIET]


def test_a_backlog_of_few_keys_is_stored_for_two_buffers_a_minute_at_most() -> None:
    """
    P12: reading on for the others' sake was in vain, so most of it does not take the way through the state database.

    And it goes on: a burst of many buffers does not keep whoever waits behind it for ever.
    """
    one, stored, now = Starvation(BOUND), [0] * 20, 0.0
    while now < 1199.0:
        now += 1.0
        if full(one, now) or one.is_eager:
            one.stored(100)
            stored[int(now // 60)] += 100
    assert stored[0] <= 4 * BOUND
    assert all(1.5 * BOUND <= size <= 2 * BOUND + 100 for size in stored[1:]), stored
    assert full(one, now, fed=(HOT, QUIET)) == []
    full(one, now + 1)
    assert full(one, now + 4) == [QUIET], "it was fed meanwhile, so it counts again"


def test_as_long_as_others_are_fed_it_helps_to_store() -> None:
    """P12: a hot document beside others that come now and then."""
    one = Starvation(BOUND)
    full(one, 0.0)
    assert full(one, 3.0) == [QUIET]
    for now in range(4, 100):
        one.stored(BOUND // 4)
        full(one, float(now), fed=(HOT, QUIET) if now % 2 else (HOT,))
        assert one.is_eager
    one.stored(2 * BOUND)
    assert not one.is_eager


@pytest.mark.parametrize(("fed_every", "starves"), [(4, True), (2, False)])
def test_one_that_is_fed_now_and_then_starves_as_long_as_it_is_idle_most_of_the_time(
    fed_every: int, starves: bool
) -> None:
    """P12: a hot document lets others through at its own pace; workers that all have work are no reason to store."""
    one = Starvation(BOUND)
    found = [full(one, turn / 4, fed=(HOT,) if turn % fed_every else (HOT, QUIET)) for turn in range(100)]
    assert any(found) is starves


def test_as_long_as_one_that_was_idle_has_work_storing_goes_on() -> None:
    """P12: it is why nobody is; to wait until somebody is would cost him two seconds each time."""
    one = Starvation(BOUND)
    full(one, 0.0)
    assert full(one, 3.0) == [QUIET]
    for now in range(4, 100):
        one.stored(BOUND // 4)
        full(one, float(now), fed=(HOT, QUIET))
        assert one.is_eager


# How much is stored


def test_what_is_stored_while_it_is_counted_is_not_forgotten() -> None:
    """P12: a count that began before would else make room that is not there."""
    stock = Stock(BOUND)
    stock.asked("shop/record/0/1")
    stock.added("shop/record/0/1", Amount(3, 300))
    stock.counted("shop/record/0/1", Amount(1, 100))
    assert stock.total == Amount(4, 400)
    stock.asked("shop/record/0/1")
    stock.counted("shop/record/0/1", Amount(3, 300))
    assert stock.total == Amount(3, 300)


def test_the_bound_counts_all_and_one_subscription_has_three_quarters() -> None:
    """P12: one handler cannot take all the room for what stands."""
    stock = Stock(BOUND)
    stock.added("shop/record/0/1", Amount(5, 500))
    stock.added("shop/record/0/2", Amount(2, 200))
    assert [stock.room(f"shop/{name}/0/1") for name in ("record", "audit")] == [50, 300]
    stock.added("shop/record/0/1", Amount(1, 50))
    assert stock.room("shop/record/0/1") == 0
    assert "handler record alone" in stock.objection("shop/record/0/1")
    stock.added("shop/audit/0/1", Amount(1, 260))
    assert stock.room("shop/audit/0/1") == 0
    assert "spill_bytes allows 1000" in stock.objection("shop/audit/0/1")


def test_what_is_removed_leaves_its_share_of_the_bytes() -> None:
    """Removals are known by number; a count corrects them."""
    stock = Stock(BOUND)
    stock.added("a/b/0/1", Amount(4, 400))
    stock.removed("a/b/0/1", 1)
    assert stock.of("a/b/0/1") == Amount(3, 300)
    stock.counted("a/b/0/1", Amount(3, 250))
    assert (stock.total, stock.is_counted("a/b/0/1")) == (Amount(3, 250), True)
    stock.removed("a/b/0/1", 7)
    assert stock.total == Amount()


def test_growth_is_smoothed_over_minutes() -> None:
    """A moment says nothing about how long the bound lasts."""
    stock = Stock(BOUND)
    for second in range(1200):
        stock.observe(float(second))
        stock.added("a/b/0/1", Amount(1, 10))
    assert stock.growth == pytest.approx(10, rel=0.01)
    stock.observe(1201.0)
    assert stock.growth > 9


def test_the_bound_is_told_at_three_levels_each_once_until_it_falls_below() -> None:
    """P12: before the stream waits for what stands. Around a level it is told once."""
    stock = Stock(BOUND)

    def at(size: int) -> int | None:
        stock.counted("a/b/0/1", Amount(1, size))
        return stock.reached()

    assert [at(size) for size in (740, 750, 800, 749, 751, 890, 930, 996, 1000)] == [
        None, 75, None, None, None, None, 90, 100, None,
    ]  # fmt: skip
    assert [at(size) for size in (920, 1000, 500, 910, 10, 760)] == [None, 100, None, 90, None, 75]


def test_how_long_the_bound_lasts() -> None:
    """At the present growth; nobody knows while nothing grows."""
    stock = Stock(100_000)
    for second in range(1200):
        stock.observe(float(second))
        stock.added("a/b/0/1", Amount(1, 10))
    assert stock.lasts == pytest.approx(8800, rel=0.01)
    assert Stock(BOUND).lasts is None
