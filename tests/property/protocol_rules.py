"""The rules of the protocol for listeners and workers; those of misfortune are in ``protocol_faults``.

Each rule is a generator of steps with the states they lead to. A variant (``Broken``) is one ``if`` beside
the rule it breaks, so that the difference can be read.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from tests.property.exploration import Step, put
from tests.property.protocol_model import (
    MARK,
    Broken,
    Claim,
    Commit,
    Handled,
    Image,
    Listener,
    Message,
    Partition,
    Run,
    State,
    Steps,
    Target,
    World,
    owns,
)
from tests.property.stores import with_partition

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
        token
        for token in excused(world, to.config, old.token + 1, to.token)
        if world.partition(to.config, token) == index
    )
    return with_partition(state, index, new)._replace(settled=state.settled | passed | {done, *to.also})


def committed(world: World, state: State, index: int) -> State:
    """Return the state in which what is handled in a partition has become its position."""
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
        gone = put(state.listeners, len(state.listeners) - 1, ended(listener))
        yield Step("release", listener, fair=False), state._replace(holder=0, listeners=gone)


def ended(listener: Listener) -> Listener:
    """Return what is left of a listener that does nothing any more."""
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
        numbered = world.broken is Broken.NUMBERED_AT_READING
        taken = listener._replace(taken=listener.taken + 1, images=images, at_opening=images if numbered else ())
    listener = taken if epoch == listener.term else ended(listener)
    yield Step("take over", listener), after._replace(listeners=put(state.listeners, which, listener))


def taken_over(world: World, state: State, index: int, listener: Listener) -> tuple[State, Image]:
    """Return the state after the take-over of one partition, and the image that it answered."""
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
        yield Step("win", won), after._replace(listeners=put(state.listeners, which, won))


def read(world: World, state: State, which: int) -> Steps:
    """The listener reads on, or takes a fresh image of a partition."""
    listener = state.listeners[which]
    if listener.cursor < len(world.stream):
        onward = listener._replace(cursor=listener.cursor + 1)
        yield Step("read", onward), state._replace(listeners=put(state.listeners, which, onward))
    for index, partition in enumerate(state.partitions):
        found = partition if world.broken is Broken.LOOK_BEFORE_MAJORITY else partition.seen
        image = Image(found.committed, found.token)
        if image != listener.images[index]:
            aware = listener._replace(images=put(listener.images, index, image))
            yield Step("look", aware), state._replace(listeners=put(state.listeners, which, aware))


def buffered(world: World, listener: Listener, index: int, after: int) -> list[int]:
    """Return the changes of a partition that were read and lie after a token, in order."""
    return [
        token
        for token in range(max(listener.opened, after) + 1, listener.cursor + 1)
        if world.matched(listener.config, token) and world.partition(listener.config, token) == index
    ]


def dispatch(world: World, state: State, which: int) -> Steps:
    """Window 1: the first change that is not done goes out; again and again, which is the sweep.

    More than the design allows: neither a live claim nor a lock holds it back. Waiting saves messages, not safety.
    """
    listener = state.listeners[which]
    for index, image in enumerate(listener.images):
        waiting = buffered(world, listener, index, image.token)
        if waiting:
            first = image.committed + 1
            if listener.at_opening:
                base = listener.at_opening[index]
                first = base.committed + 1 + buffered(world, listener, index, base.token).index(waiting[0])
            message = Message(index, listener.term, first, waiting[0], tuple(waiting[1:2]) if world.runs else ())
            if message not in state.messages:
                yield Step("dispatch", message), state._replace(messages=state.messages | {message})


def complete(world: World, listener: Listener, token: int) -> bool:
    """Tell whether an item of the window is complete, as far as the listener knows."""
    if not world.matched(listener.config, token):
        return True
    index = world.partition(listener.config, token)
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
    """Tell whether the filter of a claim matches."""
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
    if not world.matches and not world.moved:
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
            starts = put(state.starts, message.token - 1, state.starts[message.token - 1] + 1)
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
        starts = put(state.starts, token - 1, state.starts[token - 1] + 1)
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
        if partition.handled is None:
            continue
        if world.broken is not Broken.COMMIT_BELIEVES_MESSAGE:
            handled = partition.handled
            after = unsure(state, committed(world, state, index), index, {handled.token, *handled.also})
            yield Step("commit", partition.handled), after
            continue
        for message in state.messages:
            if message.partition == index and message.first == partition.committed + 1:
                believed = Handled(message.first, message.token, partition.handled.config)
                yield Step("commit", message), moved(world, state, index, believed, partition.handled.token)
