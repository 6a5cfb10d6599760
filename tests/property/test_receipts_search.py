"""The exhaustive search of two-phase commit with receipts: every interleaving of small scenarios."""

from __future__ import annotations

import pytest

from tests.property.receipts_model import Broken, World
from tests.property.receipts_search import INVARIANTS, search
from tests.property.receipts_variants import CAUGHT, SLOW, SOUND
from tests.property.scenarios import Caught, Sound


@pytest.mark.parametrize("sound", SOUND, ids=str)
def test_no_interleaving_violates_an_invariant(sound: Sound[World]) -> None:
    """Once or not at all, as the log says, as callers were told, in every state; and all comes to an end.

    The floor keeps the check from becoming hollow: a rule that never fires makes the space collapse.
    """
    seen = search(sound.world)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor
    assert seen.quiescent > 0


@pytest.mark.slow
@pytest.mark.parametrize("sound", SLOW, ids=str)
def test_no_interleaving_of_a_larger_scenario_violates_an_invariant(sound: Sound[World]) -> None:
    """As above, with more branches, more who recover or cancel, and deaths."""
    seen = search(sound.world, limit=3_000_000)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor


@pytest.mark.parametrize("variant", CAUGHT, ids=str)
def test_receipts_with_one_rule_broken_are_caught(variant: Caught[World]) -> None:
    """The shortest violation of each broken variant breaks exactly the invariants that it should."""
    finding = search(variant.world, watched=variant.watched).finding
    assert finding is not None, f"{variant.world.broken}: no violation found in {variant.world.name!r}"
    assert finding.invariants == variant.breaks, str(finding)


def test_the_scenarios_of_the_variants_are_among_those_that_are_sound() -> None:
    """What catches a variant is its broken rule, not the scenario."""
    assert {variant.world._replace(broken=Broken.NOTHING) for variant in CAUGHT} <= {each.world for each in SOUND}


def test_every_invariant_and_every_rule_has_a_variant_that_breaks_it() -> None:
    """An oracle that has never spoken and a rule that was never broken have not been tested."""
    assert frozenset().union(*(variant.breaks for variant in CAUGHT)) == INVARIANTS
    assert {variant.world.broken for variant in CAUGHT} == set(Broken) - {Broken.NOTHING}
