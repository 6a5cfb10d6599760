"""The demo's verdict catches hand-made bad histories, and lets a good one pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mongo_celery.demo import plan
from mongo_celery.demo.history import Effect, Started
from mongo_celery.demo.plan import PlannedWrite
from mongo_celery.demo.record import Record, line
from mongo_celery.demo.setting import NAME_FROM_CUSTOMER, NAME_INTO_ORDER, SUMMARISE, DemoSetting, from_environment
from mongo_celery.demo.verdict import WRONG, Evidence, handled, judge

WRITES = [*(PlannedWrite("o", n, "c") for n in range(3)), *(PlannedWrite("c", version, None) for version in (1, 2))]


def start(handler: str, key: str, n: int, fence: int) -> Started:
    return Started(handler=handler, key=key, n=n, fence=fence)


def summary(n: int, key: str = "o") -> Effect:
    return Effect(handler=SUMMARISE, key=key, n=n)


def name(version: int) -> Effect:
    return Effect(handler=NAME_INTO_ORDER, key="o", n=version)


GOOD = Evidence(
    started=[
        start(SUMMARISE, "o", 0, 10),
        start(NAME_FROM_CUSTOMER, "c", 1, 10),
        start(NAME_INTO_ORDER, "o", 0, 10),
        start(SUMMARISE, "o", 1, 11),
        start(NAME_FROM_CUSTOMER, "c", 2, 11),
        start(SUMMARISE, "o", 2, 12),
    ],
    effects=[summary(0), name(1), summary(1), name(2), summary(2)],
    final=[summary(2), name(2)],
)


def test_a_good_history_passes() -> None:
    """No finding, no duplicate (P1, P2, P6)."""
    verdict = judge(WRITES, GOOD)

    assert verdict.good
    assert (verdict.lost, verdict.out_of_order, verdict.unexpected, verdict.duplicates) == ((), (), (), 0)


@pytest.mark.parametrize("missing", range(len(GOOD.started)))
def test_a_change_without_any_start_is_lost(missing: int) -> None:
    """Whichever handler's start is missing, it is one loss, once (P1)."""
    starts = [each for place, each in enumerate(GOOD.started) if place != missing]

    verdict = judge(WRITES, replace(GOOD, started=starts))

    assert len(verdict.lost) == 1
    assert not verdict.good


def test_a_missing_effect_is_lost_though_its_handler_started() -> None:
    """A handler that ran is not enough: the last number must be in the summary (P1)."""
    assert len(judge(WRITES, replace(GOOD, final=[summary(1), name(2)])).lost) == 1
    assert len(judge(WRITES, replace(GOOD, final=[name(2)])).lost) == 1


@pytest.mark.parametrize("copy", [[], [name(1)], [name(WRONG)]])
def test_an_order_with_an_old_name_of_its_customer_is_lost(copy: list[Effect]) -> None:
    """The join must end with the customer's last version, and with the name of that version."""
    assert len(judge(WRITES, replace(GOOD, final=[summary(2), *copy])).lost) == 1


def test_one_write_that_is_missing_in_two_places_is_lost_once() -> None:
    """Losses are counted by write."""
    verdict = judge(WRITES, replace(GOOD, started=GOOD.started[:-1], final=[summary(1), name(2)]))

    assert len(verdict.lost) == 1


def test_swapped_starts_are_out_of_order() -> None:
    """n=2 was granted the right to run before n=1 (P2)."""
    starts = [*GOOD.started[:3], start(SUMMARISE, "o", 2, 11), GOOD.started[4], start(SUMMARISE, "o", 1, 12)]

    verdict = judge(WRITES, replace(GOOD, started=starts))

    assert len(verdict.out_of_order) == 1
    assert not verdict.lost
    assert not verdict.good


def test_starts_with_one_token_are_judged_in_the_order_of_the_oplog() -> None:
    """A token that does not grow hides nothing (P3)."""
    starts = [replace(each, fence=10) for each in (*GOOD.started[:3], *reversed(GOOD.started[3:]))]

    assert len(judge(WRITES, replace(GOOD, started=starts)).out_of_order) == 1


def test_a_late_journal_entry_of_a_superseded_execution_is_a_duplicate_and_no_disorder() -> None:
    """What counts is when the right to run was granted, not when a frozen process wrote its entry."""
    verdict = judge(WRITES, replace(GOOD, started=[*GOOD.started, start(SUMMARISE, "o", 0, 9)]))

    assert verdict.good
    assert verdict.duplicates == 1


