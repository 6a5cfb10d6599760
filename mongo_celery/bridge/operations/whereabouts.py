"""
Whereabouts of a document's changes: whether they have reached a handler, and what holds them.

From what is stored. A change that only the listener's memory has is not seen; it was written after `handled_until`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.operations.acts import reached, refuse_unknown
from mongo_celery.bridge.operations.bridge_snapshot import PartitionStatus
from mongo_celery.bridge.operations.keys import hash_of_key, key_of, quote_key
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerStatus
    from mongo_celery.bridge.wiring import Wiring

STORED_MAX = 10_000
"""Stored changes of the partition that are looked through."""

_LETTERS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """
    The changes of one key for one handler.

    Attributes:
        key: as Python writes it, since a number and a text that looks like it are two keys.
        partition: in which its changes lie.
        handled_until: every change of the key that was written before this is handled, but for those below.
        lasts: whether nothing is left to do, so that this goes on with each report of the listener.
        blocked: whether the change at which the partition is blocked is one of this key.
        running: whether a worker runs changes of the partition now. They may be of this key.
        stored: how many changes of the key are stored and not handled. None where there are too many to look through.
        parked: whether the key is parked: its later changes become dead letters until somebody releases it.
        dead_letters: ids of its dead letters, for `changes dead-letters`.
    """

    handler: str
    key: str
    partition: PartitionStatus
    handled_until: datetime | None
    lasts: bool
    blocked: bool
    running: bool
    stored: int | None
    parked: bool
    dead_letters: tuple[str, ...]


def find_whereabouts(wiring: Wiring, handler: str, text: str, source: str | None = None) -> Whereabouts:
    """
    Find out whether the changes of a key have reached a handler.

    Args:
        text: the key, as a person types it.
        source: the collection of the document, as `db.collection`, where the handler has several.

    Raises:
        CommandRefusedError: there is no such handler, or it is not clear which partition has the key.
        ServerUnavailableError, DeploymentError: as for `read_snapshot`.
    """
    snapshot = read_snapshot(wiring)
    found = next((each for each in snapshot.handlers if each.name == handler), None)
    if found is None and handler not in [each.name for each in wiring.handlers]:
        raise refuse_unknown(wiring, handler, [each.name for each in snapshot.handlers])
    if found is None or not found.partitions:
        names = ", ".join(each.name for each in snapshot.handlers if each.partitions)
        raise CommandRefusedError(
            f"No listener has led handler {handler!r} of bridge {wiring.name} yet, so none of its changes is handled. "
            f"Handlers with partitions: {names or 'none'}."
        )
    with reached(wiring) as store:
        layout = layouts_in_force(store.subscriptions.read_all())[handler]
        key = key_of(wiring, handler, layout, text, source)
        hash_ = hash_of_key(wiring, handler, layout, key, source)
        partition = found.partitions[hash_ % layout.partitions]
        partition_id = store.partitions.partition_id(handler, layout.term, partition.index)
        stored: int | None = 0
        if partition.stored is not None:
            lines = store.backlog.outline(partition_id, partition.token or "", partition.stored.to, STORED_MAX + 1)
            stored = sum(each.hash == hash_ for each in lines) if len(lines) <= STORED_MAX else None
        blocking = _blocking_hash(store.backlog, partition_id, partition)
        letters = store.dead_letters.find(Selection(subscription=handler, hash=hash_), [handler], _LETTERS_MAX)
        parked = hash_ in store.partitions.collect_parked_hashes(handler, layout.term)
    is_led = snapshot.leader is not None and handler in snapshot.leader.handlers
    lasts = snapshot.caught_up and found.is_registered and is_led
    return Whereabouts(
        handler=handler,
        key=quote_key(key),
        partition=partition,
        handled_until=_handled_until(snapshot, found, partition, lasts=lasts),
        lasts=lasts,
        blocked=partition.is_blocked and blocking == hash_,
        running=partition.is_running,
        stored=stored,
        parked=parked,
        dead_letters=tuple(each.id for each in letters),
    )


def _blocking_hash(backlog: Any, partition_id: str, partition: PartitionStatus) -> int | None:
    """Return the hash of the key at which a partition is blocked, where that change is stored."""
    if partition.key_token is None:
        return None
    change = backlog.fetch(partition_id, [partition.key_token]).get(partition.key_token)
    return None if change is None else int(change.hash)


def _handled_until(
    snapshot: BridgeSnapshot, handler: HandlerStatus, partition: PartitionStatus, *, lasts: bool
) -> datetime | None:
    """Return the time up to which all of a partition is handled."""
    if lasts:
        return snapshot.reported_at
    own = time_of_token({"_data": partition.token}, None) if partition.token else None
    at = None if own is None else own.as_datetime()
    if partition.is_blocked or partition.stored is not None or partition.is_running:
        return at
    return max((each for each in (at, handler.watermark_at) if each is not None), default=None)
