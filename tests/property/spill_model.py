"""Spill and repartitioning as a finite machine: its state, and what a scenario fixes.

An extension of ``stores``, with the conventions of ``protocol_model``: time is absent, a message that was sent
stays deliverable, tokens are positions in the stream from 1, and nothing is imported from the package. What is new:

- *A stored change travels by reference*: its message has no bytes, and its execution reads them under its claim.
- *A change has a key*: its partition is ``key % partitions``, however many there are.
- *A term without the handler* leaves no trace in its documents; it is the time between two terms, in which the oplog
  may roll. It needs no rule.

Left out: locks at the take-over and numbers (``protocol_model`` has both), pausing, parts of large documents, the
choice of when to spill (it is always allowed, and due where the stream would wait).

A change at or below the watermark that has not come to an end is *owed*: whatever a later configuration matches, it was
matched when it was read (rule 10 of spill), and nobody reads it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from tests.property import exploration, stores
from tests.property.exploration import Model, Step, passed, put
from tests.property.stores import (
    Claim,
    Document,
    Message,
    Partition,
    Write,
    acquire,
    can,
    counted,
    found,
    land,
    spent,
    stored,
    with_listener,
    with_partition,
    write,
)


class Broken(StrEnum):
    """One rule of spill left out or replaced by the simpler one; those of stored changes are in ``stores``."""

    WATERMARK_BEFORE_MARK = "a change is complete when it is inserted, before the mark"
    TRUSTS_DOCUMENTS = "a take-over counts documents under the mark, whoever has inserted them"
    TRUSTS_BARE_DOCUMENTS = "a take-over counts documents without any mark"
    MARK_SKIPS = "a change at or below the mark is skipped when it is read"
    COLLECTION_AT_ONCE = "the collection is run at once, whatever this term has read"
    BUFFER_FIRST = "what is in the buffer runs although stored changes are left"
    RUNS_BEFORE_STORED_AGAIN = "stored changes run although changes at or below the mark wait to be stored again"
    BOUND_REFUSES_AGAIN = "the bound also refuses what lies at or below the mark"
    DECISION_RUNS_ALL = "a decision on lost history lets everything up to the mark run"
    DECISION_TRUSTS_DOCUMENTS = "a decision on lost history counts on documents that an older term may remove"
    DECISION_KEEPS_MARK = "a decision on lost history leaves a mark under which nothing is stored"
    REWIND_BELOW_OPLOG = "a rewind goes to where the oplog no longer reaches"
    REWIND_MOVES_FORWARD = "a rewind sets the place, not the smaller of place and own position"
    REWIND_KEEPS_HEAD = "a rewind leaves the halted head of a partition that it sends back"
    SWITCH_IGNORES_STORED = "new partitions do not wait for stored changes"
    SWITCH_IGNORES_BUFFER = "new partitions do not wait for what was read"
    SWITCH_BEFORE_READ = "new partitions begin at a watermark that positions have passed"
    SWITCH_IGNORES_TERM = "the switch does not compare the epochs"
    SWITCH_UNGUARDED = "the switch does not look at the partitions once more"
    DISCARDS_ALL_OTHERS = (
        "a removal takes what is stored of all partitions but those that were in force when it was made"
    )
    FORMER_STAY = "what is stored of former partitions is not removed"


class Fault(StrEnum):
    """What may go wrong with an execution or a read; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    HALT = "a handler fails for good: its partition halts"
    ROLLBACK = "a failover loses `handled`, which was written with w:1"
    REOPEN = "the stream breaks and is opened again at the watermark"


class Late(StrEnum):
    """Further kinds of writes whose answer may be lost."""

    SWITCH = "switch"
    DISCARD = "discard"


class Decision(StrEnum):
    """From where a subscription goes on that has lost its history."""

    OLDEST = "oldest"
    NOW = "now"


