"""The exhaustive searches: every interleaving of small scenarios of six models, judged by the promises.

`-k protocol`, `-k spill`, `-k snapshot`, `-k park`, `-k limits` and `-k twophase` choose a model. Whoever
changes a model runs the slow ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.property.limits_variants import LIMITS
from tests.property.park_variants import PARK
from tests.property.protocol_variants import PROTOCOL
from tests.property.scenarios import Caught, Scenarios, Sound
from tests.property.snapshot_variants import SNAPSHOT
from tests.property.spill_variants import SPILL
from tests.property.twophase_variants import TWOPHASE

MODELS = {
    "protocol": PROTOCOL, "spill": SPILL, "snapshot": SNAPSHOT, "park": PARK, "limits": LIMITS,
    "twophase": TWOPHASE,
}  # fmt: skip


def each(choose: Callable[[Scenarios], Iterable[Any]]) -> list[Any]:
    return [
        pytest.param(
            one,
            found,
            id=f"{name}: {getattr(found, 'name', found)}",
            marks=[pytest.mark.slow] if getattr(found, "floor", 0) >= one.large else [],
        )
        for name, one in MODELS.items()
        for found in choose(one)
    ]


@pytest.mark.parametrize(("scenarios", "sound"), each(lambda one: one.sound))
def test_no_interleaving_violates_an_invariant(scenarios: Scenarios, sound: Sound) -> None:
    """P1-P6, P12, P13 hold in every state that can be reached, and where all comes to rest.

    The floor keeps the check from becoming hollow: a rule that never fires makes the space collapse.
    """
    seen = scenarios.model.search(sound.world, limit=3_000_000)
    assert seen.finding is None, str(seen.finding)
    assert seen.states >= sound.floor
    assert seen.quiescent > 0


@pytest.mark.parametrize(("scenarios", "variant"), each(lambda one: one.caught))
def test_a_model_with_one_rule_broken_is_caught(scenarios: Scenarios, variant: Caught) -> None:
    """P1-P13: the shortest violation of each broken variant breaks exactly the invariants that it should."""
    finding = scenarios.model.search(variant.world, watched=variant.watched).finding
    assert finding is not None, f"{variant.world.broken}: no violation found in {variant.world.name!r}"
    assert finding.invariants == variant.breaks, str(finding)


@pytest.mark.parametrize(("scenarios", "world"), each(Scenarios.whole))
def test_the_scenario_of_a_variant_is_clean_with_all_rules_whole(scenarios: Scenarios, world: Any) -> None:
    """P1-P13: what catches a variant is its broken rule, not the scenario."""
    finding = scenarios.model.search(world).finding
    assert finding is None, str(finding)


@pytest.mark.parametrize("scenarios", MODELS.values(), ids=MODELS)
def test_every_invariant_and_every_rule_has_a_variant_that_breaks_it(scenarios: Scenarios) -> None:
    """An oracle that has never spoken and a rule that was never broken have not been tested."""
    assert frozenset().union(*(variant.breaks for variant in scenarios.caught)) == scenarios.model.invariants
    nothing, *rules = scenarios.broken
    assert {variant.world.broken for variant in scenarios.caught} == set(rules) - {nothing}
