"""The protocol of the bridge as a finite machine: its state, its rules and the faults that may hit it.

Nothing here is imported from the package: the model is a second, independent reading of the design, small
enough to try every interleaving. What stands behind its shape:

- *Time is absent.* A lease or a claim may lapse whenever its owner is slow, a grace may end at once. What
  holds here holds under every clock.
- *A message that was sent stays deliverable.* Delivering, repeating and reordering need no rule and no bound;
  a message that fails to claim leaves no trace. Loss is a fault of its own: the sweep must send again.
- *Tokens are positions in the stream*, from 1; 0 is before the first. A position holds a change or a mark,
  which stands for a post-batch token.
- *A listener's buffers and its window follow* from where it opened the stream, how far it has read, and the
  last image it saw of each partition. A listener that lost its lease goes on with all of its rules for ever.
- *A locked partition* is left behind by a take-over, which leads and wins it later. Meanwhile everybody else may act
  there as before, which is more than its lock allows.
- *Runs carry one change*, and any message or listener may commit what is handled, as the design allows. Where a
  scenario says so, they carry two: the execution goes on with the next one, and at any time, or never, moves the
  position behind those that are done, while the claim stands.
- *What a success leaves is not of a majority at once*: ``handled``, and the position that is made of it or written
  inline. A failover may bring back the document of before, until it is replicated or anything else is written there.
  Looks see what a majority has; a take-over's commit is of a majority, which is the same as one that is replicated.
- *A rewind is a term of the operator*: it takes the lease's next version and writes it, with the new
  position, to the subscription and to the partitions in one transaction.

Left out, because time or people decide them: the waiting for ``notBefore``, the limit of crashes, new layouts
(``spill_model``), and the keys held back by ``park_key`` (``park_model``).

Each rule is a generator of steps with the states they lead to. A variant (``Broken``) is one ``if`` beside the rule it
breaks, so that the difference can be read.
Every fair step adds something that no other such step takes away, so there are no circles. Fields marked "ghost" are
never read by a rule: they are the memory of the oracles.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import NamedTuple

from tests.property import exploration
from tests.property.exploration import Model, Step, changed, gone_back, passed, put
from tests.property.stores import can, counted, spent, with_listener, with_partition

MARK = -1
"""In a stream: a post-batch token instead of a change."""


class Broken(StrEnum):
    """One rule of the protocol left out or replaced by the obvious mistake."""

    NOTHING = "nothing"
    FENCE_IS_LEASE_VERSION = "the lease's version alone is the fencing token"
    WATERMARK_IS_MAXIMUM = "the watermark is the largest completed token"
    MARK_BESIDE_WINDOW = "the post-batch token is a variable beside the window"
    CLAIM_IGNORES_HANDLED = "a claim does not ask whether the run is handled"
    OUTCOME_WITHOUT_FENCE = "an outcome is written without fence, owner and committed"
    TAKE_OVER_CLEARS_CLAIMS = "a take-over clears live claims"
    TWO_IMAGES = "number and token come from two images of the document"
    WATERMARK_IGNORES_EPOCH = "a watermark is written without comparing the epoch"
    CLAIM_IGNORES_EPOCH = "a claim does not compare the epoch"
    WATERMARK_PASSES_LOCKED = "the watermark does not wait for a partition that is locked at the take-over"
    REWIND_IN_TWO_WRITES = "a rewind is two writes: the watermark, then the positions"
    LOOK_BEFORE_MAJORITY = "a look takes a position that a failover may take back"
    CLAIM_BEFORE_MAJORITY = "a claim does not wait for a majority"
    INLINE_BEFORE_SUCCESS = "the position is written inline before the handler has succeeded"
    PROGRESS_WITHOUT_FENCE = "the position moves inside a run without fence, owner and committed"
    PROGRESS_ENDS_CLAIM = "the claim ends where the position moves inside a run"
    PROGRESS_BEFORE_SUCCESS = "the position moves inside a run behind the change that is under way"
    FAILURE_BEFORE_PROGRESS = "a change that fails inside a run has its outcome while those before it are not recorded"
    REWIND_COUNTS_ALONE = "a rewind takes each document's epoch plus one, not the lease's next version"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    CRASH = "a worker dies, or the answer to its claim is lost"
    RETRY = "a handler asks for a retry"
    FAILURE = "a handler fails for good: the failure policy applies"
    ROLLBACK = "a failover loses what no majority has: the mark `handled`, or a position"
    LOSS = "the broker loses a message"
    REOPEN = "the stream breaks and is opened again at the watermark"
    LOCK = "a transaction that nobody ends keeps a partition from being won by a take-over"


class Policy(StrEnum):
    """What happens to a change whose handler failed for good."""

    HALT = "halt"
    SKIP = "skip"
    DEAD_LETTER = "dead_letter"


class Commit(StrEnum):
    """Who turns the success of an execution into the position."""

    CHAIN = "whoever commits what is handled"
    INLINE = "the execution itself"
    EITHER = "either: the option has changed, and runs of before it are still on their way"


class World(NamedTuple):
    """A scenario: the stream, how long it goes on and what may go wrong.

    A *configuration* is what one deployment knows: term n runs with configuration min(n, last).

    Args:
        name: A sentence for reports.
        stream: The partition of the item at each position, or ``MARK``.
        terms: How many terms may begin without need, each while the one before believes itself the holder.
        budget: How many faults may happen altogether.
        faults: Which kinds.
        policy: The failure policy.
        commit: Who writes the positions.
        rewind: Whether the operator may rewind to the start, once. Numbers continue.
        matches: Per configuration the positions its handler matches; empty: everything, always.
        runs: Whether a run carries the next change, too, where it was read.
        broken: The rule left out.
    """

    name: str
    stream: tuple[int, ...]
    terms: int
    budget: int = 0
    faults: frozenset[Fault] = frozenset()
    policy: Policy = Policy.HALT
    commit: Commit = Commit.CHAIN
    rewind: bool = False
    matches: tuple[frozenset[int], ...] = ()
    runs: bool = False
    broken: Broken = Broken.NOTHING

    def matched(self, config: int, token: int) -> bool:
        if self.stream[token - 1] == MARK:
            return False
        return not self.matches or token in self.matches[min(config, len(self.matches) - 1)]


class Image(NamedTuple):
    committed: int = 0
    token: int = 0


class Claim(NamedTuple):
    """The right of one execution; ``live`` is the server's verdict on its expiry."""

    owner: int
    live: bool


