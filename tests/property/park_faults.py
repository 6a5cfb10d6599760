"""What may go wrong at any moment, and what a person does with letters."""

from __future__ import annotations

from tests.property.exploration import Step
from tests.property.park_model import (
    PARTITION,
    Actor,
    Addition,
    Broken,
    Command,
    Draft,
    Execution,
    Fault,
    Order,
    Patch,
    Phase,
    State,
    Steps,
    Transaction,
    World,
    counted,
    owns,
    with_actor,
    without,
    written,
)
from tests.property.park_rules import relinquished, removed


def possible(world: World, state: State, fault: Fault) -> bool:
    """Tell whether a fault may still happen."""
    return state.budget > 0 and fault in world.faults


def hit(world: World, state: State, run: Execution) -> State:
    """Return the state with one fault less to come, and one more start justified of each change of a run."""
    justified = state.justified
    last = min(run.first + world.length - 1, len(world.keys))
    for number in [run.number] if run.letter else range(run.first, last + 1):
        justified = counted(justified, number)
    return state._replace(budget=state.budget - 1, justified=justified)


def lapse(world: World, state: State) -> Steps:
    """A claim lapses: sooner or later if its execution is dead, as a fault while it goes on."""
    claim = state.stored.partition.claim
    if claim is None or not claim.live:
        return
    draft = Draft(state.stored)
    draft.partition = draft.partition._replace(claim=claim._replace(live=False))
    owner = next((run for run in state.actors if isinstance(run, Execution) and run.owner == claim.owner), None)
    # That time passes writes nothing: no transaction is in conflict with it.
    after = state._replace(stored=draft.stored())
    if owner is None:
        yield Step("lapse", claim), after
    elif possible(world, state, Fault.LAPSE):
        yield Step("lapse", claim, fair=False), hit(world, after, owner)


def misfortune(world: World, state: State, run: Execution) -> Steps:
    """An execution dies, asks for a retry, or its handler fails for good."""
    if possible(world, state, Fault.CRASH):
        yield Step("crash", run, fair=False), hit(world, without(state, run), run)
    if run.phase is not Phase.RUNNING:
        return
    if state.failures > 0:
        failed = with_actor(state, run, run._replace(phase=Phase.FAILED))
        is_later = run.number > run.first and not run.letter  # it becomes the head of a run of its own
        justified = counted(state.justified, run.number) if is_later else state.justified
        yield Step("fail", run, fair=False), failed._replace(failures=state.failures - 1, justified=justified)
    if possible(world, state, Fault.RETRY) and (run.letter or run.number == run.first):
        asked = with_actor(state, run, run._replace(phase=Phase.RETRYING))
        if not run.letter:
            asked = without(asked, run._replace(phase=Phase.RETRYING))
            asked = relinquished(asked, run) if owns(state.stored.partition, run) else asked
        yield Step("retry", run, fair=False), hit(world, asked, run)


def crash_between(world: World, state: State, addition: Addition) -> Steps:
    """Whoever writes in two steps may die between them."""
    if possible(world, state, Fault.CRASH):
        yield Step("crash", addition, fair=False), without(state, addition)._replace(budget=state.budget - 1)


def remove_by_hand(world: World, state: State) -> Steps:
    """Somebody removes a letter without any command, in a quiet moment; not the only one of its key."""
    if not possible(world, state, Fault.HAND) or state.transactions or state.stored.requests:
        return
    for letter in state.stored.letters:
        if any(each != letter and world.key(each.number) == world.key(letter.number) for each in state.stored.letters):
            draft = Draft(state.stored)
            del draft.letters[letter.number]
            after = written(state, draft.patch())
            ended = after._replace(budget=state.budget - 1, discarded=after.discarded | {letter.number})
            yield Step("remove by hand", letter, fair=False), ended


# -- a person -------------------------------------------------------------------------------------------------------


def order(world: World, state: State) -> Steps:
    """A person gives a command about letters that are there."""
    if state.commands == 0:
        return
    numbers = [each.number for each in state.stored.letters]
    for command in sorted(world.person):
        if command is not Command.DISCARD_ALL:
            for number in numbers:
                yield _ordered(world, state, Order(command, (number,), state.commands))
        elif len(numbers) > 1:
            forward = world.broken is Broken.DISCARD_FORWARD
            given = Order(command, tuple(sorted(numbers, reverse=not forward)), state.commands)
            yield _ordered(world, state, given)


