"""The exhaustive search of snapshots: every interleaving of small scenarios, judged by P1 to P6, P12 and P13."""

from __future__ import annotations

import pytest

from tests.property.scenarios import Caught, Sound
from tests.property.snapshot_model import Broken, World
from tests.property.snapshot_search import ORACLES, search
from tests.property.snapshot_variants import CAUGHT, HALVES_APART, SLOW, SOUND, SPARED

LARGE = 5_500
"""States from which on a scenario takes too long for every run: whoever changes the model searches these, too."""


@pytest.mark.parametrize(
    "sound",
    [pytest.param(each, marks=[pytest.mark.slow] if each.floor >= LARGE else [], id=str(each)) for each in SOUND],
)
def test_no_interleaving_violates_an_invariant(sound: Sound[World]) -> None:
    """P1-P6, P13 hold in every state that can be reached, P1 and P12 where all comes to rest.

    The floor keeps the check from becoming hollow: a rule that never fires makes the space collapse.
    """
    seen = search(sound.world)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor
    assert seen.quiescent > 0


@pytest.mark.slow
@pytest.mark.parametrize("sound", SLOW, ids=str)
def test_no_interleaving_of_a_larger_scenario_violates_an_invariant(sound: Sound[World]) -> None:
    """P1-P6, P12, P13: as above, with more keys, snapshots, terms or faults."""
    seen = search(sound.world, limit=3_000_000)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor


@pytest.mark.parametrize("variant", CAUGHT, ids=str)
def test_a_snapshot_with_one_rule_broken_is_caught(variant: Caught[World]) -> None:
    """P1-P13: the shortest violation of each broken variant breaks exactly the invariants that it should."""
    finding = search(variant.world, watched=variant.watched).finding
    assert finding is not None, f"{variant.world.broken}: no violation found in {variant.world.name!r}"
    assert finding.invariants == variant.breaks, str(finding)


WHOLE = {variant.world._replace(broken=Broken.NOTHING) for variant in CAUGHT} - {sound.world for sound in SOUND}
WHOLE -= {HALVES_APART}  # more than half a million states


@pytest.mark.slow
@pytest.mark.parametrize("world", sorted(WHOLE, key=str), ids=str)
def test_the_scenarios_of_the_variants_are_clean_with_all_rules_whole(world: World) -> None:
    """P1-P13: what catches a variant is its broken rule, not the scenario."""
    finding = search(world).finding
    assert finding is None, str(finding)


@pytest.mark.slow
@pytest.mark.parametrize("world", SPARED, ids=lambda world: f"{world.broken}: {world}")
def test_some_rules_can_be_spared(world: World) -> None:
    """P1-P6, P12, P13: what the search has found superfluous stays so; else it is a rule again."""
    finding = search(world).finding
    assert finding is None, str(finding)


def test_every_rule_has_a_variant_that_breaks_it() -> None:
    """P1-P13: an oracle that has never spoken and a rule that was never broken have not been tested."""
    assert frozenset().union(*(variant.breaks for variant in CAUGHT)) == frozenset(ORACLES)
    spared = {world.broken for world in SPARED}
    assert {variant.world.broken for variant in CAUGHT} == set(Broken) - {Broken.NOTHING} - spared
