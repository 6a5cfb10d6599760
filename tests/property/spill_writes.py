"""The writes of spill: how they end, and what each does where it lands, if its own guard lets it."""

from __future__ import annotations

from tests.property.spill_model import (
    Broken,
    Document,
    Late,
    Mode,
    Partition,
    State,
    World,
    Write,
    found,
)
from tests.property.stores import with_partition


def landed(world: World, state: State, one: Write) -> State:
    """Return the state after a write, which its own guard may have refused."""
    if one.kind is Late.WATERMARK:
        matches = state.epoch == one.term and one.place > state.watermark
        return passed_over(world, state, one) if matches else state
    if one.kind in {Late.SWITCH, Late.DISCARD}:
        return switched(world, state, one) if one.kind is Late.SWITCH else discarded(world, state, one)
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
        busy = each.claim is not None and (each.claim.live or each.claim.handled)
        unlike = each.epoch != term and world.broken is not Broken.SWITCH_IGNORES_TERM
        if busy or unlike or each.mode is not Mode.FLOWING:
            return False
        if each.spilled > each.token and world.broken is not Broken.SWITCH_IGNORES_STORED:
            return False
        if each.token > place and world.broken is not Broken.SWITCH_BEFORE_READ:
            return False
    return True
