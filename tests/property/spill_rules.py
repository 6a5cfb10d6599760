"""The rules of spill for listeners; those of workers, operators and misfortune are in ``spill_faults``.

Each rule is a generator of steps with the states they lead to. A variant (``Broken``) is one ``if`` beside the rule
it breaks, so that the difference can be read.
"""

from __future__ import annotations

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.spill_model import (
    Broken,
    Claim,
    Fault,
    Head,
    Late,
    Listener,
    Message,
    Mode,
    Partition,
    State,
    Steps,
    World,
    Write,
    partition_of,
    stored,
)
from tests.property.spill_writes import is_drained, landed
from tests.property.stores import with_listener, with_partition, write

# --- what is where ------------------------------------------------------------------------------------------


def read_changes(world: World, state: State, listener: Listener, index: int, after: int) -> list[int]:
    """Return the changes of a partition that a listener has read and that lie after a place, in order."""
    return [
        token
        for token in range(max(listener.opened, after) + 1, listener.cursor + 1)
        if world.matched(listener.config, token) and partition_of(state, world, token) == index
    ]


def unstored(world: World, state: State, listener: Listener, index: int) -> list[int]:
    """Return what a listener has read of a partition, and neither inserted itself nor seen done."""
    partition = state.partitions[index]
    after = max(listener.stored[index], partition.token)
    if world.broken is Broken.MARK_SKIPS:
        after = max(after, partition.spilled)
    changes = read_changes(world, state, listener, index, after)
    if world.broken is Broken.TRUSTS_DOCUMENTS:
        there = stored(state, index, 0, partition.spilled)
        return [token for token in changes if token not in there]
    return changes


def reach(world: World, state: State, listener: Listener, index: int) -> int:
    """Return the place up to which everything of a partition was read, and inserted by this term or done."""
    if world.broken is Broken.COLLECTION_AT_ONCE:
        return len(world.keys)
    waiting = unstored(world, state, listener, index)
    return max(waiting[0] - 1 if waiting else listener.cursor, listener.stored[index])


def is_complete(world: World, state: State, listener: Listener, token: int) -> bool:
    """Tell whether an item of the window is complete: committed, or inserted by this term and under the mark."""
    index = partition_of(state, world, token)
    partition = state.partitions[index]
    if not world.matched(listener.config, token) or token <= partition.token:
        return True
    if world.broken is Broken.TRUSTS_BARE_DOCUMENTS and token in stored(state, index, 0, token):
        return True
    if token > reach(world, state, listener, index):
        return False
    return token <= partition.spilled or world.broken is Broken.WATERMARK_BEFORE_MARK


def unfinished(world: World, state: State, listener: Listener) -> int:
    """Return how many changes a listener has in memory that are not complete."""
    window = range(listener.opened + 1, listener.cursor + 1)
    return sum(not is_complete(world, state, listener, token) for token in window)


def is_lost(state: State, listener: Listener) -> bool:
    """Tell whether the oplog has rolled past what a listener would read next."""
    return listener.cursor + 1 < state.oldest


# --- terms --------------------------------------------------------------------------------------------------


def acquire(world: World, state: State) -> Steps:
    """A standby takes lease and subscription, and the partitioning of that: so no older term's switch can follow."""
    yield from stores.acquire(world, state, lambda term, begun: opened(state, Listener(term, begun), state.watermark))


def take_over(world: World, state: State, listener: Listener) -> Steps:
    """The partitions of the subscription: the larger epoch stays, what is handled is committed."""
    if state.epoch == listener.term:
        after = state
        for index in range(len(state.partitions)):
            after = committed(world, after, index)
            after = with_partition(after, index, after.partitions[index]._replace(epoch=listener.term))
        leader = listener._replace(leads=True)
        yield Step("take over", leader), with_listener(after, listener, leader)


def opened(state: State, listener: Listener, place: int) -> Listener:
    """Return a listener that reads for the partitions in force from a place on."""
    count = len(state.partitions)
    return listener._replace(opened=place, cursor=place, stored=(place,) * count, generation=state.generation)


def committed(world: World, state: State, index: int) -> State:
    """Return the state in which what is handled in a partition has become its position."""
    partition = state.partitions[index]
    claim = partition.claim
    return moved(world, state, index, claim) if claim is not None and claim.handled else state