class Handled(NamedTuple):
    """The durable success of a handler; ``config`` is ghost, and so is ``also``: what else of its run is done."""

    last: int
    token: int
    config: int
    also: tuple[int, ...] = ()


class Partition(NamedTuple):
    """A document of ``partitions``; ``owners`` counts claims (for random owners), ``faults`` is ghost.

    ``before`` is what a failover would bring back, as long as the last write is not that of a majority; ``settling``
    is ghost: what that write has settled.
    """

    epoch: int = 0
    committed: int = 0
    token: int = 0
    fence: int = 0
    claim: Claim | None = None
    handled: Handled | None = None
    halted: bool = False
    owners: int = 0
    faults: int = 0
    before: Partition | None = None
    settling: frozenset[int] = frozenset()

    @property
    def seen(self) -> Partition:
        """What a majority has."""
        return self if self.before is None else self.before

    def replicated(self) -> Partition:
        """Return the document once a majority has it."""
        return self if self.before is None else self._replace(before=None, settling=frozenset())


class Listener(NamedTuple):
    """What one term keeps in memory; ``taken`` counts the documents taken over, subscription first.

    Of those the ``locked`` ones are not won yet: their images are known, their epochs are older.
    """

    term: int
    config: int
    taken: int = 0
    opened: int = 0
    cursor: int = 0
    images: tuple[Image, ...] = ()
    locked: frozenset[int] = frozenset()


class Message(NamedTuple):
    """A chain in the broker: its handler task and its commit task; ``rest`` are the later changes of its run."""

    partition: int
    term: int
    first: int
    token: int
    rest: tuple[int, ...] = ()


class Run(NamedTuple):
    """An execution between its claim and its outcome; ``config`` and ``era`` are ghost.

    ``first`` is the number of the first change that is not recorded, ``done`` are those in front of the one under way,
    and ``moved`` says whether any was recorded.
    """

    partition: int
    config: int
    first: int
    token: int
    owner: int
    fence: int
    era: int
    wrote: bool = False
    rest: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    moved: bool = False

    @property
    def success(self) -> Handled:
        """What is done once the change that is under way is."""
        return Handled(self.first + len(self.done), self.token, self.config, self.done)


class Target(NamedTuple):
    """What the last accepted effect of a partition left in the fenced target; all but the stamp is ghost."""

    stamp: int = 0
    era: int = 0
    token: int = 0
    owner: int = 0
    config: int = 0


