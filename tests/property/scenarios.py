"""What a search has to show, of whatever it searches: where the rules hold, and which broken one is caught where."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

WIDER = (frozenset({2, 3}), frozenset({1, 2, 3}))
"""A second configuration matches a change that lies before those of the first."""
NARROWER = (frozenset({1, 2, 3}), frozenset({1, 3}))


class AnyWorld(Protocol):
    """What is known here of a scenario: its name, and the rule that is left out."""

    @property
    def name(self) -> str:
        """A sentence for reports."""

    @property
    def broken(self) -> object:
        """The rule left out."""


WorldT = TypeVar("WorldT", bound=AnyWorld)


class Sound(NamedTuple, Generic[WorldT]):
    """A scenario without a broken rule, and the number of states below which the check would be hollow."""

    world: WorldT
    floor: int

    def __str__(self) -> str:
        """Return the scenario's name."""
        return self.world.name


class Caught(NamedTuple, Generic[WorldT]):
    """A broken variant, the invariants that its shortest violation breaks, and those that were judged."""

    world: WorldT
    breaks: frozenset[str]
    watched: frozenset[str]

    def __str__(self) -> str:
        """Return the broken rule, the scenario and the invariants broken."""
        return f"{self.world.broken}: {self.world.name}: {' '.join(sorted(self.breaks))}"
