"""Limits over all workers as a finite machine: who holds a slot.

As ``protocol_model``, it imports nothing from the package. What it models, in `mongo_celery/bridge`:

| here | there |
|---|---|
| ``holds`` | `Partition.holds_slot`; the images are those of the poller |
| ``dispatch``, ``send`` | `Subscription.due`, `RunPublisher.dispatch`: the slot first, then the message |
| ``deliver`` | `Claims.take` with the fencing token of the message |
| ``void`` | `PartitionPoller._void_orphans`, `Claims.void` |
| ``take_over``, ``win`` | `Partitions.take_over`, `Partitions.win` |

Its shape has the reasons of ``protocol_model``: time is absent, a message that was sent stays deliverable,
and a listener that lost its lease continues for ever. Changes have no places here, since the order is not the question:
of a partition only their number counts. A success is one write, with the position.

A claim that has lapsed counts as running, too: its owner may still beat.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property import exploration
from tests.property.exploration import Model, Step, put
from tests.property.stores import can, replaced, spent, with_listener, with_partition

NONE = -1
"""No message was sent, or is about to be."""


class Broken(StrEnum):
    """One rule of the limits left out or replaced by the simpler one."""

    NOTHING = "nothing"
    MESSAGE_WITHOUT_TOKEN = "a claim does not compare the fencing token of its message"
    ADOPTED_NOT_COUNTED = "claims that a take-over finds hold no slot"
    LOCKED_NOT_COUNTED = "a partition that a take-over could not win holds no slot"
    LAPSED_NOT_COUNTED = "a claim that has lapsed holds no slot"
    PAUSED_NOT_COUNTED = "a pause frees the slot of a message, which is not ended"
    NOTED_WHEN_SENT = "a slot is taken only when the broker has answered"
    NEVER_VOIDED = "nothing is ended in a partition that waits for something else"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    CRASH = "a worker dies"
    RETRY = "a handler asks for a retry"
    LOSS = "the broker loses a message"
    UNANSWERED = "the broker takes a message, and its answer is lost"
    LOCK = "a take-over cannot win a partition at once"
    PAUSE = "a person pauses a partition, and resumes it at any time or never"


class World(NamedTuple):
    """A scenario.

    Args:
        name: A sentence for reports.
        changes: How many changes each partition has.
        terms: How many terms may begin without need, each while the one before believes itself the holder.
        most: How many executions may run at a time.
        faults: Which kinds may happen; ``budget``: how many altogether.
        broken: The rule left out.
    """

    name: str
    changes: tuple[int, ...] = (1, 1)
    terms: int = 1
    most: int = 1
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    broken: Broken = Broken.NOTHING


class Claim(NamedTuple):
    """The right of one execution, whose fencing token is its owner; ``live`` is the server's verdict."""

    owner: int
    live: bool = True


class Partition(NamedTuple):
    """A document of ``partitions``, and what a listener has last seen of it."""

    term: int = 0
    fence: int = 0
    committed: int = 0
    claim: Claim | None = None
    paused: bool = False


class Listener(NamedTuple):
    """What one term keeps in memory.

    ``sent`` is, of each partition, the fencing token of the last message that may be in its queue; ``sending`` is the
    partition whose slot is taken, and whose message is not sent.
    """

    term: int
    images: tuple[Partition, ...] = ()
    sent: tuple[int, ...] = ()
    sending: int = NONE


class Message(NamedTuple):
    """A message; ``fence`` is the token that its claim must find."""

    partition: int
    term: int
    first: int
    fence: int


class Run(NamedTuple):
    partition: int
    owner: int


class State(NamedTuple):
    """Everything."""

    partitions: tuple[Partition, ...]
    listeners: tuple[Listener, ...] = ()
    messages: frozenset[Message] = frozenset()
    runs: frozenset[Run] = frozenset()
    budget: int = 0

    @property
    def epoch(self) -> int:
        return len(self.listeners)


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    return State((Partition(),) * len(world.changes), budget=world.budget)