class State(NamedTuple):
    """Everything: MongoDB, the listeners of all terms, the broker, the workers, the target, the ghosts.

    ``settled`` is ghost: positions that are committed or dead-lettered, or were passed under a configuration
    that does not match them. ``starts`` counts handler starts per position, ``asked`` those that ended with an outcome
    of the change's own: a retry, a failure; ``era`` counts rewinds.
    """

    version: int = 0
    holder: int = 0
    epoch: int = 0
    watermark: int = 0
    partitions: tuple[Partition, ...] = ()
    listeners: tuple[Listener, ...] = ()
    messages: frozenset[Message] = frozenset()
    runs: frozenset[Run] = frozenset()
    targets: tuple[Target, ...] = ()
    budget: int = 0
    era: int = 0
    settled: frozenset[int] = frozenset()
    starts: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: nothing read, nothing claimed."""
    count, none = max(world.stream) + 1, (0,) * len(world.stream)
    partitions, targets = (Partition(),) * count, (Target(),) * count
    return State(partitions=partitions, targets=targets, budget=world.budget, starts=none, asked=none)


def owns(partition: Partition, run: Run) -> bool:
    """Tell whether an execution's guard matches: owner, fence and committed, nothing handled."""
    claim = partition.claim
    return (
        claim is not None
        and claim.owner == run.owner
        and partition.fence == run.fence
        and partition.committed == run.first - 1
        and partition.handled is None
    )


# === the rules ===

# --- the position -------------------------------------------------------------------------------------------


def excused(world: World, config: int, first: int, last: int) -> frozenset[int]:
    """Return the changes from first to last that a configuration passes because it does not match them."""
    return frozenset(
        token
        for token in range(first, last + 1)
        if world.stream[token - 1] != MARK and not world.matched(config, token)
    )


def moved(world: World, state: State, index: int, to: Handled, done: int) -> State:
    """Return the state in which a partition's position is what ``to`` says, claim and handled cleared.

    ``done`` is the change that really succeeded: what else is passed goes to the ghost memory only if the
    configuration does not want it.
    """
    old = state.partitions[index].replicated()
    new = old._replace(committed=to.last, token=to.token, claim=None, handled=None)
    passed = frozenset(
        token for token in excused(world, to.config, old.token + 1, to.token) if world.stream[token - 1] == index
    )
    return with_partition(state, index, new)._replace(settled=state.settled | passed | {done, *to.also})


def committed(world: World, state: State, index: int) -> State:
    handled = state.partitions[index].handled
    return moved(world, state, index, handled, handled.token) if handled else state


# --- the lease and the listener -----------------------------------------------------------------------------


def in_office(state: State) -> Listener | None:
    """Return the listener whose lease stands and whose term no document has left behind."""
    if not state.holder:
        return None
    last = state.listeners[-1]
    current = last.term >= state.epoch and all(last.term >= each.epoch for each in state.partitions)
    return last if current else None


def acquire(world: World, state: State) -> Steps:
    """A standby takes a lease that is free or has lapsed; the version always grows.

    Without anybody in office it happens sooner or later, else it is bounded by the scenario. That a take-over
    which finds a larger epoch raises its version above it, and begins again, is contained in this step.
    """
    begun, needed = len(state.listeners), in_office(state) is None
    if needed or begun < world.terms:
        version = max(state.version, state.epoch, *(each.epoch for each in state.partitions)) + 1
        listener = Listener(version, begun)
        after = state._replace(version=version, holder=version, listeners=(*state.listeners, listener))
        yield Step("acquire", listener, fair=needed), after


def release(world: World, state: State) -> Steps:
    """The holder stops: only a lease that carries its term is emptied, and the listener is gone."""
    listener = in_office(state)
    if listener is not None and len(state.listeners) < world.terms:
        gone = with_listener(state, listener, ended(listener))
        yield Step("release", listener, fair=False), gone._replace(holder=0)


def ended(listener: Listener) -> Listener:
    return Listener(listener.term, listener.config, taken=-1)


def take_over(world: World, state: State, which: int) -> Steps:
    """One atomic update per document: the larger epoch stays; what is handled is committed on the spot."""
    listener = state.listeners[which]
    if not 0 <= listener.taken <= len(state.partitions):
        return
    if listener.taken == 0:
        epoch = max(state.epoch, listener.term)
        after = state._replace(epoch=epoch)
        taken = listener._replace(taken=1, opened=state.watermark, cursor=state.watermark)
    else:
        index = listener.taken - 1
        after, image = taken_over(world, state, index, listener)
        epoch = after.partitions[index].epoch
        images = (*listener.images, image)
        taken = listener._replace(taken=listener.taken + 1, images=images)
    known = taken if epoch == listener.term else ended(listener)
    yield Step("take over", known), with_listener(after, listener, known)


