"""Parked keys as a finite machine: its state, the broken rules, and the documents that transactions write.

As ``protocol_model``, it imports nothing from the package. What it models, in `mongo_celery/bridge`:

| here | there |
|---|---|
| ``claim``, ``claim_for_replay`` | `Claims.take`, `Claims.take_for_replay`; what a claim has read of `parkedKeys` |
| ``set_aside`` | `Claims.set_aside`, of the one that parks and of those behind (`RunSubject.fail`, `RunSubject.load`) |
| ``start``, ``load`` | `Replays.start`, `ReplaySubject.load` |
| ``succeed``, ``fail``, ``redirect``, ``postpone`` | `Replays.succeed`, `fail`, `redirect`, `retry_later` |
| ``ask``, ``discard`` | `Replays.request`, `Replays.discard`, and `dead_letter_commands.discard` of several |

What stands behind its shape:

- *One partition*, with changes of several keys: partitions share no document but the letters, which are found by key.
- *A message may be delivered at any moment*, once or often: whatever could be claimed may be. So the listener, its
  terms and the broker have no rule here.
- *A transaction* has two steps. The first reads everything, and fixes what will be written; the second writes it. If
  one of its documents is written in between, it begins anew: what it has only read may be old.
- *A run has one change or two.* Its mark `handled` and the commit of that are one step (``protocol_model`` has two).
- *A claim lapses* whenever its owner is slow, and who has lost it goes on for ever; so does a late listener.

Left out: new layouts (``spill_model`` has them), rewinds, transactional handlers (their effect is a write of the same
transaction), replays over newer data, the bounds, and the times of retries.

A person decides when a key is released, if ever. So a quiescent state may have parked keys; but their first letter has
failed itself, and says why, and nothing that a person has asked for is left.

Fields marked "ghost" are never read by a rule: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property import exploration
from tests.property.exploration import Model, Step
from tests.property.stores import can, counted, spent

KEPT_FREE = 8
"""Fencing tokens for the replays of a letter; more than any scenario uses."""


class Broken(StrEnum):
    """One rule of parked keys left out or replaced by the simpler one."""

    NOTHING = "nothing"
    LETTER_LATER = "the letter is stored in a write behind that of the position"
    PARKED_LATER = "the hash is added in a write behind that of the letter"
    BEHIND_UNASKED = "a change is set aside behind without the condition that its key is parked"
    RUN_GOES_ON = "a run does not end in front of a change whose key is parked"
    OUTCOME_WITHOUT_FENCE = "a change is set aside without comparing fence, owner and committed"
    TOKENS_NOT_KEPT = "no tokens are kept free for the replays of a letter"
    START_UNCHECKED = "a start does not look whether its letter is the first"
    ASKED_LATER = "a removal asks for the next letter in a write of its own"
    RELEASED_LATER = "a removal takes the hash away in a write of its own"
    REMOVED_UNWRITTEN = "a removal writes the partition only where it takes the hash away"
    DISCARD_FORWARD = "several letters are discarded from the first to the last"
    LATER_DISCARD_ASKS = "discarding a later letter asks for the first one"
    DISCARD_ASKS_NOBODY = "discarding the first letter asks for none"
    DISCARD_IGNORES_CLAIM = "a letter is discarded while its replay is running"
    REDIRECT_AS_READ = "the first letter is asked for as it was read before the transaction"
    STARTS_FORGOTTEN = "starts are counted in the request alone, which may go"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    CRASH = "a worker dies"
    LAPSE = "a claim lapses while its handler runs"
    RETRY = "a handler asks for a retry"


class Command(StrEnum):
    """What a person does with letters; all of a scenario draw from one number."""

    REPLAY = "replay"
    DISCARD = "discard"
    DISCARD_ALL = "discard all"


class World(NamedTuple):
    """A scenario.

    Args:
        name: A sentence for reports.
        keys: The key of each change of the partition, in the order of the stream.
        failures: How many executions may fail for good.
        person: What a person may do; ``commands``: how often altogether.
        faults: Which kinds may happen; ``budget``: how many altogether.
        length: How many changes a run may have.
        broken: The rule left out.
    """

    name: str
    keys: tuple[int, ...]
    failures: int = 1
    person: frozenset[Command] = frozenset({Command.REPLAY})
    commands: int = 1
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    length: int = 1
    broken: Broken = Broken.NOTHING

    def key(self, number: int) -> int:
        return self.keys[number - 1]


class Claim(NamedTuple):
    """The right of one execution; ``live`` is the server's verdict on its expiry; ``letter``: 0 of a run."""

    owner: int
    live: bool = True
    letter: int = 0


class Partition(NamedTuple):
    committed: int = 0
    fence: int = 0
    claim: Claim | None = None
    parked: frozenset[int] = frozenset()


class Letter(NamedTuple):
    """A dead letter; ``failed``: it has failed itself, and does not only wait behind another."""

    number: int
    fence: int
    failed: bool
    replays: int = 0


