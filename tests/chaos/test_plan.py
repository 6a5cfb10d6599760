"""Plans are pure: the same for a seed, and such that a run can be judged."""

from __future__ import annotations

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.plan import draw

SEEDS = range(20)


@pytest.mark.parametrize("members", [1, 3])
def test_a_seed_gives_one_plan_with_each_kind_of_fault_that_its_servers_can_have(members: int) -> None:
    """What a run has shown can be shown again, and no kind is left to luck."""
    plans = [draw(seed, 180, members) for seed in SEEDS]
    assert plans == [draw(seed, 180, members) for seed in SEEDS]
    assert len({plan.steps for plan in plans}) == len(plans)
    possible = {k.name for k in KINDS.values() if k.members <= members and not (k.alone and members > 1)}
    for plan in plans:
        assert {step.does for step in plan.steps if step.does in KINDS} == possible
        assert all(step.at < plan.seconds for step in plan.steps)