def taken_over(world: World, state: State, index: int, listener: Listener) -> tuple[State, Image]:
    after = committed(world, state, index)
    partition = after.partitions[index].replicated()
    partition = partition._replace(epoch=max(partition.epoch, listener.term))
    if world.broken is Broken.TAKE_OVER_CLEARS_CLAIMS:
        partition = partition._replace(claim=None)
    token = partition.token
    if world.broken is Broken.TWO_IMAGES:  # the token as it was looked up while standing by
        seen = [each.images[index] for each in state.listeners if len(each.images) > index]
        token = seen[-1].token if seen else token
    return with_partition(after, index, partition), Image(partition.committed, token)


def win(world: World, state: State, which: int) -> Steps:
    """A partition that was locked at the take-over is free now, and won like the others."""
    listener = state.listeners[which]
    for index in listener.locked:
        after, image = taken_over(world, state, index, listener)
        if after.partitions[index].epoch == listener.term:
            won = listener._replace(images=put(listener.images, index, image), locked=listener.locked - {index})
        else:
            won = ended(listener)
        yield Step("win", won), with_listener(after, listener, won)


def read(world: World, state: State, which: int) -> Steps:
    listener = state.listeners[which]
    if listener.cursor < len(world.stream):
        onward = listener._replace(cursor=listener.cursor + 1)
        yield Step("read", onward), with_listener(state, listener, onward)
    for index, partition in enumerate(state.partitions):
        found = partition if world.broken is Broken.LOOK_BEFORE_MAJORITY else partition.seen
        image = Image(found.committed, found.token)
        if image != listener.images[index]:
            aware = listener._replace(images=put(listener.images, index, image))
            yield Step("look", aware), with_listener(state, listener, aware)


def buffered(world: World, listener: Listener, index: int, after: int) -> list[int]:
    """Return the changes of a partition that were read and lie after a token, in order."""
    return [
        token
        for token in range(max(listener.opened, after) + 1, listener.cursor + 1)
        if world.matched(listener.config, token) and world.stream[token - 1] == index
    ]


def dispatch(world: World, state: State, which: int) -> Steps:
    """Window 1: the first change that is not done goes out; again and again, which is the sweep.

    More than the design allows: neither a live claim nor a lock holds it back. Waiting saves messages, not safety.
    """
    listener = state.listeners[which]
    for index, image in enumerate(listener.images):
        waiting = buffered(world, listener, index, image.token)
        if waiting:
            rest = tuple(waiting[1:2]) if world.runs else ()
            message = Message(index, listener.term, image.committed + 1, waiting[0], rest)
            if message not in state.messages:
                yield Step("dispatch", message), state._replace(messages=state.messages | {message})


def complete(world: World, listener: Listener, token: int) -> bool:
    """Tell whether an item of the window is complete, as far as the listener knows."""
    if not world.matched(listener.config, token):
        return True
    index = world.stream[token - 1]
    if world.broken is Broken.WATERMARK_PASSES_LOCKED and index in listener.locked:
        return True
    return token <= listener.images[index].token


def low_watermark(world: World, listener: Listener) -> int:
    """Return the last token of the completed prefix of a listener's window."""
    window = range(listener.opened + 1, listener.cursor + 1)
    done = [token for token in window if complete(world, listener, token)]
    if world.broken is Broken.WATERMARK_IS_MAXIMUM:
        return max(done, default=listener.opened)
    prefix = next((token - 1 for token in window if token not in done), listener.cursor)
    if world.broken is Broken.MARK_BESIDE_WINDOW and prefix == listener.cursor:
        arrived = range(prefix + 1, len(world.stream) + 1)  # the driver has the batch, nobody has read it
        return next((token for token in arrived if world.stream[token - 1] == MARK), prefix)
    return prefix


def store_watermark(world: World, state: State, which: int) -> Steps:
    """One update: the subscription's epoch is my term, and the new token is larger."""
    listener = state.listeners[which]
    if state.epoch != listener.term and world.broken is not Broken.WATERMARK_IGNORES_EPOCH:
        return
    token = low_watermark(world, listener)
    if token > state.watermark:
        passed = excused(world, listener.config, state.watermark + 1, token)
        # What is passed for good stays settled, also where its position is taken back.
        partitions = tuple(each._replace(settling=each.settling - passed) for each in state.partitions)
        after = state._replace(watermark=token, settled=state.settled | passed, partitions=partitions)
        yield Step("watermark", listener), after