class World(NamedTuple):
    """A scenario: the stream, how long it goes on and what may go wrong.

    Args:
        name: A sentence for reports.
        keys: The key of the change at each position.
        terms: How many terms may begin without need.
        matches: Per configuration the positions that its handler matches; empty: everything, always.
        partitions: How many there are at the beginning, then how many each configuration wants; one: it stays.
        faults: Which kinds may happen; ``budget``: how many of them altogether.
        late: Which writes may land late; ``delays``: how many altogether.
        rolls: The places to which the oplog may roll, one after the other: the oldest entry that can be read.
        decision: What the operator decides on lost history; without one the subscription stands still.
        rewind: The place to which the operator may rewind, once.
        operator: Whether somebody retries or skips what is halted.
        storing: Whether a halting execution stores its change, unmarked.
        buffer: How many changes a listener keeps in memory; 0: any number.
        bound: How many documents may be stored; 0: any number.
        broken: The rule left out.
    """

    name: str
    keys: tuple[int, ...]
    terms: int
    matches: tuple[frozenset[int], ...] = ()
    partitions: tuple[int, ...] = (1,)
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    late: frozenset[StrEnum] = frozenset()
    delays: int = 0
    rolls: tuple[int, ...] = ()
    decision: Decision | None = None
    rewind: int | None = None
    operator: bool = False
    storing: bool = False
    buffer: int = 0
    bound: int = 0
    broken: StrEnum = stores.Broken.NOTHING

    def matched(self, config: int, token: int) -> bool:
        return not self.matches or token in self.matches[min(config, len(self.matches) - 1)]

    def wanted(self, config: int) -> int:
        return self.partitions[min(config + 1, len(self.partitions) - 1)]


class Change(NamedTuple):
    """A change; ``config`` and ``owed`` are ghost, as of its claim.

    ``owed`` is the watermark when it began: what another configuration has stored by then may not be passed. (An
    execution of an older term that ends later passes what only its successor matches, as without spill.)
    """

    token: int
    config: int = 0
    owed: int = 0


class Listener(NamedTuple):
    """What one term keeps in memory.

    It ``leads`` when it has taken the partitions over. It has read what lies after ``opened`` up to ``cursor``; of a
    partition everything up to ``stored`` was inserted by it, or is done.
    """

    term: int
    config: int
    leads: bool = False
    opened: int = 0
    cursor: int = 0
    stored: tuple[int, ...] = ()
    generation: int = 0


class Started(NamedTuple):
    """Ghost: the last change of a key whose handler was started."""

    token: int = 0
    config: int = 0


class State(NamedTuple):
    """Everything: MongoDB, the listeners, the broker, what is on its way, the ghosts.

    ``done`` and what follows is ghost: positions that were committed or skipped; those that were passed by a
    configuration that does not match them, or given up by a decision; starts of handlers per position, and how many
    of them are justified; the last start of each key; whether the operator has rewound.
    """

    epoch: int = 0
    watermark: int = 0
    generation: int = 0
    partitions: tuple[Partition, ...] = ()
    documents: frozenset[Document] = frozenset()
    listeners: tuple[Listener, ...] = ()
    messages: frozenset[Message] = frozenset()
    writes: frozenset[Write] = frozenset()
    oldest: int = 1
    rolls: int = 0
    delays: int = 0
    budget: int = 0
    done: frozenset[int] = frozenset()
    excused: frozenset[int] = frozenset()
    starts: tuple[int, ...] = ()
    justified: tuple[int, ...] = ()
    last: tuple[Started, ...] = ()
    rewound: bool = False

    @property
    def settled(self) -> frozenset[int]:
        """Ghost: the positions at which nothing is owed any more."""
        return self.done | self.excused


Steps = Iterator[tuple[Step, State]]


def initial(world: World) -> State:
    """Return the state before the first term: nothing read, nothing stored."""
    length = len(world.keys)
    return State(
        partitions=(Partition(),) * world.partitions[0], delays=world.delays, budget=world.budget,
        starts=(0,) * length, justified=(1,) * length, last=(Started(),) * (max(world.keys) + 1),
    )  # fmt: skip


def partition_of(state: State, world: World, token: int) -> int:
    return world.keys[token - 1] % len(state.partitions)


# === the writes, and what each does where it lands, if its own guard lets it ===


def landed(world: World, state: State, one: Write) -> State:
    if one.kind is stores.Late.WATERMARK:
        matches = state.epoch == one.term and one.place > state.watermark
        return passed_over(world, state, one) if matches else state
    if one.kind in {Late.SWITCH, Late.DISCARD}:
        return switched(world, state, one) if one.kind is Late.SWITCH else discarded(world, state, one)
    return stores.landed(world, state, one)


def passed_over(world: World, state: State, one: Write) -> State:
    """Return the state with a new watermark; what its term does not match is owed to nobody."""
    config = next((each.config for each in state.listeners if each.term == one.term), 0)
    passed = frozenset(token for token in range(state.watermark + 1, one.place + 1) if not world.matched(config, token))
    return state._replace(watermark=one.place, excused=state.excused | passed)


