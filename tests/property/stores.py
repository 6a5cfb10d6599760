"""The base of the models: what a listener, a partition and a stored change are, and the steps that all models share.

`protocol_model` uses the first part. `spill_model` and `snapshot_model` use all of it, and add fields and steps. A
state has at least these fields there: ``epoch``, ``watermark``, ``generation``, ``partitions``, ``documents``,
``listeners``, ``messages``, ``writes``, ``delays`` and ``budget``.

- *A claim is its execution*: `protocol_model` has proved claims, fences and outcomes.
- *A write is acknowledged at once, or its answer is lost*: then its author continues as if it had failed, and it lands
  at any later time, or never. A deposed listener can do nothing else, since a fresh image shows it a larger epoch. A
  crash is a term that begins between any two steps.
- *A bulk* whose answer is lost lands document by document, in any order.
- *A listener acts on fresh images*: an act on a stale one is a late write too, or cannot claim.

A variant (``Broken``) is one ``if`` beside the rule it breaks. Fields marked "ghost" are the memory of the oracles: no
rule reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar, cast

from tests.property.exploration import Step, changed, gone_back, put

StateT = TypeVar("StateT")
Steps = Iterator[tuple[Step, Any]]


# === listeners, partitions and faults ===


def replaced(state: StateT, **fields: Any) -> StateT:
    after: StateT = cast("Any", state)._replace(**fields)
    return after


def with_partition(state: StateT, index: int, partition: Any) -> StateT:
    return replaced(state, partitions=put(cast("Any", state).partitions, index, partition))


def with_listener(state: StateT, old: Any, new: Any) -> StateT:
    return replaced(state, listeners=tuple(new if each is old else each for each in cast("Any", state).listeners))


def can(world: Any, state: Any, fault: Any) -> bool:
    return state.budget > 0 and fault in world.faults


def spent(state: StateT) -> StateT:
    return replaced(state, budget=cast("Any", state).budget - 1)


def counted(counts: tuple[int, ...], index: int, by: int = 1) -> tuple[int, ...]:
    return put(counts, index, counts[index] + by)


def in_office(state: Any) -> Any:
    """Return the listener of the last term, unless an operator's rewind was the last. None without one."""
    last = state.listeners[-1] if state.listeners else None
    return last if last is not None and last.term == state.epoch else None


def leader(state: Any) -> Any:
    listener = in_office(state)
    return listener if listener is not None and listener.leads else None


def acquire(world: Any, state: Any, make: Callable[[int, int], Any]) -> Steps:
    """A standby takes the lease and the subscription; without anybody in office it happens sooner or later.

    Else it is bounded by the scenario. The two writes are one step, since between them nobody learns anything. Epochs
    count the terms; a rewind is a term without a listener. ``make`` gets the term, and how many there were before.
    """
    needed, begun = in_office(state) is None, state.epoch - state.rewound
    if needed or begun < world.terms:
        listener = make(state.epoch + 1, begun)
        after = state._replace(epoch=listener.term, listeners=(*state.listeners, listener))
        yield Step("acquire", listener, fair=needed), after


# === what is stored ===


class Broken(StrEnum):
    """One rule of stored changes left out or replaced by the simpler one."""

    NOTHING = "nothing"
    MARK_BEFORE_INSERT = "the mark is written before the documents are acknowledged"
    DUPLICATE_DOES_NOTHING = "an insert that finds its document does nothing"
    MARK_IGNORES_GROWTH = "the mark is guarded by the epoch only"
    CLEAR_IGNORES_MARK = "clearing does not compare mark and position"
    REMOVAL_IGNORES_TERM = "a removal does not compare the term"
    REMOVAL_UP_TO_HANDLED = "a removal reaches up to what is handled"
    REMOVAL_FOLLOWS_MARK = "only partitions with a mark are looked at for removal"


class Late(StrEnum):
    """The kinds of writes whose answer may be lost."""

    INSERT = "insert"
    MARK = "mark"
    WATERMARK = "watermark"
    CLEAR = "clear"
    REMOVE = "remove"


class Claim(NamedTuple):
    """An execution and its right; ``item`` is what it runs, ``handled`` its success, which a failover may take back."""

    item: Any
    term: int = 0
    live: bool = True
    handled: bool = False


class Partition(NamedTuple):
    """A document of ``partitions``; ``token`` is the position, ``spilled`` the mark; ``head``: where it has halted."""

    epoch: int = 0
    token: Any = 0
    spilled: Any = 0
    claim: Claim | None = None
    head: Any = None

    @property
    def is_busy(self) -> bool:
        return self.claim is not None and (self.claim.live or self.claim.handled)

    @property
    def has_stored(self) -> bool:
        """Whether the mark lies ahead: then the partition runs what is stored, and nothing else."""
        return bool(self.spilled > self.token)


