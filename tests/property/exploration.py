"""The search over every interleaving of a finite machine, breadth first, up to the first violation.

A state is quiescent when only unfair steps (faults, take-overs without need, operators) could still change it. A
machine whose fair steps make no circle comes to rest in a quiescent state, whatever the order; so to judge these is
to judge where everything ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar


class AnyStep(Protocol):
    """What the search needs to know of a step; its text is a line of the trace."""

    @property
    def fair(self) -> bool:
        """Whether it happens sooner or later; other steps may or may not happen."""


StateT = TypeVar("StateT", bound=Hashable)
StepT = TypeVar("StepT", bound=AnyStep)


class Machine(NamedTuple, Generic[StateT, StepT]):
    """What is searched.

    Args:
        start: The first state.
        steps: Every step that a state allows, with the state it leads to.
        judge: What the oracles say about a step, by invariant; empty when all is well.
        undone: What they say about a state at which everything has come to rest, by invariant.
    """

    start: StateT
    steps: Callable[[StateT], Iterator[tuple[StepT, StateT]]]
    judge: Callable[[StateT, StepT, StateT], Mapping[str, str]]
    undone: Callable[[StateT], Mapping[str, str]]


class Finding(NamedTuple):
    """The shortest way into a violation: which invariants, what they say, and the steps."""

    invariants: frozenset[str]
    complaints: tuple[str, ...]
    trace: tuple[str, ...]

    def __str__(self) -> str:
        """Return the finding as a text for a failure message."""
        lines = [f"{number:3} {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([", ".join(sorted(self.invariants)), *self.complaints, *lines])


class Search(NamedTuple):
    """What a search has seen."""

    states: int
    quiescent: int
    finding: Finding | None


def explore(machine: Machine[StateT, StepT], *, name: str, limit: int) -> Search:
    """Explore every interleaving, breadth first, up to the first violation.

    Args:
        machine: What is searched.
        name: What to call it when it is too large.
        limit: The largest number of states; more is an error of the scenario, never a silent cut.
    """
    parents: dict[StateT, tuple[StateT, StepT] | None] = {machine.start: None}
    queue, quiescent = deque([machine.start]), 0
    while queue:
        before = queue.popleft()
        at_rest = True
        for step, after in machine.steps(before):
            at_rest = at_rest and not step.fair
            said = machine.judge(before, step, after)
            if said:
                return Search(len(parents), quiescent, finding(said, [*way_to(parents, before), str(step)]))
            if after not in parents:
                parents[after] = (before, step)
                queue.append(after)
        if at_rest:
            quiescent += 1
            said = machine.undone(before)
            if said:
                return Search(len(parents), quiescent, finding(said, way_to(parents, before)))
        assert len(parents) <= limit, f"{name}: more than {limit} states"
    return Search(len(parents), quiescent, None)


def way_to(parents: Mapping[StateT, tuple[StateT, StepT] | None], state: StateT) -> list[str]:
    """Return the steps that lead to a state, first to last."""
    trace = []
    link = parents[state]
    while link is not None:
        state, step = link
        trace.append(str(step))
        link = parents[state]
    return trace[::-1]


def finding(said: Mapping[str, str], trace: Iterable[str]) -> Finding:
    """Return what was said about the end of a trace."""
    return Finding(frozenset(said), tuple(said.values()), tuple(trace))
