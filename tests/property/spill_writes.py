"""The writes of spill: how they end, and what each does where it lands, if its own guard lets it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.property.spill_model import (
    Broken,
    Document,
    Late,
    Mode,
    Range,
    State,
    Step,
    Steps,
    World,
    Write,
    found,
    with_partition,
)


def write(world: World, state: State, writes: Iterable[Write], done: State, *, fair: bool = True) -> Steps:
    """Yield the two ends of a write: it is acknowledged and everything is ``done``; or it lands whenever it likes."""
    one, *others = writes = list(writes)
    yield Step("write", one, fair=fair), done
    if one.kind in world.late and state.delays and not state.writes.issuperset(writes):
        sent = state._replace(delays=state.delays - 1, writes=state.writes | set(writes))
        yield Step("send" if not others else "send a bulk", one, fair=False), sent


def landed(world: World, state: State, one: Write) -> State:
    """Return the state after a write, which its own guard may have refused."""
    if one.kind is Late.WATERMARK:
        matches = state.epoch == one.term and one.place > state.watermark
        return passed_over(world, state, one) if matches else state
    if one.kind in {Late.COPY, Late.FLIP, Late.DISCARD}:
        return relaid(world, state, one)
    if one.kind in {Late.INSERT, Late.REMOVE}:
        return inserted(world, state, one) if one.kind is Late.INSERT else removed(world, state, one)
    return marked(world, state, one)


def removed(world: World, state: State, one: Write) -> State:
    """Return the state without a partition's documents up to a place, but for those of later terms."""
    guarded = world.broken is not Broken.REMOVAL_IGNORES_TERM
    return state._replace(
        documents=frozenset(
            each
            for each in state.documents
            if (each.generation, each.partition) != (one.generation, one.partition)
            or each.token > one.place
            or (guarded and each.term > one.term)
        )
    )


def marked(world: World, state: State, one: Write) -> State:
    """Return the state after a partition's mark was set or cleared."""
    if one.generation != state.generation or state.partitions[one.partition].epoch != one.term:
        return state
    partition = state.partitions[one.partition]
    if one.kind is Late.MARK:
        grows = one.place > partition.spilled or world.broken is Broken.MARK_IGNORES_GROWTH
        return with_partition(state, one.partition, partition._replace(spilled=one.place)) if grows else state
    same = partition.spilled == one.place <= partition.token or world.broken is Broken.CLEAR_IGNORES_MARK
    return with_partition(state, one.partition, partition._replace(spilled=0)) if same else state


def inserted(world: World, state: State, one: Write) -> State:
    """Return the state after one document was inserted, or the term of the one that is there was raised."""
    there = found(state, one.generation, one.partition, one.place)
    if there is None:
        new = Document(one.generation, one.partition, one.place, one.term)
        return state._replace(documents=state.documents | {new})
    if there.term >= one.term or world.broken is Broken.DUPLICATE_DOES_NOTHING:
        return state
    return state._replace(documents=state.documents - {there} | {there._replace(term=one.term)})


def passed_over(world: World, state: State, one: Write) -> State:
    """Return the state with a new watermark; what its term does not match is owed to nobody."""
    config = next((each.config for each in state.listeners if each.term == one.term), 0)
    passed = frozenset(token for token in range(state.watermark + 1, one.place + 1) if not world.matched(config, token))
    return state._replace(watermark=one.place, excused=state.excused | passed)


# --- a new layout -------------------------------------------------------------------------------------------


def relaid(world: World, state: State, one: Write) -> State:
    """Return the state after a write that belongs to a new layout."""
    if one.kind is Late.COPY:
        return copied(world, state, one)
    if one.kind is Late.DISCARD:
        smaller = world.broken in {Broken.DISCARD_ONLY_SMALLER, Broken.GENERATION_PLUS_ONE}
        limit = one.place if smaller else one.term
        others = {each for each in state.documents if each.generation != one.place and each.generation < limit}
        return state._replace(documents=state.documents - others)
    mine = state.epoch == one.term or world.broken is Broken.FLIP_IGNORES_EPOCH
    new = next((each for each in state.prepared if each.generation == one.place), None)
    if not mine or state.generation != one.generation or new is None:
        return state
    return state._replace(generation=new.generation, partitions=new.partitions, messages=frozenset())


def copied(world: World, state: State, one: Write) -> State:
    """Return the state after a copy: what exists there already is kept."""
    documents = set(state.documents)
    for index, each in enumerate(one.ranges):
        for document in state.documents:
            if document[:2] != (one.generation, index) or not each.after < document.token <= each.up_to:
                continue
            target = world.keys[document.token - 1] % one.partition
            if found(state, one.place, target, document.token) is None:
                standing = standing_of(world, document, each)
                documents.add(Document(one.place, target, document.token, one.term, standing))
    return state._replace(documents=frozenset(documents))


def standing_of(world: World, document: Document, one: Range) -> Mode | None:
    """Return the state that goes with a copied change: that of its partition where it stands there, else its own.

    What was put in force in the old layout and let go there stands no more.
    """
    if world.broken is Broken.STANDING_LEFT_BEHIND:
        return None
    if document.token == one.head and one.mode is not Mode.FLOWING:
        return one.mode
    if document.token == one.stood and world.broken is not Broken.STANDING_KEPT:
        return None
    return document.standing
