"""What is known of a run beside the facts that every history has (`tests.rig.history`). Pure."""

from __future__ import annotations

from dataclasses import dataclass

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
class Step:
    """
    One thing that happens.

    Attributes:
        at: seconds after the writer's start. It `lasts` for seconds.
        does: a kind of fault, `poison: ...`, or `person: ...`.
        where: the subscription of a poison, or of what a person does.
        choice: from 0 to 1, for whatever is chosen when it happens.
    """

    at: float
    does: str
    lasts: float = 0.0
    where: str = ""
    partition: int = -1
    key: str = ""
    choice: float = 0.0

    def __str__(self) -> str:
        place = f" {self.where}/{self.partition}" if self.where else ""
        lasts = f" for {self.lasts:.1f} s" if self.lasts else ""
        return f"{self.at:7.2f} s  {self.does}{place}{f' {self.key}' if self.key else ''}{lasts}"


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int | str
    seconds: float
    members: int
    steps: tuple[Step, ...]

    def lines(self) -> list[str]:
        return [f"seed {self.seed}, {self.seconds:.0f} s, {self.members} members", *map(str, self.steps)]
