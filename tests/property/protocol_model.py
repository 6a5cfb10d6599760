"""The protocol of the bridge as a finite machine: its state, its rules and the faults that may hit it.

Nothing here is imported from the package: the model is a second, independent reading of the design, small
enough to try every interleaving (see ``protocol_search``). What stands behind its shape:

- *Time is absent.* A lease or a claim may lapse whenever its owner is slow, a grace may end at once. What
  holds here holds under every clock.
- *A message that was sent stays deliverable.* Delivering, repeating and reordering need no rule and no bound;
  a message that fails to claim leaves no trace. Loss is a fault of its own: the sweep must send again.
- *Tokens are positions in the stream*, from 1; 0 is before the first. A position holds a change or a mark,
  which stands for a post-batch token.
- *A listener's buffers and its window follow* from where it opened the stream, how far it has read, and the
  last image it saw of each partition. A listener that lost its lease goes on with all of its rules for ever.
- *A locked partition* is left behind by a take-over, which leads and wins it later. Meanwhile everybody else may act
  there as before, which is more than its lock allows.
- *Runs carry one change*, and any message or listener may commit what is handled, as the design allows. Where a
  scenario says so, they carry two: the execution goes on with the next one, and at any time, or never, moves the
  position behind those that are done, while the claim stands.
- *What a success leaves is not of a majority at once*: ``handled``, and the position that is made of it or written
  inline. A failover may bring back the document of before, until it is replicated or anything else is written there.
  Looks see what a majority has; a take-over's commit is of a majority, which is the same as one that is replicated.
- *A rewind is a term of the operator*: it takes the lease's next version and writes it, with the new
  position, to the subscription and to the partitions in one transaction.

Left out, because time or people decide them: the waiting for ``notBefore``, the limit of crashes, new layouts
(``spill_model``), and the keys held back by ``park_key`` (``park_model``).

Fields marked "ghost" are never read by a rule of the protocol: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property.exploration import Step

MARK = -1
"""In a stream: a post-batch token instead of a change."""


class Broken(StrEnum):
    """One rule of the protocol left out or replaced by the obvious mistake."""

    NOTHING = "nothing"
    FENCE_IS_LEASE_VERSION = "the lease's version alone is the fencing token"
    COMMIT_BELIEVES_MESSAGE = "values are taken from the message at commit"
    WATERMARK_IS_MAXIMUM = "the watermark is the largest completed token"
    MARK_BESIDE_WINDOW = "the post-batch token is a variable beside the window"
    CLAIM_IGNORES_HANDLED = "a claim does not ask whether the run is handled"
    OUTCOME_WITHOUT_FENCE = "an outcome is written without fence, owner and committed"
    TAKE_OVER_CLEARS_CLAIMS = "a take-over clears live claims"
    TWO_IMAGES = "number and token come from two images of the document"
    WATERMARK_IGNORES_EPOCH = "a watermark is written without comparing the epoch"
    CLAIM_IGNORES_EPOCH = "a claim does not compare the epoch"
    NUMBERED_AT_READING = "the sequence number is fixed at reading"
    KEY_CHANGES = "a change read again has another partition key"
    WATERMARK_PASSES_LOCKED = "the watermark does not wait for a partition that is locked at the take-over"
    REWIND_IN_TWO_WRITES = "a rewind is two writes: the watermark, then the positions"
    LOOK_BEFORE_MAJORITY = "a look takes a position that a failover may take back"
    CLAIM_BEFORE_MAJORITY = "a claim does not wait for a majority"
    INLINE_BEFORE_SUCCESS = "the position is written inline before the handler has succeeded"
    PROGRESS_WITHOUT_FENCE = "the position moves inside a run without fence, owner and committed"
    PROGRESS_ENDS_CLAIM = "the claim ends where the position moves inside a run"
    PROGRESS_BEFORE_SUCCESS = "the position moves inside a run behind the change that is under way"
    FAILURE_BEFORE_PROGRESS = "a change that fails inside a run has its outcome while those before it are not recorded"
    FAILURE_CUTS_RUN = "a change that fails inside a run ends it, and is the first of the next one"
    REWIND_COUNTS_ALONE = "a rewind takes each document's epoch plus one, not the lease's next version"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    CRASH = "a worker dies, or the answer to its claim is lost"
    RETRY = "a handler asks for a retry"
    FAILURE = "a handler fails for good: the failure policy applies"
    ROLLBACK = "a failover loses what no majority has: the mark `handled`, or a position"
    LOSS = "the broker loses a message"
    REOPEN = "the stream breaks and is opened again at the watermark"
    LOCK = "a transaction that nobody ends keeps a partition from being won by a take-over"


class Policy(StrEnum):
    """What happens to a change whose handler failed for good."""

    HALT = "halt"
    SKIP = "skip"
    DEAD_LETTER = "dead_letter"


class Commit(StrEnum):
    """Who turns the success of an execution into the position."""

    CHAIN = "whoever commits what is handled"
    INLINE = "the execution itself"
    EITHER = "either: the option has changed, and runs of before it are still on their way"


class Rewind(StrEnum):
    """Whether an operator may rewind to the start, and what becomes of the sequence number."""

    NEVER = "never"
    NUMBER_KEPT = "the number goes on, the token goes back"
    NUMBER_BACK = "number and token go back"


class World(NamedTuple):
    """A scenario: the stream, how long it goes on and what may go wrong.

    A *configuration* is what one deployment knows: term n runs with configuration min(n, last).

    Args:
        name: A sentence for reports.
        stream: The partition of the item at each position, or ``MARK``.
        terms: How many terms may begin without need, each while the one before believes itself the holder.
        budget: How many faults may happen altogether.
        faults: Which kinds.
        policy: The failure policy.
        commit: Who writes the positions.
        rewind: Whether and how the operator may rewind, once.
        matches: Per configuration the positions its handler matches; empty: everything, always.
        runs: Whether a run carries the next change, too, where it was read.
        moved: The stream as read by later configurations (``Broken.KEY_CHANGES``); empty: as the first.
        broken: The rule left out.
    """

    name: str
    stream: tuple[int, ...]
    terms: int
    budget: int = 0
    faults: frozenset[Fault] = frozenset()
    policy: Policy = Policy.HALT
    commit: Commit = Commit.CHAIN
    rewind: Rewind = Rewind.NEVER
    matches: tuple[frozenset[int], ...] = ()
    moved: tuple[int, ...] = ()
    runs: bool = False
    broken: Broken = Broken.NOTHING

    def partition(self, config: int, token: int) -> int:
        """Return the partition into which a configuration sorts the item at a position."""
        return (self.moved if self.moved and config else self.stream)[token - 1]

    def matched(self, config: int, token: int) -> bool:
        """Tell whether the item is a change that this configuration's handler wants."""
        if self.stream[token - 1] == MARK:
            return False
        return not self.matches or token in self.matches[min(config, len(self.matches) - 1)]