# --- workers ------------------------------------------------------------------------------------------------


def claimable(world: World, partition: Partition, message: Message) -> bool:
    return (
        (partition.epoch == message.term or world.broken is Broken.CLAIM_IGNORES_EPOCH)
        and partition.committed == message.first - 1
        and partition.token < message.token
        and (partition.handled is None or world.broken is Broken.CLAIM_IGNORES_HANDLED)
        and (partition.claim is None or not partition.claim.live)
        and not partition.halted
    )


def ruling(world: World, state: State, partition: Partition) -> int:
    """Return the configuration of the term to which a partition belongs (after a rewind: of the last before).

    Where all configurations are alike it is always the first: fewer states that differ in nothing.
    """
    if not world.matches:
        return 0
    return next(each.config for each in reversed(state.listeners) if each.term <= partition.epoch)


def deliver(world: World, state: State) -> Steps:
    """A worker gets a message, for the first time or again, and claims; without a match it drops it."""
    for message in state.messages:
        partition = state.partitions[message.partition]
        if claimable(world, partition, message):
            owner, fence = partition.owners + 1, partition.fence + 1
            if world.broken is Broken.FENCE_IS_LEASE_VERSION:
                fence = message.term
            base = partition.replicated()
            if world.broken is Broken.CLAIM_BEFORE_MAJORITY:
                base = partition._replace(before=partition.seen)
            claimed = base._replace(fence=fence, owners=owner, claim=Claim(owner, live=True))
            config = ruling(world, state, partition)
            run = Run(
                message.partition, config, message.first, message.token, owner, fence, state.era, rest=message.rest
            )
            after = with_partition(state, message.partition, claimed)
            starts = counted(state.starts, message.token - 1)
            yield Step("claim", run), after._replace(runs=state.runs | {run}, starts=starts)


def execute(world: World, state: State, run: Run) -> Steps:
    """The handler writes its effect to the fenced target; after it returned, ``handled`` or the position is written.

    Both happen at any time, also long after the claim has lapsed and another execution has passed.
    """
    others = state.runs - {run}
    partition = state.partitions[run.partition]
    if world.broken is Broken.INLINE_BEFORE_SUCCESS and not run.wrote and owns(partition, run):
        yield Step("position", run), inline(world, state, run)
    if not run.wrote:
        if run.fence < state.targets[run.partition].stamp:
            yield Step("refused effect", run), state._replace(runs=others)
            return
        stamp = Target(run.fence, run.era, run.token, run.owner, run.config)
        targets = put(state.targets, run.partition, stamp)
        after = state._replace(targets=targets, runs=others | {run._replace(wrote=True)})
        yield Step("effect", run), after
    elif run.rest:
        token, *rest = run.rest
        following = run._replace(token=token, rest=tuple(rest), done=(*run.done, run.token), wrote=False)
        starts = counted(state.starts, token - 1)
        yield Step("go on", run), state._replace(runs=others | {following}, starts=starts)
    elif owns(partition, run) or world.broken is Broken.OUTCOME_WITHOUT_FENCE:
        ended = state._replace(runs=others)
        if run.moved:  # its message asks for a first change that is passed
            yield Step("position", run), moved(world, ended, run.partition, run.success, run.token)
            return
        if world.commit is not Commit.CHAIN:
            yield Step("position", run), inline(world, ended, run)
        if world.commit is not Commit.INLINE:
            done = partition.replicated()._replace(handled=run.success, before=partition.seen)
            yield Step("handled", run), with_partition(ended, run.partition, done)
    else:
        yield Step("refused outcome", run), state._replace(runs=others)


def inline(world: World, state: State, run: Run) -> State:
    """Return the state in which an execution has written the position, for now without a majority."""
    done = run.token if run.wrote else 0
    after = moved(world, state, run.partition, run.success, done)
    return unsure(state, after, run.partition, {done, *run.done})


def unsure(before: State, after: State, index: int, done: AbstractSet[int]) -> State:
    """Return the state behind a position that was written with w:1: until it is replicated, it may be taken back."""
    old = before.partitions[index]
    settling = old.settling | (done - before.settled)
    return with_partition(after, index, after.partitions[index]._replace(before=old.seen, settling=settling))


def replicate(state: State) -> Steps:
    """What was written with w:1 reaches a majority."""
    for index, partition in enumerate(state.partitions):
        if partition.before is not None:
            yield Step("replicated"), with_partition(state, index, partition.replicated())


