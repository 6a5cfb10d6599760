"""Two-phase commit with markers as a finite machine, its broken variants, and the oracles of its search (P17, P18).

As the other models, it imports nothing from the package. One transaction changes two participants. What it models, in
`mongo_celery/twophase`:

| here | there |
|---|---|
| ``look``, ``prove``, ``apply``, ``again`` | `documents.look`, `TransactionLog.prove`, `documents.apply` |
| ``begin``, ``applied``, ``done``, ``canceling``, ``canceled`` | `TransactionLog.move` by a `Coordinator` |
| ``settle``, ``undo``, ``renew`` | `documents.settle`, both updates of `documents.undo` |
| ``read``, ``take`` | `Engine.finish`, `TransactionLog.take_over`, `TwoPhaseCommit.cancel` |

Each step is one command of a server. A process that is frozen may make its next step at any time, or never. That is a
crash, a pause, and an update that the network delivers late. A lost answer makes a process repeat its step. Left out:
deadlines (a cancel by recovery is one by an operator), rules for an undo, and a participant that is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from tests.property.exploration import Model, Move, Step


class Broken(StrEnum):
    """One rule of the protocol left out or replaced by the simpler one."""

    NOTHING = "nothing"
    TUTORIAL = "a change is applied where its marker is missing, whatever the version"
    NOT_PROVED = "nothing is proved between a look and a change"
    NOT_GIVEN = "a participant without a version gets none, and matches itself"
    SETTLED_AS_IS = "settling renews no version"
    UNDONE_AS_IS = "an undo renews no version where it finds no marker"
    REPLACED_UNSEEN = "incarnations are not compared"
    CANCELED_LATE = "what is applied can be canceled"
    DONE_FIRST = "done is recorded before the markers are pulled"
    APPLIED_FIRST = "applied is recorded before the second change"
    MOVED_UNGUARDED = "a step is recorded without comparing state and version"


class World(NamedTuple):
    """A scenario: how often each thing may happen.

    Args:
        name: A sentence for reports.
        unmet: The participant whose rule fails; None for none.
        freezes: Processes that freeze.
        losses: Answers that are lost.
        takers: Recoveries that begin while the coordinator is at work.
        cancels: Operators who cancel.
        others: Other transactions that look at a participant, and are settled in it.
        replacements: Participants that a program writes back as wholes.
        broken: The rule left out.
    """

    name: str
    unmet: int | None = None
    freezes: int = 0
    losses: int = 0
    takers: int = 0
    cancels: int = 0
    others: int = 0
    replacements: int = 0
    broken: Broken = Broken.NOTHING


class Log(NamedTuple):
    """The transaction's document; ``of``: the incarnations of its participants."""

    state: str = "initial"
    version: int = 0
    owner: int = 0
    of: tuple[int, ...] = ()


class Part(NamedTuple):
    """A participant; ``changes``: how often it has the change; ``of`` and ``at``: its version, 0 for none."""

    changes: int = 0
    marked: bool = False
    of: int = 0
    at: int = 0


class Process(NamedTuple):
    """A coordinator: its next step, the participant of that, and what it has read of the log and the participants.

    ``fresh``: it has not had the transaction yet; ``cancels``: it is an operator's.
    """

    id: int
    step: str = "read"
    side: int = 0
    log: Log = Log()
    seen: tuple[Part, ...] = ()
    fresh: bool = True
    cancels: bool = False
    frozen: bool = False


class State(NamedTuple):
    """Everything; ``stopped``: it waits for a person; ``left``: what may still happen, in the order of the world."""

    left: World
    log: Log = Log()
    parts: tuple[Part, Part] = (Part(), Part())
    processes: tuple[Process, ...] = (Process(1),)
    started: int = 1
    fresh: int = 1
    stopped: bool = False
    replaced: bool = False


def put(state: State, side: int, **fields: Any) -> State:
    parts = [*state.parts]
    parts[side] = parts[side]._replace(**fields)
    return state._replace(parts=(parts[0], parts[1]))


def renew(state: State, side: int) -> State:
    if not state.parts[side].at:
        return state
    return put(state, side, at=state.fresh)._replace(fresh=state.fresh + 1)


def give(state: State, side: int) -> State:
    if state.parts[side].at:
        return state
    return put(state, side, of=state.fresh, at=state.fresh)._replace(fresh=state.fresh + 1)


def go(state: State, me: Process, step: str, side: int = 0, **fields: Any) -> State:
    """Return the state in which a process has its next step; "end" is none."""
    others = tuple(each for each in state.processes if each.id != me.id)
    mine = () if step == "end" else (me._replace(step=step, side=side, **fields),)
    return state._replace(processes=tuple(sorted((*others, *mine))))


