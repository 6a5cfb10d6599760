"""The base of the models that have listeners and partitions: documents, terms, faults, and writes that land late.

A write is acknowledged at once, or its answer is lost: then its author goes on as if it had failed, and it lands at any
later time, or never. What a deposed listener still does is nothing but such late writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from tests.property.exploration import Step, put

StateT = TypeVar("StateT")


def replaced(state: StateT, **fields: Any) -> StateT:
    """Return the state with some fields replaced."""
    after: StateT = cast("Any", state)._replace(**fields)
    return after


def with_partition(state: StateT, index: int, partition: Any) -> StateT:
    """Return the state with one partition document replaced."""
    return replaced(state, partitions=put(cast("Any", state).partitions, index, partition))


def with_listener(state: StateT, old: Any, new: Any) -> StateT:
    """Return the state with one listener's memory replaced."""
    return replaced(state, listeners=tuple(new if each is old else each for each in cast("Any", state).listeners))


def can(world: Any, state: Any, fault: Any) -> bool:
    """Tell whether a fault may still happen."""
    return state.budget > 0 and fault in world.faults


def spent(state: StateT) -> StateT:
    """Return the state with one fault less to come."""
    return replaced(state, budget=cast("Any", state).budget - 1)


def in_office(state: Any) -> Any:
    """Return the listener of the last term, unless an operator's rewind was the last. None without one."""
    last = state.listeners[-1] if state.listeners else None
    return last if last is not None and last.term == state.epoch else None


def acquire(world: Any, state: StateT, make: Callable[[int, int], Any]) -> Iterator[tuple[Step, StateT]]:
    """A standby takes the lease and the subscription; without anybody in office it happens sooner or later.

    Else it is bounded by the scenario. The two writes are one step, since between them nobody learns anything. Epochs
    count the terms; a rewind is a term without a listener.

    Args:
        make: A listener of a term, from that and from how many there were before.
    """
    known = cast("Any", state)
    needed, begun = in_office(known) is None, known.epoch - known.rewound
    if needed or begun < world.terms:
        listener = make(known.epoch + 1, begun)
        after = replaced(state, epoch=listener.term, listeners=(*known.listeners, listener))
        yield Step("acquire", listener, fair=needed), after


def write(
    world: Any, state: StateT, writes: Iterable[Any], done: StateT, *, fair: bool = True
) -> Iterator[tuple[Step, StateT]]:
    """Yield the two ends of a write: it is acknowledged and everything is ``done``; or it lands whenever it likes."""
    known, (one, *others) = cast("Any", state), (all_ := list(writes))
    yield Step("write", one, fair=fair), done
    if one.kind in world.late and known.delays and not known.writes.issuperset(all_):
        sent = replaced(state, delays=known.delays - 1, writes=known.writes | set(all_))
        yield Step("send" if not others else "send a bulk", one, fair=False), sent


def land(world: Any, state: StateT, landed: Callable[[Any, StateT, Any], StateT]) -> Iterator[tuple[Step, StateT]]:
    """What is on its way lands, at any time or never."""
    writes = cast("Any", state).writes
    for one in writes:
        yield Step("land", one, fair=False), landed(world, replaced(state, writes=writes - {one}), one)
