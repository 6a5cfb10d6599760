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

Fields marked "ghost" are never read by a rule: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property.exploration import Step

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
    COUNT = "letters are counted beside the hash, which is taken away at zero"
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
    TAKE_OVER = "a listener takes over"
    HAND = "somebody removes a letter by hand that is not the only one of its key"


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
        """Return the key of a change."""
        return self.keys[number - 1]


class Claim(NamedTuple):
    """The right of one execution; ``live`` is the server's verdict on its expiry; ``letter``: 0 of a run."""

    owner: int
    live: bool = True
    letter: int = 0


class Partition(NamedTuple):
    """The document of the partition; ``counts`` is of ``Broken.COUNT`` alone."""

    committed: int = 0
    fence: int = 0
    claim: Claim | None = None
    parked: frozenset[int] = frozenset()
    counts: tuple[tuple[int, int], ...] = ()


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

    def __str__(self) -> str:
        """Return the execution as a part of a trace."""
        what = "replay of change" if self.letter else "change"
        return f"execution {self.owner}, {what} {self.number}, {self.phase}, token {self.token}"


class Order(NamedTuple):
    """A command that a person has given, and the letters that it has yet to come to."""

    command: Command
    numbers: tuple[int, ...]
    id: int

    def __str__(self) -> str:
        """Return the command as a part of a trace."""
        return f"{self.command} {', '.join(map(str, self.numbers))}"


class Addition(NamedTuple):
    """A write of its own behind a transaction, of broken rules.

    It adds or takes a hash, or it asks for a letter or keeps one.
    """

    what: str
    which: int
    id: int

    def __str__(self) -> str:
        """Return the write as a part of a trace."""
        return f"{self.what} {self.which}"


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

    def __str__(self) -> str:
        """Return the transaction as a part of a trace."""
        return f"{self.kind} by {self.who}"


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

    stored: Stored
    actors: frozenset[Actor]
    transactions: frozenset[Transaction]
    targets: tuple[Target, ...]
    failures: int
    commands: int
    budget: int
    done: frozenset[int]
    discarded: frozenset[int]
    starts: tuple[int, ...]
    justified: tuple[int, ...]
    owed: frozenset[int]


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first change."""
    count = len(world.keys)
    return State(
        stored=Stored(), actors=frozenset(), transactions=frozenset(),
        targets=(Target(),) * (max(world.keys) + 1),
        failures=world.failures, commands=world.commands, budget=world.budget,
        done=frozenset(), discarded=frozenset(), starts=(0,) * count, justified=(1,) * count, owed=frozenset(),
    )  # fmt: skip


class Draft:
    """What a transaction, or one write, makes of the documents that it has read."""

    def __init__(self, stored: Stored) -> None:
        """Begin with what is stored."""
        self.partition = stored.partition
        self.letters = {each.number: each for each in stored.letters}
        self.requests = {each.number: each for each in stored.requests}
        self._written: set[Document] = set()
        self._before = stored

    def first_of(self, world: World, key: int) -> int:
        """Return the first letter that waits for a key; 0 where none does."""
        return min((number for number in self.letters if world.key(number) == key), default=0)

    def write(self, *documents: Document) -> None:
        """Write documents that may be left as they are."""
        self._written.update(documents)

    def remove(self, number: int) -> Letter | None:
        """Remove a letter and its request; return it as it was."""
        self.requests.pop(number, None)
        return self.letters.pop(number, None)

    def ask(self, number: int) -> None:
        """Ask for a letter, unless somebody has done so."""
        if number not in self.requests:
            letter = self.letters.get(number)
            self.requests[number] = Request(number, letter.replays if letter else 0)

    def end_claim(self) -> None:
        """End the claim of the partition."""
        self.partition = self.partition._replace(claim=None)

    def patch(self) -> Patch:
        """Return what is to be written."""
        old, new = _documents(self._before), _documents(self.stored())
        names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} | self._written
        return Patch(frozenset((name, new.get(name)) for name in names))

    def stored(self) -> Stored:
        """Return the documents as they will be."""
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
    """Return the state without some actors, and without their transactions."""
    return state._replace(
        actors=state.actors - {*actors},
        transactions=frozenset(each for each in state.transactions if each.who not in actors),
    )


def with_actor(state: State, old: Actor, new: Actor) -> State:
    """Return the state in which an actor has gone on."""
    return state._replace(actors=state.actors - {old} | {new})


def owns(partition: Partition, run: Execution) -> bool:
    """Tell whether an execution's guard matches: fence, owner and committed."""
    claim = partition.claim
    return (
        claim is not None
        and claim.owner == run.owner == partition.fence
        and partition.committed == run.first - 1
    )  # fmt: skip


def counted(counts: tuple[int, ...], number: int, by: int = 1) -> tuple[int, ...]:
    """Return numbers by change with one of them grown."""
    return (*counts[: number - 1], counts[number - 1] + by, *counts[number:])
