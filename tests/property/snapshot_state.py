"""A snapshot beside the stream: its scenarios, what is stored and kept in memory, and what each write does."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.stores import Document, Message, Partition, Write

# Entries of the oplog beside "key was set" (key + 1) and "key was deleted" (minus that).
MARK = 0
"""A write elsewhere: what the stream shows of it is a post-batch token."""
DROP, AWAY, BACK = 97, 98, 99
"""The source is dropped; renamed away; renamed back, with the UUID that it had."""


class Broken(StrEnum):
    """One rule of the snapshot left out or replaced by the simpler one."""

    NOTHING = "nothing"
    TOKEN_BEFORE_CHANGES = "an item's token is the high-watermark token of T"
    NUMBERED_BY_CHUNK = "items are numbered within their chunk, whatever other snapshots do"
    NO_PASS = "nothing is written behind T"
    ROW_KEPT = "an item is run although its key was changed in the window"
    DELETION_IGNORED = "a deletion in the window drops no item"
    WINDOW_TO_H = "the window ends at H, though the stream is past it"
    H_IS_PLACE = "T is H, though the stream is past it"
    NOT_AGAIN = "an item that is dropped is not read again where the change brings no document"
    AGAIN_KEPT = "what is read again is run although its key was changed once more"
    BEGIN_BEFORE_TAKE_OVER = "a snapshot begins before the partitions are taken over"
    BEGIN_AHEAD = "the next chunk begins when the last is appended, before the cursor moves"
    BEGIN_COUNTS_UP = "a begin adds one to whatever is there, and the author counts by itself"
    READ_LOCAL = "a chunk is read as it is now, in the majority or not"
    EMPTY_IS_END = "an empty answer is the end, whatever became of the source"
    UUID_IS_ENOUGH = "an empty answer is the end if the source has the known UUID afterwards"
    END_AT_L = "renames and drops are looked for up to L"
    WATERMARK_AT_ITEM = "watermarks may be an item's token"
    ITEMS_HOLD = "items hold the watermark"
    CURSOR_AT_APPEND = "the cursor moves when the items are appended"
    CURSOR_AT_INSERT = "an item that is inserted counts, before the mark"
    CURSOR_LOCAL = "the cursor believes a commit that is not in the majority yet"
    CURSOR_IGNORES_EPOCH = "the cursor compares begun, not the epoch"
    CURSOR_IGNORES_BEGUN = "the cursor compares the epoch, not begun"
    RECORDS_LAST = "a take-over raises the records when it begins anew, not before it dispatches"
    CHUNK_SURVIVES = "a chunk is kept when the stream is opened again at the watermark"
    STOPPED_STAYS = "a take-over raises the records of snapshots that run, and not of those that are stopped"
    REWIND_KEEPS_MARK = "a rewind leaves a mark that was reached"
    LETTER_BY_TOKEN = "a dead letter of an item is kept by its token"
    LOOKED_UP_KEPT = "an item is run although its key was looked up after T"
    DROPPED_AWAITED = "a cursor waits for the items that are dropped"
    ROOM_FOR_CHUNK_ONLY = "a snapshot begins when there is room for its chunk and nothing else"
    UNBOUNDED = "a snapshot begins without room for a chunk"
    NO_UNTIL = "a snapshot goes on until nothing is left, whatever is inserted behind it"
    UNTIL_LOCAL = "the largest _id is read as it is now, in the majority or not"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    HALT = "a handler fails for good: its partition halts"
    LETTER = "a handler fails for good: its change becomes a dead letter"
    ROLLBACK = "a failover loses a commit that was seen, but not by the majority"
    REOPEN = "the stream breaks and is opened again at the watermark"
    UNREADABLE = "a chunk cannot be read"
    ANSWERED_LATER = "the answer to a begin is given when it is asked for again, with the time of that"
    ELECTION = "a new primary lacks what is not in the majority"
    STOP = "somebody stops a snapshot, and lets it go on at any later time"


class Late(StrEnum):
    """Further kinds of writes whose answer may be lost: on the record of a snapshot."""

    BEGIN = "begin"
    PASS = "pass"
    CURSOR = "cursor"


class Progress(StrEnum):
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
        partitions: How many there are.
        faults: Which kinds may happen; ``budget``: how many of them altogether.
        late: Which writes may land late; ``delays``: how many altogether.
        spills: Whether what is buffered may be stored.
        rewind: The time to which the operator may rewind, once.
        transactional: Whether a handler's effect happens with its commit.
        operator: Whether somebody retries or sets aside what is halted.
        matches: The keys of the documents that each snapshot wants; empty: all.
        lookup: Whether a change shows the document as it is when the change is read.
        partial: Whether a change of a document that was there brings no document.
        apart: Whether keys and documents are read at different times, and the stream may pass H before it is known.
        room: How many changes and items a listener keeps in memory; 0: any number.
        broken: The rule left out.
    """

    name: str
    keys: int
    writes: tuple[int, ...] = ()
    absent: frozenset[int] = frozenset()
    snapshots: int = 1
    chunk: int = 2
    terms: int = 1
    partitions: int = 1
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    late: frozenset[StrEnum] = frozenset()
    delays: int = 0
    spills: bool = False
    rewind: int | None = None
    transactional: bool = False
    operator: bool = False
    matches: tuple[frozenset[int], ...] = ()
    lookup: bool = False
    partial: bool = False
    apart: bool = False
    room: int = 0
    broken: Broken = Broken.NOTHING

    def matched(self, snapshot: int, key: int) -> bool:
        return not self.matches or key in self.matches[snapshot]

    @property
    def restarts(self) -> bool:
        """Whether a stream may be opened a second time, so that it matters which watermark is stored when."""
        reopened = self.terms > 1 or self.rewind is not None
        return reopened or Fault.REOPEN in self.faults or self.broken is Broken.WATERMARK_AT_ITEM


