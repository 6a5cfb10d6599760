"""
Snapshots in a run: a person orders one for a subscription while faults of all kinds happen.

It is planned like a fault, since it has its effect on what is judged: each document that it brings starts once more.
What must never be is that one takes a key back; that is judged as for all effects, by their order in the partition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pymongo.errors import PyMongoError

from mongo_celery.embedded.processes import polls
from tests.chaos.plan import Plan, Step
from tests.chaos.setting import BRIDGE, FLOWS, HOT, STATE
from tests.chaos.world import World

_END_SECONDS = 60.0
_SLOWLY = 0.5
_RATE = 20
"""Documents a second of a snapshot that is to last, so that something befalls it."""


def snapshot(world: World, step: Step) -> Iterator[None]:
    """Order one for some subscription; over when it is, and before that nobody wonders that documents come again."""
    name, rate = chosen(step)
    world.command("snapshot", name, "--yes", "--match", json.dumps(sound(name)), *rate).wait()
    yield
    for _ in polls(_END_SECONDS):
        with suppress(PyMongoError):
            if not _runs(world, name):
                return


def chosen(step: Step) -> tuple[str, tuple[str, ...]]:
    """Of which subscription, and with which rate."""
    names = sorted(FLOWS)
    place = step.choice * len(names)
    return names[int(place)], ("--rate", str(_RATE)) if place % 1 < _SLOWLY else ()


def sound(name: str) -> dict[str, Any]:
    """A condition on documents: what is poisoned is left out, since each new start of it would be charged."""
    key = "$documentKey._id"
    # "-" is the character before "."; a pattern would fail on a key that is no UTF-8.
    own = {"$and": [{"$gte": [key, f"{name}-"]}, {"$lt": [key, f"{name}."]}]}
    return {"$or": [{"$eq": [key, HOT]}, own]}


def beside_faults() -> Plan:
    """Snapshots of all subscriptions, and what may befall them: whoever reads, runs or stores them ends or is away."""
    ways = 2 * len(FLOWS)
    asked = (Step(2.0 + 3 * n, "snapshot", lasts=1.0, choice=(n % ways + 0.5) / ways) for n in range(12))
    befalls = ("kill listener", "kill worker", "kill cursors", "freeze listener", "step down", "kill pool process")
    faults = (Step(3.0 + 3 * n, befalls[n % len(befalls)], lasts=2.0, choice=n % 5 / 5) for n in range(11))
    steps = sorted([*asked, *faults], key=lambda step: step.at)
    return Plan("snapshots", 40.0, 1, tuple(steps))


def _runs(world: World, name: str) -> bool:
    mine = {"_id": {"$gte": f"{BRIDGE}/{name}/", "$lt": f"{BRIDGE}/{name}0"}, "state": "running"}
    return world.client[STATE]["snapshots"].find_one(mine, {"_id": 1}) is not None
