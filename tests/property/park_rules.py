"""The rules of parked keys: what claims a partition, what an execution writes, and what a removal brings about."""

from __future__ import annotations

from tests.property.exploration import Step
from tests.property.park_model import (
    KEPT_FREE,
    PARTITION,
    Actor,
    Addition,
    Broken,
    Claim,
    Draft,
    Execution,
    Letter,
    Phase,
    State,
    Steps,
    Target,
    Transaction,
    World,
    counted,
    owns,
    with_actor,
    without,
    written,
)


def is_free(state: State) -> bool:
    """Tell whether the partition can be claimed."""
    claim = state.stored.partition.claim
    return claim is None or not claim.live


def claim(world: World, state: State) -> Steps:
    """An execution claims the next change, by whatever message, and reads which keys are parked."""
    partition = state.stored.partition
    number = partition.committed + 1
    if not is_free(state) or number > len(world.keys):
        return
    owner = partition.fence + 1
    is_behind = world.key(number) in partition.parked
    phase = Phase.BEHIND if is_behind else Phase.RUNNING
    run = Execution(owner, number, number, phase, parked=partition.parked, token=owner)
    after = claimed(state, run)
    yield Step("claim", run), after if is_behind else begun(after, number)


def claim_for_replay(state: State) -> Steps:
    """An execution claims the partition for a letter that is asked for, in whatever order messages come."""
    partition = state.stored.partition
    if not is_free(state):
        return
    for request in state.stored.requests:
        owner, number = partition.fence + 1, request.number
        run = Execution(owner, partition.committed + 1, number, Phase.CLAIMED, letter=number, starts=request.starts)
        yield Step("claim for a replay", run), claimed(state, run)


def claimed(state: State, run: Execution) -> State:
    """Return the state in which an execution has the claim."""
    draft = Draft(state.stored)
    draft.partition = draft.partition._replace(fence=run.owner, claim=Claim(run.owner, letter=run.letter))
    after = written(state, draft.patch())
    return after._replace(actors=after.actors | {run})


def begun(state: State, number: int) -> State:
    """Return the state in which a handler has started with a change."""
    return state._replace(starts=counted(state.starts, number))


def execute(world: World, state: State, run: Execution) -> Steps:
    """Yield what an execution does next, but for its misfortunes."""
    match run.phase:
        case Phase.CLAIMED:
            yield from start(world, state, run)
        case Phase.STARTED:
            yield from load(world, state, run)
        case Phase.RUNNING:
            yield from take_effect(world, state, run)
        case Phase.DONE if not run.letter:
            yield from handle(state, run)
            yield from go_on(world, state, run)
        case _:
            yield from begin(world, state, run)


def start(world: World, state: State, run: Execution) -> Steps:
    """Record a start, in the letter too; who finds nothing to start, or another start, ends its claim."""
    draft = Draft(state.stored)
    request = draft.requests.get(run.letter)
    if request is None or request.starts != run.starts:
        yield Step("nothing to start", run), relinquished(state, run)
        return
    draft.requests[run.letter] = request._replace(starts=request.starts + 1, fence=run.owner)
    letter = draft.letters.get(run.letter)
    if letter is not None and world.broken is not Broken.STARTS_FORGOTTEN:
        draft.letters[run.letter] = letter._replace(replays=request.starts + 1)
    after = written(state, draft.patch())
    recorded = run._replace(phase=Phase.STARTED, starts=request.starts + 1)
    yield Step("start", run), with_actor(after, run, recorded)


def load(world: World, state: State, run: Execution) -> Steps:
    """Read the letter, and whether it is the first of its key."""
    draft = Draft(state.stored)
    letter = draft.letters.get(run.letter)
    if letter is None:
        draft.requests.pop(run.letter, None)
        forgotten = written(state, draft.patch())
        yield Step("forget", run), relinquished(forgotten, run)
        return
    first = draft.first_of(world, world.key(run.letter))
    if first != run.letter and world.broken is not Broken.START_UNCHECKED:
        yield Step("not the first", run), with_actor(state, run, run._replace(phase=Phase.LATER, first_letter=first))
        return
    ready = run._replace(phase=Phase.RUNNING, token=letter.fence + run.starts)
    yield Step("handler starts", ready), begun(with_actor(state, run, ready), run.letter)