def moved(world: World, state: State, index: int, ended: Claim | Head) -> State:
    """Return the state in which a partition's position is a change that has ended, and nothing stands there.

    What else is passed is excused where it was not owed when it began and its configuration does not match it.
    """
    partition = state.partitions[index]
    passed = frozenset(
        each
        for each in range(max(partition.token, ended.owed) + 1, ended.token)
        if partition_of(state, world, each) == index and not world.matched(ended.config, each)
    )
    after = state._replace(done=state.done | {ended.token}, excused=state.excused | passed)
    new = partition._replace(token=ended.token, claim=None, mode=Mode.FLOWING, head=None)
    return with_partition(after, index, new)


# --- reading and storing ------------------------------------------------------------------------------------


def read(world: World, state: State, listener: Listener) -> Steps:
    """The listener reads on while it has room."""
    full = world.buffer and unfinished(world, state, listener) >= world.buffer
    if listener.cursor < len(world.keys) and not is_lost(state, listener) and not full:
        onward = listener._replace(cursor=listener.cursor + 1)
        yield Step("read", onward), with_listener(state, listener, onward)


def insert(world: World, state: State, listener: Listener, index: int) -> Steps:
    """All of a partition's buffered prefix in one bulk; a document that is there already gets my term, if larger."""
    tokens = with_room(world, state, index, unstored(world, state, listener, index))
    if not tokens:
        return
    partition = state.partitions[index]
    writes = [Write(Late.INSERT, listener.term, state.generation, index, token) for token in tokens]
    done = state
    if world.broken is not Broken.MARK_BEFORE_INSERT:
        for each in writes:
            done = landed(world, done, each)
    else:
        done = state._replace(writes=state.writes | set(writes))
    mine = listener._replace(stored=put(listener.stored, index, tokens[-1]))
    full = world.buffer > 0 and unfinished(world, state, listener) >= world.buffer
    fair = partition.stands or partition.spilled > partition.token or full or world.large
    yield from write(world, state, writes, with_listener(done, listener, mine), fair=fair)


def with_room(world: World, state: State, index: int, tokens: list[int]) -> list[int]:
    """Return the prefix that the bound lets in: always what is there already, or lies at or below the mark."""
    if not world.bound:
        return tokens
    there = stored(state, index, 0, len(world.keys))
    below = 0 if world.broken is Broken.BOUND_REFUSES_AGAIN else state.partitions[index].spilled
    room = world.bound - len(state.documents)
    new = [token for token in tokens if token not in there and token > below]
    if world.large and world.broken is not Broken.BOUND_REFUSES_LARGE and partition_is_due(state, index):
        new = [token for token in new if token != tokens[0]]
    refused = next(iter(new[max(room, 0) :]), len(world.keys) + 1)
    return [token for token in tokens if token < refused]


def partition_is_due(state: State, index: int) -> bool:
    """Tell whether a partition would run its next change from memory: it flows, and nothing of it is stored."""
    partition = state.partitions[index]
    return not partition.stands and partition.spilled <= partition.token


