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
- *Repartitioning* is the business of ``spill_model``: new partitions begin where everything is done.

Each rule is a generator of steps with the states they lead to. A variant (``Broken``) is one ``if`` beside the rule it
breaks, so that the difference can be read.
Fields marked "ghost" are never read by a rule: they are the memory of the oracles.

What the model does, as MongoDB's updates (v: my version; b: the chunk's number; r: the record's ``_id``)::

    raise    take-over, before any partition is touched, and in a rewind's transaction; also of those that are stopped
             {_id: {$in: mine}, epoch: {$lt: v}}                   {$set: {epoch: v}}                  w majority
    begin    {_id: r, epoch: v, state: "running", begun: b - 1}    {$set: {begun: b}}                  w majority
             n = 1: T = reply.operationTime; n = 0: look again (another epoch: not mine, stop; begun: b: as if the
             answer had been lost, begin b + 1). The reader stands still from sending this until T is known.
    read     find {$expr: {$and: [{$gt: ["$_id", {$literal: lastId}]}, {$lte: ["$_id", {$literal: untilId}]}]}},
             sort {_id: 1}, limit N, hint {_id: 1}, readConcern {level: "snapshot", atClusterTime: T}, within a time:
             else T is given up, begin b + 1. Of a record without ``untilId``, before it and as of the same T:
             find {}, sort {_id: -1}, limit 1
    pass     {_id: r, epoch: v, begun: b}                          {$inc: {passed: 1}}                 after the read
             again, until the reader is behind T; n = 0: not mine, stop
    cursor   {_id: r, epoch: v, begun: b, moved: {$ne: b}}         {$set: {lastId: end, moved: b}, $inc: {done: n}}
             whether it runs or was stopped meanwhile; where the record had no ``untilId``, it is set in the same write
    finish   {_id: r, epoch: v, begun: b, state: "running"}        {$set: {state: "done" | "source gone"}}
             of an empty answer, when the reader is behind a write that came after the read
    rewind   of each partition that goes back, besides position, claim, head and fence
             spilled: {$cond: [{$lte: ["$spilled.to", "$resumeToken._data"]}, null, "$spilled"]}      (old position)

``passed`` and ``moved`` are not in the model, where every ``pass`` is an entry of the oplog and nothing is counted: an
update that changes nothing writes no entry, and a cursor whose answer was lost would count its documents twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property import exploration
from tests.property.exploration import Model, Step, gone_back, put
from tests.property.stores import acquire, can, in_office, land, spent, with_listener, with_partition, write

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
    STOPPED_STAYS = "a take-over raises the records of snapshots that run, and not of those that are stopped"
    REWIND_KEEPS_MARK = "a rewind leaves a mark that was reached"
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
        partitions: How many there are.
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
    partitions: int = 1
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

    def matched(self, snapshot: int, key: int) -> bool:
        """Tell whether a snapshot wants a document."""
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


class Message(NamedTuple):
    """A run in the broker: it can claim while its partition stands at ``base``."""

    partition: int
    term: int
    base: Token
    item: Item


class Write(NamedTuple):
    """A write on its way to a snapshot or partition (``target``), guarded by term, and by begun."""

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
        watermark=Token(-1) if world.broken is Broken.PINNED_LATE else START,
        partitions=(Partition(),) * world.partitions, documents=frozenset(), records=(Record(),) * world.snapshots,
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


# === the writes, and what each does where it lands, if its own guard lets it ===


def landed(world: World, state: State, one: Write) -> State:
    """Return the state after a write, which its own guard may have refused."""
    if one.kind is Late.WATERMARK:
        matches = state.epoch == one.term and one.token > state.watermark
        return state._replace(watermark=one.token) if matches else state
    if one.kind in {Late.BEGIN, Late.PASS, Late.CURSOR}:
        return recorded(world, state, one)
    if one.kind is Late.INSERT:
        return inserted(state, one)
    if one.kind is Late.REMOVE:
        kept = (each for each in state.documents if not is_removed(world, each, one))
        return state._replace(documents=frozenset(kept))
    partition = state.partitions[one.target]
    grows = partition.epoch == one.term and one.token > partition.spilled
    return with_partition(state, one.target, partition._replace(spilled=one.token)) if grows else state


