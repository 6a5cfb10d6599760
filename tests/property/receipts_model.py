"""Two-phase commit with receipts as a finite machine: its state, and what a scenario fixes.

One transaction over several clusters. A *branch* is what it changes in one cluster: one local transaction of MongoDB,
so one step here, with the receipt that it leaves beside the documents. The branch in the log's own cluster has no
receipt: it changes with the log, as the first or as the last.

- *Time is absent.* Each cluster has a clock of its own, which passes the deadline or has not yet; what is to be purged
  may be purged at any time after that.
- *An actor may rest between any two commands*, for any time. One that dies rests for ever, and a lost answer is
  another actor that comes after it.
- *The log may follow as late as it likes.* The caller is released by the decider; whoever says so in the log is the
  same actor after a rest, alone or in a batch: each transaction of a batch is asked for by itself, and where several
  are applied or settled by one command, that is one step of each.
- *What an apply has met may differ the next time*: a participant that refuses one driver may take the change of
  another.

Left out: several transactions at once (a branch is one local transaction, so they meet in MongoDB), clocks that run
back, and of standalone servers what befalls documents with markers when they are replaced or made anew.

Fields marked "ghost" are never read by a rule: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Broken(StrEnum):
    """One rule of receipts left out or replaced by the simpler one."""

    NOTHING = "nothing"
    RECEIPT_OUTSIDE = "the receipt is looked for before the local transaction, and not in it"
    RECEIPT_IN_DOCUMENT = "the receipt lies in the participant, which others may replace"
    NO_DEADLINE = "an apply is never too late"
    UNDO_DELETES = "an undo deletes the receipt of what it reverts"
    UNDO_LEAVES_NOTHING = "an undo that finds no receipt leaves none"
    UNDO_REVERTS_SETTLED = "an undo reverts what has its receipt settled"
    VOID_STAYS = "a receipt that an undo leaves is kept for ever"
    TTL_FROM_CREATION = "a receipt expires from when it was made"
    SETTLED_BEFORE_APPLIED = "receipts are settled before the log says applied"
    PURGED_BEFORE_DEADLINE = "a receipt may be purged before its cluster has passed the deadline"
    DECIDER_SETTLED_FIRST = "the decider's receipt is settled before the others"
    DECIDER_UNASKED = "a cancel undoes the decider like any other branch"
    CANCEL_STANDS = "a cancel that the decider refuses leaves the log canceling"
    OWN_APART = "the own branch is reverted apart from the log"
    OWN_LAST_UNGUARDED = "the own branch is changed whatever the log says"
    RELEASED_EARLY = "a caller is released by the first branch, and not by the decider"
    SETTLED_UNASKED = "what is finished in batches is settled also where the log did not become applied"
    MARKED_UNPROVED = "a branch with markers is changed without a proof that the transaction is still pending"
    MARKED_UNSEEN = "a branch with markers is changed whatever version it has"
    MARKED_KEPT = "an undo that finds no marker leaves the version as it is"
    MARKED_DECIDES = "a marker decides, as the receipt of the last branch does"
    LATE_ASKS_FIRST = "whoever finds the deadline passed asks the first branch, and not the decider"


class Own(StrEnum):
    """What the log's own cluster takes part with."""

    NONE = "nothing"
    FIRST = "the first branch"
    LAST = "the last branch"


class Log(StrEnum):
    """The state of the transaction in the log."""

    PENDING = "pending"
    APPLIED = "applied"
    DONE = "done"
    CANCELING = "canceling"
    CANCELED = "canceled"


class Mark(StrEnum):
    """What a receipt says."""

    APPLIED = "applied"
    UNDONE = "undone"
    VOID = "void"


class At(StrEnum):
    """The command that an actor sends next."""

    READ = "read the log"
    LOOK = "look at the decider's receipt"
    APPLY = "apply"
    PROVE = "prove that it is pending"
    CHANGE = "change what was looked for"
    APPLIED = "say applied"
    SETTLE = "settle"
    DONE = "say done"
    CANCEL = "say canceling"
    DECIDE = "ask the decider"
    FORWARD = "say applied after all"
    UNDO = "undo"
    REVERT = "revert the own branch"
    CANCELED = "say canceled"


