"""The oracles that judge each step of spill and each quiescent state, and their search (see ``exploration``).

A change at or below the watermark that has not come to an end is *owed*: whatever a later configuration matches, it
was matched when it was read (rule 10 of spill), and nobody reads it again.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.property import exploration
from tests.property.exploration import Model, gone_back, passed
from tests.property.spill_faults import (
    command,
    decide,
    deliver,
    end_pause,
    execute,
    is_owed,
    land,
    leader,
    reopen,
    rewind,
    roll,
)
from tests.property.spill_model import (
    Broken,
    Claim,
    Document,
    Head,
    Late,
    Listener,
    Message,
    State,
    Steps,
    World,
    Write,
    found,
    initial,
    partition_of,
)
from tests.property.spill_rules import (
    acquire,
    adopt,
    clear,
    discard,
    dispatch,
    insert,
    is_lost,
    mark,
    read,
    remove,
    store_watermark,
    switch,
    take_over,
)

Move = exploration.Move[World, State]


def no_loss(move: Move) -> Iterator[str]:
    """P1: a position never passes a change that is owed, or that its own configuration matches, and is not settled."""
    if move.before.generation != move.after.generation:
        return
    for index, (old, new) in enumerate(zip(move.before.partitions, move.after.partitions, strict=True)):
        ended = old.claim or old.head
        if ended is None or new.token <= old.token:
            continue

        def is_missing(token: int, index: int = index, ended: Claim | Head = ended) -> bool:
            wanted = token <= ended.owed or move.world.matched(ended.config, token)
            return wanted and token not in move.after.settled and partition_of(move.after, move.world, token) == index

        yield from passed(old.token, new.token, index, is_missing)


def order(move: Move) -> Iterator[str]:
    """P2: handlers of a key never start at an earlier change than the last (but by a rewind).

    A change that the later one's configuration did not match was not earlier for it.
    """
    if move.step.kind == "start":
        for old, new in zip(move.before.last, move.after.last, strict=True):
            if new.token < old.token and move.world.matched(old.config, new.token):
                yield f"change {new.token} has started after change {old.token}"


def monotone(move: Move) -> Iterator[str]:
    """P4: epochs, watermark and positions never go back but by a rewind, which goes where the stream can be read."""
    before, after, rewound = move.before, move.after, move.step.kind == "rewind"
    yield from gone_back("an epoch", before.epoch, after.epoch)
    if not rewound:
        yield from gone_back("the watermark", before.watermark, after.watermark)
    if rewound and after.watermark > before.watermark:
        yield "a rewind has moved the watermark forward"
    if rewound and after.watermark + 1 < before.oldest <= before.watermark + 1:
        yield "a rewind has gone where the stream cannot be opened"
    if before.generation != after.generation:
        return
    for old, new in zip(before.partitions, after.partitions, strict=True):
        if new.epoch < old.epoch or (new.token < old.token and not rewound):
            yield f"a partition has gone back from {old.token} to {new.token}"
        if rewound and new.token > old.token:
            yield "a rewind has moved a position forward"


def prefix(move: Move) -> Iterator[str]:
    """P5, P13: whatever lies at or below the watermark is settled, or stored between position and mark."""
    for token in range(1, move.after.watermark + 1):
        if token not in move.after.settled and not is_owed(move.world, move.after, token):
            yield f"change {token} lies below the watermark and is neither done nor stored under the mark"


def bounded_duplicates(move: Move) -> Iterator[str]:
    """P6: a handler starts once per change, once more per fault or command, and never when it was done."""
    if isinstance(move.step.who, Message) and move.step.kind == "start":
        token = move.step.who.token
        if move.after.starts[token - 1] > move.after.justified[token - 1]:
            yield f"change {token} has started {move.after.starts[token - 1]} times"
        if token in move.before.done:
            yield f"change {token} has started after it was done"


def bytes_at_hand(move: Move) -> Iterator[str]:
    """P13: an execution of a change that travels by reference finds its bytes."""
    if isinstance(move.step.who, Message) and move.step.who.stored and move.step.kind == "start":
        token = move.step.who.token
        if found(move.after, move.step.who.generation, move.step.who.partition, token) is None:
            yield f"the bytes of change {token} are gone"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12, where nothing more will happen: everything is done but what stands, and nothing has to wait for that."""
    listener = leader(state)
    if listener is None:
        yield "nobody is in office"
        return
    lost = is_lost(state, listener)
    stands = {index for index, each in enumerate(state.partitions) if each.stands}
    if world.wanted(listener.config) != len(state.partitions) and not lost and not stands:
        yield f"there are {len(state.partitions)} partitions for ever"
    garbage = {each for each in state.documents if is_garbage(state, each)}
    full = bool(stands) and 0 < world.bound <= len(state.documents - garbage)
    reached = state.watermark if lost else listener.cursor if full else len(world.keys)
    for token in range(1, reached + 1):
        wanted = token <= state.watermark or world.matched(listener.config, token)
        if wanted and token not in state.settled and partition_of(state, world, token) not in stands:
            yield f"change {token} is not done, and its partition does not stand"
    if state.watermark < len(world.keys) and not lost and not full:
        yield f"the watermark stands at {state.watermark} for ever"
    for index, partition in enumerate(state.partitions):
        if partition.spilled > partition.token and index not in stands and not lost:
            yield f"the mark of partition {index} stands at {partition.spilled} for ever"
    for document in garbage:
        yield f"nobody removes the document of change {document.token} in generation {document.generation}"


