"""A snapshot beside the stream as a finite machine: its state, and what a scenario fixes.

A third model, with the conventions of ``protocol_model`` and ``spill_model``: time is absent, a message that was sent
stays deliverable, nothing is imported from the package, a claim *is* its execution, a write is acknowledged at once or
lands at any later time or never, and a crash is a term that begins between any two steps. What is new here:

- *The oplog grows*. Somebody writes to the source while everything else continues, and every ``begin`` and ``pass`` of
  a snapshot is an entry of its own, so that L, H and the stream's end are what they are by order alone.
- *A chunk has a window*. L is the time of its begin, H that of a write after its reading. T, the place of its items, is
  the time before H or the place that the stream has reached by then. A chunk is read in two steps.
- *A token is a time and a number*: 0 is the change at that time, larger ones are the items of a snapshot at T = time,
  behind that change and before everything later.
- *A value is the time of the write that made it*; a deletion is minus its time. So "older" can be read off.
- *Handlers copy* what they are given: the copy is the effect, which happens when the claim is won (what comes later is
  refused by the fence, as ``protocol_model`` proves).
- *Repartitioning* is one step: what may go wrong within it is the business of ``spill_model``.

Fields marked "ghost" are never read by a rule: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property.exploration import Step, put
from tests.property.stores import in_office

# Entries of the oplog beside "key was set" (key + 1) and "key was deleted" (minus that).
MARK = 0
"""A write elsewhere: what the stream shows of it is a post-batch token."""
DROP, AWAY, BACK = 97, 98, 99
"""The source is dropped; renamed away; renamed back, with the UUID that it had."""


class Broken(StrEnum):
    """One rule of the snapshot left out or replaced by the simpler one."""

    NOTHING = "nothing"
    TOKEN_BEFORE_CHANGES = "an item's token is the high-watermark token of T"
    TOKEN_OF_NEXT = "an item's token is the high-watermark token of T + 1, and a number"
    NUMBERED_BY_CHUNK = "items are numbered within their chunk, whatever other snapshots do"
    NO_PASS = "nothing is written behind T"
    PASS_ONCE = "what moves the stream past T is written once, whether or not it was acknowledged"
    ROW_KEPT = "an item is run although its key was changed in the window"
    DELETION_IGNORED = "a deletion in the window drops no item"
    WINDOW_TO_H = "the window ends at H, though the stream is past it"
    H_BEFORE_READ = "H is noted before the chunk is read"
    H_IS_PLACE = "T is H, though the stream is past it"
    NOT_AGAIN = "an item that is dropped is not read again where the change brings no document"
    AGAIN_AS_READ = "an item that is dropped is appended as it was read, behind the window"
    AGAIN_KEPT = "what is read again is run although its key was changed once more"
    BEGIN_BEFORE_TAKE_OVER = "a snapshot begins before the partitions are taken over"
    BEGIN_AHEAD = "the next chunk begins when the last is appended, before the cursor moves"
    BEGIN_COUNTS_UP = "a begin adds one to whatever is there, and the author counts by itself"
    READ_LOCAL = "a chunk is read as it is now, in the majority or not"
    APPENDED_AT_ONCE = "a chunk is appended as soon as it is read"
    BRACKETED = "what is left is what is greater than the last _id, within its type"
    FEWER_IS_END = "fewer than were asked for is the end"
    EMPTY_IS_END = "an empty answer is the end, whatever became of the source"
    UUID_IS_ENOUGH = "an empty answer is the end if the source has the known UUID afterwards"
    END_AT_L = "renames and drops are looked for up to L"
    MATCHING_NONE_IS_END = "a chunk of which nothing matches is the end"
    WATERMARK_AT_ITEM = "watermarks may be an item's token"
    ITEMS_HOLD = "items hold the watermark"
    CURSOR_AT_DISPATCH = "the cursor moves when the items are dispatched"
    CURSOR_AT_APPEND = "the cursor moves when the items are appended"
    CURSOR_AT_INSERT = "an item that is inserted counts, before the mark"
    CURSOR_LOCAL = "the cursor believes a commit that is not in the majority yet"
    CURSOR_UNGUARDED = "the cursor compares nothing"
    CURSOR_IGNORES_EPOCH = "the cursor compares begun, not the epoch"
    CURSOR_IGNORES_BEGUN = "the cursor compares the epoch, not begun"
    RECORDS_LAST = "a take-over raises the records when it begins anew, not before it dispatches"
    CHUNK_SURVIVES = "a chunk is kept when the stream is opened again at the watermark"
    CHUNK_SURVIVES_LAYOUT = "a chunk is kept when the partitions are replaced"
    STOPPED_STAYS = "a take-over raises the records of snapshots that run, and not of those that are stopped"
    REWIND_KEEPS_MARK = "a rewind leaves a mark that was reached"
    REWIND_LEAVES_RECORDS = "a rewind does not raise the records' epoch"
    REFUSED_BEGIN_COUNTS = "a begin that matched nothing gives a T"
    CURSOR_AT_ANY_MARK = "an item at or below the mark counts, whoever has inserted it"
    LETTER_BY_TOKEN = "a dead letter of an item is kept by its token"
    LOOKED_UP_KEPT = "an item is run although its key was looked up after T"
    DROPPED_AWAITED = "a cursor waits for the items that are dropped"
    PINNED_LATE = "the stream's start is pinned after the first chunk"
    ROOM_FOR_CHUNK_ONLY = "a snapshot begins when there is room for its chunk and nothing else"
    UNBOUNDED = "a snapshot begins without room for a chunk"
    NO_UNTIL = "a snapshot goes on until nothing is left, whatever is inserted behind it"
    UNTIL_OF_EACH_TERM = "each term takes the largest _id anew"
    UNTIL_BEFORE_START = "the largest _id is taken when the snapshot is asked for, before the stream's start"
    UNTIL_LOCAL = "the largest _id is read as it is now, in the majority or not"
    UNTIL_OF_CHUNK = "the largest _id is that of the first chunk's documents"
    UNTIL_EXCLUDED = "what is left is less than the largest _id"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    HALT = "a handler fails for good: its partition halts"
    LETTER = "a handler fails for good: its change becomes a dead letter"
    ROLLBACK = "a failover loses a commit that was seen, but not by the majority"
    REOPEN = "the stream breaks and is opened again at the watermark"
    UNREADABLE = "a chunk cannot be read"
    SHORT = "the server returns fewer documents than it could"
    ANSWERED_LATER = "the answer to a begin is given when it is asked for again, with the time of that"
    ELECTION = "a new primary lacks what is not in the majority"
    STOP = "somebody stops a snapshot, and lets it go on at any later time"


class Late(StrEnum):
    """The kinds of writes whose answer may be lost."""

    BEGIN = "begin"
    PASS = "pass"
    CURSOR = "cursor"
    INSERT = "insert"
    MARK = "mark"
    WATERMARK = "watermark"
    REMOVE = "remove"


class Mode(StrEnum):
    """The state of a partition."""

    FLOWING = "flowing"
    HALTED = "halted"


class Progress(StrEnum):
    """The state of a snapshot."""

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"
    GONE = "source gone"


class World(NamedTuple):
    """A scenario: what exists, what is written meanwhile and what may go wrong.

    Args:
        name: A sentence for reports.
        keys: How many documents there may be; the partition of a key is ``key % partitions``.
        writes: What somebody else writes, in this order (see ``MARK`` and the following).
        absent: The keys that do not exist at the beginning.
        snapshots: How many run at once; ``chunk``: how many documents one read asks for.
        terms: How many terms may begin without need.
        partitions: How many there are at the beginning, then how many each term wants; one: it stays.
        faults: Which kinds may happen; ``budget``: how many of them altogether.
        late: Which writes may land late; ``delays``: how many altogether.
        spills: Whether what is buffered may be stored.
        rewind: The time to which the operator may rewind, once.
        transactional: Whether a handler's effect happens with its commit.
        operator: Whether somebody retries or sets aside what is halted.
        matches: The keys of the documents that each snapshot wants; empty: all.
        mixed: Whether every key has a type of its own.
        lookup: Whether a change shows the document as it is when the change is read.
        partial: Whether a change of a document that was there brings no document.
        apart: Whether keys and documents are read at different times, and the stream may pass H before it is known.
        room: How many changes and items a listener keeps in memory; 0: any number.
        fresh: The keys that were inserted after the snapshot was asked for, and before the stream's start.
        broken: The rule left out.
    """

    name: str
    keys: int
    writes: tuple[int, ...] = ()
    absent: frozenset[int] = frozenset()
    snapshots: int = 1
    chunk: int = 2
    terms: int = 1
    partitions: tuple[int, ...] = (1,)
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    late: frozenset[Late] = frozenset()
    delays: int = 0
    spills: bool = False
    rewind: int | None = None
    transactional: bool = False
    operator: bool = False
    matches: tuple[frozenset[int], ...] = ()
    mixed: bool = False
    lookup: bool = False
    partial: bool = False
    apart: bool = False
    room: int = 0
    fresh: frozenset[int] = frozenset()
    broken: Broken = Broken.NOTHING

    def __str__(self) -> str:
        """Return the scenario's name."""
        return self.name

    def wanted(self, term: int) -> int:
        """Return how many partitions a term asks for."""
        return self.partitions[min(term, len(self.partitions) - 1)]

    def matched(self, snapshot: int, key: int) -> bool:
        """Tell whether a snapshot wants a document."""
        return not self.matches or key in self.matches[snapshot]

    @property
    def restarts(self) -> bool:
        """Whether a stream may be opened a second time, so that it matters which watermark is stored when."""
        reopened = self.terms > 1 or self.rewind is not None or len(self.partitions) > 1
        return reopened or Fault.REOPEN in self.faults or self.broken is Broken.WATERMARK_AT_ITEM


