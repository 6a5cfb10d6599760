"""The oracles that judge each step of the protocol and each quiescent state, and their search (``exploration``).

Every fair step adds something that no other such step takes away, so there are no circles.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.property import exploration
from tests.property.exploration import Model, changed, gone_back, passed
from tests.property.protocol_faults import lapse, lock, misfortune_of_runs, misfortune_of_stores, reopen, rewind
from tests.property.protocol_model import MARK, Policy, Run, State, Steps, World, initial
from tests.property.protocol_rules import (
    acquire,
    commit,
    deliver,
    dispatch,
    execute,
    in_office,
    progress,
    read,
    release,
    replicate,
    store_watermark,
    take_over,
    win,
)

Move = exploration.Move[World, State]


OUTCOMES = frozenset({"handled", "position", "progress", "retry", *Policy})
"""The kinds of steps by which an execution records how it ended, or how far it is."""


def no_loss(move: Move) -> Iterator[str]:
    """P1: a position never passes a change of its own configuration that is not done."""
    if move.after.partitions is move.before.partitions:
        return
    for index, (old, new) in enumerate(zip(move.before.partitions, move.after.partitions, strict=True)):
        if new.token <= old.token:
            continue
        config = old.handled.config if old.handled else getattr(move.step.who, "config", 0)

        def is_owed(token: int, index: int = index, config: int = config) -> bool:
            wanted = move.world.matched(config, token) and move.world.partition(config, token) == index
            return wanted and token not in move.after.settled

        yield from passed(old.token, new.token, index, is_owed)


def order(move: Move) -> Iterator[str]:
    """P2: accepted effects of a partition never go back to an earlier change (but by a rewind).

    A change that the writer of the later effect did not match was not earlier for it: a new configuration
    that matches more may still run it first, and then runs again what was begun behind it and not committed. And a run
    of several changes is repeated by a newer execution from the first one that is not recorded.
    """
    for partition, (old, new) in zip(
        move.before.partitions, zip(move.before.targets, move.after.targets, strict=True), strict=True
    ):
        again = move.world.runs and new.owner > old.owner and new.token > partition.token
        back = old.era == new.era and new.token < old.token and move.world.matched(old.config, new.token)
        if (back and not again) or new.era < old.era:
            yield f"the effect of change {new.token} was accepted after that of change {old.token}"


def fencing(move: Move) -> Iterator[str]:
    """P3: no effect is accepted from an execution older than the last, no outcome from a replaced one."""
    for old, new in changed(move.before.targets, move.after.targets):
        if new.owner < old.owner:
            yield f"execution {new.owner} overwrote what execution {old.owner} had written"
    run = move.step.who
    if isinstance(run, Run) and move.step.kind in OUTCOMES:
        partition = move.before.partitions[run.partition]
        if run.owner < partition.owners or run.era < move.before.era or run.first != partition.committed + 1:
            yield f"the stale execution {run.owner} recorded the outcome {move.step.kind!r}"


def monotone(move: Move) -> Iterator[str]:
    """P4: versions, epochs and fences never go back; numbers and tokens only by a rewind."""
    before, after, rewound = move.before, move.after, move.step.kind == "rewind"
    yield from gone_back("a version", before.version, after.version)
    yield from gone_back("an epoch", before.epoch, after.epoch)
    if not rewound:
        yield from gone_back("the watermark", before.watermark, after.watermark)
    for old, new in changed(before.partitions, after.partitions):
        if move.step.kind == "rollback":  # what no majority had does not count
            continue
        yield from gone_back("an epoch", old.epoch, new.epoch)
        yield from gone_back("a fence", old.fence, new.fence)
        if not rewound:
            yield from gone_back("a number", old.committed, new.committed)
            yield from gone_back("a position", old.token, new.token)
        if rewound and not (new.epoch > old.epoch and new.fence > old.fence):
            yield "a rewind has not raised epoch and fence"


def prefix(move: Move) -> Iterator[str]:
    """P5: a watermark never passes a change that is not committed or dead-lettered."""
    if move.step.kind == "watermark":
        for token in range(move.before.watermark + 1, move.after.watermark + 1):
            if move.world.stream[token - 1] != MARK and token not in move.after.settled:
                yield f"the watermark {move.after.watermark} has passed change {token}, which is not done"
    for token in move.before.settled - move.after.settled:
        if token <= move.after.watermark and move.step.kind == "rollback":
            yield f"change {token} was taken back, and the watermark {move.after.watermark} has passed it"


def bounded_duplicates(move: Move) -> Iterator[str]:
    """P6: a handler starts once per change, once more for each outcome of its own, and per fault of the partition."""
    run = move.step.who
    if not isinstance(run, Run) or move.step.kind not in {"claim", "go on"}:
        return
    token = run.rest[0] if move.step.kind == "go on" else run.token
    starts, faults = move.after.starts[token - 1], move.before.partitions[run.partition].faults
    if starts > 1 + faults + move.before.asked[token - 1]:
        yield f"change {token} has started {starts} times with {faults} faults"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P1, where nothing more will happen: everything is done, or its partition has stopped loudly."""
    listener = in_office(state)
    if listener is None:
        yield "nobody is in office"
        return
    for token in range(1, len(world.stream) + 1):
        wanted = world.matched(listener.config, token) and token not in state.settled
        if wanted and not state.partitions[world.partition(listener.config, token)].halted:
            yield f"change {token} is neither done nor is its partition halted"
    if state.watermark < len(world.stream) and not any(each.halted for each in state.partitions):
        yield f"the watermark stands at {state.watermark} for ever"


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
    yield from acquire(world, state)
    yield from release(world, state)
    for which, listener in enumerate(state.listeners):
        if listener.taken > len(state.partitions):
            yield from read(world, state, which)
            yield from dispatch(world, state, which)
            yield from store_watermark(world, state, which)
            yield from reopen(world, state, which)
            yield from win(world, state, which)
        else:
            yield from take_over(world, state, which)
            yield from lock(world, state, which)
    yield from deliver(world, state)
    for run in state.runs:
        yield from execute(world, state, run)
        yield from progress(world, state, run)
        yield from misfortune_of_runs(world, state, run)
    yield from commit(world, state)
    yield from replicate(state)
    yield from lapse(world, state)
    yield from misfortune_of_stores(world, state)
    yield from rewind(world, state)


PROTOCOL_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss,),
        "P2": (order,),
        "P3": (fencing,),
        "P4": (monotone,),
        "P5": (prefix,),
        "P6": (bounded_duplicates,),
    },
    at_rest={"P1": left_undone},
)
