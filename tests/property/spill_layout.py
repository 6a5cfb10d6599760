"""A new layout: close, store what stands before the positions, copy, flip, discard."""

from __future__ import annotations

from tests.property.spill_model import (
    Broken,
    Late,
    Listener,
    Mode,
    Partition,
    Prepared,
    Range,
    State,
    Step,
    Steps,
    World,
    Write,
    with_listener,
    with_partition,
)
from tests.property.spill_rules import is_lost, opened, relayouts, reopened, until
from tests.property.spill_writes import landed, write


def close(world: World, state: State, listener: Listener, index: int) -> Steps:
    """A partition without a live claim is closed; a dead claim is ended, and its execution can record nothing."""
    partition = state.partitions[index]
    claim = partition.claim
    busy = claim is not None and (claim.live or claim.handled)
    if not relayouts(world, state, listener) or partition.mode is Mode.MOVING or busy:
        return
    if world.broken is not Broken.NEVER_CLOSED:
        closed = partition._replace(mode=Mode.MOVING, was=partition.mode, claim=None)
        yield Step("close", closed), with_partition(state, index, closed)


def give_up(world: World, state: State, listener: Listener) -> Steps:
    """Who has closed and cannot read on ends the term, so that a take-over opens what is closed.

    It does not open it itself: a copy of its own that was sent before must not meet what runs meanwhile.
    """
    closed = any(each.mode is Mode.MOVING for each in state.partitions)
    if not closed or not is_lost(state, listener) or world.broken is Broken.CLOSED_WHEN_LOST:
        return
    if world.broken is Broken.REOPENS_ITSELF:
        yield (
            Step("reopen partitions", listener),
            state._replace(partitions=tuple(reopened(each) for each in state.partitions)),
        )
    else:
        others = tuple(each for each in state.listeners if each is not listener)
        yield Step("step down", listener), state._replace(listeners=others)


def copy(world: World, state: State, listener: Listener) -> Steps:
    """Everything that stands before the positions is stored: it is copied, and the new partitions are prepared.

    From here on this term stores nothing in the old layout. A copy whose answer was lost is made again.
    """
    place = listener.until if world.broken is Broken.UNTIL_BEFORE_CLOSE else until(world, state)
    if world.broken is Broken.NOTHING_STORED:
        place = 0
    closed = all(each.mode is Mode.MOVING for each in state.partitions) or world.broken is Broken.NEVER_CLOSED
    if not relayouts(world, state, listener) or listener.copied or not closed or state.watermark < place:
        return
    plus_one = world.broken is Broken.GENERATION_PLUS_ONE
    generation = state.generation + 1 if plus_one else listener.term
    ranges = tuple(
        Range(each.token, each.spilled, each.was, each.head.token if each.head else 0, each.stood)
        for each in state.partitions
    )
    count = world.wanted(listener.config)
    one = Write(Late.COPY, listener.term, state.generation, count, generation, ranges)
    done = prepared(landed(world, state, one), one)
    yield from write(world, state, [one], with_listener(done, listener, listener._replace(copied=generation)))


def prepared(state: State, one: Write) -> State:
    """Return the state with the partitions of a new layout: at the start where something was copied."""
    partitions = []
    for index in range(one.partition):
        tokens = [each.token for each in state.documents if each[:2] == (one.place, index)]
        partitions.append(Partition(one.term, 0 if tokens else state.watermark, max(tokens, default=0)))
    others = tuple(each for each in state.prepared if each.generation != one.place)
    return state._replace(prepared=(*others, Prepared(one.place, tuple(partitions))))


def flip(world: World, state: State, listener: Listener) -> Steps:
    """One write on the subscription puts the new layout in force; who has written it opens the stream again."""
    if listener.copied:
        count = world.wanted(listener.config)
        one = Write(Late.FLIP, listener.term, state.generation, count, listener.copied)
        after = landed(world, state, one)
        mine = opened(after, listener, after.watermark)
        yield from write(world, state, [one], with_listener(after, listener, mine))


def adopt(state: State, listener: Listener) -> Steps:
    """A listener sees that its flip has come into force although its answer was lost."""
    mine = opened(state, listener, state.watermark)
    yield Step("adopt", mine), with_listener(state, listener, mine)


def discard(world: World, state: State, listener: Listener) -> Steps:
    """Documents of other generations than the one that is seen in force go, but for what later terms have made."""
    kept = state.generation
    if world.broken is Broken.DISCARD_BEFORE_FLIP and listener.copied:
        kept = listener.copied
    one = Write(Late.DISCARD, listener.term, 0, 0, kept)
    after = landed(world, state, one)
    if after.documents != state.documents:
        yield from write(world, state, [one], after)