def recorded(world: World, state: State, one: Write) -> State:
    """Return the state after a write on the record of a snapshot: an entry of the oplog, if it matches."""
    if not matches(world, state, one):
        return state
    record = state.records[one.target]
    if one.kind is Late.BEGIN:
        after = with_record(state, one.target, record._replace(begun=record.begun + 1))
        return appended(world, after, MARK)
    if one.kind is Late.PASS:
        return appended(world, state, MARK)
    ended = one.state if one.state is not Progress.RUNNING else record.state
    record = record._replace(state=ended)
    if one.end >= 0:
        first = record.first if record.first >= 0 else one.time
        record = record._replace(last=one.end, until=one.until, first=first)
    return with_record(state, one.target, record)


def matches(world: World, state: State, one: Write) -> bool:
    """Tell whether the guard of a write on a record matches."""
    record = state.records[one.target]
    starts_or_ends = one.kind is Late.BEGIN or (one.kind is Late.CURSOR and one.state is not Progress.RUNNING)
    if starts_or_ends and record.state is Progress.STOPPED:
        return False
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_UNGUARDED:
        return True
    epoch = record.epoch == one.term or (one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_EPOCH)
    begun = record.begun == one.guard
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_BEGUN:
        begun = True
    if one.kind is Late.BEGIN and world.broken is Broken.BEGIN_COUNTS_UP:
        begun = True
    return epoch and begun


def inserted(state: State, one: Write) -> State:
    """Return the state after something was stored, or the term of what is there was raised; its bytes stay."""
    assert one.item is not None
    there = next(
        (each for each in state.documents if each.partition == one.target and each.item.token == one.item.token), None
    )
    if there is None:
        return state._replace(documents=state.documents | {Document(one.target, one.item, one.term)})
    if there.term >= one.term:
        return state
    return state._replace(documents=state.documents - {there} | {there._replace(term=one.term)})


def is_removed(world: World, document: Document, one: Write) -> bool:
    """Tell whether a removal takes a document away."""
    if document.partition != one.target or document.term > one.term:
        return False
    token = document.item.token
    prefixed = token.number < 0 and one.token == (token.time, -100) and world.broken is Broken.TOKEN_OF_NEXT
    return token <= one.token or prefixed


# === the rules ===

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


def with_raised_records(state: State, term: int, *, stopped: bool = True) -> State:
    """Return the state in which the records of all snapshots carry a term, those too that are ``stopped``."""
    return state._replace(
        records=tuple(
            each._replace(epoch=term) if stopped or each.state is not Progress.STOPPED else each
            for each in state.records
        )
    )


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
    if state.watermark.time < 0:  # only where the start is pinned late
        if any(each is not None and each.read >= 0 for each in listener.chunks):
            pinned = state._replace(watermark=Token(state.majority))
            yield Step("pin"), with_listener(pinned, listener, listener._replace(cursor=state.majority))
        return
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


def has_room(world: World, state: State, listener: Listener, more: int) -> bool:
    """Tell whether so much more may be kept in memory, beside what is there and what is begun."""
    begun = sum(world.chunk for each in listener.chunks if each is not None and not each.appended)
    return not world.room or in_memory(state, listener) + begun + more <= world.room


def may_begin(world: World, state: State, listener: Listener) -> bool:
    """Tell whether there is room for a chunk, and for one change more: what lies before T has to be read first."""
    if world.broken is Broken.UNBOUNDED:
        return True
    more = 0 if world.broken is Broken.ROOM_FOR_CHUNK_ONLY else 1
    return has_room(world, state, listener, world.chunk + more)


def in_memory(state: State, listener: Listener) -> int:
    """Return how much a listener keeps: what is stored is read back from there."""
    return sum(
        item.token > max(listener.stored[index], partition.token)
        for index, partition in enumerate(state.partitions)
        for item in listener.buffers[index]
    )


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
                listener = with_chunk(listener, index, None)
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


def is_spoiled(world: World, chunk: Chunk, when: int) -> bool:
    """Tell whether a move that is taken in makes a chunk that is read begin anew."""
    if world.broken is Broken.END_AT_L:
        return when <= chunk.low
    return world.broken not in {Broken.EMPTY_IS_END, Broken.UUID_IS_ENOUGH}


