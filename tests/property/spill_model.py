"""Spill and repartitioning as a finite machine: its state, and what a scenario fixes.

A second model beside ``protocol_model``, with its conventions: time is absent, a message that was sent stays
deliverable, tokens are positions in the stream from 1, and nothing is imported from the package. The first model
has proved claims, fences and outcomes; here a claim *is* its execution, which lets the stores be looked at closely:

- *A write is either acknowledged at once, or its answer is lost*: then its author goes on as if it had failed, and it
  lands at any later time, or never. What a deposed listener still does is nothing but such late writes, since an
  image that it takes afresh shows it a larger epoch. A crash is a term that begins between any two steps.
- *A listener acts on fresh images*. What it would do on stale ones is a late write too, or cannot claim; what it has
  read ahead from the collection is a message that is out already.
- *A stored change travels by reference*: its message has no bytes, and its execution reads them under its claim.
- *A bulk* whose answer is lost lands document by document, in any order.
- *A change has a key*: its partition is ``key % partitions``, however many there are.
- *A term without the handler* leaves no trace in its documents; it is the time between two terms, in which the oplog
  may roll. It needs no rule.

Left out: locks at the take-over and numbers (``protocol_model`` has both), pausing, parts of large documents, the
choice of when to spill (it is always allowed, and due where the stream would wait).

Fields marked "ghost" are never read by a rule: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property.exploration import Step


class Broken(StrEnum):
    """One rule of spill left out or replaced by the simpler one."""

    NOTHING = "nothing"
    MARK_BEFORE_INSERT = "the mark is written before the documents are acknowledged"
    WATERMARK_BEFORE_MARK = "a change is complete when it is inserted, before the mark"
    TRUSTS_DOCUMENTS = "a take-over counts documents under the mark, whoever has inserted them"
    TRUSTS_BARE_DOCUMENTS = "a take-over counts documents without any mark"
    MARK_SKIPS = "a change at or below the mark is skipped when it is read"
    COLLECTION_AT_ONCE = "the collection is run at once, whatever this term has read"
    BUFFER_FIRST = "what is in the buffer runs although stored changes are left"
    RUNS_BEFORE_STORED_AGAIN = "stored changes run although changes at or below the mark wait to be stored again"
    BOUND_REFUSES_LARGE = "the bound also refuses a change that is too large for a message"
    DUPLICATE_DOES_NOTHING = "an insert that finds its document does nothing"
    MARK_IGNORES_GROWTH = "the mark is guarded by the epoch only"
    CLEAR_IGNORES_MARK = "clearing does not compare mark and position"
    NONE_LEFT_CLEARS = "a read that finds none clears the mark"
    REMOVAL_IGNORES_TERM = "a removal does not compare the term"
    REMOVAL_UP_TO_HANDLED = "a removal reaches up to what is handled"
    REMOVAL_FOLLOWS_MARK = "only partitions with a mark are looked at for removal"
    BOUND_REFUSES_AGAIN = "the bound also refuses what lies at or below the mark"
    DECISION_RUNS_ALL = "a decision on lost history lets everything up to the mark run"
    DECISION_TRUSTS_DOCUMENTS = "a decision on lost history counts on documents that an older term may remove"
    DECISION_KEEPS_MARK = "a decision on lost history leaves a mark under which nothing is stored"
    REWIND_BELOW_OPLOG = "a rewind goes to where the oplog no longer reaches"
    REWIND_MOVES_FORWARD = "a rewind sets the place, not the smaller of place and own position"
    REWIND_KEEPS_HEAD = "a rewind leaves the halted head of a partition that it sends back"
    SWITCH_IGNORES_STORED = "new partitions do not wait for stored changes"
    SWITCH_IGNORES_BUFFER = "new partitions do not wait for what was read"
    SWITCH_BEFORE_READ = "new partitions begin at a watermark that positions have passed"
    SWITCH_IGNORES_TERM = "the switch does not compare the epochs"
    SWITCH_UNGUARDED = "the switch does not look at the partitions once more"
    DISCARDS_ALL_OTHERS = (
        "a removal takes what is stored of all partitions but those that were in force when it was made"
    )
    FORMER_STAY = "what is stored of former partitions is not removed"


class Fault(StrEnum):
    """What may go wrong with an execution or a read; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    HALT = "a handler fails for good: its partition halts"
    PARK = "a handler asks for a retry in an hour"
    ROLLBACK = "a failover loses `handled`, which was written with w:1"
    STALE_READ = "a deposed primary answers that nothing is stored"
    REOPEN = "the stream breaks and is opened again at the watermark"