class Image(NamedTuple):
    """Number and token of a partition, as seen at one moment."""

    committed: int = 0
    token: int = 0


class Claim(NamedTuple):
    """The right of one execution; ``live`` is the server's verdict on its expiry."""

    owner: int
    live: bool

    def __str__(self) -> str:
        """Return the claim as a part of a trace."""
        return f"claim of execution {self.owner}"


class Handled(NamedTuple):
    """The durable success of a handler; ``config`` is ghost, and so is ``also``: what else of its run is done."""

    last: int
    token: int
    config: int
    also: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the mark as a part of a trace."""
        return f"number {self.last}, change {self.token}"


class Partition(NamedTuple):
    """A document of ``partitions``; ``owners`` counts claims (for random owners), ``faults`` is ghost.

    ``before`` is what a failover would bring back, as long as the last write is not that of a majority; ``settling``
    is ghost: what that write has settled.
    """

    epoch: int = 0
    committed: int = 0
    token: int = 0
    fence: int = 0
    claim: Claim | None = None
    handled: Handled | None = None
    halted: bool = False
    owners: int = 0
    faults: int = 0
    before: Partition | None = None
    settling: frozenset[int] = frozenset()

    @property
    def seen(self) -> Partition:
        """What a majority has."""
        return self if self.before is None else self.before

    def replicated(self) -> Partition:
        """Return the document once a majority has it."""
        return self if self.before is None else self._replace(before=None, settling=frozenset())


class Listener(NamedTuple):
    """What one term keeps in memory; ``taken`` counts the documents taken over, subscription first.

    Of those the ``locked`` ones are not won yet: their images are known, their epochs are older.
    """

    term: int
    config: int
    taken: int = 0
    opened: int = 0
    cursor: int = 0
    images: tuple[Image, ...] = ()
    at_opening: tuple[Image, ...] = ()
    locked: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """Return the listener as a part of a trace."""
        seen = ", ".join(f"{image.committed}/{image.token}" for image in self.images)
        where = f"read {self.opened}..{self.cursor}" if self.taken >= 0 else "ended"
        return f"term {self.term}, {self.taken} taken, {where}, number/token seen [{seen}]"


class Message(NamedTuple):
    """A chain in the broker: its handler task and its commit task; ``rest`` are the later changes of its run."""

    partition: int
    term: int
    first: int
    token: int
    rest: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the message as a part of a trace."""
        return f"term {self.term}, partition {self.partition}: number {self.first} is change {self.token}"


