"""The branches of a transaction over several clusters: what it changes in each of them, and which of them decides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mongo_celery.twophase.participants import Part


class Own(StrEnum):
    """Which branch the log's own cluster is; that one needs no receipt, since it changes with the log."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Branch:
    """
    All participants of one cluster.

    Attributes:
        cluster: its alias; None for the log's own.
        parts: in their order.
        marked: whether it is changed with markers in the documents, and leaves no receipt: a standalone server.
    """

    cluster: str | None
    parts: tuple[Part, ...]
    marked: bool = False

    @property
    def database(self) -> str:
        """Where its receipt lies: the database of its first participant."""
        return self.parts[0].namespace.partition(".")[0]

    def __str__(self) -> str:
        return f"of cluster {self.cluster!r}"


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """
    How a transaction is carried out over clusters.

    Attributes:
        own: which branch the log's cluster is; None if it takes no part.
        home: that branch.
        remote: the others, in their order; each leaves a receipt, or markers until it is settled.
    """

    own: Own | None
    home: Branch | None
    remote: tuple[Branch, ...]

    @property
    def decider(self) -> Branch | None:
        """
        The branch whose receipt says whether all is committed; None where the log does.

        It does with its own branch, or where the last one has markers: they are gone once it is settled.
        """
        return None if self.own is Own.LAST or self.remote[-1].marked else self.remote[-1]

    @property
    def others(self) -> tuple[Branch, ...]:
        """The remote branches that a cancel undoes."""
        return self.remote if self.decider is None else self.remote[:-1]


def plan_of(parts: Sequence[Part], marked: Collection[str] = ()) -> BranchPlan:
    """
    How participants of several clusters are changed: in the order of the first of each cluster.

    The log's own cluster comes first if it has the first participant, else last.

    Args:
        parts: the participants.
        marked: clusters that are standalone servers.
    """
    grouped: dict[str | None, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part.cluster, []).append(part)
    branches = [Branch(cluster, tuple(each), cluster in marked) for cluster, each in grouped.items()]
    home = next((branch for branch in branches if branch.cluster is None), None)
    own = None if home is None else Own.FIRST if branches[0] is home else Own.LAST
    return BranchPlan(own, home, tuple(branch for branch in branches if branch.cluster is not None))
