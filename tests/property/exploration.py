"""A finite machine, its oracles, and the search over every interleaving, breadth first, up to the first violation.

A state is quiescent when only unfair steps (faults, take-overs without need, operators) could still change it. A
machine whose fair steps make no circle comes to rest in a quiescent state, whatever the order; so to judge these is
to judge where everything ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
WorldT = TypeVar("WorldT")
StateT = TypeVar("StateT", bound=Hashable)


class Step(NamedTuple):
    """A transition: who did what. ``fair`` steps happen sooner or later; the others may or may not happen."""

    kind: str
    who: Any = None
    fair: bool = True

    def __str__(self) -> str:
        return self.kind if self.who is None else f"{self.kind}: {self.who}"


class Move(NamedTuple, Generic[WorldT, StateT]):
    world: WorldT
    before: StateT
    step: Step
    after: StateT


class Finding(NamedTuple):
    """The shortest way into a violation: which invariants, what they say, and the steps."""

    invariants: frozenset[str]
    complaints: tuple[str, ...]
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{number:3} {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([", ".join(sorted(self.invariants)), *self.complaints, *lines])


class Search(NamedTuple):
    states: int
    quiescent: int
    finding: Finding | None


class Model(NamedTuple, Generic[WorldT, StateT]):
    """What is searched.

    Args:
        initial: The first state of a scenario.
        steps: Every step that a state allows, with the state it leads to.
        oracles: What judges a step, by invariant; they say nothing when all is well.
        at_rest: What judges a state at which everything has come to rest, by invariant.
    """

    initial: Callable[[WorldT], StateT]
    steps: Callable[[WorldT, StateT], Iterator[tuple[Step, StateT]]]
    oracles: Mapping[str, Iterable[Callable[[Move[WorldT, StateT]], Iterator[str]]]]
    at_rest: Mapping[str, Callable[[WorldT, StateT], Iterator[str]]]

    @property
    def invariants(self) -> frozenset[str]:
        return frozenset({*self.oracles, *self.at_rest})

    def search(self, world: WorldT, *, watched: frozenset[str] | None = None, limit: int = 500_000) -> Search:
        """Explore every interleaving of a scenario, breadth first, up to the first violation.

        It judges the ``watched`` invariants, or all. More states than the limit are an error, never a silent cut.
        """
        judged = self.invariants if watched is None else watched
        oracles = [(name, oracle) for name, found in self.oracles.items() if name in judged for oracle in found]
        at_rest = {name: oracle for name, oracle in self.at_rest.items() if name in judged}
        start = self.initial(world)
        parents: dict[StateT, tuple[StateT, Step] | None] = {start: None}
        queue, quiescent = deque([start]), 0
        while queue:
            before = queue.popleft()
            rests = True
            for step, after in self.steps(world, before):
                rests = rests and not step.fair
                move = Move(world, before, step, after)
                said = {name: complaint for name, oracle in oracles for complaint in oracle(move)}
                if said:
                    trace = (*way_to(parents, before), str(step))
                    return Search(len(parents), quiescent, Finding(frozenset(said), (*said.values(),), trace))
                if after not in parents:
                    parents[after] = (before, step)
                    queue.append(after)
            if rests:
                quiescent += 1
                texts = {name: "; ".join(oracle(world, before)) for name, oracle in at_rest.items()}
                said = {name: text for name, text in texts.items() if text}
                if said:
                    trace = (*way_to(parents, before),)
                    return Search(len(parents), quiescent, Finding(frozenset(said), (*said.values(),), trace))
            assert len(parents) <= limit, f"{world}: more than {limit} states"
        return Search(len(parents), quiescent, None)


def way_to(parents: Mapping[StateT, tuple[StateT, Step] | None], state: StateT) -> list[str]:
    trace = []
    link = parents[state]
    while link is not None:
        state, step = link
        trace.append(str(step))
        link = parents[state]
    return trace[::-1]


def put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def changed(before: tuple[Item, ...], after: tuple[Item, ...]) -> list[tuple[Item, Item]]:
    if before is after:
        return []
    return [(old, new) for old, new in zip(before, after, strict=True) if old is not new]


def passed(old: int, new: int, index: int, is_owed: Callable[[int], bool]) -> Iterator[str]:
    """P1: a position of a partition never passes a change that is owed there."""
    for token in range(old + 1, new + 1):
        if is_owed(token):
            yield f"partition {index} has passed change {token}, which nobody handled"


def gone_back(what: str, old: Any, new: Any) -> Iterator[str]:
    """P4: what is stored never goes back."""
    if new < old:
        yield f"{what} has gone back from {old} to {new}"