def holds(world: World, listener: Listener, index: int) -> bool:
    """Tell whether something may run in a partition, as far as a listener knows: then it holds a slot."""
    image, sent, broken = listener.images[index], listener.sent[index], world.broken
    if image.term < listener.term:
        return broken is not Broken.LOCKED_NOT_COUNTED or image.claim is not None
    is_adopted = image.claim is not None and sent == NONE
    if is_adopted and broken is Broken.ADOPTED_NOT_COUNTED:
        return False
    if image.claim is not None and (image.claim.live or broken is not Broken.LAPSED_NOT_COUNTED):
        return True
    return sent == image.fence and not (image.paused and broken is Broken.PAUSED_NOT_COUNTED)


# === the rules ===


def acquire(world: World, state: State) -> Steps:
    """A term begins; the first one sooner or later."""
    if state.epoch < world.terms:
        begun = Listener(state.epoch + 1, sent=(NONE,) * len(world.changes))
        yield Step("acquire", begun, fair=state.epoch == 0), replaced(state, listeners=(*state.listeners, begun))


def take_over(world: World, state: State, listener: Listener) -> Steps:
    """A term wins its partitions one by one, and reads each afterwards; a locked one it reads alone."""
    index = len(listener.images)
    found = state.partitions[index]
    if found.term <= listener.term:
        won = found._replace(term=listener.term)
        after = with_partition(state, index, won)
        yield Step("win", won), with_listener(after, listener, listener._replace(images=(*listener.images, won)))
    if found.term < listener.term and can(world, state, Fault.LOCK):
        passed = listener._replace(images=(*listener.images, found))
        yield Step("lock", found, fair=False), spent(with_listener(state, listener, passed))


def win(state: State, listener: Listener) -> Steps:
    for index, image in enumerate(listener.images):
        if image.term < listener.term and state.partitions[index].term <= listener.term:
            won = state.partitions[index]._replace(term=listener.term)
            after = with_partition(state, index, won)
            yield Step("win late", won), with_listener(after, listener, _seeing(listener, index, won))


def look(state: State, listener: Listener) -> Steps:
    """A listener reads a partition that no later term has won."""
    for index, found in enumerate(state.partitions):
        if found.term <= listener.term and found != listener.images[index]:
            yield Step("look", found), with_listener(state, listener, _seeing(listener, index, found))


def _seeing(listener: Listener, index: int, image: Partition) -> Listener:
    return listener._replace(images=put(listener.images, index, image))


def dispatch(world: World, state: State, listener: Listener) -> Steps:
    """A listener takes a slot for the next change of a partition. A lapsed claim has had its grace."""
    used = sum(holds(world, listener, index) for index in range(len(world.changes)))
    for index, image in enumerate(listener.images):
        is_held = holds(world, listener, index)
        is_due = image.committed < world.changes[index] and not image.paused and image.term == listener.term
        if not is_due or (image.claim is not None and image.claim.live) or not (is_held or used < world.most):
            continue
        if _message(listener, index) in state.messages:  # to send it again changes nothing
            continue
        begun = listener._replace(sending=index)
        if world.broken is not Broken.NOTED_WHEN_SENT:
            begun = begun._replace(sent=put(begun.sent, index, image.fence))
        yield Step("dispatch", begun), with_listener(state, listener, begun)


def _message(listener: Listener, index: int) -> Message:
    image = listener.images[index]
    return Message(index, listener.term, image.committed + 1, image.fence)


def send(world: World, state: State, listener: Listener) -> Steps:
    """The message is sent; or the listener does not know that it is."""
    index, message = listener.sending, _message(listener, listener.sending)
    unsure = listener._replace(sending=NONE)
    known = unsure._replace(sent=put(unsure.sent, index, message.fence))
    sent = replaced(state, messages=state.messages | {message})
    yield Step("send", message), with_listener(sent, listener, known)
    if can(world, state, Fault.UNANSWERED):
        yield Step("send unanswered", message, fair=False), spent(with_listener(sent, listener, unsure))


def void(world: World, state: State, listener: Listener) -> Steps:
    """A listener ends what may still run in a partition of which it can or need send nothing."""
    if world.broken is Broken.NEVER_VOIDED:
        return
    for index, image in enumerate(listener.images):
        is_idle = image.paused or image.committed == world.changes[index]
        is_orphan = image.term == listener.term and holds(world, listener, index)
        found = state.partitions[index]
        if not (is_idle and is_orphan) or (image.claim is not None and image.claim.live):
            continue
        if found.term == listener.term and found.fence == image.fence and not (found.claim and found.claim.live):
            ended = found._replace(fence=found.fence + 1, claim=None)
            yield Step("void", ended), with_partition(state, index, ended)