def progress(world: World, state: State, run: Run) -> Steps:
    """The position moves behind what is done of a run, at any time; the claim stands."""
    too_far = world.broken is Broken.PROGRESS_BEFORE_SUCCESS and run.rest and not run.wrote
    if not run.done and not too_far:
        return
    others = state.runs - {run}
    if not owns(state.partitions[run.partition], run) and world.broken is not Broken.PROGRESS_WITHOUT_FENCE:
        yield Step("refused progress", run), state._replace(runs=others)
        return
    *also, last = (*run.done, run.token) if too_far else run.done
    count = len(also) + 1
    to = Handled(run.first + count - 1, last, run.config, tuple(also))
    after = moved(world, state, run.partition, to, 0 if too_far else last)
    if world.broken is not Broken.PROGRESS_ENDS_CLAIM:
        partition = after.partitions[run.partition]
        after = with_partition(after, run.partition, partition._replace(claim=state.partitions[run.partition].claim))
    following = run._replace(first=run.first + count, done=(), moved=True)
    if too_far:
        token, *rest = run.rest
        following = following._replace(token=token, rest=tuple(rest))
    yield Step("progress", run), after._replace(runs=others | {following})


def commit(world: World, state: State) -> Steps:
    """Whoever comes first, task or listener, turns what is handled into the position."""
    for index, partition in enumerate(state.partitions):
        handled = partition.handled
        if handled is not None:
            after = unsure(state, committed(world, state, index), index, {handled.token, *handled.also})
            yield Step("commit", handled), after


# === what may go wrong at any moment, and persons ===


def lapse(world: World, state: State) -> Steps:
    """A claim lapses: sooner or later if nobody beats for it, as a fault while its execution goes on."""
    owners = {(run.partition, run.owner) for run in state.runs}
    for index, partition in enumerate(state.partitions):
        claim = partition.claim
        if claim is None or not claim.live:
            continue
        lapsed = partition._replace(claim=claim._replace(live=False))
        if (index, claim.owner) not in owners:
            yield Step("lapse", claim), with_partition(state, index, lapsed)
        elif can(world, state, Fault.LAPSE):
            yield Step("lapse", claim, fair=False), hit(with_partition(state, index, lapsed), index)


def hit(state: State, index: int) -> State:
    """Return the state with one fault less to come and one more counted for a partition."""
    partition = state.partitions[index]
    return spent(with_partition(state, index, partition._replace(faults=partition.faults + 1)))


def misfortune_of_runs(world: World, state: State, run: Run) -> Steps:
    """An execution dies, asks for a retry, or fails for good; its outcome is guarded like every other."""
    others = state._replace(runs=state.runs - {run})
    partition = state.partitions[run.partition]
    if can(world, state, Fault.CRASH):
        yield Step("crash", run, fair=False), hit(others, run.partition)
    guarded = owns(partition, run) or world.broken is Broken.OUTCOME_WITHOUT_FENCE
    if run.done and world.broken is not Broken.FAILURE_BEFORE_PROGRESS:
        return
    if guarded and can(world, state, Fault.RETRY):
        retried = with_partition(others, run.partition, partition._replace(claim=None))
        yield Step("retry", run, fair=False), answered(retried, run)
    if guarded and can(world, state, Fault.FAILURE):
        yield Step(world.policy, run, fair=False), answered(given_up(world, others, run), run)


def answered(state: State, run: Run) -> State:
    """Return the state with one fault less to come, which is that of one change alone."""
    return spent(state)._replace(asked=counted(state.asked, run.token - 1))


def given_up(world: World, state: State, run: Run) -> State:
    """Return the state after the failure policy was applied to a run."""
    if world.policy is Policy.HALT:
        halted = state.partitions[run.partition]._replace(claim=None, halted=True)
        return with_partition(state, run.partition, halted)
    return moved(world, state, run.partition, Handled(run.first, run.token, run.config), run.token)


def misfortune_of_stores(world: World, state: State) -> Steps:
    """A failover takes back what no majority has; the broker loses a message that still could claim."""
    for index, partition in enumerate(state.partitions):
        if partition.before is not None and can(world, state, Fault.ROLLBACK):
            yield Step("rollback", fair=False), hit(rolled_back(state, index), index)
    if can(world, state, Fault.LOSS):
        for message in state.messages:
            if message.term == state.partitions[message.partition].epoch:
                lost = state._replace(messages=state.messages - {message})
                yield Step("loss", message, fair=False), spent(lost)


