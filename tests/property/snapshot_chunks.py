"""One chunk of a snapshot: from its begin to the cursor that passes it.

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

from tests.property.exploration import Step
from tests.property.snapshot_state import (
    START,
    Chunk,
    Item,
    Listener,
    Record,
    RecordWrite,
    State,
    Steps,
    Token,
    buffered,
    exists,
    has_room,
    is_partial,
    is_there,
    landed,
    partition_of,
    value_at,
    with_chunk,
    with_raised_records,
    with_record,
)
from tests.property.snapshot_world import Broken, Fault, Late, Progress, World
from tests.property.stores import can, spent, with_listener, write

# --- from a begin to L --------------------------------------------------------------------------------------


def begin(world: World, state: State, listener: Listener, index: int) -> Steps:
    """One update of the record, compared with what was seen of it; its own place in the oplog is L."""
    record, chunk = state.records[index], listener.chunks[index]
    ahead = world.broken is Broken.BEGIN_AHEAD and chunk is not None and chunk.appended
    if record.state is not Progress.RUNNING or not (chunk is None or ahead):
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
    chunk = Chunk(record.begun + 1, len(after.oplog))
    if Fault.ANSWERED_LATER not in world.faults:
        chunk = chunk._replace(low=len(after.oplog))  # one step for two that nothing can part
    yield from write(world, state, [one], with_listener(after, listener, with_chunk(listener, index, chunk)))


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
    if can(world, state, Fault.SHORT) and len(scanned) > 1:
        step, after = scanned_to(world, state, listener, index, chunk, scanned[:1])
        yield step._replace(fair=False), spent(after)
    if can(world, state, Fault.UNREADABLE):
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


# --- its place, T, and what follows it ----------------------------------------------------------------------


def pass_on(world: World, state: State, listener: Listener, index: int) -> Steps:
    """When the chunk is there, a write of our own is H; what moves the stream past T is written until it is past."""
    chunk = listener.chunks[index]
    if chunk is None or chunk.appended or chunk.low < 0:
        return
    if chunk.read < 0 and (world.broken is not Broken.H_BEFORE_READ or chunk.time >= 0):
        return
    one = RecordWrite(Late.PASS, listener.term, index, chunk.begun)
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


def move_cursor(world: World, state: State, listener: Listener, index: int) -> Steps:
    """When every item is committed, or inserted by this term at or below the mark, or superfluous: on to the next."""
    chunk = listener.chunks[index]
    if chunk is None or not chunk.appended or not all(is_secured(world, state, listener, each) for each in chunk.done):
        return
    progress = Progress.DONE if chunk.is_final else Progress.RUNNING
    one = RecordWrite(
        Late.CURSOR, listener.term, index, chunk.begun, chunk.end, chunk.until, time=chunk.scanned, state=progress
    )
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
    reached: Token = partition.token
    claim = partition.claim
    if world.broken is Broken.CURSOR_LOCAL and claim is not None and claim.handled:
        reached = claim.item.token
    if world.broken is Broken.CURSOR_AT_DISPATCH:
        sent = [each.item.token for each in state.messages if each.partition == index and each.term == listener.term]
        reached = max([reached, *sent])
    inserted: Token = min(listener.stored[index], partition.spilled)
    if world.broken is Broken.CURSOR_AT_INSERT:
        inserted = listener.stored[index]
    return item.token <= reached or item.token <= inserted