def deliver(world: World, state: State) -> Steps:
    for message in state.messages:
        found = state.partitions[message.partition]
        is_next = found.term == message.term and found.committed == message.first - 1 and not found.paused
        is_free = found.claim is None or not found.claim.live
        is_expected = found.fence == message.fence or world.broken is Broken.MESSAGE_WITHOUT_TOKEN
        if is_next and is_free and is_expected:
            owner = found.fence + 1
            after = with_partition(state, message.partition, found._replace(fence=owner, claim=Claim(owner)))
            run = Run(message.partition, owner)
            yield Step("claim", message), replaced(after, runs=after.runs | {run})


def execute(world: World, state: State, run: Run) -> Steps:
    """An execution succeeds, asks for a retry, dies, is late, or is refused."""
    found, others = state.partitions[run.partition], replaced(state, runs=state.runs - {run})
    mine = found.claim is not None and found.claim.owner == run.owner == found.fence
    ended = found._replace(claim=None)
    yield (
        Step("finish" if mine else "refused", run),
        with_partition(others, run.partition, ended._replace(committed=found.committed + 1)) if mine else others,
    )
    if can(world, state, Fault.CRASH):
        yield Step("crash", run, fair=False), spent(others)
    if mine and can(world, state, Fault.RETRY):
        yield Step("retry", run, fair=False), spent(with_partition(others, run.partition, ended))
    if mine and found.claim is not None and not found.claim.live:
        beaten = found._replace(claim=Claim(run.owner))
        yield Step("beat late", run, fair=False), with_partition(state, run.partition, beaten)


def lapse(world: World, state: State) -> Steps:
    """A claim lapses: eventually if no process renews it, as a fault while its execution continues."""
    for index, found in enumerate(state.partitions):
        if found.claim is None or not found.claim.live:
            continue
        lapsed = with_partition(state, index, found._replace(claim=Claim(found.claim.owner, live=False)))
        if Run(index, found.claim.owner) not in state.runs:
            yield Step("lapse", found), lapsed
        elif can(world, state, Fault.LAPSE):
            yield Step("lapse", found, fair=False), spent(lapsed)


def lose(world: World, state: State) -> Steps:
    for message in state.messages if can(world, state, Fault.LOSS) else ():
        yield Step("loss", message, fair=False), spent(replaced(state, messages=state.messages - {message}))


def pause(world: World, state: State) -> Steps:
    for index, found in enumerate(state.partitions):
        if found.paused:
            yield Step("resume", index, fair=False), with_partition(state, index, found._replace(paused=False))
        elif can(world, state, Fault.PAUSE):
            paused = with_partition(state, index, found._replace(paused=True))
            yield Step("pause", index, fair=False), spent(paused)


# === the oracles, and the search ===

Move = exploration.Move[World, State]


def no_more_running(move: Move) -> Iterator[str]:
    """Never more executions have a claim than may run at a time."""
    running = sum(each.claim is not None for each in move.after.partitions)
    if running > move.world.most:
        yield f"{running} executions have a claim, and {move.world.most} may run"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P17: where nothing more will happen, all is done but what is paused."""
    for index, found in enumerate(state.partitions):
        if found.committed < world.changes[index] and not found.paused:
            yield f"partition {index} stays at {found.committed} for ever"


def steps(world: World, state: State) -> Steps:
    yield from acquire(world, state)
    for listener in state.listeners:
        if len(listener.images) < len(world.changes):
            yield from take_over(world, state, listener)
        elif listener.sending != NONE:
            yield from send(world, state, listener)
        else:
            yield from win(state, listener)
            yield from look(state, listener)
            yield from dispatch(world, state, listener)
            yield from void(world, state, listener)
    yield from deliver(world, state)
    for run in state.runs:
        yield from execute(world, state, run)
    yield from lapse(world, state)
    yield from lose(world, state)
    yield from pause(world, state)


LIMITS_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={"running": (no_more_running,)},
    at_rest={"P17": left_undone},
)
