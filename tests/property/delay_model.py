"""A handler's delay as a finite machine: its state, and what a scenario fixes.

As ``protocol_model``, it imports nothing from the package. Here alone time is a number, of a server: it passes only
where no process has to act, since the dispatcher acts when something is due. What it models, in `mongo_celery/bridge`:

| here | there |
|---|---|
| ``next_run`` | `Delay.count_due`, `Subscription._without_delayed` |
| ``listener_time`` | `Delay.observe`, `StreamIntake.reading_time` |
| ``store``, ``advance`` | `Storing._lasting_block_reason`, `Watermarks` |

*One partition.* What is stored and marked is as in ``spill_model``, and a run with its claim as in ``protocol_model``;
so both are one step here. A message is taken immediately, or lost with its worker. A take-over forgets the changes that
were read, and begins at the watermark. A run has stored changes or buffered ones, so changes that wait beside stored
ones are stored.

``handled``, ``starts`` and ``highest`` are ghosts: the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from tests.property import exploration
from tests.property.exploration import Model, Step


class Broken(StrEnum):
    """One rule of delays left out or replaced by the simpler one."""

    NOTHING = "nothing"
    CLIENT_CLOCK = "a client's clock decides, which may be ahead"
    RUN_NOT_CUT = "a run whose first change is due also has changes that are not"
    FIRST_DECIDES = "a burst is over a delay after its first change"
    LATER_OUTSIDE = "a change is passed over for a later one outside of its run"
    QUIET_AHEAD = "a quiet key runs before a change that waits in front of it"
    UNREAD_IS_QUIET = "a key is quiet although later changes may be unread"
    TAIL_STAYS = "what waits beside stored changes is not stored"
    SPLIT_SOON = "a burst is split as soon as its key is quiet"
    NO_SPLIT = "a quiet key waits for all that overlap with it"
    NO_BOUND = "a key that never becomes quiet waits for ever"
    WAIT_FORGOTTEN = "a change that waits is not looked at again"


class World(NamedTuple):
    """A scenario.

    Args:
        name: A sentence for reports.
        changes: Time and key of each change, in the order of the stream.
        delay: How long a change waits; ``longest``: how many delays a burst may take; ``split``: how many, until it
            may be in two runs if its key is quiet.
        coalesces: Whether keys must be quiet.
        length: How many changes a run may have.
        terms: How often another listener may take over; ``crashes``: how often a worker may die.
        stores: Whether what waits may be stored.
        broken: The rule left out.
    """

    name: str
    changes: tuple[tuple[int, int], ...]
    delay: int = 2
    split: int = 2
    longest: int = 3
    coalesces: bool = True
    length: int = 4
    terms: int = 0
    crashes: int = 0
    stores: bool = False
    broken: Broken = Broken.NOTHING

    def time(self, number: int) -> int:
        """Return the time of a change, from 1."""
        return self.changes[number - 1][0]

    def key(self, number: int) -> int:
        """Return the key of a change."""
        return self.changes[number - 1][1]

    @property
    def end(self) -> int:
        """The time at which everything is over, whatever has happened."""
        return self.changes[-1][0] + self.delay * (self.longest + 1)


class Run(NamedTuple):
    """A run: the changes that the handler gets, and the position afterwards."""

    given: tuple[int, ...]
    last: int


class State(NamedTuple):
    """Everything: the stream's time, MongoDB, the listener's memory, a run, the ghosts."""

    now: int = 0
    committed: int = 0
    mark: int = 0
    watermark: int = 0
    cursor: int = 0
    run: Run | None = None
    terms: int = 0
    crashes: int = 0
    waits: bool = False
    handled: frozenset[int] = frozenset()
    starts: tuple[int, ...] = ()
    highest: int = 0


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before anything has happened."""
    return State(starts=(0,) * len(world.changes))


def happened(world: World, now: int) -> int:
    """Return the number of changes up to a time."""
    return sum(time <= now for time, _ in world.changes)