class Document(NamedTuple):
    """A document of ``backlog``: an item with a ``token``, and the last term that has stored it."""

    generation: int
    partition: int
    item: Any
    term: int


class Message(NamedTuple):
    """A run in the broker: it can claim while its partition stands at ``base``.

    One by reference (``stored``) has no bytes: its execution reads them under its claim.
    """

    partition: int
    term: int
    base: Any
    item: Any
    stored: bool = False


class Write(NamedTuple):
    """A write on its way; ``item``: what is inserted; ``place``: the mark, the watermark, how far a removal reaches."""

    kind: StrEnum
    term: int
    generation: int = 0
    partition: int = 0
    place: Any = 0
    item: Any = None


def stored(state: Any, index: int, after: Any, up_to: Any) -> list[Any]:
    return sorted(
        each.item
        for each in state.documents
        if each.partition == index and each.generation == state.generation and after < each.item.token <= up_to
    )


def found(state: Any, index: int, token: Any, generation: int) -> Document | None:
    return next(
        (
            each
            for each in state.documents
            if each.item.token == token and each.partition == index and each.generation == generation
        ),
        None,
    )


# === the writes, and what each does where it lands, if its own guard lets it ===


def write(world: Any, state: Any, writes: Iterable[Any], done: Any, *, fair: bool = True) -> Steps:
    """Yield the two ends of a write: it is acknowledged and everything is ``done``; or it lands whenever it likes."""
    one, *others = all_ = list(writes)
    yield Step("write", one, fair=fair), done
    if one.kind in world.late and state.delays and not state.writes.issuperset(all_):
        sent = state._replace(delays=state.delays - 1, writes=state.writes | set(all_))
        yield Step("send" if not others else "send a bulk", one, fair=False), sent


def land(world: Any, state: Any, landed: Callable[[Any, Any, Any], Any]) -> Steps:
    """What is on its way lands, at any time or never."""
    for one in state.writes:
        yield Step("land", one, fair=False), landed(world, state._replace(writes=state.writes - {one}), one)


def landed(world: Any, state: StateT, one: Write) -> StateT:
    """Return the state after a write on stored changes or their mark, which its own guard may have refused."""
    if one.kind is Late.INSERT:
        return inserted(world, state, one)
    return removed(world, state, one) if one.kind is Late.REMOVE else marked(world, state, one)


def inserted(world: Any, state: StateT, one: Write) -> StateT:
    """Return the state after something was stored, or the term of what is there was raised; its bytes stay."""
    documents = cast("Any", state).documents
    there = found(state, one.partition, one.item.token, one.generation)
    if there is None:
        return replaced(state, documents=documents | {Document(one.generation, one.partition, one.item, one.term)})
    if there.term >= one.term or world.broken is Broken.DUPLICATE_DOES_NOTHING:
        return state
    return replaced(state, documents=documents - {there} | {there._replace(term=one.term)})


def removed(world: Any, state: StateT, one: Write) -> StateT:
    """Return the state without a partition's documents up to a place, but for those of later terms."""
    guarded = world.broken is not Broken.REMOVAL_IGNORES_TERM
    kept = (
        each
        for each in cast("Any", state).documents
        if (each.generation, each.partition) != (one.generation, one.partition)
        or each.item.token > one.place
        or (guarded and each.term > one.term)
    )
    return replaced(state, documents=frozenset(kept))


def marked(world: Any, state: StateT, one: Write) -> StateT:
    known = cast("Any", state)
    if one.generation != known.generation or known.partitions[one.partition].epoch != one.term:
        return state
    partition: Partition = known.partitions[one.partition]
    if one.kind is Late.MARK:
        grows = one.place > partition.spilled or world.broken is Broken.MARK_IGNORES_GROWTH
        return with_partition(state, one.partition, partition._replace(spilled=one.place)) if grows else state
    same = partition.spilled == one.place <= partition.token or world.broken is Broken.CLEAR_IGNORES_MARK
    return with_partition(state, one.partition, without_mark(partition)) if same else state


def without_mark(partition: Partition) -> Partition:
    """Return a partition that has no mark: it lies at the start."""
    return partition._replace(spilled=type(partition.token)(0))


def may_land(state: Any, one: Write) -> bool:
    if one.kind is Late.WATERMARK:
        return bool(one.term == state.epoch)
    if one.kind in {Late.MARK, Late.CLEAR}:
        is_there: bool = one.generation == state.generation and one.term == state.partitions[one.partition].epoch
        return is_there
    return True