class Run(NamedTuple):
    """An execution between its claim and its outcome; ``config`` and ``era`` are ghost.

    ``first`` is the number of the first change that is not recorded, ``done`` are those in front of the one under way,
    and ``moved`` says whether any was recorded.
    """

    partition: int
    config: int
    first: int
    token: int
    owner: int
    fence: int
    era: int
    wrote: bool = False
    rest: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    moved: bool = False

    @property
    def success(self) -> Handled:
        """What is done once the change that is under way is."""
        return Handled(self.first + len(self.done), self.token, self.config, self.done)

    def __str__(self) -> str:
        """Return the execution as a part of a trace."""
        return f"execution {self.owner}, fence {self.fence}, partition {self.partition}: change {self.token}"


class Target(NamedTuple):
    """What the last accepted effect of a partition left in the fenced target; all but the stamp is ghost."""

    stamp: int = 0
    era: int = 0
    token: int = 0
    owner: int = 0
    config: int = 0


class State(NamedTuple):
    """Everything: MongoDB, the listeners of all terms, the broker, the workers, the target, the ghosts.

    ``settled`` is ghost: positions that are committed or dead-lettered, or were passed under a configuration
    that does not match them. ``starts`` counts handler starts per position, ``asked`` those that ended with an outcome
    of the change's own: a retry, a failure; ``era`` counts rewinds.
    """

    version: int
    holder: int
    epoch: int
    watermark: int
    partitions: tuple[Partition, ...]
    listeners: tuple[Listener, ...]
    messages: frozenset[Message]
    runs: frozenset[Run]
    targets: tuple[Target, ...]
    budget: int
    era: int
    settled: frozenset[int]
    starts: tuple[int, ...]
    asked: tuple[int, ...]


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: nothing read, nothing claimed."""
    count = max(world.stream + world.moved) + 1
    return State(
        version=0, holder=0, epoch=0, watermark=0,
        partitions=(Partition(),) * count, listeners=(), messages=frozenset(), runs=frozenset(),
        targets=(Target(),) * count, budget=world.budget, era=0,
        settled=frozenset(), starts=(0,) * len(world.stream), asked=(0,) * len(world.stream),
    )  # fmt: skip


def owns(partition: Partition, run: Run) -> bool:
    """Tell whether an execution's guard matches: owner, fence and committed, nothing handled."""
    claim = partition.claim
    return (
        claim is not None
        and claim.owner == run.owner
        and partition.fence == run.fence
        and partition.committed == run.first - 1
        and partition.handled is None
    )