def is_garbage(state: State, document: Document) -> bool:
    """Tell whether a document belongs to former partitions, or to a change that is done."""
    return document.generation != state.generation or document.token <= state.partitions[document.partition].token


def led(world: World, state: State, listener: Listener) -> Steps:
    """Yield the steps of a listener that has taken over, where it has not been left behind."""
    if listener.generation != state.generation:
        yield from adopt(state, listener)
        return
    if state.epoch == listener.term:
        yield from switch(world, state, listener)
        yield from discard(world, state, listener)
    yield from read(world, state, listener)
    if state.epoch == listener.term:
        yield from store_watermark(world, state, listener)
        yield from decide(world, state, listener)
        yield from reopen(world, state, listener)
    for index, partition in enumerate(state.partitions):
        if partition.epoch == listener.term:
            yield from insert(world, state, listener, index)
            yield from mark(world, state, listener, index)
            yield from clear(world, state, listener, index)
            yield from remove(world, state, listener, index)
            yield from dispatch(world, state, listener, index)


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows, with the state it leads to in its plainest form."""
    for step, after in all_steps(world, state):
        yield step, plain(world, after)


def all_steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
    yield from acquire(world, state)
    for listener in state.listeners:
        if listener.leads:
            yield from led(world, state, listener)
        else:
            yield from take_over(world, state, listener)
    yield from deliver(world, state)
    for index in range(len(state.partitions)):
        yield from execute(world, state, index)
        yield from end_pause(state, index)
        yield from command(world, state, index)
    yield from land(world, state)
    yield from roll(world, state)
    yield from rewind(world, state)


def plain(world: World, state: State) -> State:
    """Return the state without what can never matter again: it differs in nothing, and is one state more often."""
    listeners = tuple(each for each in state.listeners if may_act(state, each))
    messages = frozenset(each for each in state.messages if may_claim(state, each))
    writes = frozenset(each for each in state.writes if may_land(world, state, each))
    return state._replace(listeners=listeners, messages=messages, writes=writes)


def may_land(world: World, state: State, one: Write) -> bool:
    """Tell whether the guard of a write may still match."""
    if one.kind is Late.WATERMARK:
        return one.term == state.epoch
    if one.kind is Late.SWITCH:
        mine = one.term == state.epoch or world.broken is Broken.SWITCH_IGNORES_TERM
        return mine and one.generation == state.generation
    if one.kind in {Late.MARK, Late.CLEAR}:
        return one.generation == state.generation and one.term == state.partitions[one.partition].epoch
    return True


def may_act(state: State, listener: Listener) -> bool:
    """Tell whether a listener may still find a document that carries its term, or is about to."""
    if listener.leads and listener.generation != state.generation:
        return listener.term == state.epoch
    return listener.term == state.epoch or any(each.epoch == listener.term for each in state.partitions)


def may_claim(state: State, message: Message) -> bool:
    """Tell whether a message could claim when its partition flows."""
    if message.generation != state.generation:
        return False
    partition = state.partitions[message.partition]
    return partition.epoch == message.term and partition.token == message.base


SPILL_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss,),
        "P2": (order,),
        "P4": (monotone,),
        "P5": (prefix,),
        "P6": (bounded_duplicates,),
        "P13": (bytes_at_hand,),
    },
    at_rest={"P12": left_undone},
)