# --- repartitioning -----------------------------------------------------------------------------------------


def discarded(world: World, state: State, one: Write) -> State:
    """Return the state without the documents of some former partitions, but for those of later terms."""
    if world.broken is Broken.DISCARDS_ALL_OTHERS:
        gone = frozenset(each for each in state.documents if each.generation != one.place and each.term <= one.term)
    else:
        gone = frozenset(
            each for each in state.documents if each.generation == one.generation and each.term <= one.term
        )
    return state._replace(documents=state.documents - gone)


def switched(world: World, state: State, one: Write) -> State:
    """Return the state with new partitions, if the old ones have nothing left to do at this moment."""
    mine = state.epoch == one.term or world.broken is Broken.SWITCH_IGNORES_TERM
    here = state.watermark == one.place or world.broken is Broken.SWITCH_IGNORES_BUFFER
    if not mine or not here or state.generation != one.generation:
        return state
    if world.broken is not Broken.SWITCH_UNGUARDED and not is_drained(world, state, one.term, one.place):
        return state
    partitions = (Partition(one.term, one.place),) * one.partition
    return state._replace(generation=one.term, partitions=partitions, messages=frozenset())


def is_drained(world: World, state: State, term: int, place: int) -> bool:
    """Tell whether all partitions are the term's, flow, and have nothing to do and nothing done after a place."""
    for each in state.partitions:
        unlike = each.epoch != term and world.broken is not Broken.SWITCH_IGNORES_TERM
        if each.is_busy or unlike or each.head is not None:
            return False
        if each.has_stored and world.broken is not Broken.SWITCH_IGNORES_STORED:
            return False
        if each.token > place and world.broken is not Broken.SWITCH_BEFORE_READ:
            return False
    return True


# === the rules ===

# --- what is where ------------------------------------------------------------------------------------------


def read_changes(world: World, state: State, listener: Listener, index: int, after: int) -> list[int]:
    return [
        token
        for token in range(max(listener.opened, after) + 1, listener.cursor + 1)
        if world.matched(listener.config, token) and partition_of(state, world, token) == index
    ]


def unstored(world: World, state: State, listener: Listener, index: int) -> list[int]:
    """Return what a listener has read of a partition, and neither inserted itself nor seen done."""
    partition = state.partitions[index]
    after = max(listener.stored[index], partition.token)
    if world.broken is Broken.MARK_SKIPS:
        after = max(after, partition.spilled)
    changes = read_changes(world, state, listener, index, after)
    if world.broken is Broken.TRUSTS_DOCUMENTS:
        there = tokens_of(stored(state, index, 0, partition.spilled))
        return [token for token in changes if token not in there]
    return changes


def tokens_of(changes: Iterable[Change]) -> list[int]:
    return [each.token for each in changes]


def reach(world: World, state: State, listener: Listener, index: int) -> int:
    """Return the place up to which everything of a partition was read, and inserted by this term or done."""
    if world.broken is Broken.COLLECTION_AT_ONCE:
        return len(world.keys)
    waiting = unstored(world, state, listener, index)
    return max(waiting[0] - 1 if waiting else listener.cursor, listener.stored[index])


def is_complete(world: World, state: State, listener: Listener, token: int) -> bool:
    """Tell whether an item of the window is complete: committed, or inserted by this term and under the mark."""
    index = partition_of(state, world, token)
    partition = state.partitions[index]
    if not world.matched(listener.config, token) or token <= partition.token:
        return True
    if world.broken is Broken.TRUSTS_BARE_DOCUMENTS and token in tokens_of(stored(state, index, 0, token)):
        return True
    if token > reach(world, state, listener, index):
        return False
    return token <= partition.spilled or world.broken is Broken.WATERMARK_BEFORE_MARK


def unfinished(world: World, state: State, listener: Listener) -> int:
    window = range(listener.opened + 1, listener.cursor + 1)
    return sum(not is_complete(world, state, listener, token) for token in window)


def is_lost(state: State, listener: Listener) -> bool:
    """Tell whether the oplog has rolled past what a listener would read next."""
    return listener.cursor + 1 < state.oldest


# --- terms --------------------------------------------------------------------------------------------------