class Token(NamedTuple):
    """A place in the order of a partition: the change at a time, or the n-th item of a snapshot as of that time."""

    time: int
    number: int = 0

    def __str__(self) -> str:
        """Return the token as a part of a trace."""
        return f"{self.time}~{self.number}" if self.number else str(self.time)


START = Token(0)


class Item(NamedTuple):
    """What a handler is given: a change, or an existing document; a ``partial`` change brings no document."""

    token: Token
    key: int
    value: int
    partial: bool = False

    def __str__(self) -> str:
        """Return the item as a part of a trace."""
        return f"key {self.key} as of {self.value} at {self.token}"


class Claim(NamedTuple):
    """An execution and its right; ``seen``: its commit has happened, but not in the majority yet."""

    item: Item
    live: bool = True
    seen: bool = False


class Partition(NamedTuple):
    """A document of ``partitions``; ``token`` is the position, ``spilled`` the mark."""

    epoch: int = 0
    token: Token = START
    spilled: Token = START
    claim: Claim | None = None
    mode: Mode = Mode.FLOWING
    head: Item | None = None


class Document(NamedTuple):
    """A document of ``backlog``."""

    partition: int
    item: Item
    term: int


class Record(NamedTuple):
    """A document of ``snapshots``; ``last`` is the last key scanned, ``until`` the last to be scanned; -1: none.

    ``first`` is ghost: the time as of which the keys of the first chunk that was recorded were found.
    """

    epoch: int = 0
    begun: int = 0
    last: int = -1
    state: Progress = Progress.RUNNING
    until: int = -1
    first: int = -1