class Token(NamedTuple):
    """A place in the order of a partition: the change at a time, or the n-th item of a snapshot as of that time."""

    time: int
    number: int = 0


START = Token(0)


class Item(NamedTuple):
    """What a handler is given: a change, or an existing document; a ``partial`` change brings no document."""

    token: Token
    key: int
    value: int
    partial: bool = False


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
    ``high`` is H.
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
    appended: bool = False
    changes: frozenset[tuple[int, int]] = frozenset()


class Listener(NamedTuple):
    """The memory of one term: 0 it has the subscription, 1 the records of snapshots, 2 the partitions.

    ``stored`` is how far this term has inserted what is buffered.
    """

    term: int
    stage: int = 0
    cursor: int = 0
    buffers: tuple[tuple[Item, ...], ...] = ()
    stored: tuple[Token, ...] = ()
    chunks: tuple[Chunk | None, ...] = ()

    @property
    def leads(self) -> bool:
        return self.stage == 2


class RecordWrite(NamedTuple):
    """A write on its way to the record of a snapshot, guarded by term, and by ``begun``."""

    kind: Late
    term: int
    snapshot: int
    begun: int
    end: int = -1
    until: int = -1
    time: int = -1
    state: Progress = Progress.RUNNING


class State(NamedTuple):
    """Everything: MongoDB, the listeners, the broker, what is on its way, the ghosts.

    ``letters`` are the dead letters: key, and the token by which it is kept (None: by the document's key).
    ``copy`` and what follows is ghost: what handlers have made of each key; the time of what they saw last (-1:
    nothing, or there was a rewind); how often a key was started as an item of a snapshot; whether the operator has
    rewound. The partitions stay those of ``generation`` 0.
    """

    oplog: tuple[int, ...]
    majority: int
    written: int
    epoch: int
    watermark: Token
    partitions: tuple[Partition, ...]
    documents: frozenset[Document]
    records: tuple[Record, ...]
    letters: frozenset[tuple[int, Token | None]]
    listeners: tuple[Listener, ...]
    messages: frozenset[Message]
    writes: frozenset[Write | RecordWrite]
    delays: int
    budget: int
    copy: tuple[int | None, ...]
    seen: tuple[int, ...]
    starts: tuple[int, ...]
    rewound: bool
    generation: int = 0


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: documents exist, nothing is written, read or stored."""
    return State(
        oplog=(), majority=0, written=0, epoch=0, records=(Record(),) * world.snapshots, letters=frozenset(),
        watermark=START,
        partitions=(Partition(token=START, spilled=START),) * world.partitions, documents=frozenset(),
        listeners=(), messages=frozenset(), writes=frozenset(), delays=world.delays, budget=world.budget,
        copy=(None,) * world.keys, seen=(-1,) * world.keys, starts=(0,) * world.keys, rewound=False,
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
    return abs(entry) - 1 if 0 < abs(entry) < DROP else None


def value_at(world: World, state: State, key: int, time: int) -> int | None:
    """Return a document as of a time: when it was written, 0 at the beginning; minus the time of its deletion."""
    for when in range(min(time, len(state.oplog)), 0, -1):
        if key_of(state.oplog[when - 1]) == key:
            return when if state.oplog[when - 1] > 0 else -when
    return None if key in world.absent else 0


def exists(value: int | None) -> bool:
    return value is not None and value >= 0


def is_there(state: State) -> bool:
    moves = [entry for entry in state.oplog if entry in {DROP, AWAY, BACK}]
    return not moves or moves[-1] == BACK


# --- what is where ------------------------------------------------------------------------------------------


def partition_of(state: State, key: int) -> int:
    return key % len(state.partitions)


def with_record(state: State, index: int, record: Record) -> State:
    return state._replace(records=put(state.records, index, record))


def with_raised_records(state: State, term: int, *, stopped: bool = True) -> State:
    """Return the state in which the records of all snapshots carry a term, those too that are ``stopped``."""
    return state._replace(
        records=tuple(
            each._replace(epoch=term) if stopped or each.state is not Progress.STOPPED else each
            for each in state.records
        )
    )


def with_chunk(listener: Listener, index: int, chunk: Chunk | None) -> Listener:
    """Return a listener that knows something else of a snapshot's chunk."""
    return listener._replace(chunks=put(listener.chunks, index, chunk))