def take_over(world: World, state: State, listener: Listener) -> Steps:
    """The partitions of the subscription: the larger epoch stays, what is handled is committed."""
    if state.epoch == listener.term:
        after = state
        for index in range(len(state.partitions)):
            after = committed(world, after, index)
            after = with_partition(after, index, after.partitions[index]._replace(epoch=listener.term))
        leader = listener._replace(leads=True)
        yield Step("take over", leader), with_listener(after, listener, leader)


def opened(state: State, listener: Listener, place: int) -> Listener:
    """Return a listener that reads for the partitions in force from a place on."""
    count = len(state.partitions)
    return listener._replace(opened=place, cursor=place, stored=(place,) * count, generation=state.generation)


def committed(world: World, state: State, index: int) -> State:
    partition = state.partitions[index]
    claim = partition.claim
    return moved(world, state, index, claim.item) if claim is not None and claim.handled else state


def moved(world: World, state: State, index: int, change: Change) -> State:
    """Return the state in which a partition's position is a change that has ended, and nothing stands there.

    What else is passed is excused where it was not owed when it began and its configuration does not match it.
    """
    partition = state.partitions[index]
    passed = frozenset(
        each
        for each in range(max(partition.token, change.owed) + 1, change.token)
        if partition_of(state, world, each) == index and not world.matched(change.config, each)
    )
    after = state._replace(done=state.done | {change.token}, excused=state.excused | passed)
    return stores.ended(after, index, change)


# --- reading and storing ------------------------------------------------------------------------------------


def read(world: World, state: State, listener: Listener) -> Steps:
    if listener.cursor < len(world.keys) and not is_lost(state, listener) and not is_full(world, state, listener):
        onward = listener._replace(cursor=listener.cursor + 1)
        yield Step("read", onward), with_listener(state, listener, onward)


def insert(world: World, state: State, listener: Listener, index: int) -> Steps:
    """What a listener has read of a partition is stored, as far as there is room."""
    tokens = with_room(world, state, index, unstored(world, state, listener, index))
    if tokens:
        changes = [Change(each) for each in tokens]
        yield from stores.insert(world, state, listener, index, changes, urgent=is_full(world, state, listener))


def is_full(world: World, state: State, listener: Listener) -> bool:
    return 0 < world.buffer <= unfinished(world, state, listener)


def with_room(world: World, state: State, index: int, tokens: list[int]) -> list[int]:
    """Return the prefix that the bound lets in: always what is there already, or lies at or below the mark."""
    if not world.bound:
        return tokens
    there = tokens_of(stored(state, index, 0, len(world.keys)))
    below = 0 if world.broken is Broken.BOUND_REFUSES_AGAIN else state.partitions[index].spilled
    room = world.bound - len(state.documents)
    new = [token for token in tokens if token not in there and token > below]
    refused = next(iter(new[max(room, 0) :]), len(world.keys) + 1)
    return [token for token in tokens if token < refused]


def mark(world: World, state: State, listener: Listener, index: int) -> Steps:
    read = read_changes(world, state, listener, index, state.partitions[index].token)
    place = max((token for token in read if token <= listener.stored[index]), default=0)
    yield from stores.mark(world, state, listener, index, place)


def store_watermark(world: World, state: State, listener: Listener) -> Steps:
    window = range(listener.opened + 1, listener.cursor + 1)
    place = next((token - 1 for token in window if not is_complete(world, state, listener, token)), listener.cursor)
    if place > state.watermark:
        one = Write(stores.Late.WATERMARK, listener.term, place=place)
        yield from write(world, state, [one], landed(world, state, one))


# --- running ------------------------------------------------------------------------------------------------


def next_change(world: World, state: State, listener: Listener, index: int) -> int | None:
    """Return what a partition runs next: from the collection while the mark lies ahead, else from memory."""
    partition = state.partitions[index]
    if not runs_from_store(world, partition):
        return next(iter(read_changes(world, state, listener, index, partition.token)), None)
    waiting = unstored(world, state, listener, index)
    is_again = bool(waiting) and waiting[0] <= partition.spilled
    limit = min(partition.spilled, max(reach(world, state, listener, index), listener.stored[index]))
    if world.broken is Broken.RUNS_BEFORE_STORED_AGAIN:
        limit = min(partition.spilled, listener.cursor)
    elif is_again and world.broken is not Broken.COLLECTION_AT_ONCE:
        return None
    return next(iter(tokens_of(stored(state, index, partition.token, limit))), None)


