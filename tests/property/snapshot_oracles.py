"""What is judged of a snapshot, at each step and where everything has come to rest."""

from __future__ import annotations

from collections.abc import Iterator

from tests.property import exploration, stores
from tests.property.exploration import Model, changed
from tests.property.snapshot_model import steps
from tests.property.snapshot_state import (
    START,
    Item,
    Listener,
    State,
    Token,
    exists,
    in_memory,
    initial,
    is_partial,
    key_of,
    partition_of,
    value_at,
)
from tests.property.snapshot_world import AWAY, DROP, Progress, World
from tests.property.stores import stored

Move = exploration.Move[World, State]


def no_loss(move: Move) -> Iterator[str]:
    """P1: a position never passes a change, or something stored under the mark, that was not run."""
    before, after = move.before, move.after
    if move.step.kind == "rewind":
        return
    for index, (old, new) in enumerate(zip(before.partitions, after.partitions, strict=True)):
        if old.token >= new.token:
            continue
        for when in range(old.token.time + 1, new.token.time + 1):
            key = key_of(after.oplog[when - 1])
            if key is not None and partition_of(after, key) == index and old.token < Token(when) < new.token:
                yield f"partition {index} has passed the change at {when}, which nobody handled"
        for item in stored(before, index, old.token, min(new.token, old.spilled)):
            if item.token < new.token and is_owed(move.world, after, item):
                yield f"partition {index} has passed {item}, which is stored"


def is_owed(world: World, state: State, item: Item) -> bool:
    """Tell whether something stored has to be run: a change, or an item behind which a cursor counts on it."""
    passed = any(record.last >= item.key for record in state.records)
    return not item.token.number or (passed and not is_cared_for(world, state, item.key))


def nothing_missed(move: Move) -> Iterator[str]:
    """P1: when a snapshot is done, every document has been delivered, or its last change was; or it is stored."""
    for index, (old, new) in enumerate(zip(move.before.records, move.after.records, strict=True)):
        if old.state is not Progress.DONE is new.state:
            for key in range(move.world.keys):
                if move.world.matched(index, key) and not is_cared_for(move.world, move.after, key):
                    yield f"the snapshot is done, and key {key} was never delivered"


def is_cared_for(world: World, state: State, key: int) -> bool:
    """Tell whether a key that exists was delivered, or a change or an item of it is certain to come."""
    if not exists(value_at(world, state, key, state.majority)) or state.copy[key] is not None or settled(state, key):
        return True
    partition = state.partitions[partition_of(state, key)]
    if partition.head is not None and partition.head.key == key:
        return True
    waiting = stored(state, partition_of(state, key), partition.token, partition.spilled)
    if any(item.key == key and not item.partial for item in waiting):
        return True
    ahead = range(max(partition.token.time, state.watermark.time, 0) + 1, len(state.oplog) + 1)
    return any(key_of(state.oplog[when - 1]) == key and not is_partial(world, state, when) for when in ahead)


def settled(state: State, key: int) -> bool:
    """Ghost: whether something of a key was set aside, so that its copy is a person's business."""
    return any(each == key for each, _ in state.letters)


def order(move: Move) -> Iterator[str]:
    """P2: what handlers of a key see is never older than what they have seen before (but by a rewind)."""
    if move.step.kind in {"start", "commit"}:
        for key, (old, new) in enumerate(zip(move.before.seen, move.after.seen, strict=True)):
            if new < old:
                yield f"key {key} goes back from {old} to {new}"


def records_never_back(move: Move) -> Iterator[str]:
    """P4: no snapshot goes back, and no stream is opened at an item."""
    if move.after.watermark.number:
        yield f"the watermark is {move.after.watermark}, at which no stream can be opened"
    for old, new in changed(move.before.records, move.after.records):
        if (new.epoch, new.begun, new.last) < (old.epoch, old.begun, old.last) or new.last < old.last:
            yield f"a snapshot has gone back from {old} to {new}"
        if old.state in {Progress.DONE, Progress.GONE} and new.state is not old.state:
            yield "a snapshot that had ended has changed its state"


def cursor(move: Move) -> Iterator[str]:
    """P5: what a cursor has passed was delivered, or is stored under the mark, or a later change of it is to come."""
    for index, (old, new) in enumerate(zip(move.before.records, move.after.records, strict=True)):
        for key in range(old.last + 1, new.last + 1):
            if move.world.matched(index, key) and not is_cared_for(move.world, move.after, key):
                yield f"the cursor has passed key {key}, which nobody was given"


