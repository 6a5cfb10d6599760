"""Plans are pure: the same for a seed, and such that a run can be judged."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.chaos.broken import BROKEN, directed
from tests.chaos.faults import KINDS, choose_snapshot
from tests.chaos.plan import POISONS, beside_faults, draw, healthy_partitions
from tests.chaos.setting import FLOWS, HARMLESS, STANDING_PARTITIONS, is_poison, keys_of, partition_of

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


def test_no_two_faults_befall_one_thing_at_a_time() -> None:
    """Else the end of one would end the other."""
    for plan in (*(draw(seed, 180) for seed in SEEDS), *map(directed, BROKEN)):
        for on in {kind.on for kind in KINDS.values()}:
            of_kind = {name for name, kind in KINDS.items() if kind.on == on}
            steps = [each for each in plan.steps if each.does in of_kind and each.lasts]
            assert all(before.at + before.lasts <= after.at for before, after in pairwise(steps))


def test_poison_and_persons_leave_most_partitions_alone() -> None:
    """P12: healthy is what nobody has touched."""
    for seed in SEEDS:
        plan = draw(seed, 180)
        poisoned = [step for step in plan.steps if step.key and step.does.startswith("poison")]
        assert {step.does.partition(": ")[2] for step in poisoned} == set(POISONS)
        for step in poisoned:
            assert is_poison(step.key) is not step.key.startswith(HARMLESS)
            assert partition_of(step.where, step.key) == step.partition
            assert (step.where, step.partition) not in healthy_partitions()
        assert {step.partition for step in plan.steps} <= {*STANDING_PARTITIONS, -1}


def test_each_flow_writes_to_healthy_partitions() -> None:
    """Else there would be nothing to judge."""
    for flow in FLOWS.values():
        used = {(flow.name, partition_of(flow.name, key)) for key in keys_of(flow)}
        assert len(used & healthy_partitions()) >= 3


def test_the_plans_of_broken_builds_and_of_snapshots_have_known_faults_in_order() -> None:
    """A name that is planned and not known would end a run in its middle."""
    for plan in (*map(directed, BROKEN), beside_faults()):
        assert plan.steps == tuple(sorted(plan.steps, key=lambda step: step.at))
        assert {step.does for step in plan.steps if ": " not in step.does} <= set(KINDS)
    orders = [choose_snapshot(step) for step in beside_faults().steps if step.does == "snapshot"]
    assert {(name, bool(rate)) for name, rate in orders} == {
        (name, slowly) for name in FLOWS for slowly in (False, True)
    }
