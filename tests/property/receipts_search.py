"""The oracles that judge each step with receipts and each quiescent state, and their search (see ``exploration``)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.property.exploration import Machine, Search, explore
from tests.property.receipts_faults import die, pass_deadline, purge, replace
from tests.property.receipts_model import Log, Own, State, Step, Steps, World, initial
from tests.property.receipts_rules import act

INVARIANTS = frozenset({"once", "all-or-none", "told", "ends"})


def once(world: World, state: State) -> Iterator[str]:
    """A branch is changed once or not at all, in every state."""
    for branch, count in enumerate(state.effects):
        if count not in {0, 1}:
            yield f"branch {branch} is changed {count} times"
    if state.own not in ({0, 1} if world.own is not Own.NONE else {0}):
        yield f"the own branch is changed {state.own} times"


def all_or_none(world: World, state: State) -> Iterator[str]:
    """What the log calls done is changed everywhere, what it calls canceled nowhere."""
    if state.log not in {Log.DONE, Log.CANCELED}:
        return
    wanted = int(state.log is Log.DONE)
    effects = state.effects if world.own is Own.NONE else (*state.effects, state.own)
    if any(each != wanted for each in effects):
        yield f"the log says {state.log}, and branches are changed {effects} times"


def kept(state: State) -> Iterator[str]:
    """What a caller was told stays so."""
    if state.told >= {Log.DONE, Log.CANCELED}:
        yield "one caller was told done, another canceled"
    for told, other in ((Log.DONE, Log.CANCELED), (Log.CANCELED, Log.DONE)):
        if told in state.told and state.log is other:
            yield f"a caller was told {told}, and the log says {other}"


def judged(world: World, state: State, watched: frozenset[str]) -> dict[str, str]:
    """Return what the watched oracles say about a state, by invariant."""
    said = {"once": once(world, state), "all-or-none": all_or_none(world, state), "told": kept(state)}
    found = {name: "; ".join(each) for name, each in said.items() if name in watched}
    return {name: each for name, each in found.items() if each}


def left_undone(state: State) -> Iterator[str]:
    """Where nothing more will happen: the log is final, and no receipt stays for ever."""
    if state.log not in {Log.DONE, Log.CANCELED}:
        yield f"the log stays {state.log}"
    for branch, receipt in enumerate(state.receipts):
        if receipt is not None and not receipt.expires:
            yield f"the receipt of branch {branch} stays for ever"


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
    for actor in dict.fromkeys(state.actors):
        yield from act(world, state, actor)
    yield from pass_deadline(world, state)
    yield from purge(world, state)
    yield from replace(world, state)
    yield from die(world, state)


def search(world: World, *, watched: frozenset[str] = INVARIANTS, limit: int = 500_000) -> Search:
    """Explore every interleaving of a scenario, breadth first, up to the first violation.

    Args:
        world: The scenario.
        watched: The invariants to judge; the others are let pass.
        limit: The largest number of states; more is an error of the scenario, never a silent cut.
    """

    def judge(before: State, step: Step, after: State) -> dict[str, str]:
        del before, step
        return judged(world, after, watched)

    def undone(state: State) -> dict[str, str]:
        said = list(left_undone(state)) if "ends" in watched else []
        return {"ends": "; ".join(said)} if said else {}

    machine = Machine(start=initial(world), steps=lambda state: steps(world, state), judge=judge, undone=undone)
    return explore(machine, name=world.name, limit=limit)
