"""A checker that has never failed has not been tested: each meets hand-made bad histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.acceptance.history import (
    Dropped,
    Effect,
    Fact,
    Led,
    Started,
    Stored,
    Written,
    beyond_prefix,
    going_back,
    invented,
    longest_gap,
    lost,
    out_of_order,
    reused_fences,
    shared_versions,
    stale,
    too_often,
    violations,
)

ALL = {"record": ""}
WHERE = "0/record/1"


def place(number: int) -> str:
    return f"82{number:04d}"


def written(n: int, key: str = "a") -> Written:
    return Written(key, n, place(n), float(n))


def started(n: int, fence: int | None = None, key: str = "a") -> Started:
    return Started("record", key, n, fence or n, float(n))


def effect(n: int, fence: int | None = None, key: str = "a") -> Effect:
    return Effect("record", key, n, fence or n, WHERE, place(n), float(n))


def watermark(n: int) -> Stored:
    return Stored("subscriptions/project/record", place(n), {"epoch": 7}, "record")


def committed(n: int, fence: int = 1) -> Stored:
    return Stored("partitions/project/record/0/1", place(n), {"committed": n, "fence": fence, "epoch": 7})


GOOD: list[Fact] = [
    Led("one", 7),
    written(1),
    written(2),
    started(1),
    effect(1),
    committed(1, 1),
    watermark(1),
    started(2),
    effect(2),
    committed(2, 2),
    watermark(2),
    Led("two", 8),
]


def test_a_good_history_has_no_violations() -> None:
    """Else the checkers would be of no use."""
    assert violations(GOOD, ALL) == []


def without(kind: type, n: int) -> list[Fact]:
    return [fact for fact in GOOD if not (isinstance(fact, kind) and getattr(fact, "n", None) == n)]


Check = Callable[[list[Fact]], list[str]]
BAD: dict[str, tuple[Check, list[Fact]]] = {
    "the last change is lost": (lambda h: lost(h, ALL), without(Effect, 2)),
    "the first change is lost": (lambda h: lost(h, ALL), without(Effect, 1)),
    "another handler lost everything": (lambda h: lost(h, {"record": "", "audit": ""}), GOOD),
    "an effect without a write": (invented, [*GOOD, effect(3)]),
    "a start without a write": (invented, [*GOOD, started(3)]),
    "an effect before its write": (invented, [effect(1), written(1)]),
    "two effects swapped": (out_of_order, [written(1), written(2), effect(2), effect(1)]),
    "an effect that goes back": (out_of_order, [*GOOD, effect(1, 9)]),
    "an effect skipped": (out_of_order, [effect(1), effect(3)]),
    "a smaller fence accepted": (stale, [effect(1, 5), effect(2, 4)]),
    "a smaller fence after an equal one": (stale, [effect(1, 5), effect(2, 5), effect(2, 4)]),
    "a smaller fence of another key": (stale, [effect(1, 5), effect(1, 4, "b")]),
    "a fence given twice": (reused_fences, [started(1, 5), replace(started(1, 5), at=9.0)]),
    "a version given twice": (shared_versions, [Led("one", 7), Led("two", 7)]),
    "a smaller version": (shared_versions, [Led("one", 7), Led("two", 6)]),
    "a version given again after a drop": (shared_versions, [Led("one", 7), Dropped(), Led("two", 7)]),
    "a watermark that goes back": (going_back, [watermark(2), watermark(1)]),
    "a position that goes back": (going_back, [committed(2), committed(1)]),
    "a fence that goes back": (going_back, [committed(1, 5), committed(2, 4)]),
    "a fence that goes back after a drop": (going_back, [committed(1, 5), Dropped(), committed(2, 4)]),
    "a token that goes back behind a number alone": (
        going_back,
        [watermark(2), Stored("subscriptions/project/record", "", {"epoch": 8}), watermark(1)],
    ),
    "an epoch that goes back": (going_back, [replace(watermark(1), numbers={"epoch": 8}), watermark(2)]),
    "a watermark before the effect": (lambda h: beyond_prefix(h, ALL), [written(1), watermark(1), effect(1)]),
    "a watermark over a gap": (
        lambda h: beyond_prefix(h, ALL),
        [written(1), written(2, "b"), effect(2, key="b"), watermark(2), effect(1)],
    ),
    "a watermark before the effect, its write seen later": (
        lambda h: beyond_prefix(h, ALL),
        [watermark(1), written(1), effect(1)],
    ),
    "a repetition without a fault": (too_often, [started(1, 1), started(1, 2)]),
    "two repetitions after one fault": (lambda h: too_often(h, 1), [started(1, 1), started(1, 2), started(1, 3)]),
}


@pytest.mark.parametrize(("check", "history"), BAD.values(), ids=BAD.keys())
def test_a_bad_history_is_caught(check: Check, history: list[Fact]) -> None:
    """Each by the check that is named after the invariant it breaks."""
    assert check(history)


def test_all_checks_are_part_of_the_verdict() -> None:
    """A history in which everything is wrong gives a sentence of each."""
    bad: list[Fact] = [
        Led("one", 7),
        Led("two", 7),
        written(1),
        written(2),
        watermark(2),
        started(2, 5),
        started(2, 5),
        effect(2, 5),
        effect(1, 4),
        effect(9, 6),
        watermark(1),
        written(3),
    ]
    words = (
        "lost",
        "invented",
        "after 2",
        "accepted after",
        "under one fence",
        "led with",
        "went back",
        "passed",
        "times",
    )
    found = violations(bad, ALL)
    assert [word for word in words if not any(word in sentence for sentence in found)] == []


def test_changes_before_a_handlers_start_are_not_its_own() -> None:
    """A handler that was added later owes nothing from before."""
    history: list[Fact] = [written(1), watermark(1), written(2), effect(2), watermark(2)]
    assert lost(history, {"record": place(1)}) == []
    assert beyond_prefix(history, {"record": place(1)}) == []
    assert lost(history, ALL)


def test_positions_may_begin_anew_after_a_drop() -> None:
    """Versions and fences may not; those are other checks."""
    assert going_back([committed(5, 1), Dropped(), committed(1, 2)]) == []


def test_repetitions_within_the_bound_and_repeated_effects_are_no_violation() -> None:
    """P6 allows one more for each fault; the same effect twice in a row goes nowhere back."""
    assert too_often([started(1, 1), started(1, 2)], 1) == []
    assert out_of_order([effect(1, 1), effect(1, 2), effect(2, 3)]) == []


def test_the_longest_gap_counts_the_ends_too() -> None:
    """P7: silence until the end of the load is a gap, and so is silence at its beginning."""
    history: list[Fact] = [started(2), started(3), started(6)]
    assert longest_gap(history, 1.0, 7.0) == 3.0
    assert longest_gap(history, 1.0, 11.0) == 5.0
    assert longest_gap([], 1.0, 3.0) == 2.0
