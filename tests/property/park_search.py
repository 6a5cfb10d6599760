"""The oracles that judge each step with parked keys and each quiescent state, and their search (``exploration``).

A person decides when a key is released, if ever. So a quiescent state may have parked keys; but their first letter has
failed itself, and says why, and nothing that a person has asked for is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.property import exploration
from tests.property.exploration import Model
from tests.property.park_faults import (
    crash_between,
    lapse,
    misfortune,
    obey,
    order,
    remove_by_hand,
    take_over,
)
from tests.property.park_model import (
    Addition,
    Draft,
    Execution,
    Fault,
    Order,
    State,
    Steps,
    Transaction,
    World,
    initial,
    owns,
)
from tests.property.park_rules import add, claim, claim_for_replay, commit, execute

Move = exploration.Move[World, State]


def _ended(state: State) -> frozenset[int]:
    return state.done | state.discarded


def no_loss(move: Move) -> Iterator[str]:
    """P1: what the position has passed is handled, discarded by a person, or a letter."""
    state = move.after
    letters = {each.number for each in state.stored.letters}
    for number in range(1, state.stored.partition.committed + 1):
        if number not in letters and number not in _ended(state):
            yield f"change {number} is passed, and neither handled nor discarded nor a letter"


def in_order(move: Move) -> Iterator[str]:
    """P2: an effect is accepted when all earlier changes of its key are handled or discarded."""
    run = move.step.who
    if move.step.kind == "effect" and isinstance(run, Execution):
        for number in range(1, run.number):
            is_done = number in _ended(move.before) or (run.first <= number and not run.letter)
            if move.world.key(number) == move.world.key(run.number) and not is_done:
                yield f"the effect of change {run.number} was accepted, and change {number} of its key is not done"


def fenced(move: Move) -> Iterator[str]:
    """P3: no older effect over a newer one, none of the rightful refused, no outcome of a replaced execution."""
    for old, new in zip(move.before.targets, move.after.targets, strict=True):
        if (new.number, new.owner) < (old.number, old.owner):
            yield f"change {new.number} by execution {new.owner} went over change {old.number} by {old.owner}"
    who, partition = move.step.who, move.before.stored.partition
    if move.step.kind == "refused" and isinstance(who, Execution) and owns(partition, who):
        yield f"execution {who.owner} is the newest, and the target has refused it"
    run = who.who if move.step.kind == "commit" and isinstance(who, Transaction) else None
    if isinstance(run, Execution) and not owns(partition, run):
        yield f"the replaced execution {run.owner} has written its outcome"


def no_more_starts(move: Move) -> Iterator[str]:
    """P6: a handler starts once per change, once more per fault or command, and never when a person has said no."""
    for number, (starts, most) in enumerate(zip(move.after.starts, move.after.justified, strict=True), 1):
        if starts > most and starts > move.before.starts[number - 1]:
            yield f"the handler of change {number} has started {starts} times, and {most} are justified"
    run, kind = move.step.who, move.step.kind
    if not isinstance(run, Execution):
        return
    if kind in {"claim", "handler starts"} and run.number in _ended(move.before):
        yield f"the handler of change {run.number} has started, which is done or discarded"
    if kind == "effect" and run.number in move.before.discarded and owns(move.before.stored.partition, run):
        yield f"change {run.number} was discarded, and took effect afterwards"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12: where nothing more will happen, no hash is without letters, and nothing waits that nobody knows of."""
    partition, draft = state.stored.partition, Draft(state.stored)
    if partition.committed < len(world.keys):
        yield f"the partition stands at {partition.committed} for ever"
    keys = {world.key(each.number) for each in state.stored.letters}
    for key in partition.parked - keys:
        yield f"key {key} is parked for ever, and has no letter"
    for key in keys - partition.parked:
        yield f"a letter waits for key {key}, which is not parked"
    for key in keys:
        first = draft.letters[draft.first_of(world, key)]
        if not first.failed and Fault.HAND not in world.faults:
            yield f"letter {first.number} is the first of its key, has not failed, and nobody asks for it"
    if state.owed and Fault.HAND not in world.faults:
        yield f"a person has asked for the replay of {sorted(state.owed)}, and nothing has come of it"
    for request in state.stored.requests:
        yield f"the request for letter {request.number} is left"


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
    yield from claim(world, state)
    yield from claim_for_replay(state)
    yield from lapse(world, state)
    for actor in state.actors:
        if isinstance(actor, Execution):
            yield from execute(world, state, actor)
            yield from misfortune(world, state, actor)
        elif isinstance(actor, Order):
            yield from obey(world, state, actor)
        elif isinstance(actor, Addition):
            yield from add(state, actor)
            yield from crash_between(world, state, actor)
    for transaction in state.transactions:
        for step, after in commit(world, state, transaction):
            who = transaction.who
            asks = transaction.kind == "ask" and isinstance(who, Order)
            yield step, after._replace(owed=after.owed | {who.numbers[0]}) if asks and isinstance(who, Order) else after
    yield from order(world, state)
    yield from take_over(world, state)
    yield from remove_by_hand(world, state)


PARK_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={"P1": (no_loss,), "P2": (in_order,), "P3": (fenced,), "P6": (no_more_starts,)},
    at_rest={"P12": left_undone},
)