@pytest.mark.parametrize("back", [[summary(1), summary(2)], [name(1), name(2)]])
def test_an_accepted_stale_write_is_out_of_order_though_the_end_is_right(back: list[Effect]) -> None:
    """An effect went back and was repaired later: the final documents do not show it, the history does (P2, P3)."""
    verdict = judge(WRITES, replace(GOOD, effects=[*GOOD.effects, *back]))

    assert len(verdict.out_of_order) == 1
    assert not verdict.good


def test_a_repeated_start_is_a_duplicate_and_allowed() -> None:
    """Faults may repeat a handler; the number is reported (P6)."""
    again = start(SUMMARISE, "o", 2, 13)

    verdict = judge(WRITES, replace(GOOD, started=[*GOOD.started, again, replace(again, fence=14)]))

    assert verdict.duplicates == 2
    assert verdict.good


def test_refused_stale_writes_are_reported() -> None:
    """A refusal is the fence at work, not a fault."""
    verdict = judge(WRITES, replace(GOOD, refused=3))

    assert verdict.stale_writes_refused == 3
    assert verdict.good


def test_what_nobody_wrote_is_unexpected() -> None:
    """A handler, an effect or a summary out of nothing fails the run (P11)."""
    for evidence in (
        replace(GOOD, started=[*GOOD.started, start(SUMMARISE, "o", 3, 13)]),
        replace(GOOD, effects=[*GOOD.effects, summary(3)]),
        replace(GOOD, final=[*GOOD.final, summary(0, "x")]),
    ):
        verdict = judge(WRITES, evidence)

        assert verdict.unexpected
        assert not verdict.good


def test_nothing_read_back_loses_everything() -> None:
    """A checker that finds nothing must not be content."""
    verdict = judge(WRITES, Evidence([], [], []))

    assert len(verdict.lost) == len(list(handled(WRITES))) + 1  # and the copy of the name


@pytest.mark.parametrize("orders", [1, 2, 40])
def test_the_plan_writes_each_key_in_order_and_by_one_thread(orders: int) -> None:
    """What the verdict calls the write order is one: no two threads, and no two parts, write a key."""
    threads = [list(plan.plan(orders, part, thread)) for part in plan.PARTS for thread in range(plan.THREADS)]

    keys = [{write.key for write in writes} for writes in threads]
    assert sum(map(len, keys)) == len(set().union(*keys))
    for write_list in threads:
        numbers: dict[str, list[int]] = {}
        for write in write_list:
            numbers.setdefault(write.key, []).append(write.number)
        assert all(found == sorted(found) for found in numbers.values())
    assert sum(map(len, threads)) == plan.total(orders)


@pytest.mark.parametrize("orders", [1, 2, 40])
def test_the_order_whose_handler_freezes_is_not_in_the_calm_part(orders: int) -> None:
    """The rate without faults is measured there."""
    threads = range(plan.THREADS)
    calm, rest = ({write.key for at in threads for write in plan.plan(orders, part, at)} for part in plan.PARTS)

    assert calm
    assert plan.first_order(orders) in rest - calm


def test_the_record_gives_back_what_was_recorded_and_waits_for_unfinished_lines(tmp_path: Path) -> None:
    """The verdict rests on the writer's own record."""
    writes = [write for part in plan.PARTS for thread in range(plan.THREADS) for write in plan.plan(3, part, thread)]
    path = tmp_path / "record"
    record = Record(path)
    record.read()
    assert record.writes == []

    text = b"".join(line(write) for write in writes)
    path.write_bytes(text[:-5])
    record.read()
    assert record.writes == writes[:-1]
    with path.open("ab") as file:
        file.write(text[-5:])
    record.read()

    assert record.writes == writes
    assert len(writes) == plan.total(3)
    assert sum(record.due.values()) == len(list(handled(writes)))


def test_a_setting_survives_the_environment() -> None:
    """All processes of a run get the same setting; Celery's own variables do not get in between."""
    setting = DemoSetting(run="r", mongo_url="mongodb://m", redis_url="redis://r", start=(7, 1), freeze="order:2")

    assert from_environment(setting.environment()) == setting
    assert from_environment({}).run == "local"
