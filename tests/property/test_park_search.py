"""The exhaustive search of parked keys: every interleaving of small scenarios, judged by P1 to P3, P6 and P12."""

from __future__ import annotations

import pytest

from tests.property.park_model import Broken, World
from tests.property.park_search import INVARIANTS, search
from tests.property.park_variants import CAUGHT, SLOW, SOUND
from tests.property.scenarios import Caught, Sound

LARGE = 10_000
"""States from which on a scenario takes too long for every run: whoever changes the model searches these, too."""


@pytest.mark.parametrize(
    "sound",
    [pytest.param(each, marks=[pytest.mark.slow] if each.floor >= LARGE else [], id=str(each)) for each in SOUND],
)
def test_no_interleaving_violates_an_invariant(sound: Sound[World]) -> None:
    """P1-P3, P6 hold in every state that can be reached, and P12 in every state at which all comes to rest.

    The floor keeps the check from becoming hollow: a rule that never fires makes the space collapse.
    """
    seen = search(sound.world)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor
    assert seen.quiescent > 0


@pytest.mark.slow
@pytest.mark.parametrize("sound", SLOW, ids=str)
def test_no_interleaving_of_a_larger_scenario_violates_an_invariant(sound: Sound[World]) -> None:
    """P1-P3, P6, P12: as above, with more changes, commands, failures or faults."""
    seen = search(sound.world, limit=3_000_000)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor


@pytest.mark.parametrize("variant", CAUGHT, ids=str)
def test_parked_keys_with_one_rule_broken_are_caught(variant: Caught[World]) -> None:
    """P1-P3, P6, P12: the shortest violation of each broken variant breaks exactly the invariants that it should."""
    finding = search(variant.world, watched=variant.watched).finding
    assert finding is not None, f"{variant.world.broken}: no violation found in {variant.world.name!r}"
    assert finding.invariants == variant.breaks, str(finding)


WHOLE = dict.fromkeys((each.world._replace(broken=Broken.NOTHING), each.watched) for each in CAUGHT)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "watched"), [pytest.param(*each, id=each[0].name) for each in WHOLE])
def test_the_same_scenario_with_all_rules_whole_is_clean(world: World, watched: frozenset[str]) -> None:
    """P1-P3, P6, P12: what catches a variant is its broken rule, not the scenario."""
    finding = search(world, watched=watched).finding
    assert finding is None, str(finding)


def test_every_invariant_and_every_rule_has_a_variant_that_breaks_it() -> None:
    """An oracle that has never spoken and a rule that was never broken have not been tested."""
    assert frozenset().union(*(variant.breaks for variant in CAUGHT)) == INVARIANTS
    assert {variant.world.broken for variant in CAUGHT} == set(Broken) - {Broken.NOTHING}
