"""The writes of a snapshot: how they end, and what each does where it lands, if its own guard lets it.

What the model does, as MongoDB's updates (v: my version; b: the chunk's number; r: the record's ``_id``)::

    raise    take-over, before any partition is touched, and in a rewind's transaction; also of those that are stopped
             {_id: {$in: mine}, epoch: {$lt: v}}                   {$set: {epoch: v}}                  w majority
    begin    {_id: r, epoch: v, state: "running", begun: b - 1}    {$set: {begun: b}}                  w majority
             n = 1: T = reply.operationTime; n = 0: look again (another epoch: not mine, stop; begun: b: as if the
             answer had been lost, begin b + 1). The reader stands still from sending this until T is known.
    read     find {$expr: {$and: [{$gt: ["$_id", {$literal: lastId}]}, {$lte: ["$_id", {$literal: untilId}]}]}},
             sort {_id: 1}, limit N, hint {_id: 1}, readConcern {level: "snapshot", atClusterTime: T}, within a time:
             else T is given up, begin b + 1. Of a record without ``untilId``, before it and as of the same T:
             find {}, sort {_id: -1}, limit 1
    pass     {_id: r, epoch: v, begun: b}                          {$inc: {passed: 1}}                 after the read
             again, until the reader is behind T; n = 0: not mine, stop
    cursor   {_id: r, epoch: v, begun: b, moved: {$ne: b}}         {$set: {lastId: end, moved: b}, $inc: {done: n}}
             whether it runs or was stopped meanwhile; where the record had no ``untilId``, it is set in the same write
    finish   {_id: r, epoch: v, begun: b, state: "running"}        {$set: {state: "done" | "source gone"}}
             of an empty answer, when the reader is behind a write that came after the read
    rewind   of each partition that goes back, besides position, claim, head and fence
             spilled: {$cond: [{$lte: ["$spilled.to", "$resumeToken._data"]}, null, "$spilled"]}      (old position)

``passed`` and ``moved`` are not in the model, where every ``pass`` is an entry of the oplog and nothing is counted: an
update that changes nothing writes no entry, and a cursor whose answer was lost would count its documents twice.
"""

from __future__ import annotations

from tests.property.snapshot_model import (
    MARK,
    Broken,
    Document,
    Late,
    Progress,
    State,
    World,
    Write,
    appended,
    with_record,
)
from tests.property.stores import with_partition


def landed(world: World, state: State, one: Write) -> State:
    """Return the state after a write, which its own guard may have refused."""
    if one.kind is Late.WATERMARK:
        matches = state.epoch == one.term and one.token > state.watermark
        return state._replace(watermark=one.token) if matches else state
    if one.kind in {Late.BEGIN, Late.PASS, Late.CURSOR}:
        return recorded(world, state, one)
    if one.is_over(state.generation):
        return state
    if one.kind is Late.INSERT:
        return inserted(state, one)
    if one.kind is Late.REMOVE:
        kept = (each for each in state.documents if not is_removed(world, each, one))
        return state._replace(documents=frozenset(kept))
    partition = state.partitions[one.target]
    grows = partition.epoch == one.term and one.token > partition.spilled
    return with_partition(state, one.target, partition._replace(spilled=one.token)) if grows else state


def recorded(world: World, state: State, one: Write) -> State:
    """Return the state after a write on the record of a snapshot: an entry of the oplog, if it matches."""
    if not matches(world, state, one):
        return state
    record = state.records[one.target]
    if one.kind is Late.BEGIN:
        after = with_record(state, one.target, record._replace(begun=record.begun + 1))
        return appended(world, after, MARK)
    if one.kind is Late.PASS:
        return appended(world, state, MARK)
    ended = one.state if one.state is not Progress.RUNNING else record.state
    record = record._replace(state=ended)
    if one.end >= 0:
        first = record.first if record.first >= 0 else one.time
        record = record._replace(last=one.end, until=one.until, first=first)
    return with_record(state, one.target, record)


def matches(world: World, state: State, one: Write) -> bool:
    """Tell whether the guard of a write on a record matches."""
    record = state.records[one.target]
    starts_or_ends = one.kind is Late.BEGIN or (one.kind is Late.CURSOR and one.state is not Progress.RUNNING)
    if starts_or_ends and record.state is Progress.STOPPED:
        return False
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_UNGUARDED:
        return True
    epoch = record.epoch == one.term or (one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_EPOCH)
    begun = record.begun == one.guard
    if one.kind is Late.CURSOR and world.broken is Broken.CURSOR_IGNORES_BEGUN:
        begun = True
    if one.kind is Late.BEGIN and world.broken is Broken.BEGIN_COUNTS_UP:
        begun = True
    return epoch and begun


def inserted(state: State, one: Write) -> State:
    """Return the state after something was stored, or the term of what is there was raised; its bytes stay."""
    assert one.item is not None
    there = next(
        (each for each in state.documents if each.partition == one.target and each.item.token == one.item.token), None
    )
    if there is None:
        return state._replace(documents=state.documents | {Document(one.target, one.item, one.term)})
    if there.term >= one.term:
        return state
    return state._replace(documents=state.documents - {there} | {there._replace(term=one.term)})


def is_removed(world: World, document: Document, one: Write) -> bool:
    """Tell whether a removal takes a document away."""
    if document.partition != one.target or document.term > one.term:
        return False
    token = document.item.token
    prefixed = token.number < 0 and one.token == (token.time, -100) and world.broken is Broken.TOKEN_OF_NEXT
    return token <= one.token or prefixed