def move(state: State, me: Process, name: str, then: tuple[str, int], *, takes: bool = False) -> State:
    """Record a step in the log, if it is as it was seen; else read it again."""
    is_unguarded = state.left.broken is Broken.MOVED_UNGUARDED and me.log.state != "initial"
    if not is_unguarded and not owns(state, me):
        return go(state, me, "read")
    log = state.log._replace(state=name)
    if takes:
        log = log._replace(version=log.version + 1, owner=me.id)
    if name == "pending" and me.seen:
        log = log._replace(of=tuple(each.of for each in me.seen))
    return go(state._replace(log=log), me._replace(log=log, fresh=False), *then)


def owns(state: State, me: Process) -> bool:
    return (state.log.state, state.log.version) == (me.log.state, me.log.version)


FIRST = {"pending": ("look", 0), "applied": ("settle", 0), "canceling": ("undo", 1)}
"""The first step of a process that has the transaction, by state."""

MOVES = {
    "begin": ("pending", ("apply", 0), True),
    "applied": ("applied", ("settle", 0), False),
    "done": ("done", ("end", 0), False),
    "cancel": ("canceled", ("end", 0), False),
    "canceling": ("canceling", ("undo", 1), True),
    "canceled": ("canceled", ("end", 0), False),
}
"""By step: the state that is recorded, the step that follows, and True if the version grows."""


def read(state: State, me: Process) -> State:
    log, me = state.log, me._replace(log=state.log, seen=())
    is_too_late = me.cancels and log.state == "applied" and state.left.broken is not Broken.CANCELED_LATE
    if log.state in {"done", "canceled"}:
        return go(state, me, "end")
    if log.state == "initial":
        return go(state, me, "cancel" if me.cancels else "look")
    if log.owner == me.id:
        return go(state, me, *FIRST[log.state])
    return go(state, me, "take" if me.fresh and me.id != 1 and not is_too_late else "end")


def take(state: State, me: Process) -> State:
    """Take the transaction over; an operator's process cancels it with that."""
    name = "canceling" if me.cancels and me.log.state != "canceling" else me.log.state
    return move(state, me, name, FIRST[name], takes=True)


def look(state: State, me: Process) -> State:
    """Read a participant. Before the transaction is begun, give it a version if it has none."""
    is_initial = me.log.state == "initial"
    if is_initial and state.left.broken is not Broken.NOT_GIVEN:
        state = give(state, me.side)
    me = me._replace(seen=(*me.seen, state.parts[me.side]))
    then = "begin" if is_initial else "apply" if state.left.broken is Broken.NOT_PROVED else "prove"
    return go(state, me, "look", 1) if me.side == 0 else go(state, me, then)


def prove(state: State, me: Process) -> State:
    return go(state, me, "apply" if owns(state, me) else "read")


def change(state: State, me: Process) -> State:
    """Change a participant; or look again why that was not possible."""
    broken, side, part = state.left.broken, me.side, state.parts[me.side]
    view = part if me.step == "again" else me.seen[side]
    order = (("apply", 1), ("applied", 0))
    if broken is Broken.APPLIED_FIRST:
        order = (("applied", 0), ("settle", 0))
    if view.marked:
        return go(state, me, *order[side])
    if view.of != me.log.of[side] and broken is not Broken.REPLACED_UNSEEN:
        return stop(state, me)
    if me.step == "again":
        return go(state, me, "canceling") if part.at == me.seen[side].at else go(state, me, "look", seen=())
    is_version = part.at == view.at and (part.at != 0 or broken is Broken.NOT_GIVEN)
    if part.marked or side == state.left.unmet or not (is_version or broken is Broken.TUTORIAL):
        return go(state, me, "again", side)
    return go(put(state, side, changes=part.changes + 1, marked=True), me, *order[side])


def stop(state: State, me: Process) -> State:
    return go(state._replace(stopped=True), me, "end") if owns(state, me) else go(state, me, "read")


def settle(state: State, me: Process) -> State:
    broken, after = state.left.broken, put(state, me.side, marked=False)
    after = after if broken is Broken.SETTLED_AS_IS else renew(after, me.side)
    then = "settle" if me.side == 0 else "end" if broken is Broken.DONE_FIRST else "done"
    return go(after, me, then, 1 - me.side)