def rolled_back(state: State, index: int) -> State:
    """Return the state in which a partition is again what a majority has of it; the ghosts remember more."""
    partition = state.partitions[index]
    again = partition.seen._replace(owners=partition.owners, faults=partition.faults)
    return with_partition(state, index, again)._replace(settled=state.settled - partition.settling)


def reopen(world: World, state: State, which: int) -> Steps:
    """The stream breaks: the listener opens it again at the watermark and forgets what it had read."""
    listener = state.listeners[which]
    if listener.cursor > state.watermark and can(world, state, Fault.REOPEN):
        again = listener._replace(opened=state.watermark, cursor=state.watermark)
        yield Step("reopen", again, fair=False), spent(with_listener(state, listener, again))


def lock(world: World, state: State, which: int) -> Steps:
    """The next partition of a take-over is locked: it is read by majority, and won later."""
    listener = state.listeners[which]
    index = listener.taken - 1
    if 0 <= index < len(state.partitions) and can(world, state, Fault.LOCK):
        partition = state.partitions[index]
        image = Image(partition.seen.committed, partition.seen.token)
        passed = listener._replace(
            taken=listener.taken + 1, images=(*listener.images, image), locked=listener.locked | {index}
        )
        yield Step("lock", passed, fair=False), spent(with_listener(state, listener, passed))


def rewind(world: World, state: State) -> Steps:
    """An operator sends the subscription back to its start: versions and fences grow, positions go back.

    All of it is one transaction. In two writes a listener that comes in between moves either the watermark or
    the positions past what the other write sends back, in whichever order they are made.
    """
    if not world.rewind or not state.settled:
        return
    rewind_step, version = Step("rewind", fair=False), state.version + 1
    raised = state._replace(version=version, holder=0)
    if world.broken is Broken.REWIND_IN_TWO_WRITES:
        if state.era == 0:
            yield rewind_step, raised._replace(epoch=version, watermark=0, era=1)
        elif state.era == 1:
            back = sent_back(world, state, version)
            yield Step("rewind"), raised._replace(partitions=back, settled=frozenset(), era=2)
    elif state.era == 0:
        alone = world.broken is Broken.REWIND_COUNTS_ALONE
        base, epoch = (state, state.epoch + 1) if alone else (raised, version)
        back = sent_back(world, state, None if alone else version)
        yield (
            rewind_step,
            base._replace(epoch=epoch, watermark=0, partitions=back, settled=frozenset(), era=1),
        )


def sent_back(world: World, state: State, epoch: int | None) -> tuple[Partition, ...]:
    """Return the partitions at their start, under a new epoch (without one: each under its own plus one).

    It begins as every take-over: what is handled is committed.
    """
    for index in range(len(state.partitions)):
        state = committed(world, state, index)
    return tuple(
        each.replicated()._replace(
            epoch=each.epoch + 1 if epoch is None else epoch,
            token=0,
            fence=each.fence + 1,
            claim=None,
            handled=None,
            faults=each.faults + 1,
        )
        for each in state.partitions
    )


# === the oracles, and the search ===

Move = exploration.Move[World, State]


OUTCOMES = frozenset({"handled", "position", "progress", "retry", *Policy})
"""The kinds of steps by which an execution records how it ended, or how far it is."""


def no_loss(move: Move) -> Iterator[str]:
    """P1: a position never passes a change of its own configuration that is not done."""
    if move.after.partitions is move.before.partitions:
        return
    for index, (old, new) in enumerate(zip(move.before.partitions, move.after.partitions, strict=True)):
        if new.token <= old.token:
            continue
        config = old.handled.config if old.handled else getattr(move.step.who, "config", 0)

        def is_owed(token: int, index: int = index, config: int = config) -> bool:
            wanted = move.world.matched(config, token) and move.world.stream[token - 1] == index
            return wanted and token not in move.after.settled

        yield from passed(old.token, new.token, index, is_owed)


def order(move: Move) -> Iterator[str]:
    """P2: accepted effects of a partition never go back to an earlier change (but by a rewind).

    A change that the writer of the later effect did not match was not earlier for it: a new configuration
    that matches more may still run it first, and then runs again what was begun behind it and not committed. And a run
    of several changes is repeated by a newer execution from the first one that is not recorded.
    """
    for partition, (old, new) in zip(
        move.before.partitions, zip(move.before.targets, move.after.targets, strict=True), strict=True
    ):
        again = move.world.runs and new.owner > old.owner and new.token > partition.token
        back = old.era == new.era and new.token < old.token and move.world.matched(old.config, new.token)
        if (back and not again) or new.era < old.era:
            yield f"the effect of change {new.token} was accepted after that of change {old.token}"


