"""The exhaustive search of the protocol: every interleaving of small scenarios, judged by P1 to P6."""

from __future__ import annotations

import pytest

from tests.property.protocol_model import Broken, Rewind, World
from tests.property.protocol_search import ORACLES, search
from tests.property.protocol_variants import CAUGHT, SOUND
from tests.property.scenarios import Caught, Sound

LARGE = 13_000
"""States from which on a scenario takes too long for every run: whoever changes the model searches these, too."""


@pytest.mark.parametrize(
    "sound",
    [pytest.param(each, marks=[pytest.mark.slow] if each.floor >= LARGE else [], id=str(each)) for each in SOUND],
)
def test_no_interleaving_violates_an_invariant(sound: Sound[World]) -> None:
    """P1-P6 hold in every state that can be reached, and P1 in every state at which all comes to rest.

    The floor keeps the check from becoming hollow: a rule that never fires makes the space collapse.
    """
    seen = search(sound.world)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor
    assert seen.quiescent > 0


@pytest.mark.parametrize("variant", CAUGHT, ids=str)
def test_a_protocol_with_one_rule_broken_is_caught(variant: Caught[World]) -> None:
    """P1-P6: the shortest violation of each broken variant breaks exactly the invariants that it should."""
    finding = search(variant.world, watched=variant.watched).finding
    assert finding is not None, f"{variant.world.broken}: no violation found in {variant.world.name!r}"
    assert finding.invariants == variant.breaks, str(finding)


WHOLE = dict.fromkeys((each.world._replace(broken=Broken.NOTHING, moved=()), each.watched) for each in CAUGHT)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "watched"), [pytest.param(*each, id=each[0].name) for each in WHOLE])
def test_the_same_scenario_with_all_rules_whole_is_clean(world: World, watched: frozenset[str]) -> None:
    """P1-P6: what catches a variant is its broken rule, not the scenario (but a key may never change)."""
    finding = search(world, watched=watched).finding
    assert finding is None, str(finding)


def test_every_invariant_and_every_rule_has_a_variant_that_breaks_it() -> None:
    """P1-P6: an oracle that has never spoken and a rule that was never broken have not been tested."""
    assert frozenset().union(*(variant.breaks for variant in CAUGHT)) == frozenset(ORACLES)
    assert {variant.world.broken for variant in CAUGHT} == set(Broken) - {Broken.NOTHING}


@pytest.mark.parametrize("broken", [Broken.CLAIM_IGNORES_EPOCH, Broken.TWO_IMAGES, Broken.NUMBERED_AT_READING], ids=str)
def test_some_rules_look_superfluous_without_a_rewind_or_other_matches(broken: Broken) -> None:
    """P1, P5: in plain scenarios nobody misses these rules, so the others must stay in the table above."""
    plain = World("three changes, two terms", (0, 0, 0), terms=2, broken=broken)
    assert search(plain).finding is None
    revealing = [variant.world for variant in CAUGHT if variant.world.broken is broken]
    assert all(world.matches or world.rewind is not Rewind.NEVER for world in revealing)