class Chunk(NamedTuple):
    """What a listener knows of the chunk of a snapshot that is under way.

    ``own`` is the begin's place in the oplog, ``low`` is L, ``scanned`` the time when the keys were found, ``read``
    that when the documents were read, and ``time`` is T (-1: not yet); ``end`` is the last key scanned (-1: none was
    left), ``until`` the last to be scanned, now or later. ``changes`` are keys and times of what was taken in since.
    ``done`` are the items that are appended; ``again`` the keys whose items were dropped, and are read again.
    ``sent``: something was written behind T, and ``high``: H. (Kept for variants only.)
    """

    begun: int
    own: int
    low: int = -1
    scanned: int = -1
    read: int = -1
    time: int = -1
    high: int = -1
    items: tuple[Item, ...] = ()
    done: tuple[Item, ...] = ()
    again: frozenset[int] = frozenset()
    end: int = -1
    until: int = -1
    final: bool = False
    appended: bool = False
    changes: frozenset[tuple[int, int]] = frozenset()
    sent: bool = False

    @property
    def is_final(self) -> bool:
        """Whether nothing was left to scan."""
        return self.end < 0 or self.final

    def __str__(self) -> str:
        """Return the chunk as a part of a trace."""
        items = ", ".join(str(item) for item in self.items) if self.read >= 0 else "not read"
        return f"chunk {self.begun}, L = {self.low}, T = {self.time}, read at {self.read}: {items or 'none'}"


class Listener(NamedTuple):
    """The memory of one term: 0 it has the subscription, 1 the records of snapshots, 2 the partitions: it leads.

    ``stored`` is how far this term has inserted what is buffered; ``first`` the first L (kept by a variant only).
    """

    term: int
    stage: int = 0
    cursor: int = 0
    buffers: tuple[tuple[Item, ...], ...] = ()
    stored: tuple[Token, ...] = ()
    chunks: tuple[Chunk | None, ...] = ()
    first: int = 0

    def __str__(self) -> str:
        """Return the listener as a part of a trace."""
        return f"term {self.term}, read up to {self.cursor}"


class Message(NamedTuple):
    """A run in the broker: it can claim while its partition stands at ``base``."""

    partition: int
    term: int
    base: Token
    item: Item

    def __str__(self) -> str:
        """Return the message as a part of a trace."""
        return f"term {self.term}, partition {self.partition}: {self.item} after {self.base}"


