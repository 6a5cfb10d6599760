"""Each checker of chain histories passes a good history and catches hand-made bad ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.acceptance.chain_history import (
    Effect,
    History,
    Item,
    Start,
    lost,
    out_of_order,
    phantoms,
    restarted,
    stale_accepted,
    started_in_order,
    violations,
    weak_tokens,
)

ONE, TWO, THREE = (Item("plain", "a", n) for n in (1, 2, 3))


def start(item: Item, fence: int, at: int, partition: int = 0) -> Start:
    return Start(item, partition, seq=item.n, fence=fence, at=at)


def effect(item: Item, fence: int, seq: int | None = None) -> Effect:
    return Effect(item, 0, item.n if seq is None else seq, fence)


GOOD = History(
    written=(ONE, TWO, THREE),
    starts=(start(ONE, 10, 1), start(TWO, 11, 2), start(THREE, 12, 3)),
    effects=(effect(ONE, 10), effect(TWO, 11), effect(THREE, 12)),
)


def test_a_history_without_faults_has_no_violation() -> None:
    """Each change started once, in order, under growing tokens."""
    assert violations(GOOD) == []
    assert started_in_order(GOOD) == []


def test_a_crash_between_effect_and_mark_is_no_violation_if_it_is_spared() -> None:
    """The change runs again under a larger token, and its effect is repeated before its successor's (P6)."""
    history = replace(
        GOOD,
        starts=(*GOOD.starts[:1], start(TWO, 11, 2), start(TWO, 12, 3), start(THREE, 13, 4)),
        effects=(effect(ONE, 10), effect(TWO, 11), effect(TWO, 12), effect(THREE, 13)),
    )
    assert violations(history, spare={TWO: 1}) == []
    assert violations(history, spare=1) == []
    assert restarted(history)


def test_a_run_of_several_changes_shares_one_token() -> None:
    """One claim carries several changes; that is no reuse (P4)."""
    history = replace(GOOD, starts=tuple(replace(each, fence=10) for each in GOOD.starts))
    assert weak_tokens(history) == []


def test_a_run_that_was_cut_by_a_crash_is_repeated_from_its_beginning() -> None:
    """Only from its beginning, and only under a larger token (P2)."""
    cut = (effect(ONE, 10), effect(TWO, 10), effect(ONE, 11), effect(TWO, 12), effect(THREE, 13))
    assert out_of_order(replace(GOOD, effects=cut)) == []
    assert out_of_order(replace(GOOD, effects=(effect(ONE, 10), effect(TWO, 10), effect(ONE, 10))))
    assert out_of_order(replace(GOOD, effects=(effect(ONE, 9), effect(TWO, 10), effect(THREE, 10), effect(ONE, 11))))
    starts = (start(ONE, 10, 1), start(TWO, 10, 2), start(ONE, 11, 3), start(TWO, 12, 4), start(THREE, 13, 5))
    assert weak_tokens(replace(GOOD, starts=starts)) == []


def test_a_change_without_effect_is_lost_unless_it_was_set_aside() -> None:
    """P1, also at the end of a history."""
    assert lost(replace(GOOD, effects=GOOD.effects[:2]))
    assert lost(replace(GOOD, effects=GOOD.effects[1:]))
    assert lost(replace(GOOD, effects=()))
    assert lost(replace(GOOD, effects=GOOD.effects[:2], set_aside=frozenset({THREE}))) == []


def test_what_nobody_wrote_is_a_phantom() -> None:
    """P11: a forged change that ran, or took effect."""
    foreign = Item("plain", "a", 9)
    assert phantoms(replace(GOOD, starts=(*GOOD.starts, start(foreign, 13, 4))))
    assert phantoms(replace(GOOD, effects=(*GOOD.effects, effect(foreign, 13))))
    assert phantoms(replace(GOOD, written=(ONE, TWO)))


@pytest.mark.parametrize(
    "effects",
    [
        (effect(TWO, 10), effect(ONE, 11), effect(THREE, 12)),
        (effect(ONE, 10), effect(TWO, 11), effect(THREE, 12), effect(ONE, 13)),
        (effect(ONE, 10, seq=1), effect(THREE, 11, seq=2), effect(TWO, 12, seq=3)),
    ],
)
def test_effects_that_go_back_are_out_of_order(effects: tuple[Effect, ...]) -> None:
    """P2: swapped, repeated after a successor, or numbered against the order of writing."""
    assert out_of_order(replace(GOOD, effects=effects))


@pytest.mark.parametrize(
    "effects",
    [
        (effect(ONE, 10), effect(TWO, 9)),
        (effect(ONE, 10), effect(TWO, 12), effect(TWO, 11)),
        (effect(ONE, 10), effect(TWO, 12), effect(THREE, 13), effect(THREE, 10)),
    ],
)
def test_an_effect_under_an_older_token_is_stale(effects: tuple[Effect, ...]) -> None:
    """P3: the sink had seen a larger one."""
    assert stale_accepted(replace(GOOD, effects=effects))


@pytest.mark.parametrize(
    "starts",
    [
        (start(ONE, 10, 1), start(ONE, 10, 2)),
        (start(ONE, 10, 1), start(TWO, 9, 2)),
        (start(ONE, 10, 1), start(ONE, 12, 2), start(TWO, 11, 3)),
    ],
)
def test_tokens_that_are_shared_or_go_back_are_weak(starts: tuple[Start, ...]) -> None:
    """P4: a redelivery under the same token, a successor under a smaller one."""
    assert weak_tokens(replace(GOOD, starts=starts))


def test_starts_beyond_what_is_spared_are_counted() -> None:
    """P6: without a fault one start, with one fault two."""
    twice = replace(GOOD, starts=(*GOOD.starts, start(THREE, 13, 4)))
    thrice = replace(GOOD, starts=(*twice.starts, start(THREE, 14, 5)))
    assert restarted(twice)
    assert restarted(twice, {TWO: 1})
    assert restarted(thrice, 1)
    assert restarted(twice, {THREE: 1}) == []


def test_a_successor_that_starts_first_is_seen() -> None:
    """P2 without faults, for each partition by itself."""
    overtaken = replace(GOOD, starts=(start(ONE, 10, 5), start(TWO, 11, 2)))
    assert started_in_order(overtaken)
    elsewhere = replace(GOOD, starts=(start(ONE, 10, 5), start(TWO, 11, 2, partition=1)))
    assert started_in_order(elsewhere) == []
