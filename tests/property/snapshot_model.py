"""A snapshot beside the stream as a finite machine: its rules, but for those of a chunk.

An extension of ``stores``, with the conventions of ``protocol_model``: time is absent, a message that was sent
stays deliverable, and nothing is imported from the package. What is new here:

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

Read ``snapshot_world`` (scenarios) and ``snapshot_state`` (what is stored and known) first. Then read
``snapshot_chunks`` (the rules of a chunk), this module (all other rules), and ``snapshot_oracles`` (what is judged).
"""

from __future__ import annotations

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.snapshot_chunks import (
    answer,
    begin,
    counts,
    is_spoiled,
    move_cursor,
    pass_on,
    read_chunk,
    scan,
    with_appended,
)
from tests.property.snapshot_state import (
    START,
    Item,
    Listener,
    RecordWrite,
    State,
    Steps,
    Token,
    appended,
    buffered,
    has_room,
    is_partial,
    key_of,
    landed,
    partition_of,
    unstored,
    value_at,
    with_chunk,
    with_raised_records,
    with_record,
)
from tests.property.snapshot_world import AWAY, BACK, DROP, MARK, Broken, Fault, Progress, World
from tests.property.stores import (
    Claim,
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
    """What this term has inserted is marked."""
    place = max((each.token for each in listener.buffers[index] if each.token <= listener.stored[index]), default=START)
    yield from stores.mark(world, state, listener, index, place)


def remove(world: World, state: State, listener: Listener, index: int) -> Steps:
    """What lies up to the position goes, and in a variant also what begins with its token."""
    up_to = state.partitions[index].token
    if world.broken is Broken.TOKEN_OF_NEXT and up_to.number == -100 and stored(state, index, START, up_to):
        up_to = up_to._replace(number=-1)
    yield from stores.remove(world, state, listener, index, up_to)


def next_item(world: World, state: State, listener: Listener, index: int) -> Item | None:
    """Return what a partition runs next: from the collection while the mark lies ahead, else from memory.

    From there only what lies before the first that this term has read and not inserted yet.
    """
    partition = state.partitions[index]
    if partition.has_stored:
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
    """Return the state in which a handler has done what it does."""
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


# === all steps ===


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
            yield from remove(world, state, listener, index)
            yield from dispatch(world, state, listener, index)


ZOMBIES = frozenset({Broken.CURSOR_UNGUARDED, Broken.CURSOR_IGNORES_EPOCH})
"""Variants in which who is deposed can still do something."""


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows, with the state it leads to in its plainest form."""
    for step, after in all_steps(world, state):
        acting = (trimmed(world, after, each) for each in after.listeners if may_act(world, after, each))
        yield step, stores.plain(world, after, acting, may_land)


def all_steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
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


def may_land(world: World, state: State, one: Write | RecordWrite) -> bool:
    """Tell whether the guard of a write may still match."""
    if isinstance(one, RecordWrite):
        return world.broken in ZOMBIES or one.term == state.records[one.snapshot].epoch
    return stores.may_land(state, one)
