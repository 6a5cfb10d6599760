"""A checker that has never failed has not been tested: each meets hand-made bad histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.history import (
    Dropped,
    Due,
    Effect,
    Fact,
    Kept,
    Led,
    SetAside,
    Started,
    Stored,
    Wrote,
    beyond_prefix,
    going_back,
    granted_out_of_order,
    invented,
    longest_gap,
    lost,
    missing,
    out_of_order,
    out_of_sequence,
    shared_versions,
    skipped,
    stale,
    started_out_of_sequence,
    too_often,
    violations,
    weak_tokens,
    went_back,
)

ALL = {"record": ""}


def place(number: int) -> str:
    return f"82{number:04d}"


def written(n: int, key: str = "a") -> Wrote:
    return Wrote(key, n, place(n), float(n))


def started(n: int, fence: int | None = None, key: str = "a") -> Started:
    return Started(handler="record", key=key, n=n, fence=fence or n, at=float(n))


def effect(n: int, fence: int | None = None, key: str = "a") -> Effect:
    return Effect(handler="record", key=key, n=n, fence=fence or n, place=place(n), at=float(n))


def watermark(n: int) -> Stored:
    return Stored("subscriptions/project/record", place(n), {"term": 7}, "record")


def committed(n: int, fence: int = 1) -> Stored:
    return Stored("partitions/project/record/0/1", place(n), {"committed": n, "fencingToken": fence, "term": 7})


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
    "an effect skipped": (skipped, [effect(1), effect(3)]),
    "an effect skipped, by the whole check": (out_of_order, [effect(1), effect(3)]),
    "an effect that goes back, though a later one is newer": (went_back, [effect(2), effect(1), effect(2)]),
    "a start granted after its successor": (granted_out_of_order, [started(1, 9), started(2, 8)]),
    "two starts swapped under one token": (granted_out_of_order, [started(2, 8), started(1, 8)]),
    "a smaller fence accepted": (stale, [effect(1, 5), effect(2, 4)]),
    "a smaller fence after an equal one": (stale, [effect(1, 5), effect(2, 5), effect(2, 4)]),
    "a smaller fence of another key": (stale, [effect(1, 5), effect(1, 4, "b")]),
    "a fence given twice": (weak_tokens, [started(1, 5), replace(started(1, 5), at=9.0)]),
    "a version given twice": (shared_versions, [Led("one", 7), Led("two", 7)]),
    "a smaller version": (shared_versions, [Led("one", 7), Led("two", 6)]),
    "a version given again after a drop": (shared_versions, [Led("one", 7), Dropped(), Led("two", 7)]),
    "a watermark that goes back": (going_back, [watermark(2), watermark(1)]),
    "a position that goes back": (going_back, [committed(2), committed(1)]),
    "a fence that goes back": (going_back, [committed(1, 5), committed(2, 4)]),
    "a fence that goes back after a drop": (going_back, [committed(1, 5), Dropped(), committed(2, 4)]),
    "a token that goes back behind a number alone": (
        going_back,
        [watermark(2), Stored("subscriptions/project/record", "", {"term": 8}), watermark(1)],
    ),
    "an epoch that goes back": (going_back, [replace(watermark(1), numbers={"term": 8}), watermark(2)]),
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
        "nobody wrote",
        "back from 2 to 1",
        "skipped from",
        "accepted after",
        "under one token",
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


def test_a_watermark_may_pass_what_is_stored_in_the_state_database() -> None:
    """P5, P13: of that very handler, and no other change; it is still owed."""
    history: list[Fact] = [written(1), Kept("record", place(1)), watermark(1)]
    assert beyond_prefix(history, ALL) == []
    assert lost(history, ALL)
    assert beyond_prefix([written(1), Kept("audit", place(1)), watermark(1)], ALL)


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


def test_starts_in_the_order_of_their_tokens_may_be_noted_late() -> None:
    """A frozen process notes its start after its successor's; what counts is when the right to run was granted."""
    assert granted_out_of_order([started(2, 9), started(1, 8)]) == []


# -- changes with a number in their partition, as chains carry them ---------------------------------

ONE, TWO, THREE = (Due("plain", "a", n) for n in (1, 2, 3))
WRITTEN: list[Fact] = [Wrote(due.key, due.n, handler=due.handler) for due in (ONE, TWO, THREE)]


def start_of(due: Due, fence: int, at: float, partition: int = 0) -> Started:
    return Started(**due._asdict(), fence=fence, partition=partition, seq=due.n, at=at)


def effect_of(due: Due, fence: int, seq: int | None = None) -> Effect:
    return Effect(**due._asdict(), fence=fence, partition=0, seq=due.n if seq is None else seq)


STARTS: list[Fact] = [start_of(ONE, 10, 1), start_of(TWO, 11, 2), start_of(THREE, 12, 3)]
EFFECTS: list[Fact] = [effect_of(ONE, 10), effect_of(TWO, 11), effect_of(THREE, 12)]


def test_a_chain_without_faults_has_no_violation() -> None:
    """Each change started once, in order, under growing tokens."""
    assert violations([*WRITTEN, *STARTS, *EFFECTS]) == []
    assert started_out_of_sequence(STARTS) == []