def take_effect(world: World, state: State, run: Execution) -> Steps:
    """The handler's effect, which the target accepts by its token; who is refused has failed, or was replaced."""
    key = world.key(run.number)
    target = state.targets[key]
    if run.token < target.token:
        refused = with_actor(state, run, run._replace(phase=Phase.FAILED)) if run.letter else without(state, run)
        yield Step("refused", run), refused
        return
    new = Target(run.token, run.number, run.owner)
    targets = (*state.targets[:key], new, *state.targets[key + 1 :])
    yield Step("effect", run), with_actor(state, run, run._replace(phase=Phase.DONE))._replace(targets=targets)


def handle(state: State, run: Execution) -> Steps:
    """Everything up to the execution's change is done; who was replaced writes nothing."""
    if not owns(state.stored.partition, run):
        yield Step("superseded", run), without(state, run)
        return
    yield Step("handled", run), without(handled(state, run, run.number), run)


def handled(state: State, run: Execution, last: int) -> State:
    """Return the state in which a run is committed up to a change."""
    draft = Draft(state.stored)
    draft.partition = draft.partition._replace(committed=last, claim=None)
    after = written(state, draft.patch())
    return after._replace(done=after.done | frozenset(range(run.first, last + 1)))


def go_on(world: World, state: State, run: Execution) -> Steps:
    """A run may go on with its next change, unless the key of that was parked when it was claimed."""
    number = run.number + 1
    if number >= run.first + world.length or number > len(world.keys):
        return
    if world.key(number) in run.parked and world.broken is not Broken.RUN_GOES_ON:
        return
    following = run._replace(number=number, phase=Phase.RUNNING)
    yield Step("next of the run", following), begun(with_actor(state, run, following), number)


def relinquished(state: State, run: Execution) -> State:
    """Return the state in which an execution has ended without an outcome, and its claim with it."""
    draft = Draft(state.stored)
    if draft.partition.claim is not None and draft.partition.claim.owner == run.owner:
        draft.end_claim()
    return without(written(state, draft.patch()), run)


# -- transactions ---------------------------------------------------------------------------------------------------


def begin(world: World, state: State, run: Execution) -> Steps:
    """The first half of an execution's last transaction: what it reads decides what it will write."""
    if any(each.who == run for each in state.transactions):
        return
    if not owns(state.stored.partition, run) and not (world.broken is Broken.OUTCOME_WITHOUT_FENCE and not run.letter):
        yield Step("superseded", run), without(state, run)
        return
    if run.phase is Phase.FAILED and run.number > run.first and not run.letter:
        yield Step("handled before", run), without(handled(state, run, run.number - 1), run)
        return
    draft = Draft(state.stored)
    if run.phase is Phase.BEHIND and not _may_wait(world, draft, run):
        yield Step("released meanwhile", run), relinquished(state, run)
        return
    then = outcome(world, draft, run)
    opened = Transaction(run, kind_of(run), draft.patch(), then)
    yield Step("begin", opened), state._replace(transactions=state.transactions | {opened})


def _may_wait(world: World, draft: Draft, run: Execution) -> bool:
    return world.key(run.first) in draft.partition.parked or world.broken is Broken.BEHIND_UNASKED


def kind_of(run: Execution) -> str:
    """Return the name of the outcome that an execution writes in a transaction."""
    names = {
        Phase.DONE: "succeed",
        Phase.FAILED: "fail" if run.letter else "park",
        Phase.BEHIND: "set aside behind",
        Phase.LATER: "redirect",
        Phase.RETRYING: "postpone",
    }
    return names[run.phase]


def outcome(world: World, draft: Draft, run: Execution) -> tuple[Actor, ...]:
    """Write an execution's outcome into a draft; return who goes on behind it."""
    if not run.letter:
        return set_aside(world, draft, run, parks=run.phase is Phase.FAILED)
    draft.end_claim()
    match run.phase:
        case Phase.DONE:
            return succeed(world, draft, run)
        case Phase.FAILED:
            fail(world, draft, run)
        case Phase.LATER:
            redirect(world, draft, run)
        case _:
            _postpone(draft, run)
    return ()


def set_aside(world: World, draft: Draft, run: Execution, *, parks: bool) -> tuple[Actor, ...]:
    """Pass over the first change, and keep it: as one that parks its key, or as one that waits behind."""
    key, partition = world.key(run.first), draft.partition
    kept = 0 if world.broken is Broken.TOKENS_NOT_KEPT else KEPT_FREE
    fence = partition.fence if world.broken is Broken.OUTCOME_WITHOUT_FENCE else run.owner
    draft.partition = partition._replace(committed=run.first, claim=None, fence=fence + kept)
    if world.broken is Broken.LETTER_LATER:
        return (Addition("keep", run.first, run.owner),)
    draft.letters[run.first] = Letter(run.first, run.owner, failed=parks)
    count(world, draft, key, 1)
    if parks and world.broken is Broken.PARKED_LATER:
        return (Addition("add", key, run.first),)
    if parks:
        draft.partition = draft.partition._replace(parked=draft.partition.parked | {key})
    return ()