class Late(StrEnum):
    """The kinds of writes whose answer may be lost."""

    INSERT = "insert"
    MARK = "mark"
    WATERMARK = "watermark"
    CLEAR = "clear"
    REMOVE = "remove"
    SWITCH = "switch"
    DISCARD = "discard"


class Decision(StrEnum):
    """From where a subscription goes on that has lost its history."""

    OLDEST = "oldest"
    NOW = "now"


class Mode(StrEnum):
    """The state of a partition. (A parked one is stored as flowing, with the time of its retry.)"""

    FLOWING = "flowing"
    HALTED = "halted"
    PARKED = "parked"


class World(NamedTuple):
    """A scenario: the stream, how long it goes on and what may go wrong.

    Args:
        name: A sentence for reports.
        keys: The key of the change at each position.
        terms: How many terms may begin without need.
        matches: Per configuration the positions that its handler matches; empty: everything, always.
        partitions: How many there are at the beginning, then how many each configuration wants; one: it stays.
        faults: Which kinds may happen; ``budget``: how many of them altogether.
        late: Which writes may land late; ``delays``: how many altogether.
        rolls: The places to which the oplog may roll, one after the other: the oldest entry that can be read.
        decision: What the operator decides on lost history; without one the subscription stands still.
        rewind: The place to which the operator may rewind, once.
        operator: Whether somebody retries or skips what is halted.
        storing: Whether a halting execution stores its change, unmarked.
        large: Whether changes are too large for a message: then none is dispatched before it is stored and marked.
        buffer: How many changes a listener keeps in memory; 0: any number.
        bound: How many documents may be stored; 0: any number.
        broken: The rule left out.
    """

    name: str
    keys: tuple[int, ...]
    terms: int
    matches: tuple[frozenset[int], ...] = ()
    partitions: tuple[int, ...] = (1,)
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    late: frozenset[Late] = frozenset()
    delays: int = 0
    rolls: tuple[int, ...] = ()
    decision: Decision | None = None
    rewind: int | None = None
    operator: bool = False
    storing: bool = False
    large: bool = False
    buffer: int = 0
    bound: int = 0
    broken: Broken = Broken.NOTHING

    def __str__(self) -> str:
        """Return the scenario's name."""
        return self.name

    def matched(self, config: int, token: int) -> bool:
        """Tell whether a configuration's handler wants the change at a position."""
        return not self.matches or token in self.matches[min(config, len(self.matches) - 1)]

    def wanted(self, config: int) -> int:
        """Return how many partitions a configuration asks for."""
        return self.partitions[min(config + 1, len(self.partitions) - 1)]


class Head(NamedTuple):
    """The change at which a partition stands; the rest is ghost, as of its claim."""

    token: int
    config: int
    owed: int


class Claim(NamedTuple):
    """An execution and its right; ``config`` and ``owed`` are ghost.

    ``owed`` is the watermark when it began: what another configuration has stored by then may not be passed. (An
    execution of an older term that ends later passes what only its successor matches, as without spill.)
    """

    token: int
    term: int
    config: int
    owed: int
    live: bool = True
    handled: bool = False

    def __str__(self) -> str:
        """Return the claim as a part of a trace."""
        return f"change {self.token} for term {self.term}"


class Partition(NamedTuple):
    """A document of ``partitions``; ``token`` is the position, ``spilled`` the mark (0: none)."""

    epoch: int = 0
    token: int = 0
    spilled: int = 0
    claim: Claim | None = None
    mode: Mode = Mode.FLOWING
    head: Head | None = None

    @property
    def stands(self) -> bool:
        """Whether the partition waits for a person, or for an hour."""
        return self.mode is not Mode.FLOWING


