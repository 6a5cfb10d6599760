"""What a snapshot beside the stream stores and keeps in memory, and what its writes do where they land."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.snapshot_world import AWAY, BACK, DROP, MARK, Broken, Fault, Late, Progress, World
from tests.property.stores import Document, Message, Partition, Write


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
    """The memory of one term: 0 it has the subscription, 1 the records of snapshots, 2 the partitions.

    ``stored`` is how far this term has inserted what is buffered; ``first`` the first L (kept by a variant only).
    """

    term: int
    stage: int = 0
    cursor: int = 0
    buffers: tuple[tuple[Item, ...], ...] = ()
    stored: tuple[Token, ...] = ()
    chunks: tuple[Chunk | None, ...] = ()
    first: int = 0

    @property
    def leads(self) -> bool:
        """Whether it has taken everything over."""
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
        watermark=Token(-1) if world.broken is Broken.PINNED_LATE else START,
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
    """Return the state after a write, which its own guard may have refused."""
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
    """Tell whether the guard of a write on a record matches."""
    record = state.records[one.snapshot]
    starts_or_ends = one.kind is Late.BEGIN or (one.kind is Late.CURSOR and one.state is not Progress.RUNNING)
    if starts_or_ends and record.state is Progress.STOPPED:
        return False
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_UNGUARDED:
        return True
    epoch = record.epoch == one.term or (one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_EPOCH)
    begun = record.begun == one.begun
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_BEGUN:
        begun = True
    if one.kind is Late.BEGIN and world.broken is Broken.BEGIN_COUNTS_UP:
        begun = True
    return epoch and begun
