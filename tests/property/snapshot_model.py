"""A snapshot beside the stream as a finite machine: its rules, and what is judged.

An extension of ``stores``, with the conventions of ``protocol_model``: time is absent, a message that was sent
stays deliverable, and nothing is imported from the package. What is new here:

- *The oplog grows*. Somebody writes to the source while everything else continues, and every ``begin`` and ``pass`` of
  a snapshot is an entry of its own, so that L, H and the stream's end are what they are by order alone.
- *A chunk has a window*. L is the time of its begin, H that of a write after its reading. T, the place of its items, is
  the time before H or the place that the stream has reached by then. A chunk is read in two steps.
- *Two chunks of a snapshot may be under way*: one whose items are appended and not all secured, and the next one, which
  is read behind its end. The cursor passes them in order.
- *A token is a time and a number*: 0 is the change at that time, larger ones are the items of a snapshot at T = time,
  behind that change and before everything later.
- *A value is the time of the write that made it*; a deletion is minus its time. So "older" can be read off.
- *Handlers copy* what they are given: the copy is the effect, which happens when the claim is won (what comes later is
  refused by the fence, as ``protocol_model`` proves).
- *Repartitioning* is the business of ``spill_model``: new partitions begin where everything is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property import exploration, stores
from tests.property.exploration import Model, Step, changed, put
from tests.property.stores import (
    Claim,
    Document,
    Message,
    Partition,
    Write,
    acquire,
    can,
    counted,
    land,
    spent,
    stored,
    with_listener,
    with_partition,
    write,
)

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
    BEGIN_AHEAD = "the next chunk begins behind the cursor, which has not passed the last one yet"
    BEGIN_FAR_AHEAD = "the next chunk begins behind the last one, and forgets it"
    CURSOR_OUT_OF_ORDER = "the cursor passes the next chunk first, if all of that is secured"
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
    CURSOR_IGNORES_MOVED = "the cursor compares the epoch, not the chunk that it has passed last"
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
        keys: How many documents there may be. The partition of a key is ``key % partitions``.
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

    ``moved`` is the number of the last chunk that the cursor has passed.
    ``first`` is ghost: the time as of which the keys of the first chunk that was recorded were found.
    """

    epoch: int = 0
    begun: int = 0
    last: int = -1
    state: Progress = Progress.RUNNING
    until: int = -1
    first: int = -1
    moved: int = 0