def mark(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The last change that this term has inserted becomes the mark, if it is larger."""
    partition = state.partitions[index]
    mine = [
        token
        for token in read_changes(world, state, listener, index, partition.token)
        if token <= listener.stored[index]
    ]
    if mine and mine[-1] > partition.spilled:
        one = Write(Late.MARK, listener.term, state.generation, index, mine[-1])
        yield from write(world, state, [one], landed(world, state, one))


def store_watermark(world: World, state: State, listener: Listener) -> Steps:
    """The end of the completed prefix, if it is larger than what is stored."""
    window = range(listener.opened + 1, listener.cursor + 1)
    place = next((token - 1 for token in window if not is_complete(world, state, listener, token)), listener.cursor)
    if place > state.watermark:
        one = Write(Late.WATERMARK, listener.term, 0, 0, place)
        yield from write(world, state, [one], landed(world, state, one))


def clear(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The mark goes when the position has reached it, and never because none is found."""
    partition = state.partitions[index]
    if not partition.spilled:
        return
    one = Write(Late.CLEAR, listener.term, state.generation, index, partition.spilled)
    if partition.token >= partition.spilled:
        yield from write(world, state, [one], landed(world, state, one))
    elif state.budget and Fault.STALE_READ in world.faults:
        after = state._replace(budget=state.budget - 1)
        if world.broken is Broken.NONE_LEFT_CLEARS:
            after = with_partition(after, index, partition._replace(spilled=0))
        yield Step("stale read", fair=False), after


def remove(world: World, state: State, listener: Listener, index: int) -> Steps:
    """Documents up to the position, of my term or older, with a mark or without."""
    partition = state.partitions[index]
    up_to = partition.token
    if world.broken is Broken.REMOVAL_UP_TO_HANDLED and partition.claim is not None and partition.claim.handled:
        up_to = partition.claim.token
    if world.broken is Broken.REMOVAL_FOLLOWS_MARK and not partition.spilled:
        return
    if stored(state, index, 0, up_to):
        one = Write(Late.REMOVE, listener.term, state.generation, index, up_to)
        yield from write(world, state, [one], landed(world, state, one))


# --- running ------------------------------------------------------------------------------------------------


def next_change(world: World, state: State, listener: Listener, index: int) -> int | None:
    """Return what a partition runs next: from the collection while the mark lies ahead, else from memory."""
    partition = state.partitions[index]
    if not runs_from_store(world, partition):
        return next(iter(read_changes(world, state, listener, index, partition.token)), None)
    waiting = unstored(world, state, listener, index)
    is_again = bool(waiting) and waiting[0] <= partition.spilled
    limit = min(partition.spilled, max(reach(world, state, listener, index), listener.stored[index]))
    if world.broken is Broken.RUNS_BEFORE_STORED_AGAIN:
        limit = min(partition.spilled, listener.cursor)
    elif is_again and world.broken is not Broken.COLLECTION_AT_ONCE:
        return None
    return next(iter(stored(state, index, partition.token, limit)), None)


def runs_from_store(world: World, partition: Partition) -> bool:
    """Tell whether a partition runs what is stored of it, and nothing else."""
    return partition.spilled > partition.token and world.broken is not Broken.BUFFER_FIRST


def dispatch(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The first change that is not done goes out: by reference where it is stored."""
    partition = state.partitions[index]
    token = next_change(world, state, listener, index)
    is_stored = runs_from_store(world, partition)
    if token is None or partition.stands or (world.large and not is_stored):
        return
    message = Message(state.generation, index, listener.term, partition.token, token, listener.config, is_stored)
    if message not in state.messages:
        yield Step("dispatch", message), state._replace(messages=state.messages | {message})


# --- repartitioning ---------------------------------------------------------------------------------------
#
# What was read is done, then other partitions take the place of these. That is one step here: in between no partition
# is there, and whoever takes over makes them at the watermark.


def switch(world: World, state: State, listener: Listener) -> Steps:
    """Nothing that was read is left to do, and the watermark says so: new partitions begin there."""
    count = world.wanted(listener.config)
    place = listener.cursor
    waits = unfinished(world, state, listener) > 0 or state.watermark != place
    if world.broken is Broken.SWITCH_IGNORES_BUFFER:
        waits = False
    if count == len(state.partitions) or waits or not is_drained(world, state, listener.term, place):
        return
    one = Write(Late.SWITCH, listener.term, state.generation, count, place)
    after = landed(world, state, one)
    yield from write(world, state, [one], with_listener(after, listener, opened(after, listener, place)))


def adopt(state: State, listener: Listener) -> Steps:
    """A listener sees that its switch was made although its answer was lost."""
    mine = opened(state, listener, state.watermark)
    yield Step("adopt", mine), with_listener(state, listener, mine)


def discard(world: World, state: State, listener: Listener) -> Steps:
    """Documents of former partitions go, but for what later terms have stored."""
    if world.broken is Broken.FORMER_STAY:
        return
    for former in {each.generation for each in state.documents} - {state.generation}:
        one = Write(Late.DISCARD, listener.term, former, 0, state.generation)
        after = landed(world, state, one)
        if after.documents != state.documents:
            yield from write(world, state, [one], after)
