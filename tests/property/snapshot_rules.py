"""The rules of a snapshot for listeners; those of workers, operators and misfortune are in ``snapshot_faults``.

Each rule is a generator of steps with the states they lead to. A variant (``Broken``) is one ``if`` beside the rule
it breaks, so that the difference can be read.
"""

from __future__ import annotations

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.snapshot_model import (
    AWAY,
    BACK,
    DROP,
    MARK,
    START,
    Broken,
    Chunk,
    Fault,
    Item,
    Late,
    Listener,
    Message,
    Mode,
    Partition,
    Progress,
    Record,
    State,
    Steps,
    Token,
    World,
    Write,
    exists,
    is_partial,
    is_there,
    key_of,
    partition_of,
    stored,
    value_at,
    with_chunk,
    with_record,
)
from tests.property.snapshot_writes import landed
from tests.property.stores import spent, with_listener, with_partition, write

# --- terms --------------------------------------------------------------------------------------------------


def acquire(world: World, state: State) -> Steps:
    """A standby takes the lease and the subscription."""
    yield from stores.acquire(world, state, lambda term, _: Listener(term))


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


def repartitions(world: World, state: State, listener: Listener) -> bool:
    """Tell whether a listener wants another number of partitions."""
    return world.wanted(listener.term) != len(state.partitions)


def drains(world: World, state: State, listener: Listener) -> bool:
    """Tell whether a listener lets the partitions run dry, which it does while none is blocked."""
    return repartitions(world, state, listener) and all(each.mode is Mode.FLOWING for each in state.partitions)


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
    if drains(world, state, listener) and world.broken is not Broken.CHUNK_SURVIVES_LAYOUT:
        return
    if listener.stage == 2 and not may_begin(world, state, listener):
        return
    mine = record.epoch == listener.term
    if world.broken is Broken.RECORDS_LAST and state.epoch == listener.term:
        mine, state = True, with_raised_records(state, listener.term)
    if not mine and world.broken is not Broken.REFUSED_BEGIN_COUNTS:
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
    if world.broken is Broken.CURSOR_AT_ANY_MARK:
        inserted = partition.spilled
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
    writes = [Write(Late.INSERT, listener.term, index, state.generation, item=item) for item in items]
    done = state
    for each in writes:
        done = landed(world, done, each)
    mine = listener._replace(stored=put(listener.stored, index, items[-1].token))
    full = world.room > 0 and not has_room(world, state, listener, 1)
    fair = partition.mode is not Mode.FLOWING or partition.spilled > partition.token or full
    yield from write(world, state, writes, with_listener(done, listener, mine), fair=fair)


def mark(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The last that this term has inserted becomes the mark, if it is larger."""
    partition = state.partitions[index]
    place = max((each.token for each in listener.buffers[index] if each.token <= listener.stored[index]), default=START)
    if place > max(partition.spilled, partition.token):
        one = Write(Late.MARK, listener.term, index, state.generation, place)
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
        one = Write(Late.REMOVE, listener.term, index, state.generation, place)
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
    if item is None or partition.mode is not Mode.FLOWING:
        return
    message = Message(index, listener.term, partition.token, item)
    if message not in state.messages:
        yield Step("dispatch", message), state._replace(messages=state.messages | {message})


# --- repartitioning -----------------------------------------------------------------------------------------


def switch(world: World, state: State, listener: Listener) -> Steps:
    """Nothing that was read is left to do, and the watermark says so: new partitions begin there."""
    place = Token(listener.cursor)
    if not repartitions(world, state, listener) or state.watermark != place:
        return
    for index, each in enumerate(state.partitions):
        waits = any(item.token > each.token for item in listener.buffers[index])
        blocked = each.mode is not Mode.FLOWING or each.spilled > each.token
        if waits or blocked or each.claim or each.token > place:
            return
    partitions = (Partition(listener.term, place),) * world.wanted(listener.term)
    after = state._replace(
        generation=state.generation + 1, partitions=partitions, documents=frozenset(), messages=frozenset()
    )
    mine = opened(after, listener, forget=world.broken is not Broken.CHUNK_SURVIVES_LAYOUT)
    yield Step("switch", mine), with_listener(after, listener, mine)
