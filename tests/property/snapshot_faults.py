"""Workers, writers, operators and misfortune: the other half of the rules of a snapshot."""

from __future__ import annotations

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.snapshot_model import (
    START,
    Broken,
    Claim,
    Fault,
    Item,
    Listener,
    Mode,
    Partition,
    Progress,
    State,
    Steps,
    Token,
    World,
    appended,
    partition_of,
    with_record,
)
from tests.property.snapshot_rules import opened, with_raised_records
from tests.property.snapshot_writes import landed
from tests.property.stores import can, spent, with_listener, with_partition


def write_source(world: World, state: State) -> Steps:
    """Somebody writes to the source."""
    if state.written < len(world.writes):
        entry = world.writes[state.written]
        yield Step("source", len(state.oplog) + 1), appended(world, state, entry)._replace(written=state.written + 1)


def replicate(state: State) -> Steps:
    """The majority catches up."""
    if state.majority < len(state.oplog):
        yield Step("replicate"), state._replace(majority=len(state.oplog))


def elect(world: World, state: State) -> Steps:
    """A new primary has not got what is not in the majority; its clock may be behind, so times come again."""
    if state.majority < len(state.oplog) and can(world, state, Fault.ELECTION):
        yield Step("elect", fair=False), state._replace(oplog=state.oplog[: state.majority], budget=state.budget - 1)


def land(world: World, state: State) -> Steps:
    """What is on its way lands, at any time or never."""
    return stores.land(world, state, landed)


# --- executions ---------------------------------------------------------------------------------------------


def deliver(world: World, state: State) -> Steps:
    """A worker gets a message, for the first time or again, and claims; without a match it drops it."""
    for message in state.messages:
        partition = state.partitions[message.partition]
        free = partition.claim is None or not (partition.claim.live or partition.claim.seen)
        if (
            partition.epoch == message.term
            and partition.token == message.base
            and free
            and partition.mode is Mode.FLOWING
        ):
            key = message.item.key
            claimed = with_partition(state, message.partition, partition._replace(claim=Claim(message.item)))
            starts = state.starts
            if message.item.token.number:
                starts = put(starts, key, starts[key] + 1)
            after = claimed._replace(starts=starts)
            yield Step("start", message), after if world.transactional else copied(after, message.item)


def copied(state: State, item: Item) -> State:
    """Return the state in which a handler has done what it does."""
    seen = put(state.seen, item.key, abs(item.value))
    if item.partial and state.copy[item.key] is None:  # a change of what was never given makes no document
        return state._replace(seen=seen)
    return state._replace(copy=put(state.copy, item.key, item.value), seen=seen)


def execute(world: World, state: State, index: int) -> Steps:
    """An execution ends: committed; or it fails, or its claim lapses."""
    partition = state.partitions[index]
    claim = partition.claim
    if claim is None:
        return
    done = copied(state, claim.item) if world.transactional else state
    yield Step("commit", claim.item, fair=claim.live), moved(done, index, claim.item)
    if claim.live and not claim.seen and can(world, state, Fault.ROLLBACK):
        seen = with_partition(state, index, partition._replace(claim=claim._replace(seen=True)))
        yield Step("commit, not in the majority", claim.item, fair=False), spent(seen)
    if claim.seen:
        lost = with_partition(state, index, partition._replace(claim=claim._replace(seen=False, live=False)))
        yield Step("rollback", claim.item, fair=False), lost
        return
    if claim.live and can(world, state, Fault.LAPSE):
        lapsed = with_partition(state, index, partition._replace(claim=claim._replace(live=False)))
        yield Step("lapse", claim.item, fair=False), spent(lapsed)
    if claim.live and can(world, state, Fault.HALT):
        halted = partition._replace(claim=None, mode=Mode.HALTED, head=claim.item)
        yield Step("halt", claim.item, fair=False), spent(with_partition(state, index, halted))
    if claim.live and can(world, state, Fault.LETTER):
        failed = spent(state)
        yield Step("dead letter", claim.item, fair=False), set_aside(world, failed, index, claim.item)