def runs_from_store(world: World, partition: Partition) -> bool:
    return partition.has_stored and world.broken is not Broken.BUFFER_FIRST


def dispatch(world: World, state: State, listener: Listener, index: int) -> Steps:
    """The first change that is not done goes out: by reference where it is stored."""
    partition = state.partitions[index]
    token = next_change(world, state, listener, index)
    is_stored = runs_from_store(world, partition)
    if token is None or partition.head is not None:
        return
    change = Change(token, listener.config)
    yield from stores.dispatch(state, Message(index, listener.term, partition.token, change, is_stored))


# --- repartitioning ---------------------------------------------------------------------------------------
#
# What was read is done, then other partitions take the place of these. That is one step here: in between no partition
# is there, and whoever takes over makes them at the watermark.


def switch(world: World, state: State, listener: Listener) -> Steps:
    """Nothing that was read is left to do, and the watermark says so: new partitions begin there."""
    count = world.wanted(listener.config)
    place = listener.cursor
    waits = unfinished(world, state, listener) > 0 or state.watermark != place
    if world.broken is Broken.SWITCH_IGNORES_BUFFER:
        waits = False
    if count == len(state.partitions) or waits or not is_drained(world, state, listener.term, place):
        return
    one = Write(Late.SWITCH, listener.term, state.generation, count, place)
    after = landed(world, state, one)
    yield from write(world, state, [one], with_listener(after, listener, opened(after, listener, place)))


def adopt(state: State, listener: Listener) -> Steps:
    """A listener sees that its switch was made although its answer was lost."""
    mine = opened(state, listener, state.watermark)
    yield Step("adopt", mine), with_listener(state, listener, mine)


def discard(world: World, state: State, listener: Listener) -> Steps:
    """Documents of former partitions go, but for what later terms have stored."""
    if world.broken is Broken.FORMER_STAY:
        return
    for former in {each.generation for each in state.documents} - {state.generation}:
        one = Write(Late.DISCARD, listener.term, former, 0, state.generation)
        after = landed(world, state, one)
        if after.documents != state.documents:
            yield from write(world, state, [one], after)


# === what may go wrong at any moment, and persons ===


# --- executions ---------------------------------------------------------------------------------------------


def deliver(world: World, state: State) -> Steps:
    """A worker gets a message, for the first time or again, and claims; without a match it drops it."""
    for message, partition in stores.claimable(state):
        token, config, _ = message.item
        owed = min(state.watermark, token) if world.matches else 0
        claim = Claim(message.item._replace(owed=owed), message.term)
        after = with_partition(state, message.partition, partition._replace(claim=claim))
        last = put(state.last, world.keys[token - 1], Started(token, config))
        yield Step("start", message), after._replace(starts=counted(state.starts, token - 1), last=last)


def execute(world: World, state: State, index: int) -> Steps:
    """An execution ends: handled, then committed; or it fails, asks for a retry, or its claim lapses."""
    partition = state.partitions[index]
    claim = partition.claim
    if claim is None:
        return
    token = claim.item.token
    if claim.handled:
        yield Step("commit", claim), committed(world, state, index)
        if can(world, state, Fault.ROLLBACK):
            lost = stores.with_claim(state, index, handled=False, live=False)
            yield Step("rollback", claim, fair=False), spent(justify(lost, token))
        return
    done = stores.with_claim(state, index, handled=True)
    if Fault.ROLLBACK not in world.faults:  # one step for two that nothing can part
        done = committed(world, done, index)
    yield Step("handled", claim, fair=claim.live), done
    if claim.live and can(world, state, Fault.LAPSE):
        lapsed = stores.with_claim(state, index, live=False)
        yield Step("lapse", claim, fair=False), spent(justify(lapsed, token))
    if can(world, state, Fault.HALT):
        yield from halt(world, stores.halted(spent(state), index, claim.item), claim, index)


def halt(world: World, halted: State, claim: Claim, index: int) -> Steps:
    """The partition halts at a change, which its execution may have stored before, unmarked."""
    one = Write(stores.Late.INSERT, claim.term, halted.generation, index, item=Change(claim.item.token))
    yield Step("halt", claim, fair=False), landed(world, halted, one) if world.storing else halted
    if world.storing and stores.Late.INSERT in world.late and halted.delays:
        sent = halted._replace(delays=halted.delays - 1, writes=halted.writes | {one})
        yield Step("halt, late", claim, fair=False), sent


def justify(state: State, token: int) -> State:
    return state._replace(justified=counted(state.justified, token - 1))