def succeed(world: World, draft: Draft, run: Execution) -> tuple[Actor, ...]:
    """Remove a letter whose handler has succeeded; the next one follows, or the key is released."""
    if draft.remove(run.letter) is None:
        return ()
    return removed(world, draft, run.letter, asks=True)


def removed(world: World, draft: Draft, number: int, *, asks: bool) -> tuple[Actor, ...]:
    """Behind a letter that is removed: ask for the next one, or take the hash away; return who goes on behind it."""
    key = world.key(number)
    following = draft.first_of(world, key)
    is_last = not following
    if world.broken is Broken.COUNT:
        is_last = not count(world, draft, key, -1)
    if world.broken is not Broken.REMOVED_UNWRITTEN:
        draft.write(PARTITION)
    if is_last:
        if world.broken is Broken.RELEASED_LATER:
            return (Addition("take", key, number),)
        draft.partition = draft.partition._replace(parked=draft.partition.parked - {key})
    if following and asks:
        if world.broken is Broken.ASKED_LATER:
            return (Addition("ask", following, number),)
        draft.ask(following)
    return ()


def count(world: World, draft: Draft, key: int, by: int) -> int:
    """Count a letter of a key, where that is the rule; return how many are counted."""
    if world.broken is not Broken.COUNT:
        return 0
    counts = dict(draft.partition.counts)
    counts[key] = counts.get(key, 0) + by
    draft.partition = draft.partition._replace(counts=tuple(sorted(counts.items())))
    return counts[key]


def fail(world: World, draft: Draft, run: Execution) -> None:
    """Leave a letter with its new error; its request goes, with those after it of its key."""
    letter, key = draft.letters.get(run.letter), world.key(run.letter)
    if letter is not None:
        draft.letters[run.letter] = letter._replace(failed=True, replays=run.starts)
    for number in [each for each in draft.requests if each >= run.letter and world.key(each) == key]:
        del draft.requests[number]


def redirect(world: World, draft: Draft, run: Execution) -> None:
    """Ask for the first letter in the place of this one; where this is the first by now, for this one again."""
    first = draft.first_of(world, world.key(run.letter))
    if world.broken is Broken.REDIRECT_AS_READ:
        first = run.first_letter
    if first in {0, run.letter}:
        _postpone(draft, run)
        return
    draft.requests.pop(run.letter, None)
    draft.ask(first)


def _postpone(draft: Draft, run: Execution) -> None:
    """End a start after which the letter is to be started again."""
    request = draft.requests.get(run.letter)
    if request is not None:
        draft.requests[run.letter] = request._replace(fence=0)


def commit(world: World, state: State, transaction: Transaction) -> Steps:
    """The second half of a transaction: nobody has written what it writes since it has read."""
    done, discarded = state.done, state.discarded
    who = transaction.who
    if isinstance(who, Execution) and transaction.kind == "succeed":
        done |= {who.letter}
    elif not isinstance(who, Execution):
        gone = {name[1] for name, value in transaction.patch.documents if name[0] == "letter" and value is None}
        discarded |= gone
    after = without(state, who)
    after = after._replace(actors=after.actors | {*transaction.then}, done=done, discarded=discarded)
    if transaction.kind == "fail" and isinstance(who, Execution):
        key = world.key(who.letter)
        failed = frozenset(each for each in after.owed if each >= who.letter and world.key(each) == key)
        after = after._replace(owed=after.owed - failed)
    yield Step("commit", transaction), written(after, transaction.patch)


def add(state: State, addition: Addition) -> Steps:
    """A write that a broken rule makes on its own."""
    draft = Draft(state.stored)
    partition, key = draft.partition, addition.which
    if addition.what == "ask":
        if addition.which in draft.letters:
            draft.ask(addition.which)
    elif addition.what == "keep":
        draft.letters[addition.which] = Letter(addition.which, addition.id, failed=True)
    elif addition.what == "add":
        draft.partition = partition._replace(parked=partition.parked | {key})
    else:
        draft.partition = partition._replace(parked=partition.parked - {key})
    yield Step("write", addition), without(written(state, draft.patch()), addition)