def listener_time(world: World, state: State) -> int:
    """Return the time by which the listener judges: while it catches up, that of the last change that it has read."""
    now = state.now + (world.broken is Broken.CLIENT_CLOCK)
    is_current = state.cursor == happened(world, state.now)
    if not world.coalesces or is_current or world.broken is Broken.UNREAD_IS_QUIET:
        return now
    return world.time(state.cursor) if state.cursor else -1


def next_run(world: World, state: State) -> Run | None:
    """Return what would be dispatched now."""
    first, broken = state.committed + 1, world.broken
    known = range(first, min(state.cursor, state.committed + world.length) + 1)
    now = listener_time(world, state)
    due = [each for each in known if world.time(each) + world.delay <= now]
    if not due:
        return None
    if not world.coalesces:
        return Run(tuple(known if broken is Broken.RUN_NOT_CUT else due), due[-1])
    if broken is Broken.FIRST_DECIDES or (broken is not Broken.NO_BOUND and waited(world, state, world.longest, now)):
        return coalesced(world, state, due[-1])
    last = {world.key(each): each for each in known}
    if broken is Broken.LATER_OUTSIDE:
        return Run(tuple(each for each in due if last[world.key(each)] == each), due[-1])
    quiet = [each for each in due if all(last[world.key(one)] <= each for one in range(first, each + 1))]
    if broken is Broken.QUIET_AHEAD and not quiet:
        ahead = tuple(each for each in due if last[world.key(each)] == each and each not in state.handled)
        return Run(ahead, state.committed) if ahead else None
    may_split = waited(world, state, world.split, now) and broken is not Broken.NO_SPLIT
    if not quiet and (may_split or broken is Broken.SPLIT_SOON):
        quiet = [*takewhile(lambda each: last[world.key(each)] <= due[-1], due)]
    return coalesced(world, state, quiet[-1]) if quiet else None


def waited(world: World, state: State, delays: int, now: int) -> bool:
    """Tell whether the next change has waited for so many delays."""
    return world.time(state.committed + 1) + delays * world.delay <= now


def coalesced(world: World, state: State, last: int) -> Run:
    """Return a run up to a change, but not beyond the stored ones if it begins with them."""
    first = state.committed + 1
    stored = min(state.mark, state.cursor)
    last = min(last, stored) if first <= stored else last
    of = {world.key(each): each for each in range(first, last + 1)}
    return Run(tuple(sorted(of.values())), last)


def has_tail(world: World, state: State) -> bool:
    """Tell whether buffered changes wait beside stored ones, which is not left so."""
    stays = world.broken is Broken.TAIL_STAYS or not world.coalesces
    return state.run is None and state.committed < state.mark < state.cursor and not stays


def tick(world: World, state: State) -> Steps:
    """Time passes where nothing is due."""
    if state.now < world.end and not has_tail(world, state) and (state.run or not next_run(world, state)):
        waits = state.cursor > state.committed
        yield Step("tick"), state._replace(now=state.now + 1, waits=waits)


def read(world: World, state: State) -> Steps:
    """The listener reads the next change."""
    if state.cursor < happened(world, state.now):
        yield Step("read", state.cursor + 1), state._replace(cursor=state.cursor + 1)


def store(world: World, state: State) -> Steps:
    """What waits is stored and marked."""
    if world.stores and state.run is None and max(state.committed, state.mark) < state.cursor:
        yield Step("store", state.cursor, fair=has_tail(world, state)), state._replace(mark=state.cursor)


def advance(_world: World, state: State) -> Steps:
    """The watermark follows what is committed, or stored and marked."""
    place = max(state.committed, min(state.mark, state.cursor))
    if place > state.watermark:
        yield Step("watermark", place), state._replace(watermark=place)


def dispatch(world: World, state: State) -> Steps:
    """The listener sends what is due."""
    if state.run is not None or has_tail(world, state):
        return
    if world.broken is Broken.WAIT_FORGOTTEN and state.waits:
        return
    run = next_run(world, state)
    if run is not None:
        yield Step("dispatch", run), state._replace(run=run)