def reopen(world: World, state: State, listener: Listener) -> Steps:
    """The stream breaks: the listener opens it again at the watermark and forgets what it had read and stored."""
    if listener.cursor > state.watermark and can(world, state, Fault.REOPEN):
        place = state.watermark
        again = listener._replace(opened=place, cursor=place, stored=(place,) * len(listener.stored))
        yield Step("reopen", again, fair=False), spent(with_listener(state, listener, again))


# --- the oplog and the operator -----------------------------------------------------------------------------


def roll(world: World, state: State) -> Steps:
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
    changes = stored(state, index, partition.token, partition.spilled)
    if world.broken is not Broken.DECISION_TRUSTS_DOCUMENTS:
        for each in changes:
            one = Write(stores.Late.INSERT, listener.term, state.generation, index, item=each)
            state = landed(world, state, one)
    if not changes and partition.spilled <= place and world.broken is not Broken.DECISION_KEEPS_MARK:
        return with_partition(state, index, stores.without_mark(partition))
    return state


def is_owed(world: World, state: State, token: int) -> bool:
    index = partition_of(state, world, token)
    partition = state.partitions[index]
    return token in tokens_of(stored(state, index, partition.token, partition.spilled))


def command(world: World, state: State, index: int) -> Steps:
    """An operator retries or skips the change at which a partition has halted."""
    partition = state.partitions[index]
    head = partition.head
    if not world.operator or head is None:
        return
    flowing = with_partition(state, index, partition._replace(head=None))
    yield Step("retry", head, fair=False), justify(flowing, head.token)
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
    if world.broken is Broken.REWIND_MOVES_FORWARD:
        return partition._replace(token=place, claim=None)
    if partition.token <= place:
        return partition
    back = partition._replace(token=min(partition.token, place), claim=None)
    return back if world.broken is Broken.REWIND_KEEPS_HEAD else back._replace(head=None)


# === the oracles, and the search ===

Move = exploration.Move[World, State]


def no_loss(move: Move) -> Iterator[str]:
    """P1: a position never passes a change that is owed, or that its own configuration matches, and is not settled."""
    if move.before.generation != move.after.generation:
        return
    for index, (old, new) in enumerate(zip(move.before.partitions, move.after.partitions, strict=True)):
        ended = old.claim.item if old.claim else old.head
        if ended is None or new.token <= old.token:
            continue

        def is_missing(token: int, index: int = index, ended: Change = ended) -> bool:
            wanted = token <= ended.owed or move.world.matched(ended.config, token)
            return wanted and token not in move.after.settled and partition_of(move.after, move.world, token) == index

        yield from passed(old.token, new.token, index, is_missing)


def order(move: Move) -> Iterator[str]:
    """P2: handlers of a key never start at an earlier change than the last (but by a rewind).

    A change that the later one's configuration did not match was not earlier for it.
    """
    if move.step.kind == "start":
        for old, new in zip(move.before.last, move.after.last, strict=True):
            if new.token < old.token and move.world.matched(old.config, new.token):
                yield f"change {new.token} has started after change {old.token}"


def rewind_goes_back(move: Move) -> Iterator[str]:
    """P4: a rewind moves nothing forward, and goes where the stream can be read."""
    before, after = move.before, move.after
    if move.step.kind != "rewind":
        return
    if after.watermark > before.watermark:
        yield "a rewind has moved the watermark forward"
    if after.watermark + 1 < before.oldest <= before.watermark + 1:
        yield "a rewind has gone where the stream cannot be opened"
    if any(new.token > old.token for old, new in zip(before.partitions, after.partitions, strict=True)):
        yield "a rewind has moved a position forward"


def prefix(move: Move) -> Iterator[str]:
    """P5, P13: whatever lies at or below the watermark is settled, or stored between position and mark."""
    for token in range(1, move.after.watermark + 1):
        if token not in move.after.settled and not is_owed(move.world, move.after, token):
            yield f"change {token} lies below the watermark and is neither done nor stored under the mark"


def bounded_duplicates(move: Move) -> Iterator[str]:
    """P6: a handler starts once per change, once more per fault or command, and never when it was done."""
    if isinstance(move.step.who, Message) and move.step.kind == "start":
        token = move.step.who.item.token
        if move.after.starts[token - 1] > move.after.justified[token - 1]:
            yield f"change {token} has started {move.after.starts[token - 1]} times"
        if token in move.before.done:
            yield f"change {token} has started after it was done"