def moved(state: State, index: int, item: Item) -> State:
    """Return the state in which a partition's position is something that has ended, and nothing stands there."""
    new = state.partitions[index]._replace(token=item.token, claim=None, mode=Mode.FLOWING, head=None)
    return with_partition(state, index, new)


def set_aside(world: World, state: State, index: int, item: Item) -> State:
    """Return the state with a dead letter in place of what a partition ran or stood at."""
    by_key = item.token.number and world.broken is not Broken.LETTER_BY_TOKEN
    letter = (item.key, None if by_key else item.token)
    return moved(state._replace(letters=state.letters | {letter}), index, item)


def reopen(world: World, state: State, listener: Listener) -> Steps:
    """The stream breaks: the listener opens it again at the watermark and forgets what it had read and stored."""
    if state.budget and Fault.REOPEN in world.faults:
        again = opened(state, listener, forget=world.broken is not Broken.CHUNK_SURVIVES)
        if again != listener:
            after = with_listener(state, listener, again)
            yield Step("reopen", again, fair=False), spent(after)


# --- the operator -------------------------------------------------------------------------------------------


def command(world: World, state: State, index: int) -> Steps:
    """An operator retries what a partition has halted at, or sets it aside."""
    partition = state.partitions[index]
    head = partition.head
    if not world.operator or partition.mode is not Mode.HALTED or head is None:
        return
    flowing = partition._replace(mode=Mode.FLOWING, head=None)
    yield Step("retry", head, fair=False), with_partition(state, index, flowing)
    yield Step("set aside", head, fair=False), set_aside(world, state, index, head)


def stop_or_resume(world: World, state: State) -> Steps:
    """Somebody lets a snapshot begin no chunk any more; and lets it go on, which is forgotten by nobody."""
    for index, record in enumerate(state.records):
        if record.state is Progress.RUNNING and can(world, state, Fault.STOP):
            stopped = with_record(state, index, record._replace(state=Progress.STOPPED))
            yield Step("stop", record, fair=False), spent(stopped)
        if record.state is Progress.STOPPED:
            yield Step("resume", record), with_record(state, index, record._replace(state=Progress.RUNNING))


def rewind(world: World, state: State) -> Steps:
    """An operator sends the subscription back, in one transaction, which is a term of its own.

    Nothing moves forward. Documents stay, and a mark that lies ahead; one that was reached goes, since what it stood
    for may be removed. The records keep what is scanned, and carry the new term.
    """
    if world.rewind is None or state.rewound:
        return
    place = Token(world.rewind, -100 if world.broken is Broken.TOKEN_OF_NEXT else 0)
    if all(each.token <= place for each in state.partitions):
        return
    epoch = state.epoch + 1
    after = state._replace(
        epoch=epoch, watermark=min(state.watermark, Token(world.rewind)), rewound=True,
        partitions=tuple(sent_back(world, each, place)._replace(epoch=epoch) for each in state.partitions),
        seen=(-1,) * world.keys,
    )  # fmt: skip
    if world.broken is not Broken.REWIND_LEAVES_RECORDS:
        after = with_raised_records(after, epoch)
    yield Step("rewind", fair=False), after


def sent_back(world: World, partition: Partition, place: Token) -> Partition:
    """Return a partition at a place, if that is a way back."""
    if partition.token <= place:
        return partition._replace(claim=None)
    reached = partition.spilled <= partition.token and world.broken is not Broken.REWIND_KEEPS_MARK
    spilled = START if reached else partition.spilled
    return partition._replace(token=place, spilled=spilled, claim=None, mode=Mode.FLOWING, head=None)


def settled(state: State, key: int) -> bool:
    """Ghost: whether something of a key was set aside, so that its copy is a person's business."""
    return any(each == key for each, _ in state.letters)


def behind(state: State, key: int) -> bool:
    """Ghost: whether something of a key is still to come where its partition stands."""
    return state.partitions[partition_of(state, key)].mode is not Mode.FLOWING
