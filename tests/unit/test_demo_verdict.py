"""The demo's verdict catches hand-made bad histories, and lets a good one pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mongo_celery.demo import plan
from mongo_celery.demo.record import Record, line
from mongo_celery.demo.setting import NAME_FROM_CUSTOMER, NAME_INTO_ORDER, SUMMARISE, Setting, from_environment
from mongo_celery.demo.verdict import Effect, Evidence, Start, Written, WrittenOrder, judge

ADA = ((1, "Ada"), (2, "Ada Lovelace"))
WRITTEN = Written(orders={"o": WrittenOrder("c", (0, 1, 2))}, customers={"c": ADA})
GOOD = Evidence(
    starts=[
        Start(SUMMARISE, "o", 0, 10),
        Start(NAME_FROM_CUSTOMER, "c", 1, 10),
        Start(NAME_INTO_ORDER, "o", 0, 10),
        Start(SUMMARISE, "o", 1, 11),
        Start(NAME_FROM_CUSTOMER, "c", 2, 11),
        Start(SUMMARISE, "o", 2, 12),
    ],
    effects=[
        Effect("summary", "o", 0),
        Effect("name", "o", 1),
        Effect("summary", "o", 1),
        Effect("name", "o", 2),
        Effect("summary", "o", 2),
    ],
    summaries={"o": 2},
    copies={"o": ADA[1]},
)


def test_a_good_history_passes() -> None:
    """No finding, no duplicate (P1, P2, P6)."""
    verdict = judge(WRITTEN, GOOD)

    assert verdict.good
    assert (verdict.lost, verdict.out_of_order, verdict.unexpected, verdict.duplicates) == ((), (), (), 0)


@pytest.mark.parametrize("missing", range(len(GOOD.starts)))
def test_a_change_without_any_start_is_lost(missing: int) -> None:
    """Whichever handler's start is missing, it is one loss, once (P1)."""
    starts = [start for place, start in enumerate(GOOD.starts) if place != missing]

    verdict = judge(WRITTEN, replace(GOOD, starts=starts))

    assert len(verdict.lost) == 1
    assert not verdict.good


def test_a_missing_effect_is_lost_though_its_handler_started() -> None:
    """A handler that ran is not enough: the last number must be in the summary (P1)."""
    assert len(judge(WRITTEN, replace(GOOD, summaries={"o": 1})).lost) == 1
    assert len(judge(WRITTEN, replace(GOOD, summaries={})).lost) == 1


@pytest.mark.parametrize("copy", [None, ADA[0], (2, "Ada")])
def test_an_order_with_an_old_name_of_its_customer_is_lost(copy: tuple[int, str] | None) -> None:
    """The join must end with the customer's last version, and with the name of that version."""
    assert len(judge(WRITTEN, replace(GOOD, copies={"o": copy})).lost) == 1


def test_one_write_that_is_missing_in_two_places_is_lost_once() -> None:
    """Losses are counted by write."""
    verdict = judge(WRITTEN, replace(GOOD, starts=GOOD.starts[:-1], summaries={"o": 1}))

    assert len(verdict.lost) == 1


def test_swapped_starts_are_out_of_order() -> None:
    """n=2 was granted the right to run before n=1 (P2)."""
    starts = [*GOOD.starts[:3], Start(SUMMARISE, "o", 2, 11), GOOD.starts[4], Start(SUMMARISE, "o", 1, 12)]

    verdict = judge(WRITTEN, replace(GOOD, starts=starts))

    assert len(verdict.out_of_order) == 1
    assert not verdict.lost
    assert not verdict.good


def test_starts_with_one_token_are_judged_in_the_order_of_the_oplog() -> None:
    """A token that does not grow hides nothing (P3)."""
    starts = [replace(start, fence=10) for start in (*GOOD.starts[:3], *reversed(GOOD.starts[3:]))]

    assert len(judge(WRITTEN, replace(GOOD, starts=starts)).out_of_order) == 1