def test_a_crash_between_effect_and_mark_is_no_violation_if_it_is_spared() -> None:
    """The change runs again under a larger token, and its effect is repeated before its successor's (P6)."""
    starts = [*STARTS[:1], start_of(TWO, 11, 2), start_of(TWO, 12, 3), start_of(THREE, 13, 4)]
    effects = [effect_of(ONE, 10), effect_of(TWO, 11), effect_of(TWO, 12), effect_of(THREE, 13)]
    history: list[Fact] = [*WRITTEN, *starts, *effects]
    assert violations(history, spare={TWO: 1}) == []
    assert violations(history, spare=1) == []
    assert too_often(history)


def test_a_run_of_several_changes_shares_one_token() -> None:
    """One claim carries several changes; that is no reuse (P4)."""
    assert weak_tokens([start_of(due, 10, at) for at, due in enumerate((ONE, TWO, THREE))]) == []


def test_a_run_that_was_cut_by_a_crash_is_repeated_from_its_beginning() -> None:
    """Only from its beginning, and only under a larger token (P2)."""
    cut = [effect_of(ONE, 10), effect_of(TWO, 10), effect_of(ONE, 11), effect_of(TWO, 12), effect_of(THREE, 13)]
    assert out_of_order(cut) == []
    assert out_of_sequence([effect_of(ONE, 10), effect_of(TWO, 10), effect_of(ONE, 10)])
    assert out_of_order([effect_of(ONE, 9), effect_of(TWO, 10), effect_of(THREE, 10), effect_of(ONE, 11)])
    assert weak_tokens([start_of(ONE, 10, 1), start_of(TWO, 10, 2), start_of(ONE, 11, 3), start_of(TWO, 12, 4)]) == []


def test_a_change_without_effect_is_lost_unless_it_was_set_aside() -> None:
    """P1, also at the end of a history."""
    assert lost([*WRITTEN, *EFFECTS[:2]])
    assert lost([*WRITTEN, *EFFECTS[1:]])
    assert len(lost(WRITTEN)) == 3
    assert lost([*WRITTEN, *EFFECTS[:2], SetAside(THREE)]) == []
    assert missing([*WRITTEN, *STARTS[1:]], {}, Started) == [ONE]


def test_what_was_written_for_another_handler_is_invented() -> None:
    """P11: a forged change that ran, or took effect."""
    foreign = Due("plain", "a", 9)
    assert invented([*WRITTEN, start_of(foreign, 13, 4)])
    assert invented([*WRITTEN, effect_of(foreign, 13)])
    assert invented([*WRITTEN, effect_of(Due("other", "a", 1), 13)])
    assert invented([*WRITTEN[:2], *STARTS])


@pytest.mark.parametrize(
    "effects",
    [
        [effect_of(TWO, 10), effect_of(ONE, 11), effect_of(THREE, 12)],
        [effect_of(ONE, 10), effect_of(TWO, 11), effect_of(THREE, 12), effect_of(ONE, 13)],
        [effect_of(ONE, 10, seq=1), effect_of(THREE, 11, seq=2), effect_of(TWO, 12, seq=3)],
    ],
)
def test_effects_that_go_back_are_out_of_sequence(effects: list[Fact]) -> None:
    """P2: swapped, repeated after a successor, or numbered against the order of writing."""
    assert out_of_sequence(effects)


@pytest.mark.parametrize(
    "effects",
    [
        [effect_of(ONE, 10), effect_of(TWO, 9)],
        [effect_of(ONE, 10), effect_of(TWO, 12), effect_of(TWO, 11)],
        [effect_of(ONE, 10), effect_of(TWO, 12), effect_of(THREE, 13), effect_of(THREE, 10)],
    ],
)
def test_an_effect_under_an_older_token_is_stale(effects: list[Fact]) -> None:
    """P3: the sink had seen a larger one."""
    assert stale(effects)


@pytest.mark.parametrize(
    "starts",
    [
        [start_of(ONE, 10, 1), start_of(ONE, 10, 2)],
        [start_of(ONE, 10, 1), start_of(TWO, 9, 2)],
        [start_of(ONE, 10, 1), start_of(ONE, 12, 2), start_of(TWO, 11, 3)],
    ],
)
def test_tokens_that_are_shared_or_go_back_are_weak(starts: list[Fact]) -> None:
    """P4: a redelivery under the same token, a successor under a smaller one."""
    assert weak_tokens(starts)


def test_starts_beyond_what_is_spared_are_counted() -> None:
    """P6: without a fault one start, with one fault two."""
    twice = [*STARTS, start_of(THREE, 13, 4)]
    assert too_often(twice)
    assert too_often(twice, {TWO: 1})
    assert too_often([*twice, start_of(THREE, 14, 5)], 1)
    assert too_often(twice, {THREE: 1}) == []


def test_a_successor_that_starts_first_is_seen() -> None:
    """P2 without faults, for each partition by itself."""
    assert started_out_of_sequence([start_of(ONE, 10, 5), start_of(TWO, 11, 2)])
    assert started_out_of_sequence([start_of(ONE, 10, 5), start_of(TWO, 11, 2, partition=1)]) == []
