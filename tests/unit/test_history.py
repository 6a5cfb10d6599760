"""A checker that has never failed has not been tested: each meets hand-made bad histories, and good ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.rig import history as checks
from tests.rig.history import Dropped, Due, Effect, Fact, Kept, Led, SetAside, Started, Stored, Wrote

ALL = {"record": ""}


def place(number: int) -> str:
    return f"82{number:04d}"


def written(n: int, key: str = "a") -> Wrote:
    return Wrote(key, n, place(n), float(n))


def started(n: int, fence: int | None = None, key: str = "a") -> Started:
    return Started(handler="record", key=key, n=n, fence=fence or n, at=float(n))


def effect(n: int, fence: int | None = None, key: str = "a") -> Effect:
    return Effect(handler="record", key=key, n=n, fence=fence or n, at=float(n))


def watermark(n: int) -> Stored:
    return Stored("subscriptions/project/record", place(n), {"term": 7}, "record")


def committed(n: int, fence: int = 1) -> Stored:
    return Stored("partitions/project/record/0/1", place(n), {"committed": n, "fencingToken": fence, "term": 7})


def start_of(due: Due, fence: int, at: float, partition: int = 0) -> Started:
    return Started(**due._asdict(), fence=fence, partition=partition, seq=due.n, at=at)


def effect_of(due: Due, fence: int, seq: int | None = None) -> Effect:
    return Effect(**due._asdict(), fence=fence, partition=0, seq=due.n if seq is None else seq)


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

# Changes with a number in their partition, as chains carry them.
ONE, TWO, THREE = (Due("plain", "a", n) for n in (1, 2, 3))
WRITTEN: list[Fact] = [Wrote(due.key, due.n, handler=due.handler) for due in (ONE, TWO, THREE)]
STARTS: list[Fact] = [start_of(ONE, 10, 1), start_of(TWO, 11, 2), start_of(THREE, 12, 3)]
EFFECTS: list[Fact] = [effect_of(ONE, 10), effect_of(TWO, 11), effect_of(THREE, 12)]
REPEATED: list[Fact] = [
    *WRITTEN,
    *(start_of(ONE, 10, 1), start_of(TWO, 11, 2), start_of(TWO, 12, 3), start_of(THREE, 13, 4)),
    *(effect_of(ONE, 10), effect_of(TWO, 11), effect_of(TWO, 12), effect_of(THREE, 13)),
]


def without(kind: type, n: int) -> list[Fact]:
    return [fact for fact in GOOD if not (isinstance(fact, kind) and getattr(fact, "n", None) == n)]


Check = Callable[[list[Fact]], object]
BAD: list[tuple[str, Check, list[Fact]]] = [
    ("the last change is lost", lambda h: checks.lost(h, ALL), without(Effect, 2)),
    ("the first change is lost", lambda h: checks.lost(h, ALL), without(Effect, 1)),
    ("a change that is only stored", lambda h: checks.lost(h, ALL), [written(1), Kept("record", place(1))]),
    ("an effect without a write", checks.invented, [*GOOD, effect(3)]),
    ("a start without a write", checks.invented, [*GOOD, started(3)]),
    ("an effect before its write", checks.invented, [effect(1), written(1)]),
    ("a change that was never written for it", checks.invented, [*WRITTEN[:2], *STARTS]),
    ("two effects swapped", checks.out_of_order, [written(1), written(2), effect(2), effect(1)]),
    ("an effect skipped", checks.skipped, [effect(1), effect(3)]),
    ("an effect that goes back under a newer one", checks.went_back, [effect(2), effect(1), effect(2)]),
    ("a number repeated after its successor", checks.out_of_sequence, [*EFFECTS, effect_of(ONE, 13)]),
    ("numbers against the order of writing", checks.out_of_sequence, [effect_of(THREE, 11, 2), effect_of(TWO, 12, 3)]),
    ("a repetition under the same token", checks.out_of_sequence, [
        effect_of(ONE, 10), effect_of(TWO, 10), effect_of(ONE, 10)]),
    ("a repetition from before the run", checks.out_of_order, [
        effect_of(ONE, 9), effect_of(TWO, 10), effect_of(THREE, 10), effect_of(ONE, 11)]),
    ("a successor that starts first", checks.started_out_of_sequence, [start_of(ONE, 10, 5), start_of(TWO, 11, 2)]),
    ("a smaller fence accepted", checks.stale, [effect(1, 5), effect(2, 4)]),
    ("a fence given twice", checks.weak_tokens, [started(1, 5), replace(started(1, 5), at=9.0)]),
    ("a successor under a smaller token", checks.weak_tokens, [
        start_of(ONE, 10, 1), start_of(ONE, 12, 2), start_of(TWO, 11, 3)]),
    ("a version given twice", checks.shared_versions, [Led("one", 7), Led("two", 7)]),
    ("a version given again after a drop", checks.shared_versions, [Led("one", 7), Dropped(), Led("two", 7)]),
    ("a watermark that goes back", checks.going_back, [watermark(2), watermark(1)]),
    ("a position that goes back", checks.going_back, [committed(2), committed(1)]),
    ("a fence that goes back", checks.going_back, [committed(1, 5), committed(2, 4)]),
    ("a token that goes back behind a number alone", checks.going_back, [
        watermark(2), Stored("subscriptions/project/record", "", {"term": 8}), watermark(1)]),
    ("a term that goes back", checks.going_back, [replace(watermark(1), numbers={"term": 8}), watermark(2)]),
    ("a watermark before the effect", lambda h: checks.beyond_prefix(h, ALL), [written(1), watermark(1), effect(1)]),
    ("a watermark over a gap", lambda h: checks.beyond_prefix(h, ALL), [
        written(1), written(2, "b"), effect(2, key="b"), watermark(2), effect(1)]),
    ("a watermark over what another handler stored", lambda h: checks.beyond_prefix(h, ALL), [
        written(1), Kept("audit", place(1)), watermark(1)]),
    ("a repetition without a fault", checks.too_often, [started(1, 1), started(1, 2)]),
    ("two repetitions after one fault", lambda h: checks.too_often(h, 1), [
        started(1, 1), started(1, 2), started(1, 3)]),
    ("a repetition of another change than the spared", lambda h: checks.too_often(h, {THREE: 1}), REPEATED),
]  # fmt: skip
FINE: list[tuple[str, Check, list[Fact]]] = [
    ("a good history", lambda h: checks.violations(h, ALL), GOOD),
    ("a chain without faults", checks.violations, [*WRITTEN, *STARTS, *EFFECTS]),
    ("starts of different partitions", checks.started_out_of_sequence, [
        start_of(ONE, 10, 5), start_of(TWO, 11, 2, partition=1)]),
    ("a spared repetition of a change", lambda h: checks.violations(h, spare={TWO: 1}), REPEATED),
    ("any spared repetition", lambda h: checks.violations(h, spare=1), REPEATED),
    ("changes before the handler's start", lambda h: [*checks.lost(h, {"record": place(1)}),
        *checks.beyond_prefix(h, {"record": place(1)})], [
            written(1), watermark(1), written(2), effect(2), watermark(2)]),
    ("a watermark over what is stored", lambda h: checks.beyond_prefix(h, ALL), [
        written(1), Kept("record", place(1)), watermark(1)]),
    ("a watermark over what was set aside", lambda h: checks.beyond_prefix(h, ALL), [
        written(1), SetAside(effect(1).due), watermark(1)]),
    ("positions that begin anew after a drop", checks.going_back, [committed(5, 1), Dropped(), committed(1, 2)]),
    ("one effect twice in a row", checks.out_of_order, [effect(1, 1), effect(1, 2), effect(2, 3)]),
    ("a run of several changes under one token", checks.weak_tokens, [
        start_of(due, 10, at) for at, due in enumerate((ONE, TWO, THREE))]),
    ("a run that was cut, and is repeated from its beginning", checks.out_of_order, [
        effect_of(ONE, 10), effect_of(TWO, 10), effect_of(ONE, 11), effect_of(TWO, 12), effect_of(THREE, 13)]),
    ("a change that was set aside", checks.lost, [*WRITTEN, *EFFECTS[:2], SetAside(THREE)]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "history"), [pytest.param(*row, id=name) for name, *row in BAD])
def test_a_bad_history_is_caught(check: Check, history: list[Fact]) -> None:
    assert check(history)


@pytest.mark.parametrize(("check", "history"), [pytest.param(*row, id=name) for name, *row in FINE])
def test_a_good_history_is_not(check: Check, history: list[Fact]) -> None:
    assert check(history) == []


def test_all_checks_are_part_of_the_verdict() -> None:
    bad: list[Fact] = [
        *(Led("one", 7), Led("two", 7), written(1), written(2), watermark(2), started(2, 5), started(2, 5)),
        *(effect(2, 5), effect(1, 4), effect(9, 6), watermark(1), written(3)),
    ]
    with_starts = (checks.lost, checks.beyond_prefix)
    alone = (
        *(checks.invented, checks.out_of_order, checks.stale, checks.weak_tokens),
        *(checks.shared_versions, checks.going_back, checks.too_often),
    )
    found = [*(check(bad, ALL) for check in with_starts), *(check(bad) for check in alone)]
    assert all(found)
    assert set(checks.violations(bad, ALL)) == {line for lines in found for line in lines}