class World(NamedTuple):
    """A scenario: the branches, who acts, and what may go wrong.

    Args:
        name: A sentence for reports.
        remote: How many branches are in other clusters; they come in this order.
        own: Whether the log's cluster takes part.
        drivers: How many drive: the caller and those who recover.
        cancelers: How many cancel.
        refusing: The branches that may refuse a driver; ``remote`` is the own branch where it is the last.
        late: Whether clocks may pass the deadline; receipts that are settled may then be purged.
        kills: How many actors may die.
        replaced: Whether somebody may replace participants as wholes, once.
        marked: Those of them on standalone servers: with markers and versions in the documents, and no receipt.
        broken: The rule left out.
    """

    name: str
    remote: int
    own: Own = Own.NONE
    drivers: int = 1
    cancelers: int = 0
    refusing: frozenset[int] = frozenset()
    late: bool = True
    kills: int = 0
    replaced: bool = False
    marked: frozenset[int] = frozenset()
    broken: Broken = Broken.NOTHING

    def __str__(self) -> str:
        """Return the scenario's name."""
        return self.name

    @property
    def decider(self) -> int | None:
        """The branch whose receipt decides; None where the log does: a marker is gone once it is settled."""
        last = self.remote - 1
        by_log = self.own is Own.LAST or (last in self.marked and self.broken is not Broken.MARKED_DECIDES)
        return None if by_log else last

    @property
    def undone(self) -> tuple[int, ...]:
        """The branches that a cancel undoes, in their order."""
        asked = self.decider is not None and self.broken is not Broken.DECIDER_UNASKED
        return tuple(index for index in reversed(range(self.remote)) if not (asked and index == self.decider))

    @property
    def settled(self) -> tuple[int, ...]:
        """The branches in the order in which they are settled: the decider, which is the last, at the end."""
        order = tuple(range(self.remote))
        return order[::-1] if self.broken is Broken.DECIDER_SETTLED_FIRST else order


class Receipt(NamedTuple):
    """What lies beside the documents of a branch; ``expires``: whether it may be purged after the deadline."""

    mark: Mark
    expires: bool = False


class Actor(NamedTuple):
    """Somebody who drives or cancels; ``place``: the branch in the order of what it does; ``seen``: a version there."""

    cancels: bool
    at: At
    place: int = 0
    seen: int = 0


class State(NamedTuple):
    """The log, the documents, the receipts and the clocks of all clusters.

    Args:
        log: What the log says.
        own: How often the own branch is changed (ghost, as ``effects``).
        effects: How often each other branch is changed.
        receipts: Of each other branch; where it has markers, the marker.
        versions: Of the documents of each other branch, if it has markers.
        past: Whether the clock of each other cluster has passed the deadline.
        log_past: The same of the log's cluster.
        actors: Who is under way, in any order.
        kills: How many died.
        replaced: Whether somebody has replaced participants.
        told: What callers were told (ghost).
    """

    log: Log
    own: int
    effects: tuple[int, ...]
    receipts: tuple[Receipt | None, ...]
    past: tuple[bool, ...]
    log_past: bool
    actors: tuple[Actor, ...]
    kills: int = 0
    replaced: bool = False
    told: frozenset[Log] = frozenset()
    versions: tuple[int, ...] = ()


class Step(NamedTuple):
    """One line of a trace."""

    kind: str
    who: Actor | None = None
    branch: int | None = None
    fair: bool = True

    def __str__(self) -> str:
        """Return it as a line."""
        who = "" if self.who is None else "canceler: " if self.who.cancels else "driver: "
        return f"{who}{self.kind}{'' if self.branch is None else f' (branch {self.branch})'}"


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state after the transaction was stored, with the own branch if that comes first."""
    actors = [Actor(cancels=False, at=At.READ)] * world.drivers + [Actor(cancels=True, at=At.READ)] * world.cancelers
    return State(
        log=Log.PENDING,
        own=int(world.own is Own.FIRST),
        effects=(0,) * world.remote,
        receipts=(None,) * world.remote,
        past=(False,) * world.remote,
        log_past=False,
        actors=tuple(actors),
        versions=(0,) * world.remote,
    )


def acted(state: State, actor: Actor, after: Actor | None) -> State:
    """Return the state with an actor gone on, or at its end."""
    others = list(state.actors)
    others.remove(actor)
    return state._replace(actors=tuple(sorted([*others, *([] if after is None else [after])])))


def changed(state: State, branch: int, receipt: Receipt | None, effect: int = 0) -> State:
    """Return the state with another receipt of a branch, and its documents changed or reverted."""
    effects, receipts = list(state.effects), list(state.receipts)
    effects[branch] += effect
    receipts[branch] = receipt
    return state._replace(effects=tuple(effects), receipts=tuple(receipts))


def renewed(state: State, branch: int) -> State:
    """Return the state with another version of a branch with markers, one that was never there."""
    versions = list(state.versions)
    versions[branch] += 1
    return state._replace(versions=tuple(versions))