class Write(NamedTuple):
    """A write on its way to a snapshot or partition (``target``), guarded by term, and by begun or generation."""

    kind: Late
    term: int
    target: int
    guard: int = 0
    token: Token = START
    item: Item | None = None
    end: int = -1
    until: int = -1
    time: int = -1
    state: Progress = Progress.RUNNING

    def is_over(self, generation: int) -> bool:
        """Tell whether a write on a partition belongs to former partitions."""
        return self.guard != generation

    def __str__(self) -> str:
        """Return the write as a part of a trace."""
        what = {
            Late.CURSOR: f"{self.state} after key {self.end}" if self.end >= 0 else str(self.state),
            Late.INSERT: str(self.item),
        }.get(self.kind, str(self.token) if self.token != START else f"{self.guard}")
        return f"{self.kind} of term {self.term}, {self.target}: {what}"


class State(NamedTuple):
    """Everything: MongoDB, the listeners, the broker, what is on its way, the ghosts.

    ``letters`` are the dead letters: key, and the token by which it is kept (None: by the document's key).
    ``copy`` and what follows is ghost: what handlers have made of each key; the time of what they saw last (-1:
    nothing, or there was a rewind); how often a key was started as an item of a snapshot; whether the operator has
    rewound.
    """

    oplog: tuple[int, ...]
    majority: int
    written: int
    epoch: int
    watermark: Token
    generation: int
    partitions: tuple[Partition, ...]
    documents: frozenset[Document]
    records: tuple[Record, ...]
    letters: frozenset[tuple[int, Token | None]]
    listeners: tuple[Listener, ...]
    messages: frozenset[Message]
    writes: frozenset[Write]
    delays: int
    budget: int
    copy: tuple[int | None, ...]
    seen: tuple[int, ...]
    starts: tuple[int, ...]
    rewound: bool


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: documents exist, nothing is written, read or stored."""
    return State(
        oplog=(), majority=0, written=0, epoch=0,
        watermark=Token(-1) if world.broken is Broken.PINNED_LATE else START, generation=0,
        partitions=(Partition(),) * world.partitions[0], documents=frozenset(), records=(Record(),) * world.snapshots,
        letters=frozenset(), listeners=(), messages=frozenset(), writes=frozenset(), delays=world.delays,
        budget=world.budget, copy=(None,) * world.keys, seen=(-1,) * world.keys, starts=(0,) * world.keys,
        rewound=False,
    )  # fmt: skip


# --- the oplog ----------------------------------------------------------------------------------------------


def appended(world: World, state: State, entry: int) -> State:
    """Return the state with one more entry of the oplog; without elections everything is in the majority."""
    oplog = (*state.oplog, entry)
    if Fault.ELECTION in world.faults and entry != MARK:
        return state._replace(oplog=oplog)
    return state._replace(oplog=oplog, majority=len(oplog))  # ours are acknowledged by the majority


def is_partial(world: World, state: State, when: int) -> bool:
    """Return True if a change brings no document: it is one of a document that was there."""
    entry = state.oplog[when - 1]
    key = key_of(entry)
    return world.partial and key is not None and entry > 0 and exists(value_at(world, state, key, when - 1))


def key_of(entry: int) -> int | None:
    """Return the key that an entry of the oplog writes, if it writes one."""
    return abs(entry) - 1 if 0 < abs(entry) < DROP else None


def value_at(world: World, state: State, key: int, time: int) -> int | None:
    """Return a document as of a time: when it was written, 0 at the beginning; minus the time of its deletion."""
    for when in range(min(time, len(state.oplog)), 0, -1):
        if key_of(state.oplog[when - 1]) == key:
            return when if state.oplog[when - 1] > 0 else -when
    return None if key in world.absent else 0


def exists(value: int | None) -> bool:
    """Tell whether a value is that of a document that exists."""
    return value is not None and value >= 0


def is_there(state: State) -> bool:
    """Tell whether the source can be read under its name."""
    moves = [entry for entry in state.oplog if entry in {DROP, AWAY, BACK}]
    return not moves or moves[-1] == BACK


# --- what is where ------------------------------------------------------------------------------------------


def partition_of(state: State, key: int) -> int:
    """Return the index of a key under the partitioning in force."""
    return key % len(state.partitions)


def with_record(state: State, index: int, record: Record) -> State:
    """Return the state with the record of one snapshot replaced."""
    return state._replace(records=put(state.records, index, record))


def with_chunk(listener: Listener, index: int, chunk: Chunk | None) -> Listener:
    """Return a listener that knows something else of a snapshot's chunk."""
    return listener._replace(chunks=put(listener.chunks, index, chunk))


def stored(state: State, index: int, after: Token, up_to: Token) -> list[Item]:
    """Return what is stored of a partition after one place and not after another, in order."""
    there = (each.item for each in state.documents if each.partition == index)
    return sorted(item for item in there if after < item.token <= up_to)


def leader(state: State) -> Listener | None:
    """Return the listener in office, if it has taken everything over."""
    listener = in_office(state)
    return listener if listener is not None and listener.stage == 2 else None