def buffered(state: State, listener: Listener, item: Item) -> Listener:
    """Return a listener with something more in a buffer, unless it lies at or below the position."""
    index = partition_of(state, item.key)
    if item.token <= state.partitions[index].token:
        return listener
    return listener._replace(buffers=put(listener.buffers, index, (*listener.buffers[index], item)))


def unstored(state: State, listener: Listener, index: int) -> list[Item]:
    """Return what is in a buffer, and neither inserted by this term nor done."""
    after = max(listener.stored[index], state.partitions[index].token)
    return [item for item in listener.buffers[index] if item.token > after]


def has_room(world: World, state: State, listener: Listener, more: int) -> bool:
    """Tell whether so much more may be kept in memory, beside what is there and what is begun."""
    begun = sum(world.chunk for each in listener.chunks if each is not None and not each.appended)
    return not world.room or in_memory(state, listener) + begun + more <= world.room


def in_memory(state: State, listener: Listener) -> int:
    """Return how much a listener keeps: what is stored is read back from there."""
    return sum(
        item.token > max(listener.stored[index], partition.token)
        for index, partition in enumerate(state.partitions)
        for item in listener.buffers[index]
    )


# === the writes, and what each does where it lands, if its own guard lets it ===


def landed(world: World, state: State, one: Write | RecordWrite) -> State:
    if isinstance(one, RecordWrite):
        return recorded(world, state, one)
    if one.kind is stores.Late.WATERMARK:
        matches = state.epoch == one.term and one.place > state.watermark
        return state._replace(watermark=one.place) if matches else state
    return stores.landed(world, state, one)


def recorded(world: World, state: State, one: RecordWrite) -> State:
    """Return the state after a write on the record of a snapshot: an entry of the oplog, if it matches."""
    if not matches(world, state, one):
        return state
    record = state.records[one.snapshot]
    if one.kind is Late.BEGIN:
        after = with_record(state, one.snapshot, record._replace(begun=record.begun + 1))
        return appended(world, after, MARK)
    if one.kind is Late.PASS:
        return appended(world, state, MARK)
    ended = one.state if one.state is not Progress.RUNNING else record.state
    record = record._replace(state=ended)
    if one.end >= 0:
        first = record.first if record.first >= 0 else one.time
        record = record._replace(last=one.end, until=one.until, first=first)
    return with_record(state, one.snapshot, record)


def matches(world: World, state: State, one: RecordWrite) -> bool:
    record = state.records[one.snapshot]
    starts_or_ends = one.kind is Late.BEGIN or (one.kind is Late.CURSOR and one.state is not Progress.RUNNING)
    if starts_or_ends and record.state is Progress.STOPPED:
        return False
    epoch = record.epoch == one.term or (one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_EPOCH)
    begun = record.begun == one.begun
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_BEGUN:
        begun = True
    if one.kind is Late.BEGIN and world.broken is Broken.BEGIN_COUNTS_UP:
        begun = True
    return epoch and begun