def bounded_duplicates(move: Move) -> Iterator[str]:
    """P6: an existing document starts once per snapshot, and for each at most once more per fault, or take-over."""
    if move.step.kind == "start":
        world, state = move.world, move.after
        faults = world.budget - state.budget + world.delays - state.delays + max(state.epoch - 1, 0)
        for key, count in enumerate(state.starts):
            if count > world.snapshots * (1 + faults):
                yield f"key {key} was started {count} times as an existing document"


def one_letter(move: Move) -> Iterator[str]:
    """P13: an existing document is set aside once, however often it was read."""
    if move.after.letters != move.before.letters:
        changes = {when + 1 for when, entry in enumerate(move.after.oplog) if key_of(entry) is not None}
        for key in range(move.world.keys):
            letters = [
                token
                for each, token in move.after.letters
                if each == key and (token is None or token.number or token.time not in changes)
            ]
            if len(letters) > 1:
                yield f"key {key} was set aside {len(letters)} times"


def bounded_memory(move: Move) -> Iterator[str]:
    """P12: a listener never keeps more than its share."""
    if move.world.room:
        for listener in move.after.listeners:
            if listener.leads and listener.term == move.after.epoch:
                count = in_memory(move.after, listener)
                if count > move.world.room:
                    yield f"a listener keeps {count}"


def bounded_scan(move: Move) -> Iterator[str]:
    """P12: a cursor passes nothing that was inserted behind all that was there at the T of the first chunk recorded.

    Else who inserts faster than chunks are handled keeps a snapshot from ending.
    """
    for old, new in zip(move.before.records, move.after.records, strict=True):
        there = (key for key in range(move.world.keys) if exists(value_at(move.world, move.after, key, new.first)))
        if new.last > old.last and new.last > max(there, default=-1):
            yield f"the cursor has passed key {new.last}, which was inserted behind the end of {new.first}"


def left_wrong(world: World, state: State) -> Iterator[str]:
    """P1, where nothing more will happen: the copy of every document is what the source has."""
    for key in range(world.keys):
        value = value_at(world, state, key, len(state.oplog))
        wanted = any(world.matched(index, key) for index in range(world.snapshots))
        if settled(state, key) or behind(state, key) or not wanted or state.copy[key] == value:
            continue
        unknown = state.copy[key] is None and not exists(value)
        gone = any(record.state is Progress.GONE for record in state.records)
        if not unknown and not gone and all(record.state is not Progress.RUNNING for record in state.records):
            yield f"key {key} is {value} in the source, and {state.copy[key]} in the copy"


def behind(state: State, key: int) -> bool:
    """Ghost: whether something of a key is still to come where its partition stands."""
    return state.partitions[partition_of(state, key)].head is not None


def left_undone(world: World, state: State) -> Iterator[str]:
    """P12, where nothing more will happen: every snapshot has ended, and nothing has to wait for what stands."""
    listener: Listener | None = stores.leader(state)
    if listener is None:
        yield "nobody is in office"
        return
    stands = {index for index, each in enumerate(state.partitions) if each.head is not None}
    for record in state.records:
        if record.state is Progress.RUNNING and (not stands or world.spills):
            yield f"a snapshot stands for ever: {record}"
        if record.state is Progress.GONE and not {DROP, AWAY} & set(state.oplog):
            yield "a snapshot says that its source is gone"
    held = [item.token.time for index in stands for item in listener.buffers[index] if not item.token.number]
    held += [each.head.token.time for each in state.partitions if each.head is not None and not each.head.token.number]
    place = min([len(state.oplog) + 1, *([] if world.spills else held)]) - 1
    if state.watermark.time < place:
        yield f"the watermark stands at {state.watermark} for ever"
    for index, partition in enumerate(state.partitions):
        if partition.spilled > START and index not in stands:
            yield f"the mark of partition {index} stands at {partition.spilled} for ever"
        for item in stored(state, index, START, partition.token):
            yield f"nobody removes {item}"


SNAPSHOT_MODEL = Model(
    initial=initial,
    steps=steps,
    oracles={
        "P1": (no_loss, nothing_missed),
        "P2": (order,),
        "P4": (stores.never_back, records_never_back),
        "P5": (cursor,),
        "P6": (bounded_duplicates,),
        "P12": (bounded_memory, bounded_scan),
        "P13": (one_letter,),
    },
    at_rest={"P1": left_wrong, "P12": left_undone},
)