def execute(world: World, state: State) -> Steps:
    """A worker handles a run and commits it, or dies in between."""
    run = state.run
    if run is None:
        return
    starts = tuple(count + (number in run.given) for number, count in enumerate(state.starts, 1))
    begun = state._replace(run=None, starts=starts)
    yield (
        Step("handle", run),
        begun._replace(
            committed=run.last,
            handled=state.handled | set(run.given),
            highest=max(run.given),
        ),
    )
    if state.crashes < world.crashes:
        yield Step("crash", run, fair=False), begun._replace(crashes=state.crashes + 1)


def take_over(world: World, state: State) -> Steps:
    """Another listener begins at the watermark, and a run continues."""
    if state.terms < world.terms:
        yield (
            Step("take over", fair=False),
            state._replace(terms=state.terms + 1, cursor=max(state.watermark, state.committed), waits=False),
        )


# === the oracles ===


def no_loss(move: exploration.Move[World, State]) -> Iterator[str]:
    """P1: each change is handled, or passed over for a later one of its key that was handled with it."""
    world, state = move.world, move.after
    for number in range(move.before.committed + 1, state.committed + 1):
        later = [each for each in state.handled if each <= state.committed and world.key(each) == world.key(number)]
        if not any(each >= number for each in later):
            yield f"the position has passed change {number}, whose key was not handled since"


def in_order(move: exploration.Move[World, State]) -> Iterator[str]:
    """P2: the handler gets no change after a later one of its partition."""
    run = move.step.who if move.step.kind == "handle" else None
    if isinstance(run, Run) and run.given[0] <= move.before.highest:
        yield f"change {run.given[0]} came after change {move.before.highest}"


def once(move: exploration.Move[World, State]) -> Iterator[str]:
    """P6: a handler starts once per change and crash; of a burst, only the last one, unless it is long."""
    world, state = move.world, move.after
    for number, count in enumerate(state.starts, 1):
        if count > 1 + state.crashes:
            yield f"change {number} has started {count} times"
    run = move.step.who if move.step.kind == "dispatch" else None
    if not isinstance(run, Run) or not world.coalesces:
        return
    last = min(happened(world, state.now), state.committed + world.length)
    for number in run.given:
        burst = [each for each in range(number + 1, last + 1) if world.key(each) == world.key(number)]
        is_quiet = not burst or world.time(burst[-1]) + world.delay <= state.now
        if burst and not waited(world, state, world.split if is_quiet else world.longest, state.now):
            yield f"change {number} was sent although {burst[0]} has happened"


def not_sooner(move: exploration.Move[World, State]) -> Iterator[str]:
    """P10: no change is given to its handler before its delay."""
    run = move.step.who if move.step.kind == "dispatch" else None
    for number in run.given if isinstance(run, Run) else ():
        if move.world.time(number) + move.world.delay > move.after.now:
            yield f"change {number} was sent at {move.after.now}"


def bounded(move: exploration.Move[World, State]) -> Iterator[str]:
    """P17: when all is read, no change waits for longer than the bound."""
    world, state = move.world, move.before
    if move.step.kind != "tick" or state.run or not state.committed < state.cursor == happened(world, state.now):
        return
    first = state.committed + 1
    known = range(first, min(state.cursor, state.committed + world.length) + 1)
    last = max(each for each in known if world.key(each) == world.key(first))
    is_quiet = world.time(last) + world.delay <= state.now
    if waited(world, state, (world.split if is_quiet else world.longest) if world.coalesces else 1, state.now):
        yield f"change {state.committed + 1} still waits at {state.now}"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12: where nothing more will happen, all is handled, and the last change of each key itself."""
    if state.committed < len(world.changes):
        yield f"the partition stays at {state.committed} for ever"
    for key in {key for _, key in world.changes}:
        last = max(number for number in range(1, len(world.changes) + 1) if world.key(number) == key)
        if last not in state.handled:
            yield f"change {last}, the last one of its key, was not handled"


def steps(world: World, state: State) -> Steps:
    """Yield every step that a state allows."""
    for part in (tick, read, store, advance, dispatch, execute, take_over):
        yield from part(world, state)


DELAY_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={"P1": (no_loss,), "P2": (in_order,), "P6": (once,), "P10": (not_sooner,), "P17": (bounded,)},
    at_rest={"P12": left_undone},
)