def plain(world: Any, state: StateT, listeners: Iterable[Any], may_land: Callable[[Any, Any, Any], bool]) -> StateT:
    """Return the state without what can never matter again: it differs in nothing, and is one state more often."""
    known = cast("Any", state)
    messages = frozenset(each for each in known.messages if may_claim(state, each))
    writes = frozenset(each for each in known.writes if may_land(world, state, each))
    return replaced(state, listeners=tuple(listeners), messages=messages, writes=writes)


# === the steps of a listener that has taken over ===


def insert(world: Any, state: Any, listener: Any, index: int, items: list[Any], *, urgent: bool) -> Steps:
    """All of a partition's buffered prefix in one bulk; a document that is there already gets my term, if larger."""
    writes = [Write(Late.INSERT, listener.term, state.generation, index, item=item) for item in items]
    done = state
    for each in writes:
        done = landed(world, done, each)
    if world.broken is Broken.MARK_BEFORE_INSERT:
        done = state._replace(writes=state.writes | set(writes))
    mine = listener._replace(stored=put(listener.stored, index, items[-1].token))
    partition = state.partitions[index]
    fair = partition.head is not None or partition.has_stored or urgent
    yield from write(world, state, writes, with_listener(done, listener, mine), fair=fair)


def mark(world: Any, state: Any, listener: Any, index: int, place: Any) -> Steps:
    """The last that this term has inserted becomes the mark, if it is larger."""
    partition = state.partitions[index]
    if place > max(partition.spilled, partition.token):
        one = Write(Late.MARK, listener.term, state.generation, index, place)
        yield from write(world, state, [one], landed(world, state, one))


def clear(world: Any, state: Any, listener: Any, index: int) -> Steps:
    partition = state.partitions[index]
    if partition != without_mark(partition) and not partition.has_stored:
        one = Write(Late.CLEAR, listener.term, state.generation, index, partition.spilled)
        yield from write(world, state, [one], landed(world, state, one))


def remove(world: Any, state: Any, listener: Any, index: int, up_to: Any) -> Steps:
    """Documents up to the position, of my term or older, with a mark or without."""
    partition = state.partitions[index]
    claim = partition.claim
    if world.broken is Broken.REMOVAL_UP_TO_HANDLED and claim is not None and claim.handled:
        up_to = claim.item.token
    if world.broken is Broken.REMOVAL_FOLLOWS_MARK and partition == without_mark(partition):
        return
    one = Write(Late.REMOVE, listener.term, state.generation, index, up_to)
    after = landed(world, state, one)
    if after.documents != state.documents:
        yield from write(world, state, [one], after)


def dispatch(state: Any, message: Message) -> Steps:
    """A message goes out; again and again, which is the sweep."""
    if message not in state.messages:
        yield Step("dispatch", message), state._replace(messages=state.messages | {message})


# === executions ===


def claimable(state: Any) -> Iterator[tuple[Message, Partition]]:
    """Yield what a worker gets, for the first time or again, and can claim; it drops all other messages."""
    for message in state.messages:
        partition = state.partitions[message.partition]
        if may_claim(state, message) and not partition.is_busy and partition.head is None:
            yield message, partition


def may_claim(state: Any, message: Message) -> bool:
    partition = state.partitions[message.partition]
    return bool(partition.epoch == message.term and partition.token == message.base)


def with_claim(state: StateT, index: int, **fields: Any) -> StateT:
    partition = cast("Any", state).partitions[index]
    return with_partition(state, index, partition._replace(claim=partition.claim._replace(**fields)))


def ended(state: StateT, index: int, item: Any) -> StateT:
    """Return the state in which a partition's position is an item that has ended, and nothing stands there."""
    partition = cast("Any", state).partitions[index]
    return with_partition(state, index, partition._replace(token=item.token, claim=None, head=None))


def halted(state: StateT, index: int, item: Any) -> StateT:
    partition = cast("Any", state).partitions[index]
    return with_partition(state, index, partition._replace(claim=None, head=item))


# === what is judged in every model ===


def never_back(move: Any) -> Iterator[str]:
    """P4: epochs, watermark and positions never go back but by a rewind."""
    before, after, rewound = move.before, move.after, move.step.kind == "rewind"
    yield from gone_back("an epoch", before.epoch, after.epoch)
    if not rewound:
        yield from gone_back("the watermark", before.watermark, after.watermark)
    if before.generation != after.generation:
        return
    for old, new in changed(before.partitions, after.partitions):
        yield from gone_back("the epoch of a partition", old.epoch, new.epoch)
        if not rewound:
            yield from gone_back("a partition", old.token, new.token)