class Request(NamedTuple):
    """That a letter is to be replayed; ``fence``: of the claim under which it was started last, or 0."""

    number: int
    starts: int = 0
    fence: int = 0


class Stored(NamedTuple):
    """All documents; letters and requests by number."""

    partition: Partition = Partition()
    letters: tuple[Letter, ...] = ()
    requests: tuple[Request, ...] = ()


class Phase(StrEnum):
    """How far an execution is, or what it is about to write."""

    CLAIMED = "claimed for a replay"
    STARTED = "start recorded"
    RUNNING = "handler running"
    DONE = "handler done"
    FAILED = "handler failed"
    BEHIND = "key parked"
    LATER = "letter not the first"
    RETRYING = "retry asked for"


class Execution(NamedTuple):
    """An execution between claim and outcome; its fence is its owner.

    ``parked`` is what the claim has read; ``letter`` is 0 of a run; ``first_letter`` is what ``load`` has found.
    """

    owner: int
    first: int
    number: int
    phase: Phase
    parked: frozenset[int] = frozenset()
    letter: int = 0
    token: int = 0
    starts: int = 0
    first_letter: int = 0


class Order(NamedTuple):
    """A command that a person has given, and the letters that it has yet to come to."""

    command: Command
    numbers: tuple[int, ...]
    id: int


class Addition(NamedTuple):
    """A write of its own behind a transaction, of broken rules.

    It adds or takes a hash, or it asks for a letter or keeps one.
    """

    what: str
    which: int
    id: int


Actor = Execution | Order | Addition
Document = tuple[str, int]
PARTITION: Document = ("partition", 0)


class Patch(NamedTuple):
    """What is written: documents with their new values, None where one goes."""

    documents: frozenset[tuple[Document, Partition | Letter | Request | None]]


class Transaction(NamedTuple):
    """One that has read and will write; ``then``: who goes on behind it."""

    who: Actor
    kind: str
    patch: Patch
    then: tuple[Actor, ...] = ()


class Target(NamedTuple):
    """What the last accepted effect of a key left in the fenced target; all but the token is ghost."""

    token: int = 0
    number: int = 0
    owner: int = 0


class State(NamedTuple):
    """Everything: the documents, who is at work, the targets, what may still happen, and the ghosts.

    Ghosts: ``done`` and ``discarded`` changes; ``starts`` of each one's handler, and how many of these are
    ``justified``; ``owed``: letters for whose replay a person has asked, and that have not ended.
    """

    stored: Stored = Stored()
    actors: frozenset[Actor] = frozenset()
    transactions: frozenset[Transaction] = frozenset()
    targets: tuple[Target, ...] = ()
    failures: int = 0
    commands: int = 0
    budget: int = 0
    done: frozenset[int] = frozenset()
    discarded: frozenset[int] = frozenset()
    starts: tuple[int, ...] = ()
    justified: tuple[int, ...] = ()
    owed: frozenset[int] = frozenset()


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    count = len(world.keys)
    return State(
        targets=(Target(),) * (max(world.keys) + 1), failures=world.failures, commands=world.commands,
        budget=world.budget, starts=(0,) * count, justified=(1,) * count,
    )  # fmt: skip


class Draft:
    def __init__(self, stored: Stored) -> None:
        self.partition = stored.partition
        self.letters = {each.number: each for each in stored.letters}
        self.requests = {each.number: each for each in stored.requests}
        self._written: set[Document] = set()
        self._before = stored

    def first_of(self, world: World, key: int) -> int:
        """Return the first letter that waits for a key; 0 where none does."""
        return min((number for number in self.letters if world.key(number) == key), default=0)

    def write(self, *documents: Document) -> None:
        self._written.update(documents)

    def remove(self, number: int) -> Letter | None:
        """Remove a letter and its request; return it as it was."""
        self.requests.pop(number, None)
        return self.letters.pop(number, None)

    def ask(self, number: int) -> None:
        if number not in self.requests:
            letter = self.letters.get(number)
            self.requests[number] = Request(number, letter.replays if letter else 0)

    def end_claim(self) -> None:
        self.partition = self.partition._replace(claim=None)

    def patch(self) -> Patch:
        old, new = _documents(self._before), _documents(self.stored())
        names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} | self._written
        return Patch(frozenset((name, new.get(name)) for name in names))

    def stored(self) -> Stored:
        letters = tuple(self.letters[number] for number in sorted(self.letters))
        return Stored(self.partition, letters, tuple(self.requests[number] for number in sorted(self.requests)))


def _documents(stored: Stored) -> dict[Document, Partition | Letter | Request]:
    return {
        PARTITION: stored.partition,
        **{("letter", each.number): each for each in stored.letters},
        **{("request", each.number): each for each in stored.requests},
    }


