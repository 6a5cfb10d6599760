"""What a search has to show, of whatever it searches: where the rules hold, and which broken one is caught where."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from tests.property.exploration import Model

WIDER = (frozenset({2, 3}), frozenset({1, 2, 3}))
"""A second configuration matches a change that lies before those of the first."""
NARROWER = (frozenset({1, 2, 3}), frozenset({1, 3}))


MORE = frozenset({
    "terms", "budget", "faults", "late", "delays", "operator", "failures", "commands", "person",
    "freezes", "losses", "takers", "cancels", "others", "replacements",
})  # fmt: skip
"""What may happen in a scenario, and how often: with less of it, nothing else can happen. A rewind is such a thing."""


def is_within(part: Any, other: Any) -> bool:
    """Return True if everything that can happen in one scenario can happen in another one."""
    pairs = zip(part._fields, part, other, strict=True)
    return all(
        mine == theirs
        or (name in MORE and mine <= theirs)
        or name == "name"
        or (name == "rewind" and mine == part._field_defaults[name])
        for name, mine, theirs in pairs
    )


class Sound(NamedTuple):
    """A scenario without a broken rule, and the number of states below which the check would be hollow."""

    world: Any
    floor: int

    def __str__(self) -> str:
        return str(self.world.name)


def sound(floor: int, base: Any, name: str = "", **changes: Any) -> Sound:
    return Sound(base._replace(name=name or base.name, **changes), floor)


class Caught(NamedTuple):
    """A broken variant, the invariants that its shortest violation breaks, and those that are judged (None: all)."""

    world: Any
    breaks: frozenset[str]
    watched: frozenset[str] | None

    def __str__(self) -> str:
        return f"{self.world.broken}: {self.world.name}: {' '.join(sorted(self.breaks))}"


def caught(broken: Any, world: Any, breaks: str, watched: str = "") -> Caught:
    judged = frozenset(watched.split()) if watched else None
    return Caught(world._replace(broken=broken), frozenset(breaks.split()), judged)


class Scenarios(NamedTuple):
    """All scenarios of a model.

    Args:
        model: What is searched.
        broken: Its rules, the first of which says that none is broken.
        large: States from which on a sound scenario takes too long for every run.
        sound: Scenarios without a violation.
        caught: Broken variants.
        unsearched: Scenarios of variants that are too large, or not sound, with all rules whole.
    """

    model: Model[Any, Any]
    broken: Iterable[StrEnum]
    large: int
    sound: tuple[Sound, ...]
    caught: tuple[Caught, ...]
    unsearched: tuple[Any, ...] = ()

    def whole(self) -> list[Any]:
        """Return the scenarios of the variants with all rules whole, but for those that are within sound ones."""
        known = [*self.unsearched, *(each.world for each in self.sound)]
        nothing = next(iter(self.broken))
        worlds = dict.fromkeys(each.world._replace(broken=nothing) for each in self.caught)
        return [world for world in worlds if not any(is_within(world, each) for each in known)]
