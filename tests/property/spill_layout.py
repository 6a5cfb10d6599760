"""Repartitioning: what was read is done, then other partitions take the place of these; the rest is removed.

That is one step here: in between no partition is there, and whoever takes over makes them at the watermark.
"""

from __future__ import annotations

from tests.property.spill_model import (
    Broken,
    Late,
    Listener,
    State,
    Step,
    Steps,
    World,
    Write,
    with_listener,
)
from tests.property.spill_rules import opened, unfinished
from tests.property.spill_writes import is_drained, landed, write


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
