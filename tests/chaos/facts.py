"""What is known of a run beside the facts that every history has (`tests.rig.history`). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.kinds import KINDS, STALL, Kind
from tests.rig.history import Due
from tests.rig.history import Fact as CommonFact

Where = tuple[str, int]
"""A partition: its subscription and its index."""


@dataclass(frozen=True, slots=True)
class Charged:
    """Something was counted against the first change of a partition, after `place`: its counts are these now."""

    where: Where
    place: str
    retries: int
    crashes: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Waited:
    """An execution met an outage: the first change of the partition is to start again, and nothing was counted."""

    where: Where
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Changed:
    """
    A partition has another state now.

    Attributes:
        head: the place of the change at which it halted. Empty if it is not halted.
    """

    where: Where
    state: str
    head: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Brought:
    """A snapshot has brought a document, as this write of it had left it."""

    where: Where
    due: Due
    place: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Parked:
    """A change was set aside, and waits for its key: it is passed, and not done."""

    due: Due


@dataclass(frozen=True, slots=True)
class Let:
    """A change waits for its key no more: its letter is gone, for it was replayed, or a person has discarded it."""

    due: Due


Fact = CommonFact | Charged | Waited | Changed | Brought | Parked | Let


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as it was; times are those of the servers' machine, in seconds."""

    name: str
    begin: float
    end: float

    @property
    def kind(self) -> Kind:
        """Its kind."""
        return STALL if self.name == STALL.name else KINDS[self.name]

    @property
    def since(self) -> float:
        """From when on its bound counts."""
        return self.begin if self.kind.has_successor else self.end

    @property
    def until(self) -> float:
        """When everything goes on, at the latest."""
        return max(self.since + self.kind.bound, self.end)