def counts(world: World, chunk: Chunk, entry: int, when: int) -> bool:
    """Tell whether a change that is taken in may drop an item: it is in the window, or was looked up meanwhile."""
    if world.broken is Broken.DELETION_IGNORED and entry < 0:
        return False
    return when > chunk.low or (world.lookup and world.broken is not Broken.LOOKED_UP_KEPT)


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
    if world.broken is Broken.AGAIN_AS_READ:
        items, lost = tuple(each for each in chunk.items if each in items or each.key in lost), frozenset()
    if world.broken is Broken.NOT_AGAIN:
        lost = frozenset()
    for item in items:
        listener = buffered(state, listener, item)
    awaited = chunk.items if world.broken is Broken.DROPPED_AWAITED else items
    chunk = chunk._replace(items=(), done=(*chunk.done, *awaited), changes=frozenset())
    if lost:
        chunk = chunk._replace(again=lost, low=chunk.time, read=-1, time=-1, high=-1, sent=False)
    else:
        chunk = chunk._replace(appended=True, again=frozenset())
    return with_chunk(listener, index, chunk)


def buffered(state: State, listener: Listener, item: Item) -> Listener:
    """Return a listener with something more in a buffer, unless it lies at or below the position."""
    index = partition_of(state, item.key)
    if item.token <= state.partitions[index].token:
        return listener
    return listener._replace(buffers=put(listener.buffers, index, (*listener.buffers[index], item)))


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
    if place > state.watermark >= START:
        one = Write(Late.WATERMARK, listener.term, 0, token=place)
        yield from write(world, state, [one], landed(world, state, one))


def is_over(world: World, state: State, listener: Listener) -> bool:
    """Tell whether everything was written and read, and no snapshot can go on."""
    ended = all(chunk is None or chunk.appended for chunk in listener.chunks)
    return ended and listener.cursor == len(state.oplog) and state.written == len(world.writes)


def is_safe(state: State, listener: Listener, item: Item) -> bool:
    """Tell whether an item or change is committed, or inserted by this term at or below the mark."""
    index = partition_of(state, item.key)
    partition = state.partitions[index]
    return item.token <= partition.token or item.token <= min(listener.stored[index], partition.spilled)


# --- a chunk ------------------------------------------------------------------------------------------------


def begin(world: World, state: State, listener: Listener, index: int) -> Steps:
    """One update of the record, compared with what was seen of it; its own place in the oplog is L."""
    record, chunk = state.records[index], listener.chunks[index]
    ahead = world.broken is Broken.BEGIN_AHEAD and chunk is not None and chunk.appended
    if record.state is not Progress.RUNNING or not (chunk is None or ahead):
        return
    if listener.stage < (1 if world.broken is Broken.BEGIN_BEFORE_TAKE_OVER else 2):
        return
    if listener.stage == 2 and not may_begin(world, state, listener):
        return
    mine = record.epoch == listener.term
    if world.broken is Broken.RECORDS_LAST and state.epoch == listener.term:
        mine, state = True, with_raised_records(state, listener.term)
    if not mine:
        return
    if not is_there(state):
        yield Step("source gone"), with_record(state, index, record._replace(state=Progress.GONE))
        return
    one = Write(Late.BEGIN, listener.term, index, record.begun)
    after = landed(world, state, one)
    chunk = Chunk(record.begun + 1, len(after.oplog))
    if Fault.ANSWERED_LATER not in world.faults:
        chunk = chunk._replace(low=len(after.oplog))  # one step for two that nothing can part
    yield from write(world, state, [one], with_listener(after, listener, with_chunk(listener, index, chunk)))