def written(state: State, patch: Patch) -> State:
    """Return the state after a write; transactions that would write one of its documents begin anew."""
    found = {**_documents(state.stored), **dict(patch.documents)}
    letters = [found[name] for name in sorted(found) if name[0] == "letter"]
    requests = [found[name] for name in sorted(found) if name[0] == "request"]
    partition = found[PARTITION]
    assert isinstance(partition, Partition), "it is never removed"
    stored = Stored(
        partition,
        tuple(each for each in letters if isinstance(each, Letter)),
        tuple(each for each in requests if isinstance(each, Request)),
    )
    names = {name for name, _ in patch.documents}
    kept = frozenset(each for each in state.transactions if names.isdisjoint(name for name, _ in each.patch.documents))
    there = frozenset(each.number for each in stored.letters)
    return state._replace(stored=stored, transactions=kept, owed=state.owed & there)


def without(state: State, *actors: Actor) -> State:
    return state._replace(
        actors=state.actors - {*actors},
        transactions=frozenset(each for each in state.transactions if each.who not in actors),
    )


def with_actor(state: State, old: Actor, new: Actor) -> State:
    return state._replace(actors=state.actors - {old} | {new})


def owns(partition: Partition, run: Execution) -> bool:
    """Tell whether an execution's guard matches: fence, owner and committed."""
    claim = partition.claim
    return (
        claim is not None
        and claim.owner == run.owner == partition.fence
        and partition.committed == run.first - 1
    )  # fmt: skip


# === the rules ===


def is_free(state: State) -> bool:
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
    draft = Draft(state.stored)
    draft.partition = draft.partition._replace(fence=run.owner, claim=Claim(run.owner, letter=run.letter))
    after = written(state, draft.patch())
    return after._replace(actors=after.actors | {run})


def begun(state: State, number: int) -> State:
    return state._replace(starts=counted(state.starts, number - 1))


def execute(world: World, state: State, run: Execution) -> Steps:
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
    if world.broken is not Broken.REMOVED_UNWRITTEN:
        draft.write(PARTITION)
    if not following:
        if world.broken is Broken.RELEASED_LATER:
            return (Addition("take", key, number),)
        draft.partition = draft.partition._replace(parked=draft.partition.parked - {key})
    if following and asks:
        if world.broken is Broken.ASKED_LATER:
            return (Addition("ask", following, number),)
        draft.ask(following)
    return ()


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


# === what may go wrong at any moment, and persons ===


def hit(world: World, state: State, run: Execution) -> State:
    """Return the state with one fault less to come, and one more start justified of each change of a run."""
    justified = state.justified
    last = min(run.first + world.length - 1, len(world.keys))
    for number in [run.number] if run.letter else range(run.first, last + 1):
        justified = counted(justified, number - 1)
    return spent(state)._replace(justified=justified)


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
    elif can(world, state, Fault.LAPSE):
        yield Step("lapse", claim, fair=False), hit(world, after, owner)


def misfortune(world: World, state: State, run: Execution) -> Steps:
    """An execution dies, asks for a retry, or its handler fails for good."""
    if can(world, state, Fault.CRASH):
        yield Step("crash", run, fair=False), hit(world, without(state, run), run)
    if run.phase is not Phase.RUNNING:
        return
    if state.failures > 0:
        failed = with_actor(state, run, run._replace(phase=Phase.FAILED))
        is_later = run.number > run.first and not run.letter  # it becomes the head of a run of its own
        justified = counted(state.justified, run.number - 1) if is_later else state.justified
        yield Step("fail", run, fair=False), failed._replace(failures=state.failures - 1, justified=justified)
    if can(world, state, Fault.RETRY) and (run.letter or run.number == run.first):
        asked = with_actor(state, run, run._replace(phase=Phase.RETRYING))
        if not run.letter:
            asked = without(asked, run._replace(phase=Phase.RETRYING))
            asked = relinquished(asked, run) if owns(state.stored.partition, run) else asked
        yield Step("retry", run, fair=False), hit(world, asked, run)


def crash_between(world: World, state: State, addition: Addition) -> Steps:
    """Whoever writes in two steps may die between them."""
    if can(world, state, Fault.CRASH):
        yield Step("crash", addition, fair=False), spent(without(state, addition))


# -- a person -------------------------------------------------------------------------------------------------------


def order(world: World, state: State) -> Steps:
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
                justified = counted(justified, letter.number - 1)
    else:
        if keys.isdisjoint(_wanted(world, state)):
            for number in given.numbers:  # from now on nobody wants these started
                justified = counted(justified, number - 1, state.starts[number - 1] - justified[number - 1])
        for letter in state.stored.letters:
            if letter.number > max(given.numbers) and world.key(letter.number) in keys:  # but these, behind them
                justified = counted(justified, letter.number - 1)
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


# === the oracles, and the search ===

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
        if not first.failed:
            yield f"letter {first.number} is the first of its key, has not failed, and nobody asks for it"
    if state.owed:
        yield f"a person has asked for the replay of {sorted(state.owed)}, and nothing has come of it"
    for request in state.stored.requests:
        yield f"the request for letter {request.number} is left"


def steps(world: World, state: State) -> Steps:
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


PARK_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={"P1": (no_loss,), "P2": (in_order,), "P3": (fenced,), "P6": (no_more_starts,)},
    at_rest={"P12": left_undone},
)