class Document(NamedTuple):
    """A document of ``backlog``."""

    generation: int
    partition: int
    token: int
    term: int


class Listener(NamedTuple):
    """What one term keeps in memory.

    It ``leads`` when it has taken the partitions over. It has read what lies after ``opened`` up to ``cursor``; of a
    partition everything up to ``stored`` was inserted by it, or is done.
    """

    term: int
    config: int
    leads: bool = False
    opened: int = 0
    cursor: int = 0
    stored: tuple[int, ...] = ()
    generation: int = 0

    def __str__(self) -> str:
        """Return the listener as a part of a trace."""
        return f"term {self.term}: read {self.opened}..{self.cursor}, stored {self.stored}"


class Message(NamedTuple):
    """A run in the broker: it can claim while its partition stands at ``base``.

    One by reference (``stored``) has no bytes: its execution reads them under its claim.
    """

    generation: int
    partition: int
    term: int
    base: int
    token: int
    config: int
    stored: bool = False

    def __str__(self) -> str:
        """Return the message as a part of a trace."""
        return f"term {self.term}, partition {self.generation}/{self.partition}: change {self.token} after {self.base}"


class Write(NamedTuple):
    """A write on its way.

    ``place``: the token inserted, the mark, the watermark, how far a removal reaches, or where new partitions begin,
    whose number is the ``partition`` then; of a discard the generation that was in force.
    """

    kind: Late
    term: int
    generation: int
    partition: int
    place: int

    def __str__(self) -> str:
        """Return the write as a part of a trace."""
        return f"{self.kind} {self.place} of term {self.term} in partition {self.generation}/{self.partition}"


class Started(NamedTuple):
    """Ghost: the last change of a key whose handler was started."""

    token: int = 0
    config: int = 0


class State(NamedTuple):
    """Everything: MongoDB, the listeners, the broker, what is on its way, the ghosts.

    ``done`` and what follows is ghost: positions that were committed or skipped; those that were passed by a
    configuration that does not match them, or given up by a decision; starts of handlers per position, and how many
    of them are justified; the last start of each key; whether the operator has rewound.
    """

    epoch: int
    watermark: int
    generation: int
    partitions: tuple[Partition, ...]
    documents: frozenset[Document]
    listeners: tuple[Listener, ...]
    messages: frozenset[Message]
    writes: frozenset[Write]
    oldest: int
    rolls: int
    delays: int
    budget: int
    done: frozenset[int]
    excused: frozenset[int]
    starts: tuple[int, ...]
    justified: tuple[int, ...]
    last: tuple[Started, ...]
    rewound: bool

    @property
    def settled(self) -> frozenset[int]:
        """Ghost: the positions at which nothing is owed any more."""
        return self.done | self.excused


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: nothing read, nothing stored."""
    length = len(world.keys)
    return State(
        epoch=0, watermark=0, generation=0, partitions=(Partition(),) * world.partitions[0],
        documents=frozenset(), listeners=(), messages=frozenset(), writes=frozenset(), oldest=1, rolls=0,
        delays=world.delays, budget=world.budget, done=frozenset(), excused=frozenset(),
        starts=(0,) * length, justified=(1,) * length, last=(Started(),) * (max(world.keys) + 1),
        rewound=False,
    )  # fmt: skip


def partition_of(state: State, world: World, token: int) -> int:
    """Return the index of a change under the partitioning in force."""
    return world.keys[token - 1] % len(state.partitions)


def stored(state: State, index: int, after: int, up_to: int) -> list[int]:
    """Return the tokens of the documents of a partition that lie after one place and not after another, in order."""
    return sorted(
        each.token
        for each in state.documents
        if each.partition == index and each.generation == state.generation and after < each.token <= up_to
    )


def found(state: State, generation: int, index: int, token: int) -> Document | None:
    """Return the document of a change, if there is one."""
    wanted = (generation, index, token)
    return next((each for each in state.documents if each[:3] == wanted), None)