def answer(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The answer to a begin arrives: its own place; or, when it was asked for again, the place of that."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.low >= 0:
        return
    known = with_low(world, chunk, chunk.own)
    yield Step("answer", known), with_listener(state, listener, with_chunk(listener, index, known))
    later = with_low(world, chunk, len(state.oplog))
    if later.low > known.low and state.budget and Fault.ANSWERED_LATER in world.faults:
        after = with_listener(state, listener, with_chunk(listener, index, later))
        yield Step("answer later", later, fair=False), spent(after)


def with_low(world: World, chunk: Chunk, low: int) -> Chunk:
    """Return a chunk that knows L, and forgets the changes before it."""
    kept = frozenset(each for each in chunk.changes if world.lookup or each[1] > low)
    return chunk._replace(low=low, changes=kept)


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
    if chunk is None or chunk.low < 0 or chunk.scanned >= 0 or not may_scan(world, chunk):
        return
    if chunk.low > len(state.oplog):  # in no history: the server waits in vain, until the time for the read is over
        yield Step("give up", chunk), with_listener(state, listener, with_chunk(listener, index, None))
        return
    if state.majority < chunk.low and world.broken is not Broken.READ_LOCAL:
        return
    time = len(state.oplog) if world.broken is Broken.READ_LOCAL else state.majority
    record = state.records[index]
    chunk = chunk._replace(until=until_of(world, state, listener, record, time), scanned=time)
    scanned = [key for key in there_at(world, state, record.last, time) if is_within(world, key, chunk.until)]
    if world.broken is Broken.UNTIL_OF_CHUNK and record.until < 0 and scanned:
        chunk = chunk._replace(until=scanned[: world.chunk][-1])
    first = chunk.low if world.broken is Broken.UNTIL_OF_EACH_TERM else listener.first
    listener, old = listener._replace(first=first), listener
    state = with_listener(state, old, listener)
    yield scanned_to(world, state, listener, index, chunk, scanned[: world.chunk])
    if state.budget and Fault.SHORT in world.faults and len(scanned) > 1:
        step, after = scanned_to(world, state, listener, index, chunk, scanned[:1])
        yield step._replace(fair=False), spent(after)
    if state.budget and Fault.UNREADABLE in world.faults:
        after = with_listener(state, listener, with_chunk(listener, index, None))
        yield Step("unreadable", chunk, fair=False), spent(after)


def may_scan(world: World, chunk: Chunk) -> bool:
    """Tell whether a chunk may be read: but for a variant, H is not known by then."""
    return world.broken is not Broken.H_BEFORE_READ or chunk.time >= 0


def scanned_to(
    world: World, state: State, listener: Listener, index: int, chunk: Chunk, scanned: list[int]
) -> tuple[Step, State]:
    """The listener knows how far a chunk goes."""
    final = world.broken is Broken.FEWER_IS_END and len(scanned) < world.chunk
    final = final or (
        world.broken is Broken.MATCHING_NONE_IS_END and not any(world.matched(index, each) for each in scanned)
    )
    chunk = chunk._replace(end=scanned[-1] if scanned else -1, final=final)
    if not scanned:
        chunk = chunk._replace(read=chunk.scanned)
    return Step("scan", chunk), with_listener(state, listener, with_chunk(listener, index, chunk))


def read_chunk(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The documents of what was scanned, or of what is read again, numbered across all snapshots."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.scanned < 0 or chunk.read >= 0:
        return
    if chunk.low > len(state.oplog):
        yield Step("give up", chunk), with_listener(state, listener, with_chunk(listener, index, None))
        return
    if state.majority < chunk.low and world.broken is not Broken.READ_LOCAL:
        return
    time = len(state.oplog) if world.broken is Broken.READ_LOCAL else state.majority
    found = [key for key in there_at(world, state, state.records[index].last, time) if key <= chunk.end]
    wanted = [key for key in found if world.matched(index, key) and (not chunk.again or key in chunk.again)]
    items = tuple(Item(START, key, value_at(world, state, key, time) or 0) for key in wanted)
    ready = chunk._replace(items=items, read=time)
    if ready.time >= 0:
        ready = placed(world, ready, index)
    knowing = with_chunk(listener, index, ready)
    if world.broken is Broken.APPENDED_AT_ONCE:
        ready = placed(world, ready._replace(time=len(state.oplog), high=len(state.oplog)), index)
        knowing = with_appended(world, state, knowing, index, ready)
    yield Step("read chunk", ready), with_listener(state, listener, knowing)


def until_of(world: World, state: State, listener: Listener, record: Record, time: int) -> int:
    """Return the largest key to be scanned: what the record says, or else what is the largest at T."""
    anew = world.broken is Broken.UNTIL_OF_EACH_TERM and not listener.first
    if record.until >= 0 and not anew:
        return record.until
    if world.broken is Broken.NO_UNTIL:
        return -1
    if world.broken is Broken.UNTIL_BEFORE_START:
        return max((key for key in range(world.keys) if key not in world.absent | world.fresh), default=-1)
    if world.broken is Broken.UNTIL_LOCAL:
        time = len(state.oplog)
    return max(there_at(world, state, -1, time), default=-1)


def is_within(world: World, key: int, until: int) -> bool:
    """Tell whether a key is to be scanned."""
    return until < 0 or key < until or (key == until and world.broken is not Broken.UNTIL_EXCLUDED)


def there_at(world: World, state: State, last: int, time: int) -> list[int]:
    """Return the keys behind the last one that exist at a time, if the source can be found now."""
    if not is_there(state):
        return []
    first = last + 1
    keys = range(first, first if world.broken is Broken.BRACKETED and world.mixed and last >= 0 else world.keys)
    return [key for key in keys if exists(value_at(world, state, key, time))]


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
    if world.broken is Broken.TOKEN_OF_NEXT:
        return Token(time + 1, number - 100)
    return Token(time, number)


def pass_on(world: World, state: State, listener: Listener, index: int) -> Steps:
    """When the chunk is there, a write of our own is H; what moves the stream past T is written until it is past."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.appended or chunk.low < 0:
        return
    if chunk.read < 0 and (world.broken is not Broken.H_BEFORE_READ or chunk.time >= 0):
        return
    one = Write(Late.PASS, listener.term, index, chunk.begun)
    if chunk.high < 0:
        if not is_there(state) and world.broken is not Broken.EMPTY_IS_END:  # it has not its UUID any more
            yield Step("drop", chunk), with_listener(state, listener, with_chunk(listener, index, None))
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
    if len(state.oplog) > chunk.time or chunk.sent or world.broken is Broken.NO_PASS:
        return  # something lies behind it already
    sent = listener
    if world.broken is Broken.PASS_ONCE:
        sent = with_chunk(listener, index, chunk._replace(sent=True))
    base = with_listener(state, listener, sent)
    yield from write(world, base, [one], landed(world, base, one))


def move_cursor(world: World, state: State, listener: Listener, index: int) -> Steps:
    """When every item is committed, or inserted by this term at or below the mark, or superfluous: on to the next."""
    chunk = listener.chunks[index]
    if chunk is None or not chunk.appended or not all(is_secured(world, state, listener, each) for each in chunk.done):
        return
    progress, end = Progress.RUNNING, chunk.end
    if chunk.is_final:
        progress = Progress.DONE
    one = Write(Late.CURSOR, listener.term, index, chunk.begun, end=end, state=progress)
    one = one._replace(until=chunk.until, time=chunk.scanned)
    after = landed(world, state, one)
    if after is state:
        if state.records[index].state is Progress.STOPPED:  # not to be ended now: it begins anew when it goes on
            yield Step("forget", chunk), with_listener(state, listener, with_chunk(listener, index, None))
        return  # refused: not mine
    yield from write(world, state, [one], with_listener(after, listener, with_chunk(listener, index, None)))


def is_secured(world: World, state: State, listener: Listener, item: Item) -> bool:
    """Tell whether a cursor may pass an item."""
    if world.broken is Broken.CURSOR_AT_APPEND:
        return True
    index = partition_of(state, item.key)
    partition = state.partitions[index]
    reached = partition.token
    claim = partition.claim
    if world.broken is Broken.CURSOR_LOCAL and claim is not None and claim.seen:
        reached = claim.item.token
    if world.broken is Broken.CURSOR_AT_DISPATCH:
        sent = [each.item.token for each in state.messages if each.partition == index and each.term == listener.term]
        reached = max([reached, *sent])
    inserted = min(listener.stored[index], partition.spilled)
    if world.broken is Broken.CURSOR_AT_INSERT:
        inserted = listener.stored[index]
    return item.token <= max(reached, inserted)


# --- storing and running ------------------------------------------------------------------------------------


def unstored(state: State, listener: Listener, index: int) -> list[Item]:
    """Return what is in a buffer, and neither inserted by this term nor done."""
    after = max(listener.stored[index], state.partitions[index].token)
    return [item for item in listener.buffers[index] if item.token > after]


def insert(world: World, state: State, listener: Listener, index: int) -> Steps:
    """All of a partition's buffered prefix in one bulk; a document that is there already gets my term, if larger."""
    items = unstored(state, listener, index)
    partition = state.partitions[index]
    if not items or not (world.spills or partition.spilled > partition.token):
        return
    writes = [Write(Late.INSERT, listener.term, index, item=item) for item in items]
    done = state
    for each in writes:
        done = landed(world, done, each)
    mine = listener._replace(stored=put(listener.stored, index, items[-1].token))
    full = world.room > 0 and not has_room(world, state, listener, 1)
    fair = partition.head is not None or partition.spilled > partition.token or full
    yield from write(world, state, writes, with_listener(done, listener, mine), fair=fair)


def mark(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The last that this term has inserted becomes the mark, if it is larger."""
    partition = state.partitions[index]
    place = max((each.token for each in listener.buffers[index] if each.token <= listener.stored[index]), default=START)
    if place > max(partition.spilled, partition.token):
        one = Write(Late.MARK, listener.term, index, token=place)
        yield from write(world, state, [one], landed(world, state, one))


def clear(state: State, index: int) -> Steps:
    """The mark goes when the position has reached it."""
    partition = state.partitions[index]
    if START < partition.spilled <= partition.token:
        yield Step("clear", index), with_partition(state, index, partition._replace(spilled=START))


def remove(world: World, state: State, listener: Listener, index: int) -> Steps:
    """Documents up to the position, of my term or older."""
    place = state.partitions[index].token
    if stored(state, index, START, place):
        one = Write(Late.REMOVE, listener.term, index, token=place)
        after = landed(world, state, one)
        if after.documents != state.documents:
            yield from write(world, state, [one], after)


def next_item(world: World, state: State, listener: Listener, index: int) -> Item | None:
    """Return what a partition runs next: from the collection while the mark lies ahead, else from memory.

    From there only what lies before the first that this term has read and not inserted yet.
    """
    partition = state.partitions[index]
    if partition.spilled > partition.token:
        waiting = unstored(state, listener, index)
        reach = [Token(listener.cursor), *(item.token._replace(number=item.token.number - 1) for item in waiting[:1])]
        ready = stored(state, index, partition.token, min([partition.spilled, *reach]))
        return next((each for each in ready if not is_hidden(world, partition, each)), None)
    return next((each for each in listener.buffers[index] if each.token > partition.token), None)


def is_hidden(world: World, partition: Partition, item: Item) -> bool:
    """Tell whether a range that begins behind a high-watermark token leaves out what begins with that token."""
    prefixed = item.token.number < 0 and partition.token == Token(item.token.time, -100)
    return prefixed and world.broken is Broken.TOKEN_OF_NEXT


def dispatch(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The first that is not done goes out."""
    partition = state.partitions[index]
    item = next_item(world, state, listener, index)
    if item is None or partition.head is not None:
        return
    message = Message(index, listener.term, partition.token, item)
    if message not in state.messages:
        yield Step("dispatch", message), state._replace(messages=state.messages | {message})


# === what may go wrong at any moment, and persons ===


def write_source(world: World, state: State) -> Steps:
    """Somebody writes to the source."""
    if state.written < len(world.writes):
        entry = world.writes[state.written]
        yield Step("source", len(state.oplog) + 1), appended(world, state, entry)._replace(written=state.written + 1)


def replicate(state: State) -> Steps:
    """The majority catches up."""
    if state.majority < len(state.oplog):
        yield Step("replicate"), state._replace(majority=len(state.oplog))


def elect(world: World, state: State) -> Steps:
    """A new primary has not got what is not in the majority; its clock may be behind, so times come again."""
    if state.majority < len(state.oplog) and can(world, state, Fault.ELECTION):
        yield Step("elect", fair=False), state._replace(oplog=state.oplog[: state.majority], budget=state.budget - 1)


# --- executions ---------------------------------------------------------------------------------------------


def deliver(world: World, state: State) -> Steps:
    """A worker gets a message, for the first time or again, and claims; without a match it drops it."""
    for message in state.messages:
        partition = state.partitions[message.partition]
        free = partition.claim is None or not (partition.claim.live or partition.claim.seen)
        if partition.epoch == message.term and partition.token == message.base and free and partition.head is None:
            key = message.item.key
            claimed = with_partition(state, message.partition, partition._replace(claim=Claim(message.item)))
            starts = state.starts
            if message.item.token.number:
                starts = put(starts, key, starts[key] + 1)
            after = claimed._replace(starts=starts)
            yield Step("start", message), after if world.transactional else copied(after, message.item)


def copied(state: State, item: Item) -> State:
    """Return the state in which a handler has done what it does."""
    seen = put(state.seen, item.key, abs(item.value))
    if item.partial and state.copy[item.key] is None:  # a change of what was never given makes no document
        return state._replace(seen=seen)
    return state._replace(copy=put(state.copy, item.key, item.value), seen=seen)


def execute(world: World, state: State, index: int) -> Steps:
    """An execution ends: committed; or it fails, or its claim lapses."""
    partition = state.partitions[index]
    claim = partition.claim
    if claim is None:
        return
    done = copied(state, claim.item) if world.transactional else state
    yield Step("commit", claim.item, fair=claim.live), moved(done, index, claim.item)
    if claim.live and not claim.seen and can(world, state, Fault.ROLLBACK):
        seen = with_partition(state, index, partition._replace(claim=claim._replace(seen=True)))
        yield Step("commit, not in the majority", claim.item, fair=False), spent(seen)
    if claim.seen:
        lost = with_partition(state, index, partition._replace(claim=claim._replace(seen=False, live=False)))
        yield Step("rollback", claim.item, fair=False), lost
        return
    if claim.live and can(world, state, Fault.LAPSE):
        lapsed = with_partition(state, index, partition._replace(claim=claim._replace(live=False)))
        yield Step("lapse", claim.item, fair=False), spent(lapsed)
    if claim.live and can(world, state, Fault.HALT):
        halted = partition._replace(claim=None, head=claim.item)
        yield Step("halt", claim.item, fair=False), spent(with_partition(state, index, halted))
    if claim.live and can(world, state, Fault.LETTER):
        failed = spent(state)
        yield Step("dead letter", claim.item, fair=False), set_aside(world, failed, index, claim.item)


def moved(state: State, index: int, item: Item) -> State:
    """Return the state in which a partition's position is something that has ended, and nothing stands there."""
    new = state.partitions[index]._replace(token=item.token, claim=None, head=None)
    return with_partition(state, index, new)


def set_aside(world: World, state: State, index: int, item: Item) -> State:
    """Return the state with a dead letter in place of what a partition ran or stood at."""
    by_key = item.token.number and world.broken is not Broken.LETTER_BY_TOKEN
    letter = (item.key, None if by_key else item.token)
    return moved(state._replace(letters=state.letters | {letter}), index, item)


def reopen(world: World, state: State, listener: Listener) -> Steps:
    """The stream breaks: the listener opens it again at the watermark and forgets what it had read and stored."""
    if state.budget and Fault.REOPEN in world.faults:
        again = opened(state, listener, forget=world.broken is not Broken.CHUNK_SURVIVES)
        if again != listener:
            after = with_listener(state, listener, again)
            yield Step("reopen", again, fair=False), spent(after)


# --- the operator -------------------------------------------------------------------------------------------


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
    place = Token(world.rewind, -100 if world.broken is Broken.TOKEN_OF_NEXT else 0)
    if all(each.token <= place for each in state.partitions):
        return
    epoch = state.epoch + 1
    after = state._replace(
        epoch=epoch, watermark=min(state.watermark, Token(world.rewind)), rewound=True,
        partitions=tuple(sent_back(world, each, place)._replace(epoch=epoch) for each in state.partitions),
        seen=(-1,) * world.keys,
    )  # fmt: skip
    yield Step("rewind", fair=False), with_raised_records(after, epoch)


def sent_back(world: World, partition: Partition, place: Token) -> Partition:
    """Return a partition at a place, if that is a way back."""
    if partition.token <= place:
        return partition._replace(claim=None)
    reached = partition.spilled <= partition.token and world.broken is not Broken.REWIND_KEEPS_MARK
    spilled = START if reached else partition.spilled
    return partition._replace(token=place, spilled=spilled, claim=None, head=None)


def settled(state: State, key: int) -> bool:
    """Ghost: whether something of a key was set aside, so that its copy is a person's business."""
    return any(each == key for each, _ in state.letters)


def behind(state: State, key: int) -> bool:
    """Ghost: whether something of a key is still to come where its partition stands."""
    return state.partitions[partition_of(state, key)].head is not None


# === the oracles, and the search ===

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


def order(move: Move) -> Iterator[str]:
    """P2: what handlers of a key see is never older than what they have seen before (but by a rewind)."""
    if move.step.kind in {"start", "commit"}:
        for key, (old, new) in enumerate(zip(move.before.seen, move.after.seen, strict=True)):
            if new < old:
                yield f"key {key} goes back from {old} to {new}"


def monotone(move: Move) -> Iterator[str]:
    """P4: nothing stored goes back but by a rewind, and no stream is opened at an item."""
    before, after, rewound = move.before, move.after, move.step.kind == "rewind"
    if after.watermark.number:
        yield f"the watermark is {after.watermark}, at which no stream can be opened"
    if not rewound:
        yield from gone_back("the watermark", before.watermark, after.watermark)
    for old, new in zip(before.records, after.records, strict=True):
        if (new.epoch, new.begun, new.last) < (old.epoch, old.begun, old.last) or new.last < old.last:
            yield f"a snapshot has gone back from {old} to {new}"
        if old.state in {Progress.DONE, Progress.GONE} and new.state is not old.state:
            yield "a snapshot that had ended has changed its state"
    if not rewound:
        for one, other in zip(before.partitions, after.partitions, strict=True):
            if other.epoch < one.epoch or other.token < one.token:
                yield f"a partition has gone back from {one.token} to {other.token}"


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
            if listener.stage == 2 and listener.term == move.after.epoch:
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


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12, where nothing more will happen: every snapshot has ended, and nothing has to wait for what stands."""
    listener = leader(state)
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


def led(world: World, state: State, listener: Listener) -> Steps:
    """Yield the steps of a listener, where it has not been left behind."""
    mine = state.epoch == listener.term
    for index in range(world.snapshots if listener.stage else 0):
        if mine or state.records[index].epoch == listener.term or world.broken in ZOMBIES:
            yield from begin(world, state, listener, index)
            yield from answer(world, state, listener, index)
            yield from scan(world, state, listener, index)
            yield from read_chunk(world, state, listener, index)
            yield from pass_on(world, state, listener, index)
            yield from move_cursor(world, state, listener, index)
    if listener.stage < 2:
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
            yield from clear(state, index)
            yield from remove(world, state, listener, index)
            yield from dispatch(world, state, listener, index)


ZOMBIES = frozenset({Broken.CURSOR_UNGUARDED, Broken.CURSOR_IGNORES_EPOCH})
"""Variants in which who is deposed can still do something."""


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows, with the state it leads to in its plainest form."""
    for step, after in all_steps(world, state):
        yield step, plain(world, after)


def all_steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
    yield from acquire(world, state, lambda term, _: Listener(term))
    for listener in state.listeners:
        if listener.stage < 2:
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


def plain(world: World, state: State) -> State:
    """Return the state without what can never matter again: it differs in nothing, and is one state more often."""
    listeners = tuple(trimmed(world, state, each) for each in state.listeners if may_act(world, state, each))
    messages = frozenset(each for each in state.messages if may_claim(state, each))
    writes = frozenset(each for each in state.writes if may_land(world, state, each))
    return state._replace(listeners=listeners, messages=messages, writes=writes)


def may_act(world: World, state: State, listener: Listener) -> bool:
    """Tell whether a listener may still find a document that carries its term, or is about to."""
    if world.broken in ZOMBIES and any(listener.chunks):
        return True
    if listener.term == state.epoch or any(each.epoch == listener.term for each in state.partitions):
        return True
    return any(each.epoch == listener.term for each in state.records)


def trimmed(world: World, state: State, listener: Listener) -> Listener:
    """Return a listener without what is done, and without the chunks of records that others have."""
    buffers = listener.buffers
    if len(buffers) == len(state.partitions):
        buffers = tuple(
            tuple(item for item in items if item.token > partition.token)
            for items, partition in zip(buffers, state.partitions, strict=True)
        )
    if world.broken in ZOMBIES or world.broken is Broken.RECORDS_LAST:
        return listener._replace(buffers=buffers)
    chunks = tuple(
        chunk if record.epoch == listener.term else None
        for chunk, record in zip(listener.chunks, state.records, strict=False)
    )
    return listener._replace(buffers=buffers, chunks=chunks)


def may_claim(state: State, message: Message) -> bool:
    """Tell whether a message could claim when its partition flows."""
    partition = state.partitions[message.partition]
    return partition.epoch == message.term and partition.token == message.base


def may_land(world: World, state: State, one: Write) -> bool:
    """Tell whether the guard of a write may still match."""
    if one.kind is Late.WATERMARK:
        return one.term == state.epoch
    if one.kind in {Late.BEGIN, Late.PASS, Late.CURSOR}:
        return world.broken in ZOMBIES or one.term == state.records[one.target].epoch
    return one.kind is not Late.MARK or one.term == state.partitions[one.target].epoch


SNAPSHOT_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss, nothing_missed),
        "P2": (order,),
        "P4": (monotone,),
        "P5": (cursor,),
        "P6": (bounded_duplicates,),
        "P12": (bounded_memory, bounded_scan),
        "P13": (one_letter,),
    },
    at_rest={"P1": left_wrong, "P12": left_undone},
)