def fencing(move: Move) -> Iterator[str]:
    """P3: no effect is accepted from an execution older than the last, no outcome from a replaced one."""
    for old, new in changed(move.before.targets, move.after.targets):
        if new.owner < old.owner:
            yield f"execution {new.owner} overwrote what execution {old.owner} had written"
    run = move.step.who
    if isinstance(run, Run) and move.step.kind in OUTCOMES:
        partition = move.before.partitions[run.partition]
        if run.owner < partition.owners or run.era < move.before.era or run.first != partition.committed + 1:
            yield f"the stale execution {run.owner} recorded the outcome {move.step.kind!r}"


def monotone(move: Move) -> Iterator[str]:
    """P4: versions, epochs and fences never go back; numbers and tokens only by a rewind."""
    before, after, rewound = move.before, move.after, move.step.kind == "rewind"
    yield from gone_back("a version", before.version, after.version)
    yield from gone_back("an epoch", before.epoch, after.epoch)
    if not rewound:
        yield from gone_back("the watermark", before.watermark, after.watermark)
    for old, new in changed(before.partitions, after.partitions):
        if move.step.kind == "rollback":  # what no majority had does not count
            continue
        yield from gone_back("an epoch", old.epoch, new.epoch)
        yield from gone_back("a fence", old.fence, new.fence)
        if not rewound:
            yield from gone_back("a number", old.committed, new.committed)
            yield from gone_back("a position", old.token, new.token)
        if rewound and not (new.epoch > old.epoch and new.fence > old.fence):
            yield "a rewind has not raised epoch and fence"


def prefix(move: Move) -> Iterator[str]:
    """P5: a watermark never passes a change that is not committed or dead-lettered."""
    if move.step.kind == "watermark":
        for token in range(move.before.watermark + 1, move.after.watermark + 1):
            if move.world.stream[token - 1] != MARK and token not in move.after.settled:
                yield f"the watermark {move.after.watermark} has passed change {token}, which is not done"
    for token in move.before.settled - move.after.settled:
        if token <= move.after.watermark and move.step.kind == "rollback":
            yield f"change {token} was taken back, and the watermark {move.after.watermark} has passed it"


def bounded_duplicates(move: Move) -> Iterator[str]:
    """P6: a handler starts once per change, once more for each outcome of its own, and per fault of the partition."""
    run = move.step.who
    if not isinstance(run, Run) or move.step.kind not in {"claim", "go on"}:
        return
    token = run.rest[0] if move.step.kind == "go on" else run.token
    starts, faults = move.after.starts[token - 1], move.before.partitions[run.partition].faults
    if starts > 1 + faults + move.before.asked[token - 1]:
        yield f"change {token} has started {starts} times with {faults} faults"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P1, where nothing more will happen: everything is done, or its partition has stopped loudly."""
    listener = in_office(state)
    if listener is None:
        yield "nobody is in office"
        return
    for token in range(1, len(world.stream) + 1):
        wanted = world.matched(listener.config, token) and token not in state.settled
        if wanted and not state.partitions[world.stream[token - 1]].halted:
            yield f"change {token} is neither done nor is its partition halted"
    if state.watermark < len(world.stream) and not any(each.halted for each in state.partitions):
        yield f"the watermark stands at {state.watermark} for ever"


def steps(world: World, state: State) -> Steps:
    yield from acquire(world, state)
    yield from release(world, state)
    for which, listener in enumerate(state.listeners):
        if listener.taken > len(state.partitions):
            yield from read(world, state, which)
            yield from dispatch(world, state, which)
            yield from store_watermark(world, state, which)
            yield from reopen(world, state, which)
            yield from win(world, state, which)
        else:
            yield from take_over(world, state, which)
            yield from lock(world, state, which)
    yield from deliver(world, state)
    for run in state.runs:
        yield from execute(world, state, run)
        yield from progress(world, state, run)
        yield from misfortune_of_runs(world, state, run)
    yield from commit(world, state)
    yield from replicate(state)
    yield from lapse(world, state)
    yield from misfortune_of_stores(world, state)
    yield from rewind(world, state)


PROTOCOL_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss,),
        "P2": (order,),
        "P3": (fencing,),
        "P4": (monotone,),
        "P5": (prefix,),
        "P6": (bounded_duplicates,),
    },
    at_rest={"P1": left_undone},
)