def bytes_at_hand(move: Move) -> Iterator[str]:
    """P13: an execution of a change that travels by reference finds its bytes."""
    message = move.step.who
    if isinstance(message, Message) and message.stored and move.step.kind == "start":
        token = message.item.token
        if found(move.after, message.partition, token, move.after.generation) is None:
            yield f"the bytes of change {token} are gone"


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12, where nothing more will happen: everything is done but what stands, and nothing has to wait for that."""
    listener: Listener | None = stores.leader(state)
    if listener is None:
        yield "nobody is in office"
        return
    lost = is_lost(state, listener)
    stands = {index for index, each in enumerate(state.partitions) if each.head is not None}
    if world.wanted(listener.config) != len(state.partitions) and not lost and not stands:
        yield f"there are {len(state.partitions)} partitions for ever"
    garbage = {each for each in state.documents if is_garbage(state, each)}
    full = bool(stands) and 0 < world.bound <= len(state.documents - garbage)
    reached = state.watermark if lost else listener.cursor if full else len(world.keys)
    for token in range(1, reached + 1):
        wanted = token <= state.watermark or world.matched(listener.config, token)
        if wanted and token not in state.settled and partition_of(state, world, token) not in stands:
            yield f"change {token} is not done, and its partition does not stand"
    if state.watermark < len(world.keys) and not lost and not full:
        yield f"the watermark stands at {state.watermark} for ever"
    for index, partition in enumerate(state.partitions):
        if partition.has_stored and index not in stands and not lost:
            yield f"the mark of partition {index} stands at {partition.spilled} for ever"
    for document in garbage:
        yield f"nobody removes the document of change {document.item.token} in generation {document.generation}"


def is_garbage(state: State, document: Document) -> bool:
    """Tell whether a document belongs to former partitions, or to a change that is done."""
    return document.generation != state.generation or document.item.token <= state.partitions[document.partition].token


def led(world: World, state: State, listener: Listener) -> Steps:
    if listener.generation != state.generation:
        yield from adopt(state, listener)
        return
    if state.epoch == listener.term:
        yield from switch(world, state, listener)
        yield from discard(world, state, listener)
    yield from read(world, state, listener)
    if state.epoch == listener.term:
        yield from store_watermark(world, state, listener)
        yield from decide(world, state, listener)
        yield from reopen(world, state, listener)
    for index, partition in enumerate(state.partitions):
        if partition.epoch == listener.term:
            yield from insert(world, state, listener, index)
            yield from mark(world, state, listener, index)
            yield from stores.clear(world, state, listener, index)
            yield from stores.remove(world, state, listener, index, partition.token)
            yield from dispatch(world, state, listener, index)


def steps(world: World, state: State) -> Steps:
    for step, after in all_steps(world, state):
        acting = (each for each in after.listeners if may_act(after, each))
        yield step, stores.plain(world, after, acting, may_land)


def all_steps(world: World, state: State) -> Steps:
    # With the partitioning of the handler: so no older term's switch can follow.
    yield from acquire(world, state, lambda term, begun: opened(state, Listener(term, begun), state.watermark))
    for listener in state.listeners:
        if listener.leads:
            yield from led(world, state, listener)
        else:
            yield from take_over(world, state, listener)
    yield from deliver(world, state)
    for index in range(len(state.partitions)):
        yield from execute(world, state, index)
        yield from command(world, state, index)
    yield from land(world, state, landed)
    yield from roll(world, state)
    yield from rewind(world, state)


def may_land(world: World, state: State, one: Write) -> bool:
    if one.kind is Late.SWITCH:
        mine = one.term == state.epoch or world.broken is Broken.SWITCH_IGNORES_TERM
        return mine and one.generation == state.generation
    return stores.may_land(state, one)


def may_act(state: State, listener: Listener) -> bool:
    """Tell whether a listener may still find a document that carries its term, or is about to."""
    if listener.leads and listener.generation != state.generation:
        return listener.term == state.epoch
    return listener.term == state.epoch or any(each.epoch == listener.term for each in state.partitions)


SPILL_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss,),
        "P2": (order,),
        "P4": (stores.never_back, rewind_goes_back),
        "P5": (prefix,),
        "P6": (bounded_duplicates,),
        "P13": (bytes_at_hand,),
    },
    at_rest={"P12": left_undone},
)