def undo(state: State, me: Process) -> State:
    """Take a change back where its marker is; else renew the version, if it is the one that was recorded."""
    side, part = me.side, state.parts[me.side]
    then = ("undo", 0) if side == 1 else ("canceled", 0)
    if me.step == "undo" and part.marked:
        return go(renew(put(state, side, changes=part.changes - 1, marked=False), side), me, *then)
    if me.step == "undo" or part.marked:
        return go(state, me, "undo" if part.marked else "renew", side)
    if part.of != me.log.of[side] and state.left.broken is not Broken.REPLACED_UNSEEN:
        return stop(state, me)
    return go(state if state.left.broken is Broken.UNDONE_AS_IS else renew(state, side), me, *then)


def record(state: State, me: Process) -> State:
    name, then, takes = MOVES[me.step]
    if me.step == "applied" and state.left.broken is Broken.DONE_FIRST:
        name = "done"
    if me.step == "applied" and state.left.broken is Broken.APPLIED_FIRST:
        then = ("apply", 1)
    return move(state, me, name, then, takes=takes)


ACTS = {"read": read, "take": take, "look": look, "prove": prove, "apply": change, "again": change}
ACTS |= {"settle": settle, "undo": undo, "renew": undo, **dict.fromkeys(MOVES, record)}


def work(state: State) -> Iterator[tuple[Step, State]]:
    """Yield the next step of each process, with its answer or without, and that it freezes."""
    left = state.left
    for me in state.processes:
        after = ACTS[me.step](state, me)
        yield Step(me.step, me, fair=not me.frozen), after
        if left.losses and (after.log, after.parts) != (state.log, state.parts):
            unknown = go(after._replace(left=left._replace(losses=left.losses - 1)), me, me.step, me.side)
            yield Step(f"{me.step}, its answer is lost", me, fair=False), unknown
        if left.freezes and not me.frozen:
            less = state._replace(left=left._replace(freezes=left.freezes - 1))
            yield Step("freeze", me, fair=False), go(less, me, me.step, me.side, frozen=True)


def befall(state: State) -> Iterator[tuple[Step, State]]:
    left, number = state.left, state.started + 1

    def less(name: str) -> State:
        return state._replace(left=left._replace(**{name: getattr(left, name) - 1}))

    def begin(before: State, *, cancels: bool = False) -> State:
        fresh = Process(number, cancels=cancels)
        return before._replace(started=number, processes=(*before.processes, fresh))

    if left.takers:
        yield Step(f"recovery without need: process {number}", fair=False), begin(less("takers"))
    if left.cancels:
        yield Step(f"an operator cancels: process {number}", fair=False), begin(less("cancels"), cancels=True)
    is_held = state.stopped or any(not each.frozen for each in state.processes)
    if state.log.state not in {"done", "canceled"} and not is_held:
        yield Step(f"recovery: process {number}"), begin(state)
    for side in (0, 1):
        if left.others:
            yield Step(f"another transaction in {'AB'[side]}", fair=False), renew(give(less("others"), side), side)
        if left.replacements:
            replaced = put(less("replacements"), side, marked=False, of=0, at=0)
            yield Step(f"{'AB'[side]} is written back", fair=False), replaced._replace(replaced=True)


def list_steps(_world: World, state: State) -> Iterator[tuple[Step, State]]:
    yield from work(state)
    yield from befall(state)


def judge_changes(move: Move[World, State]) -> Iterator[str]:
    """P18: no participant is changed twice, and none is changed back twice."""
    counts = [part.changes for part in move.after.parts]
    if not {*counts} <= {0, 1}:
        yield f"the participants have the change {counts} times"


def judge_outcome(move: Move[World, State]) -> Iterator[str]:
    """P18: done is all, canceled is nothing, and it stays so."""
    counts = [part.changes for part in move.after.parts]
    expected = {"done": [1, 1], "canceled": [0, 0]}.get(move.after.log.state)
    if {*counts} <= {0, 1} and expected not in (None, counts):
        yield f"{move.after.log.state}, and the participants have {counts}"


def judge_rest(_world: World, state: State) -> Iterator[str]:
    """P17: where nothing more will happen it is final and without markers, or it waits for a person, who is told."""
    marked = any(part.marked for part in state.parts)
    is_final = state.log.state in {"done", "canceled"} and not marked
    if not is_final and not (state.stopped and state.replaced):
        yield f"{state.log.state} for ever{', with a marker' * marked}{', stopped' * state.stopped}"


TWOPHASE_MODEL = Model(
    initial=State,
    steps=list_steps,
    oracles={"once": [judge_changes], "whole": [judge_outcome]},
    at_rest={"clean": judge_rest},
)