def test_a_late_journal_entry_of_a_superseded_execution_is_a_duplicate_and_no_disorder() -> None:
    """What counts is when the right to run was granted, not when a frozen process wrote its entry."""
    verdict = judge(WRITTEN, replace(GOOD, starts=[*GOOD.starts, Start(SUMMARISE, "o", 0, 9)]))

    assert verdict.good
    assert verdict.duplicates == 1


@pytest.mark.parametrize("target", ["summary", "name"])
def test_an_accepted_stale_write_is_out_of_order_though_the_end_is_right(target: str) -> None:
    """An effect went back and was repaired later: the final documents do not show it, the history does (P2, P3)."""
    effects = [*GOOD.effects, Effect(target, "o", 1), Effect(target, "o", 2)]

    verdict = judge(WRITTEN, replace(GOOD, effects=effects))

    assert len(verdict.out_of_order) == 1
    assert not verdict.good


def test_a_repeated_start_is_a_duplicate_and_allowed() -> None:
    """Faults may repeat a handler; the number is reported (P6)."""
    again = Start(SUMMARISE, "o", 2, 13)

    verdict = judge(WRITTEN, replace(GOOD, starts=[*GOOD.starts, again, replace(again, fence=14)]))

    assert verdict.duplicates == 2
    assert verdict.good


def test_refused_stale_writes_are_reported() -> None:
    """A refusal is the fence at work, not a fault."""
    verdict = judge(WRITTEN, replace(GOOD, refused=3))

    assert verdict.stale_writes_refused == 3
    assert verdict.good


def test_what_nobody_wrote_is_unexpected() -> None:
    """A handler, an effect or a summary out of nothing fails the run (P11)."""
    for evidence in (
        replace(GOOD, starts=[*GOOD.starts, Start(SUMMARISE, "o", 3, 13)]),
        replace(GOOD, effects=[*GOOD.effects, Effect("summary", "o", 3)]),
        replace(GOOD, summaries={"o": 2, "x": 0}),
    ):
        verdict = judge(WRITTEN, evidence)

        assert verdict.unexpected
        assert not verdict.good


def test_nothing_read_back_loses_everything() -> None:
    """A checker that finds nothing must not be content."""
    verdict = judge(WRITTEN, Evidence([], [], {}, {}))

    assert len(verdict.lost) == len(set(WRITTEN.expected())) + 1  # and the copy of the name


@pytest.mark.parametrize("orders", [1, 2, 40])
def test_the_plan_writes_each_key_in_order_and_by_one_thread(orders: int) -> None:
    """What the verdict calls the write order is one: no two threads write a key."""
    threads = [list(plan.plan(orders, thread)) for thread in range(plan.THREADS)]

    keys = [{write.key for write in writes} for writes in threads]
    assert sum(map(len, keys)) == len(set().union(*keys))
    for write_list in threads:
        numbers: dict[str, list[int]] = {}
        for write in write_list:
            numbers.setdefault(write.key, []).append(write.number)
        assert all(found == sorted(found) for found in numbers.values())
    assert sum(map(len, threads)) == plan.total(orders)


def test_the_record_gives_back_what_was_recorded_and_waits_for_unfinished_lines(tmp_path: Path) -> None:
    """The verdict rests on the writer's own record."""
    writes = [write for thread in range(plan.THREADS) for write in plan.plan(3, thread)]
    path = tmp_path / "record"
    record = Record(path)
    record.read()
    assert record.count == 0

    text = b"".join(line(write) for write in writes)
    path.write_bytes(text[:-5])
    record.read()
    assert record.count == len(writes) - 1
    with path.open("ab") as file:
        file.write(text[-5:])
    record.read()

    written = record.written()
    assert written.count == record.count == plan.total(3)
    assert written.orders["order-00000"] == WrittenOrder("customer-0000", tuple(range(plan.UPDATES + 1)))
    assert sum(record.due.values()) == len(set(written.expected()))


def test_a_setting_survives_the_environment() -> None:
    """All processes of a run get the same setting; Celery's own variables do not get in between."""
    setting = Setting(run="r", mongo_url="mongodb://m", redis_url="redis://r", start=(7, 1), freeze="order:2")

    assert from_environment(setting.environment()) == setting
    assert from_environment({}).run == "local"
