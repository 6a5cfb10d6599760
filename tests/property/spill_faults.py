"""Workers, operators and misfortune: the other half of the rules of spill."""

from __future__ import annotations

from tests.property import stores
from tests.property.exploration import Step, put
from tests.property.spill_model import (
    Broken,
    Claim,
    Decision,
    Fault,
    Head,
    Late,
    Listener,
    Mode,
    Partition,
    Started,
    State,
    Steps,
    World,
    Write,
    partition_of,
    stored,
)
from tests.property.spill_rules import committed, is_lost, moved
from tests.property.spill_writes import landed
from tests.property.stores import can, in_office, spent, with_listener, with_partition


def land(world: World, state: State) -> Steps:
    """What is on its way lands, at any time or never."""
    return stores.land(world, state, landed)


# --- executions ---------------------------------------------------------------------------------------------


def deliver(world: World, state: State) -> Steps:
    """A worker gets a message, for the first time or again, and claims; without a match it drops it."""
    for message in state.messages:
        partition = state.partitions[message.partition]
        claim = partition.claim
        free = claim is None or not (claim.live or claim.handled)
        if (
            message.generation == state.generation
            and partition.epoch == message.term
            and partition.token == message.base
            and free
            and not partition.stands
        ):
            owed = min(state.watermark, message.token) if world.matches else 0
            claim = Claim(message.token, message.term, message.config, owed)
            started = put(state.starts, message.token - 1, state.starts[message.token - 1] + 1)
            last = put(state.last, world.keys[message.token - 1], Started(message.token, message.config))
            after = with_partition(state, message.partition, partition._replace(claim=claim))
            yield Step("start", message), after._replace(starts=started, last=last)


def execute(world: World, state: State, index: int) -> Steps:
    """An execution ends: handled, then committed; or it fails, asks for a retry, or its claim lapses."""
    partition = state.partitions[index]
    claim = partition.claim
    if claim is None:
        return
    if claim.handled:
        yield Step("commit", claim), committed(world, state, index)
        if can(world, state, Fault.ROLLBACK):
            lost = with_partition(state, index, partition._replace(claim=claim._replace(handled=False, live=False)))
            yield Step("rollback", claim, fair=False), justify(lost, claim.token)
        return
    ended = partition._replace(claim=claim._replace(handled=True))
    done = with_partition(state, index, ended)
    if Fault.ROLLBACK not in world.faults:  # one step for two that nothing can part
        done = committed(world, done, index)
    yield Step("handled", claim, fair=claim.live), done
    if claim.live and can(world, state, Fault.LAPSE):
        lapsed = with_partition(state, index, partition._replace(claim=claim._replace(live=False)))
        yield Step("lapse", claim, fair=False), justify(lapsed, claim.token)
    stands = partition._replace(claim=None, head=Head(claim.token, claim.config, claim.owed))
    failed = spent(state)
    if can(world, state, Fault.PARK):
        yield Step("park", claim, fair=False), with_partition(failed, index, stands._replace(mode=Mode.PARKED))
    if can(world, state, Fault.HALT):
        yield from halt(world, with_partition(failed, index, stands._replace(mode=Mode.HALTED)), claim, index)


def halt(world: World, halted: State, claim: Claim, index: int) -> Steps:
    """The partition halts at a change, which its execution may have stored before, unmarked."""
    one = Write(Late.INSERT, claim.term, halted.generation, index, claim.token)
    yield Step("halt", claim, fair=False), landed(world, halted, one) if world.storing else halted
    if world.storing and Late.INSERT in world.late and halted.delays:
        sent = halted._replace(delays=halted.delays - 1, writes=halted.writes | {one})
        yield Step("halt, late", claim, fair=False), sent


def justify(state: State, token: int) -> State:
    """Return the state with one fault less to come, which justifies one more start of a change."""
    more = put(state.justified, token - 1, state.justified[token - 1] + 1)
    return state._replace(justified=more, budget=state.budget - 1)


def end_pause(state: State, index: int) -> Steps:
    """The hour of a parked change is over, or an operator does not wait for it."""
    partition = state.partitions[index]
    if partition.mode is Mode.PARKED and partition.head is not None:
        token = partition.head.token
        more = put(state.justified, token - 1, state.justified[token - 1] + 1)
        flowing = partition._replace(mode=Mode.FLOWING, head=None)
        after = with_partition(state, index, flowing)._replace(justified=more)
        yield Step("due", partition.head, fair=False), after


def reopen(world: World, state: State, listener: Listener) -> Steps:
    """The stream breaks: the listener opens it again at the watermark and forgets what it had read and stored."""
    if listener.cursor > state.watermark and can(world, state, Fault.REOPEN):
        place = state.watermark
        again = listener._replace(opened=place, cursor=place, stored=(place,) * len(listener.stored))
        yield Step("reopen", again, fair=False), with_listener(state, listener, again)._replace(budget=state.budget - 1)