def _ordered(world: World, state: State, given: Order) -> tuple[Step, State]:
    justified = state.justified
    keys = {world.key(number) for number in given.numbers}
    if given.command is Command.REPLAY:
        for letter in state.stored.letters:  # those before it come first, and those behind it follow
            if world.key(letter.number) in keys:
                justified = counted(justified, letter.number)
    else:
        if keys.isdisjoint(_wanted(world, state)):
            for number in given.numbers:  # from now on nobody wants these started
                justified = counted(justified, number, state.starts[number - 1] - justified[number - 1])
        for letter in state.stored.letters:
            if letter.number > max(given.numbers) and world.key(letter.number) in keys:  # but these, behind them
                justified = counted(justified, letter.number)
    after = state._replace(commands=state.commands - 1, actors=state.actors | {given}, justified=justified)
    return Step("command", given, fair=False), after


def _wanted(world: World, state: State) -> set[int]:
    """The keys of which something is asked for, or will be by what somebody has begun before."""
    asked = {each.number for each in state.stored.requests}
    for actor in state.actors:
        asked |= {actor.letter or actor.number} if isinstance(actor, Execution) else set()
        asked |= {*actor.numbers} if isinstance(actor, Order) else set()
    return {world.key(number) for number in asked}


def obey(world: World, state: State, given: Order) -> Steps:
    """The first half of the transaction for the next letter of a command."""
    if any(each.who == given for each in state.transactions):
        return
    number, left = given.numbers[0], given.numbers[1:]
    then: tuple[Actor, ...] = (given._replace(numbers=left),) if left else ()
    draft = Draft(state.stored)
    if given.command is Command.REPLAY:
        is_asked = _ask(draft, number)
        if not is_asked:
            yield Step("nothing to ask for", given), _gone_on(state, given, then)
            return
        opened = Transaction(given, "ask", draft.patch(), then)
    else:
        additions = _discard(world, draft, number)
        if additions is None:
            yield Step("not discarded", given), _gone_on(state, given, then)
            return
        opened = Transaction(given, "discard", draft.patch(), (*additions, *then))
    yield Step("begin", opened), state._replace(transactions=state.transactions | {opened})


def _gone_on(state: State, given: Order, then: tuple[Actor, ...]) -> State:
    after = without(state, given)
    return after._replace(actors=after.actors | {*then})


def _ask(draft: Draft, number: int) -> bool:
    """The letter is written too: who discards it at the same time is in conflict with this."""
    there = draft.requests.get(number)
    if number not in draft.letters or there is not None:
        return False
    draft.ask(number)
    draft.write(("letter", number))
    return True


def _discard(world: World, draft: Draft, number: int) -> tuple[Actor, ...] | None:
    """Remove a letter and its request; None where it is gone, or its replay is running."""
    request, claim, key = draft.requests.get(number), draft.partition.claim, world.key(number)
    if request is not None and request.fence and claim is not None:
        is_mine = draft.partition.fence == request.fence and claim.letter == number
        if is_mine and claim.live and world.broken is not Broken.DISCARD_IGNORES_CLAIM:
            return None
        if is_mine and not claim.live:
            draft.partition = draft.partition._replace(fence=draft.partition.fence + 1, claim=None)
    first = draft.first_of(world, key)
    if draft.remove(number) is None:
        return None
    asks = first == number or world.broken is Broken.LATER_DISCARD_ASKS
    return removed(world, draft, number, asks=asks and world.broken is not Broken.DISCARD_ASKS_NOBODY)


# -- the listener ---------------------------------------------------------------------------------------------------


def take_over(world: World, state: State) -> Steps:
    """A listener takes over, and writes the partition."""
    if possible(world, state, Fault.TAKE_OVER):
        touched = Patch(frozenset({(PARTITION, state.stored.partition)}))
        yield Step("take-over", fair=False), written(state, touched)._replace(budget=state.budget - 1)
