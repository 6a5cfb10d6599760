"""What may go wrong at any moment, and what an operator may do: the other half of the rules."""

from __future__ import annotations

from tests.property.exploration import Step, put
from tests.property.protocol_model import (
    Broken,
    Fault,
    Handled,
    Image,
    Partition,
    Policy,
    Rewind,
    Run,
    State,
    Steps,
    World,
    owns,
)
from tests.property.protocol_rules import committed, moved
from tests.property.stores import can, spent, with_partition


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
    counted = with_partition(state, index, partition._replace(faults=partition.faults + 1))
    return spent(counted)


def misfortune_of_runs(world: World, state: State, run: Run) -> Steps:
    """An execution dies, asks for a retry, or fails for good; its outcome is guarded like every other."""
    others = state._replace(runs=state.runs - {run})
    partition = state.partitions[run.partition]
    if can(world, state, Fault.CRASH):
        yield Step("crash", run, fair=False), hit(others, run.partition)
    guarded = owns(partition, run) or world.broken is Broken.OUTCOME_WITHOUT_FENCE
    if run.done and world.broken is Broken.FAILURE_CUTS_RUN and guarded and can(world, state, Fault.RETRY):
        *also, last = run.done
        done = Handled(run.first + len(also), last, run.config, tuple(also))
        cut = with_partition(others, run.partition, partition._replace(handled=done))
        yield Step("cut", run, fair=False), cut._replace(budget=cut.budget - 1)
    if run.done and world.broken is not Broken.FAILURE_BEFORE_PROGRESS:
        return
    if guarded and can(world, state, Fault.RETRY):
        retried = with_partition(others, run.partition, partition._replace(claim=None))
        yield Step("retry", run, fair=False), answered(retried, run)
    if guarded and can(world, state, Fault.FAILURE):
        yield Step(world.policy, run, fair=False), answered(given_up(world, others, run), run)


def answered(state: State, run: Run) -> State:
    """Return the state with one fault less to come, which is that of one change alone."""
    asked = put(state.asked, run.token - 1, state.asked[run.token - 1] + 1)
    return state._replace(asked=asked, budget=state.budget - 1)


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
                after = state._replace(messages=state.messages - {message}, budget=state.budget - 1)
                yield Step("loss", message, fair=False), after


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
        after = state._replace(listeners=put(state.listeners, which, again), budget=state.budget - 1)
        yield Step("reopen", again, fair=False), after


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
        after = state._replace(listeners=put(state.listeners, which, passed), budget=state.budget - 1)
        yield Step("lock", passed, fair=False), after


def rewind(world: World, state: State) -> Steps:
    """An operator sends the subscription back to its start: versions and fences grow, positions go back.

    All of it is one transaction. In two writes a listener that comes in between moves either the watermark or
    the positions past what the other write sends back, in whichever order they are made.
    """
    if world.rewind is Rewind.NEVER or not state.settled:
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
    kept = world.rewind is Rewind.NUMBER_KEPT
    return tuple(
        each.replicated()._replace(
            epoch=each.epoch + 1 if epoch is None else epoch,
            committed=each.committed if kept else 0,
            token=0,
            fence=each.fence + 1,
            claim=None,
            handled=None,
            faults=each.faults + 1,
        )
        for each in state.partitions
    )