# --- the oplog and the operator -----------------------------------------------------------------------------


def roll(world: World, state: State) -> Steps:
    """The oplog loses its beginning."""
    if state.rolls < len(world.rolls):
        yield Step("roll", fair=False), state._replace(oldest=world.rolls[state.rolls], rolls=state.rolls + 1)


def decide(world: World, state: State, listener: Listener) -> Steps:
    """An operator gives lost history up: what is stored stays owed, the place is where reading goes on.

    What it counts on is secured first. Waits until what was read before the gap is complete, which shortens the
    search and nothing else.
    """
    if world.decision is None or not is_lost(state, listener) or listener.cursor != state.watermark:
        return
    place = state.oldest - 1 if world.decision is Decision.OLDEST else len(world.keys)
    after = state
    for index in range(len(state.partitions)):
        after = secured(world, after, listener, index, place)
    gap = frozenset(token for token in range(state.watermark + 1, place + 1) if not is_owed(world, after, token))
    reach = [place] * len(state.partitions)
    if world.broken is Broken.DECISION_RUNS_ALL:
        reach = [max(place, partition.spilled) for partition in state.partitions]
    moved_on = listener._replace(opened=place, cursor=place, stored=tuple(reach))
    after = with_listener(after, listener, moved_on)
    yield Step("decide", moved_on, fair=False), after._replace(watermark=place, excused=state.excused | gap)


def secured(world: World, state: State, listener: Listener, index: int, place: int) -> State:
    """Return the state in which no removal of an older term takes what a decision counts on.

    Where nothing is left, the mark goes: what it stood for is given up with the rest.
    """
    partition = state.partitions[index]
    tokens = stored(state, index, partition.token, partition.spilled)
    if world.broken is not Broken.DECISION_TRUSTS_DOCUMENTS:
        for token in tokens:
            state = landed(world, state, Write(Late.INSERT, listener.term, state.generation, index, token))
    if not tokens and partition.spilled <= place and world.broken is not Broken.DECISION_KEEPS_MARK:
        return with_partition(state, index, partition._replace(spilled=0))
    return state


def is_owed(world: World, state: State, token: int) -> bool:
    """Tell whether a change is stored where it will be run from."""
    index = partition_of(state, world, token)
    partition = state.partitions[index]
    return token in stored(state, index, partition.token, partition.spilled)


def command(world: World, state: State, index: int) -> Steps:
    """An operator retries or skips the change at which a partition has halted."""
    partition = state.partitions[index]
    head = partition.head
    if not world.operator or partition.mode is not Mode.HALTED or head is None:
        return
    more = put(state.justified, head.token - 1, state.justified[head.token - 1] + 1)
    flowing = partition._replace(mode=Mode.FLOWING, head=None)
    after = with_partition(state, index, flowing)._replace(justified=more)
    yield Step("retry", head, fair=False), after
    yield Step("skip", head, fair=False), moved(world, state, index, head)


def rewind(world: World, state: State) -> Steps:
    """An operator sends the subscription back, in one transaction, which is a term of its own.

    Not below what the oplog has, and nothing forward: a partition or a watermark that lies before stays there. The
    mark and the documents stay too (that a mark which was reached may go is in the model of snapshots). It begins as
    every take-over: what is handled is committed, and who runs in a partition that stays goes
    on. What was halted or claimed in one that goes back is over.
    """
    if world.rewind is None or state.rewound or not any(token > world.rewind for token in state.done):
        return
    for index in range(len(state.partitions)):
        state = committed(world, state, index)
    place = max(world.rewind, state.oldest - 1)
    if world.broken is Broken.REWIND_BELOW_OPLOG:
        place = world.rewind
    epoch = state.epoch + 1
    back = tuple(sent_back(world, each, place)._replace(epoch=epoch) for each in state.partitions)
    watermark = place if world.broken is Broken.REWIND_MOVES_FORWARD else min(state.watermark, place)
    kept = frozenset(range(1, place + 1))
    after = state._replace(
        epoch=epoch, watermark=watermark, partitions=back, rewound=True,
        done=state.done & kept, excused=state.excused & kept, starts=(0,) * len(world.keys),
        justified=(1,) * len(world.keys), last=(Started(),) * len(state.last),
    )  # fmt: skip
    yield Step("rewind", fair=False), after


def sent_back(world: World, partition: Partition, place: int) -> Partition:
    """Return a partition at a place, if that is a way back."""
    if world.broken is Broken.REWIND_MOVES_FORWARD:
        return partition._replace(token=place, claim=None)
    if partition.token <= place:
        return partition
    back = partition._replace(token=min(partition.token, place), claim=None)
    return back if world.broken is Broken.REWIND_KEEPS_HEAD else back._replace(mode=Mode.FLOWING, head=None)


def leader(state: State) -> Listener | None:
    """Return the listener in office, if it has taken everything over."""
    listener = in_office(state)
    return listener if listener is not None and listener.leads else None