class Chunk(NamedTuple):
    """What a listener knows of the chunk of a snapshot that is under way.

    ``own`` is the begin's place in the oplog, ``low`` is L, ``scanned`` the time when the keys were found, ``read``
    that when the documents were read, and ``time`` is T (-1: not yet); ``end`` is the last key scanned (-1: none was
    left), ``until`` the last to be scanned, now or later. ``changes`` are keys and times of what was taken in since.
    ``done`` are the items that are appended; ``again`` the keys whose items were dropped, and are read again.
    ``high`` is H. ``last`` is the key behind which it is read, ``after`` the number of the chunk before it, and
    ``earlier`` that chunk, as long as the cursor has not passed it.
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
    last: int = -1
    after: int = 0
    earlier: Chunk | None = None


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
    """A write on its way to the record of a snapshot, guarded by term, and by ``begun``, or ``after`` for a cursor."""

    kind: Late
    term: int
    snapshot: int
    begun: int
    end: int = -1
    until: int = -1
    time: int = -1
    state: Progress = Progress.RUNNING
    after: int = 0


class State(NamedTuple):
    """Everything: MongoDB, the listeners, the broker, what is on its way, the ghosts.

    ``letters`` are the dead letters: key, and the token by which it is kept (None: by the document's key).
    ``copy`` and what follows is ghost: what handlers have made of each key; the time of what they saw last (-1:
    nothing, or there was a rewind); how often a key was started as an item of a snapshot; whether the operator has
    rewound. The partitions stay those of ``generation`` 0.
    """

    oplog: tuple[int, ...] = ()
    majority: int = 0
    written: int = 0
    epoch: int = 0
    watermark: Token = START
    partitions: tuple[Partition, ...] = ()
    documents: frozenset[Document] = frozenset()
    records: tuple[Record, ...] = ()
    letters: frozenset[tuple[int, Token | None]] = frozenset()
    listeners: tuple[Listener, ...] = ()
    messages: frozenset[Message] = frozenset()
    writes: frozenset[Write | RecordWrite] = frozenset()
    delays: int = 0
    budget: int = 0
    copy: tuple[int | None, ...] = ()
    seen: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    rewound: bool = False
    generation: int = 0


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: documents exist, nothing is written, read or stored."""
    return State(
        records=(Record(),) * world.snapshots, partitions=(Partition(token=START, spilled=START),) * world.partitions,
        delays=world.delays, budget=world.budget, copy=(None,) * world.keys, seen=(-1,) * world.keys,
        starts=(0,) * world.keys,
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


def without_chunk(listener: Listener, index: int) -> Listener:
    """Return a listener that has dropped the chunk that it reads, and keeps the one before it."""
    chunk = listener.chunks[index]
    return with_chunk(listener, index, chunk and chunk.earlier)


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
    record = record._replace(state=ended, moved=one.begun)
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
    if one.kind is Late.CURSOR:
        begun = record.moved == one.after or world.broken is Broken.CURSOR_IGNORES_MOVED
    return epoch and begun


# === a chunk, from its begin to the cursor that passes it ===

# --- from a begin to L --------------------------------------------------------------------------------------


def begin(world: World, state: State, listener: Listener, index: int) -> Steps:
    """One update of the record, compared with what was seen of it; its own place in the oplog is L."""
    record, earlier = state.records[index], listener.chunks[index]
    if record.state is not Progress.RUNNING or not (earlier is None or may_be_followed(earlier)):
        return
    if listener.stage < (1 if world.broken is Broken.BEGIN_BEFORE_TAKE_OVER else 2):
        return
    if listener.leads and not may_begin(world, state, listener):
        return
    mine = record.epoch == listener.term
    if world.broken is Broken.RECORDS_LAST and state.epoch == listener.term:
        mine, state = True, with_raised_records(state, listener.term)
    if not mine:
        return
    if not is_there(state):
        yield Step("source gone"), with_record(state, index, record._replace(state=Progress.GONE))
        return
    one = RecordWrite(Late.BEGIN, listener.term, index, record.begun)
    after = landed(world, state, one)
    chunk = Chunk(record.begun + 1, len(after.oplog), last=record.last, after=record.moved, until=record.until)
    if earlier is not None and world.broken is not Broken.BEGIN_AHEAD:
        chunk = chunk._replace(last=earlier.end, after=earlier.begun, until=earlier.until, earlier=earlier)
        if world.broken is Broken.BEGIN_FAR_AHEAD:
            chunk = chunk._replace(after=record.moved, earlier=None)
    if Fault.ANSWERED_LATER not in world.faults:
        chunk = chunk._replace(low=len(after.oplog))  # one step for two that nothing can part
    yield from write(world, state, [one], with_listener(after, listener, with_chunk(listener, index, chunk)))


def may_be_followed(chunk: Chunk) -> bool:
    """Tell whether the next chunk may be read while the cursor has not passed this one."""
    return chunk.appended and chunk.earlier is None and chunk.end >= 0


def may_begin(world: World, state: State, listener: Listener) -> bool:
    """Tell whether there is room for a chunk, and for one change more: what lies before T has to be read first."""
    if world.broken is Broken.UNBOUNDED:
        return True
    more = 0 if world.broken is Broken.ROOM_FOR_CHUNK_ONLY else 1
    return has_room(world, state, listener, world.chunk + more)


def answer(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The answer to a begin arrives: its own place; or, when it was asked for again, the place of that."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.low >= 0:
        return
    known = with_low(world, chunk, chunk.own)
    yield Step("answer", known), with_listener(state, listener, with_chunk(listener, index, known))
    later = with_low(world, chunk, len(state.oplog))
    if later.low > known.low and can(world, state, Fault.ANSWERED_LATER):
        after = with_listener(state, listener, with_chunk(listener, index, later))
        yield Step("answer later", later, fair=False), spent(after)


def with_low(world: World, chunk: Chunk, low: int) -> Chunk:
    """Return a chunk that knows L, and forgets the changes before it."""
    kept = frozenset(each for each in chunk.changes if world.lookup or each[1] > low)
    return chunk._replace(low=low, changes=kept)


# --- the reading --------------------------------------------------------------------------------------------


def scan(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The keys behind the last one that was scanned, and their documents: later, or in the same step."""
    for step, after in scan_keys(world, state, listener, index):
        knowing = next((each for each in after.listeners if each.term == listener.term), listener)
        both = [] if world.apart else list(read_chunk(world, after, knowing, index))
        yield from ((one._replace(fair=step.fair), then) for one, then in both)
        if not both:
            yield step, after


def scan_keys(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The keys behind the last one that was scanned; none of a source that is not there any more."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.low < 0 or chunk.scanned >= 0:
        return
    if chunk.low > len(state.oplog):  # in no history: the server waits in vain, until the time for the read is over
        yield Step("give up", chunk), with_listener(state, listener, without_chunk(listener, index))
        return
    if state.majority < chunk.low and world.broken is not Broken.READ_LOCAL:
        return
    time = len(state.oplog) if world.broken is Broken.READ_LOCAL else state.majority
    chunk = chunk._replace(until=until_of(world, state, chunk, time), scanned=time)
    scanned = [key for key in there_at(world, state, chunk.last, time) if chunk.until < 0 or key <= chunk.until]
    chunk = chunk._replace(end=scanned[: world.chunk][-1] if scanned else -1)
    if not scanned:
        chunk = chunk._replace(read=chunk.scanned)
    yield Step("scan", chunk), with_listener(state, listener, with_chunk(listener, index, chunk))
    if can(world, state, Fault.UNREADABLE):
        after = with_listener(state, listener, without_chunk(listener, index))
        yield Step("unreadable", chunk, fair=False), spent(after)


def until_of(world: World, state: State, chunk: Chunk, time: int) -> int:
    """Return the largest key to be scanned: what is known, or else what is the largest at T."""
    if chunk.until >= 0:
        return chunk.until
    if world.broken is Broken.NO_UNTIL:
        return -1
    if world.broken is Broken.UNTIL_LOCAL:
        time = len(state.oplog)
    return max(there_at(world, state, -1, time), default=-1)


def there_at(world: World, state: State, last: int, time: int) -> list[int]:
    """Return the keys behind the last one that exist at a time, if the source can be found now."""
    if not is_there(state):
        return []
    return [key for key in range(last + 1, world.keys) if exists(value_at(world, state, key, time))]


def read_chunk(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The documents of what was scanned, or of what is read again, numbered across all snapshots."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.scanned < 0 or chunk.read >= 0:
        return
    if chunk.low > len(state.oplog):
        yield Step("give up", chunk), with_listener(state, listener, without_chunk(listener, index))
        return
    if state.majority < chunk.low and world.broken is not Broken.READ_LOCAL:
        return
    time = len(state.oplog) if world.broken is Broken.READ_LOCAL else state.majority
    found = [key for key in there_at(world, state, chunk.last, time) if key <= chunk.end]
    wanted = [key for key in found if world.matched(index, key) and (not chunk.again or key in chunk.again)]
    items = tuple(Item(START, key, value_at(world, state, key, time) or 0) for key in wanted)
    ready = chunk._replace(items=items, read=time)
    yield Step("read chunk", ready), with_listener(state, listener, with_chunk(listener, index, ready))


# --- its place, T, and what follows it ----------------------------------------------------------------------


def pass_on(world: World, state: State, listener: Listener, index: int) -> Steps:
    """When the chunk is there, a write of our own is H; what moves the stream past T is written until it is past."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.appended or chunk.read < 0:
        return
    one = RecordWrite(Late.PASS, listener.term, index, chunk.begun)
    if chunk.high < 0:
        if not is_there(state) and world.broken is not Broken.EMPTY_IS_END:  # it has not its UUID any more
            yield Step("drop", chunk), with_listener(state, listener, without_chunk(listener, index))
            return
        after = landed(world, state, one)
        ready = chunk._replace(high=len(after.oplog))
        if not world.apart:
            ready = with_place(world, listener, ready, index)
        yield from write(world, state, [one], with_listener(after, listener, with_chunk(listener, index, ready)))
        return
    if chunk.time < 0:
        ready = with_place(world, listener, chunk, index)
        yield Step("place", ready), with_listener(state, listener, with_chunk(listener, index, ready))
        return
    if len(state.oplog) > chunk.time or world.broken is Broken.NO_PASS:
        return  # something lies behind it already
    yield from write(world, state, [one], landed(world, state, one))


def with_place(world: World, listener: Listener, chunk: Chunk, index: int) -> Chunk:
    """Return a chunk that knows T: all was read before H was written, which moves the stream past the time before."""
    below = chunk.high - 1
    time = below if world.broken is Broken.H_IS_PLACE else max(below, listener.cursor)
    return placed(world, chunk._replace(time=time), index)


def placed(world: World, chunk: Chunk, index: int) -> Chunk:
    """Return a chunk whose items have their place, T; what is read again is numbered behind what is appended."""
    number = (1 if world.broken is Broken.NUMBERED_BY_CHUNK else 1 + 10 * index) + len(chunk.done)
    items = (item._replace(token=token_of(world, chunk.time, number + place)) for place, item in enumerate(chunk.items))
    return chunk._replace(items=tuple(items))


def token_of(world: World, time: int, number: int) -> Token:
    """Return the token of an item: behind the change at T, before everything later."""
    if world.broken is Broken.TOKEN_BEFORE_CHANGES:
        return Token(time, number - 100)
    return Token(time, number)


# --- its items ----------------------------------------------------------------------------------------------


def counts(world: World, chunk: Chunk, entry: int, when: int) -> bool:
    """Tell whether a change that is taken in may drop an item: it is in the window, or was looked up meanwhile."""
    if world.broken is Broken.DELETION_IGNORED and entry < 0:
        return False
    return when > chunk.low or (world.lookup and world.broken is not Broken.LOOKED_UP_KEPT)


def is_spoiled(world: World, chunk: Chunk, when: int) -> bool:
    """Tell whether a move that is taken in makes a chunk that is read begin anew."""
    if world.broken is Broken.END_AT_L:
        return when <= chunk.low
    return world.broken not in {Broken.EMPTY_IS_END, Broken.UUID_IS_ENOUGH}


def with_appended(world: World, state: State, listener: Listener, index: int, chunk: Chunk) -> Listener:
    """Return a listener with the items of a chunk at the ends of its buffers, but for those whose key was changed."""
    low, high = chunk.low, chunk.high if world.broken is Broken.WINDOW_TO_H else chunk.time
    changed = {key: when for key, when in chunk.changes if low < when <= high or (world.lookup and when <= low)}
    if world.broken is Broken.ROW_KEPT or (world.broken is Broken.AGAIN_KEPT and chunk.again):
        changed = {}
    items = tuple(item for item in chunk.items if item.key not in changed)
    lost = frozenset(
        item.key for item in chunk.items if item.key in changed and is_partial(world, state, changed[item.key])
    )
    if world.broken is Broken.NOT_AGAIN:
        lost = frozenset()
    for item in items:
        listener = buffered(state, listener, item)
    awaited = chunk.items if world.broken is Broken.DROPPED_AWAITED else items
    chunk = chunk._replace(items=(), done=(*chunk.done, *awaited), changes=frozenset())
    if lost:
        chunk = chunk._replace(again=lost, low=chunk.time, read=-1, time=-1, high=-1)
    else:
        chunk = chunk._replace(appended=True, again=frozenset())
    return with_chunk(listener, index, chunk)


def move_cursor(world: World, state: State, listener: Listener, index: int) -> Steps:
    """When every item is committed, or inserted by this term at or below the mark, or superfluous: on to the next."""
    youngest = listener.chunks[index]
    if youngest is None:
        return
    chunk, rest = youngest, None
    if youngest.earlier is not None:
        chunk, rest = youngest.earlier, youngest._replace(earlier=None)
        if world.broken is Broken.CURSOR_OUT_OF_ORDER and is_finished(world, state, listener, youngest):
            chunk, rest = youngest._replace(after=youngest.earlier.after), None
    if not is_finished(world, state, listener, chunk):
        return
    progress = Progress.DONE if chunk.end < 0 else Progress.RUNNING
    one = RecordWrite(
        Late.CURSOR, listener.term, index, chunk.begun, chunk.end, chunk.until, time=chunk.scanned, state=progress,
        after=chunk.after,
    )  # fmt: skip
    after = landed(world, state, one)
    if after is state:
        if state.records[index].epoch == listener.term:  # it has passed it already, or is not to be ended now
            yield Step("forget", chunk), with_listener(state, listener, with_chunk(listener, index, None))
        return  # refused: not mine
    yield from write(world, state, [one], with_listener(after, listener, with_chunk(listener, index, rest)))


def is_finished(world: World, state: State, listener: Listener, chunk: Chunk) -> bool:
    """Tell whether all items of a chunk are appended and secured."""
    return chunk.appended and all(is_secured(world, state, listener, each) for each in chunk.done)


def is_secured(world: World, state: State, listener: Listener, item: Item) -> bool:
    if world.broken is Broken.CURSOR_AT_APPEND:
        return True
    index = partition_of(state, item.key)
    partition = state.partitions[index]
    reached: Token = partition.token
    claim = partition.claim
    if world.broken is Broken.CURSOR_LOCAL and claim is not None and claim.handled:
        reached = claim.item.token
    inserted: Token = min(listener.stored[index], partition.spilled)
    if world.broken is Broken.CURSOR_AT_INSERT:
        inserted = listener.stored[index]
    return item.token <= reached or item.token <= inserted


# === all other rules ===

# --- terms --------------------------------------------------------------------------------------------------


def take_over(world: World, state: State, listener: Listener) -> Steps:
    """First the records of snapshots, then the partitions: whose record is raised last could still move its cursor.

    What is claimed goes on.
    """
    if state.epoch != listener.term:
        return
    if listener.stage == 0:
        ready = listener._replace(stage=1, chunks=(None,) * world.snapshots)
        after = with_listener(state, listener, ready)
        if world.broken is not Broken.RECORDS_LAST:
            stopped = world.broken is not Broken.STOPPED_STAYS
            after = with_raised_records(after, listener.term, stopped=stopped)
        yield Step("take records over", ready), after
        return
    partitions = tuple(each._replace(epoch=listener.term) for each in state.partitions)
    ready = opened(state, listener, forget=False)._replace(stage=2)
    yield Step("take over", ready), with_listener(state, listener, ready)._replace(partitions=partitions)


def look(world: World, state: State, listener: Listener) -> Steps:
    """The leader raises the record of a snapshot that was asked for, or is resumed, and carries an older term."""
    for index, record in enumerate(state.records):
        if record.state is Progress.RUNNING and record.epoch < listener.term and world.broken is Broken.STOPPED_STAYS:
            yield Step("look", record), with_record(state, index, record._replace(epoch=listener.term))


def opened(state: State, listener: Listener, *, forget: bool = True) -> Listener:
    """Return a listener that reads from the watermark on and has dropped the chunks that were under way."""
    count = len(state.partitions)
    chunks = (None,) * len(listener.chunks) if forget else listener.chunks
    place = state.watermark
    return listener._replace(cursor=place.time, buffers=((),) * count, stored=(START,) * count, chunks=chunks)


# --- the stream ---------------------------------------------------------------------------------------------


def read(world: World, state: State, listener: Listener) -> Steps:
    """The listener reads on: what is elsewhere, in one go; or one change."""
    onward = listener
    while may_read(world, state, onward):
        onward = step_on(world, state, onward)
        moved_on = state.oplog[onward.cursor - 1] != MARK
        if moved_on or any(each is not None for each in onward.chunks):
            break
    if onward is not listener:
        yield Step("read", onward), with_listener(state, listener, onward)


def may_read(world: World, state: State, listener: Listener) -> bool:
    """Tell whether there is an entry to read, and room for it. No chunk is waited for."""
    if listener.cursor >= state.majority:
        return False
    is_change = key_of(state.oplog[listener.cursor]) is not None
    return not (world.room and is_change) or has_room(world, state, listener, 1)


def step_on(world: World, state: State, listener: Listener) -> Listener:
    """Return a listener that has read one more entry: first what lies before it, then what the entry says."""
    when = listener.cursor + 1
    for index, chunk in enumerate(listener.chunks):
        if chunk is not None and not chunk.appended and 0 <= chunk.time < when and chunk.read >= 0:
            listener = with_appended(world, state, listener, index, chunk)
    listener = listener._replace(cursor=when)
    entry = state.oplog[when - 1]
    if entry in {DROP, AWAY, BACK}:
        for index, chunk in enumerate(listener.chunks):
            if chunk is not None and not chunk.appended and is_spoiled(world, chunk, when):
                listener = without_chunk(listener, index)
    key = key_of(entry)
    if key is None:
        return listener
    value = value_at(world, state, key, state.majority if world.lookup and entry > 0 else when)
    assert value is not None
    for index, chunk in enumerate(listener.chunks):
        if chunk is not None and not chunk.appended and counts(world, chunk, entry, when):
            others = {each for each in chunk.changes if each[0] != key}
            listener = with_chunk(listener, index, chunk._replace(changes=frozenset(others | {(key, when)})))
    return buffered(state, listener, Item(Token(when), key, value, is_partial(world, state, when)))


def store_watermark(world: World, state: State, listener: Listener) -> Steps:
    """The place before the first change that is not complete. Items do not count: the cursor protects them."""
    waiting = [
        item.token.time - 1
        for index in range(len(state.partitions))
        for item in listener.buffers[index]
        if (item.token.number == 0 or world.broken is Broken.ITEMS_HOLD) and not is_safe(state, listener, item)
    ]
    place = Token(min([listener.cursor, *waiting]))
    if not world.restarts and not is_over(world, state, listener):
        return  # nobody would notice
    if world.broken is Broken.WATERMARK_AT_ITEM:
        place = max([Token(place.time - 1), *(each.token for each in state.partitions if each.token < place)])
    if place > state.watermark:
        one = Write(stores.Late.WATERMARK, listener.term, place=place)
        yield from write(world, state, [one], landed(world, state, one))


def is_over(world: World, state: State, listener: Listener) -> bool:
    """Tell whether everything was written and read, and no snapshot can go on."""
    ended = all(chunk is None or chunk.appended for chunk in listener.chunks)
    return ended and listener.cursor == len(state.oplog) and state.written == len(world.writes)


def is_safe(state: State, listener: Listener, item: Item) -> bool:
    """Tell whether an item or change is committed, or inserted by this term at or below the mark."""
    index = partition_of(state, item.key)
    partition = state.partitions[index]
    safe: Token = max(partition.token, min(listener.stored[index], partition.spilled))
    return item.token <= safe


# --- storing and running ------------------------------------------------------------------------------------


def insert(world: World, state: State, listener: Listener, index: int) -> Steps:
    """What is buffered is stored where the scenario lets it, and always behind what is stored."""
    items = unstored(state, listener, index)
    if items and (world.spills or state.partitions[index].has_stored):
        urgent = not has_room(world, state, listener, 1)
        yield from stores.insert(world, state, listener, index, items, urgent=urgent)


def mark(world: World, state: State, listener: Listener, index: int) -> Steps:
    place = max((each.token for each in listener.buffers[index] if each.token <= listener.stored[index]), default=START)
    yield from stores.mark(world, state, listener, index, place)


def next_item(state: State, listener: Listener, index: int) -> Item | None:
    """Return what a partition runs next: from the collection while the mark lies ahead, else from memory.

    From there only what lies before the first that this term has read and not inserted yet.
    """
    partition = state.partitions[index]
    if partition.has_stored:
        waiting = unstored(state, listener, index)
        reach = [Token(listener.cursor), *(item.token._replace(number=item.token.number - 1) for item in waiting[:1])]
        return next(iter(stored(state, index, partition.token, min([partition.spilled, *reach]))), None)
    return next((each for each in listener.buffers[index] if each.token > partition.token), None)


def dispatch(state: State, listener: Listener, index: int) -> Steps:
    partition = state.partitions[index]
    item = next_item(state, listener, index)
    if item is not None and partition.head is None:
        yield from stores.dispatch(state, Message(index, listener.term, partition.token, item))


# --- executions ---------------------------------------------------------------------------------------------


def deliver(world: World, state: State) -> Steps:
    """A worker gets a message, for the first time or again, and claims; without a match it drops it."""
    for message, partition in stores.claimable(state):
        item = message.item
        starts = counted(state.starts, item.key) if item.token.number else state.starts
        after = with_partition(state, message.partition, partition._replace(claim=Claim(item)))._replace(starts=starts)
        yield Step("start", message), after if world.transactional else copied(after, item)


def copied(state: State, item: Item) -> State:
    seen = put(state.seen, item.key, abs(item.value))
    if item.partial and state.copy[item.key] is None:  # a change of what was never given makes no document
        return state._replace(seen=seen)
    return state._replace(copy=put(state.copy, item.key, item.value), seen=seen)


def execute(world: World, state: State, index: int) -> Steps:
    """An execution ends: committed; or it fails, or its claim lapses."""
    claim = state.partitions[index].claim
    if claim is None:
        return
    item = claim.item
    done = copied(state, item) if world.transactional else state
    yield Step("commit", item, fair=claim.live), stores.ended(done, index, item)
    if claim.handled:
        yield Step("rollback", item, fair=False), stores.with_claim(state, index, handled=False, live=False)
    if claim.handled or not claim.live:
        return
    if can(world, state, Fault.ROLLBACK):
        seen = stores.with_claim(state, index, handled=True)
        yield Step("commit, not in the majority", item, fair=False), spent(seen)
    if can(world, state, Fault.LAPSE):
        yield Step("lapse", item, fair=False), spent(stores.with_claim(state, index, live=False))
    if can(world, state, Fault.HALT):
        yield Step("halt", item, fair=False), spent(stores.halted(state, index, item))
    if can(world, state, Fault.LETTER):
        yield Step("dead letter", item, fair=False), set_aside(world, spent(state), index, item)


def set_aside(world: World, state: State, index: int, item: Item) -> State:
    """Return the state with a dead letter in place of what a partition ran or stood at."""
    by_key = item.token.number and world.broken is not Broken.LETTER_BY_TOKEN
    letter = (item.key, None if by_key else item.token)
    return stores.ended(state._replace(letters=state.letters | {letter}), index, item)


# --- what may go wrong, and persons -------------------------------------------------------------------------


def write_source(world: World, state: State) -> Steps:
    if state.written < len(world.writes):
        entry = world.writes[state.written]
        yield Step("source", len(state.oplog) + 1), appended(world, state, entry)._replace(written=state.written + 1)


def replicate(state: State) -> Steps:
    if state.majority < len(state.oplog):
        yield Step("replicate"), state._replace(majority=len(state.oplog))


def elect(world: World, state: State) -> Steps:
    """A new primary has not got what is not in the majority; its clock may be behind, so times come again."""
    if state.majority < len(state.oplog) and can(world, state, Fault.ELECTION):
        yield Step("elect", fair=False), state._replace(oplog=state.oplog[: state.majority], budget=state.budget - 1)


def reopen(world: World, state: State, listener: Listener) -> Steps:
    """The stream breaks: the listener opens it again at the watermark and forgets what it had read and stored."""
    again = opened(state, listener, forget=world.broken is not Broken.CHUNK_SURVIVES)
    if again != listener and can(world, state, Fault.REOPEN):
        yield Step("reopen", again, fair=False), spent(with_listener(state, listener, again))


def command(world: World, state: State, index: int) -> Steps:
    """An operator retries what a partition has halted at, or sets it aside."""
    partition = state.partitions[index]
    head = partition.head
    if not world.operator or head is None:
        return
    flowing = partition._replace(head=None)
    yield Step("retry", head, fair=False), with_partition(state, index, flowing)
    yield Step("set aside", head, fair=False), set_aside(world, state, index, head)


def stop_or_resume(world: World, state: State) -> Steps:
    """Somebody lets a snapshot begin no chunk any more; and lets it go on, which is forgotten by nobody."""
    for index, record in enumerate(state.records):
        if record.state is Progress.RUNNING and can(world, state, Fault.STOP):
            stopped = with_record(state, index, record._replace(state=Progress.STOPPED))
            yield Step("stop", record, fair=False), spent(stopped)
        if record.state is Progress.STOPPED:
            yield Step("resume", record), with_record(state, index, record._replace(state=Progress.RUNNING))


def rewind(world: World, state: State) -> Steps:
    """An operator sends the subscription back, in one transaction, which is a term of its own.

    Nothing moves forward. Documents stay, and a mark that lies ahead; one that was reached goes, since what it stood
    for may be removed. The records keep what is scanned, and carry the new term.
    """
    if world.rewind is None or state.rewound:
        return
    place = Token(world.rewind)
    if all(each.token <= place for each in state.partitions):
        return
    epoch = state.epoch + 1
    after = state._replace(
        epoch=epoch, watermark=min(state.watermark, place), rewound=True,
        partitions=tuple(sent_back(world, each, place)._replace(epoch=epoch) for each in state.partitions),
        seen=(-1,) * world.keys,
    )  # fmt: skip
    yield Step("rewind", fair=False), with_raised_records(after, epoch)


def sent_back(world: World, partition: Partition, place: Token) -> Partition:
    if partition.token <= place:
        return partition._replace(claim=None)
    reached = partition.spilled <= partition.token and world.broken is not Broken.REWIND_KEEPS_MARK
    spilled = START if reached else partition.spilled
    return partition._replace(token=place, spilled=spilled, claim=None, head=None)


# === all steps ===


def led(world: World, state: State, listener: Listener) -> Steps:
    mine = state.epoch == listener.term
    for index in range(world.snapshots if listener.stage else 0):
        if mine or state.records[index].epoch == listener.term or world.broken is Broken.CURSOR_IGNORES_EPOCH:
            yield from begin(world, state, listener, index)
            yield from answer(world, state, listener, index)
            yield from scan(world, state, listener, index)
            yield from read_chunk(world, state, listener, index)
            yield from pass_on(world, state, listener, index)
            yield from move_cursor(world, state, listener, index)
    if not listener.leads:
        return
    yield from read(world, state, listener)
    if mine:
        yield from look(world, state, listener)
        yield from store_watermark(world, state, listener)
        yield from reopen(world, state, listener)
    for index, partition in enumerate(state.partitions):
        if partition.epoch == listener.term:
            yield from insert(world, state, listener, index)
            yield from mark(world, state, listener, index)
            yield from stores.clear(world, state, listener, index)
            yield from stores.remove(world, state, listener, index, partition.token)
            yield from dispatch(state, listener, index)


def steps(world: World, state: State) -> Steps:
    for step, after in all_steps(world, state):
        acting = (trimmed(world, after, each) for each in after.listeners if may_act(world, after, each))
        yield step, stores.plain(world, after, acting, may_land)


def all_steps(world: World, state: State) -> Steps:
    yield from acquire(world, state, lambda term, _: Listener(term))
    for listener in state.listeners:
        if not listener.leads:
            yield from take_over(world, state, listener)
        yield from led(world, state, listener)
    yield from deliver(world, state)
    for index in range(len(state.partitions)):
        yield from execute(world, state, index)
        yield from command(world, state, index)
    yield from write_source(world, state)
    yield from replicate(state)
    yield from elect(world, state)
    yield from land(world, state, landed)
    yield from stop_or_resume(world, state)
    yield from rewind(world, state)


def may_act(world: World, state: State, listener: Listener) -> bool:
    """Tell whether a listener may still find a document that carries its term, or is about to."""
    if world.broken is Broken.CURSOR_IGNORES_EPOCH and any(listener.chunks):
        return True
    if listener.term == state.epoch or any(each.epoch == listener.term for each in state.partitions):
        return True
    return any(each.epoch == listener.term for each in state.records)


def trimmed(world: World, state: State, listener: Listener) -> Listener:
    buffers = listener.buffers
    if len(buffers) == len(state.partitions):
        buffers = tuple(
            tuple(item for item in items if item.token > partition.token)
            for items, partition in zip(buffers, state.partitions, strict=True)
        )
    if world.broken is Broken.CURSOR_IGNORES_EPOCH or world.broken is Broken.RECORDS_LAST:
        return listener._replace(buffers=buffers)
    chunks = tuple(
        chunk if record.epoch == listener.term else None
        for chunk, record in zip(listener.chunks, state.records, strict=False)
    )
    return listener._replace(buffers=buffers, chunks=chunks)


def may_land(world: World, state: State, one: Write | RecordWrite) -> bool:
    if isinstance(one, RecordWrite):
        return world.broken is Broken.CURSOR_IGNORES_EPOCH or one.term == state.records[one.snapshot].epoch
    return stores.may_land(state, one)


# === what is judged ===

Move = exploration.Move[World, State]


def no_loss(move: Move) -> Iterator[str]:
    """P1: a position never passes a change, or something stored under the mark, that was not run."""
    before, after = move.before, move.after
    if move.step.kind == "rewind":
        return
    for index, (old, new) in enumerate(zip(before.partitions, after.partitions, strict=True)):
        if old.token >= new.token:
            continue
        for when in range(old.token.time + 1, new.token.time + 1):
            key = key_of(after.oplog[when - 1])
            if key is not None and partition_of(after, key) == index and old.token < Token(when) < new.token:
                yield f"partition {index} has passed the change at {when}, which nobody handled"
        for item in stored(before, index, old.token, min(new.token, old.spilled)):
            if item.token < new.token and is_owed(move.world, after, item):
                yield f"partition {index} has passed {item}, which is stored"


def is_owed(world: World, state: State, item: Item) -> bool:
    """Tell whether something stored has to be run: a change, or an item behind which a cursor counts on it."""
    passed = any(record.last >= item.key for record in state.records)
    return not item.token.number or (passed and not is_cared_for(world, state, item.key))


def nothing_missed(move: Move) -> Iterator[str]:
    """P1: when a snapshot is done, every document has been delivered, or its last change was; or it is stored."""
    for index, (old, new) in enumerate(zip(move.before.records, move.after.records, strict=True)):
        if old.state is not Progress.DONE is new.state:
            for key in range(move.world.keys):
                if move.world.matched(index, key) and not is_cared_for(move.world, move.after, key):
                    yield f"the snapshot is done, and key {key} was never delivered"


def is_cared_for(world: World, state: State, key: int) -> bool:
    """Tell whether a key that exists was delivered, or a change or an item of it is certain to come."""
    if not exists(value_at(world, state, key, state.majority)) or state.copy[key] is not None or settled(state, key):
        return True
    partition = state.partitions[partition_of(state, key)]
    if partition.head is not None and partition.head.key == key:
        return True
    waiting = stored(state, partition_of(state, key), partition.token, partition.spilled)
    if any(item.key == key and not item.partial for item in waiting):
        return True
    ahead = range(max(partition.token.time, state.watermark.time, 0) + 1, len(state.oplog) + 1)
    return any(key_of(state.oplog[when - 1]) == key and not is_partial(world, state, when) for when in ahead)


def settled(state: State, key: int) -> bool:
    """Ghost: whether something of a key was set aside, so that its copy is a person's business."""
    return any(each == key for each, _ in state.letters)


def order(move: Move) -> Iterator[str]:
    """P2: what handlers of a key see is never older than what they have seen before (but by a rewind)."""
    if move.step.kind in {"start", "commit"}:
        for key, (old, new) in enumerate(zip(move.before.seen, move.after.seen, strict=True)):
            if new < old:
                yield f"key {key} goes back from {old} to {new}"


def records_never_back(move: Move) -> Iterator[str]:
    """P4: no snapshot goes back, and no stream is opened at an item."""
    if move.after.watermark.number:
        yield f"the watermark is {move.after.watermark}, at which no stream can be opened"
    for old, new in changed(move.before.records, move.after.records):
        if (new.epoch, new.begun, new.last) < (old.epoch, old.begun, old.last) or new.last < old.last:
            yield f"a snapshot has gone back from {old} to {new}"
        if old.state in {Progress.DONE, Progress.GONE} and new.state is not old.state:
            yield "a snapshot that had ended has changed its state"


def cursor(move: Move) -> Iterator[str]:
    """P5: what a cursor has passed was delivered, or is stored under the mark, or a later change of it is to come."""
    for index, (old, new) in enumerate(zip(move.before.records, move.after.records, strict=True)):
        for key in range(old.last + 1, new.last + 1):
            if move.world.matched(index, key) and not is_cared_for(move.world, move.after, key):
                yield f"the cursor has passed key {key}, which nobody was given"


def bounded_duplicates(move: Move) -> Iterator[str]:
    """P6: an existing document starts once per snapshot, and for each at most once more per fault, or take-over."""
    if move.step.kind == "start":
        world, state = move.world, move.after
        faults = world.budget - state.budget + world.delays - state.delays + max(state.epoch - 1, 0)
        for key, count in enumerate(state.starts):
            if count > world.snapshots * (1 + faults):
                yield f"key {key} was started {count} times as an existing document"


def one_letter(move: Move) -> Iterator[str]:
    """P13: an existing document is set aside once, however often it was read."""
    if move.after.letters != move.before.letters:
        changes = {when + 1 for when, entry in enumerate(move.after.oplog) if key_of(entry) is not None}
        for key in range(move.world.keys):
            letters = [
                token
                for each, token in move.after.letters
                if each == key and (token is None or token.number or token.time not in changes)
            ]
            if len(letters) > 1:
                yield f"key {key} was set aside {len(letters)} times"


def bounded_memory(move: Move) -> Iterator[str]:
    """P12: a listener never keeps more than its share."""
    if move.world.room:
        for listener in move.after.listeners:
            if listener.leads and listener.term == move.after.epoch:
                count = in_memory(move.after, listener)
                if count > move.world.room:
                    yield f"a listener keeps {count}"


def bounded_scan(move: Move) -> Iterator[str]:
    """P12: a cursor passes nothing that was inserted behind all that was there at the T of the first chunk recorded.

    Else who inserts faster than chunks are handled keeps a snapshot from ending.
    """
    for old, new in zip(move.before.records, move.after.records, strict=True):
        there = (key for key in range(move.world.keys) if exists(value_at(move.world, move.after, key, new.first)))
        if new.last > old.last and new.last > max(there, default=-1):
            yield f"the cursor has passed key {new.last}, which was inserted behind the end of {new.first}"


def left_wrong(world: World, state: State) -> Iterator[str]:
    """P1, where nothing more will happen: the copy of every document is what the source has."""
    for key in range(world.keys):
        value = value_at(world, state, key, len(state.oplog))
        wanted = any(world.matched(index, key) for index in range(world.snapshots))
        if settled(state, key) or behind(state, key) or not wanted or state.copy[key] == value:
            continue
        unknown = state.copy[key] is None and not exists(value)
        gone = any(record.state is Progress.GONE for record in state.records)
        if not unknown and not gone and all(record.state is not Progress.RUNNING for record in state.records):
            yield f"key {key} is {value} in the source, and {state.copy[key]} in the copy"


def behind(state: State, key: int) -> bool:
    """Ghost: whether something of a key is still to come where its partition stands."""
    return state.partitions[partition_of(state, key)].head is not None


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12, where nothing more will happen: every snapshot has ended, and nothing has to wait for what stands."""
    listener: Listener | None = stores.leader(state)
    if listener is None:
        yield "nobody is in office"
        return
    stands = {index for index, each in enumerate(state.partitions) if each.head is not None}
    for record in state.records:
        if record.state is Progress.RUNNING and (not stands or world.spills):
            yield f"a snapshot stands for ever: {record}"
        if record.state is Progress.GONE and not {DROP, AWAY} & set(state.oplog):
            yield "a snapshot says that its source is gone"
    held = [item.token.time for index in stands for item in listener.buffers[index] if not item.token.number]
    held += [each.head.token.time for each in state.partitions if each.head is not None and not each.head.token.number]
    place = min([len(state.oplog) + 1, *([] if world.spills else held)]) - 1
    if state.watermark.time < place:
        yield f"the watermark stands at {state.watermark} for ever"
    for index, partition in enumerate(state.partitions):
        if partition.spilled > START and index not in stands:
            yield f"the mark of partition {index} stands at {partition.spilled} for ever"
        for item in stored(state, index, START, partition.token):
            yield f"nobody removes {item}"


SNAPSHOT_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss, nothing_missed),
        "P2": (order,),
        "P4": (stores.never_back, records_never_back),
        "P5": (cursor,),
        "P6": (bounded_duplicates,),
        "P12": (bounded_memory, bounded_scan),
        "P13": (one_letter,),
    },
    at_rest={"P1": left_wrong, "P12": left_undone},
)
