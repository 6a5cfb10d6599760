"""
Look-ups in the stored state: the change that blocks a partition, and one document's changes.

Changes that are only in the listener's memory are not found, for example those of a partition that is not halted and
has been blocked for less than `spill_after`.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bson import json_util

from mongo_celery.bridge.change import FLAGS, decode_event, describe
from mongo_celery.bridge.operations.acts import reached, refuse_partition, refuse_unknown
from mongo_celery.bridge.operations.bridge_facts import read_facts
from mongo_celery.bridge.operations.bridge_snapshot import PartitionStatus
from mongo_celery.bridge.operations.keys import find_key, quote_key
from mongo_celery.bridge.operations.snapshot_reader import GLANCE_SECONDS, shape
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.state.subscriptions import Layout, layouts_in_force
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerStatus
    from mongo_celery.bridge.state.backlog import StoredChange
    from mongo_celery.bridge.state.store import Store
    from mongo_celery.bridge.wiring import Wiring

STORED_MAX = 10_000
"""Largest number of a partition's stored changes to search."""

_LETTERS_MAX = 100
_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedChange:
    """
    The first uncommitted change of a partition, as far as known.

    Attributes:
        status: status of the partition.
        key: namespace, operation and document key. None if unknown.
        token: `_data` of the resume token, for a `skip` of this change only. None if unknown.
        error: the reason of the halt, the last failure or the wait, or the reason why it cannot be delivered.
        attempts: number of attempts.
        traceback: the traceback of the error that halted it. Empty if none is stored.
        since: time when it halted, began to wait for MongoDB or the broker, or was stored.
        bytes: size of the event. None if it is not stored.
        event: the event as Extended JSON. None if it is not stored or unreadable.
        raw: the bytes of an unreadable event in base64. Otherwise None.
    """

    handler: str
    status: PartitionStatus
    key: str | None
    token: str | None
    error: str | None
    attempts: int
    traceback: str
    since: datetime | None
    bytes: int | None
    event: dict[str, Any] | None
    raw: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """
    The changes of one key for one handler.

    Attributes:
        key: the key in Python's form, because a number and an equal-looking text are different keys.
        status: the partition of the key's changes.
        handled_until: all changes of the key before this time are handled, except those below.
        lasts: True if nothing is left to do for the key. Then each report of the listener advances `handled_until`.
        blocked: True if the partition is blocked at a change of this key.
        running: True if a worker runs changes of the key now, or of the partition if the keys are unknown.
        stored: number of further stored changes of the key. None if there are too many to search.
        parked: True if the key is parked, so that later changes become dead letters until its release.
        dead_letters: ids of the key's dead letters, for `changes dead-letters`.
    """

    handler: str
    key: str
    status: PartitionStatus
    handled_until: datetime | None
    lasts: bool
    blocked: bool
    running: bool
    stored: int | None
    parked: bool
    dead_letters: tuple[str, ...]


def read_blocked_change(wiring: Wiring, handler: str, partition: int, *, with_types: bool = False) -> BlockedChange:
    """
    Return the change that blocks a partition, otherwise its first uncommitted stored change.

    Args:
        with_types: as in `event_as_json`.

    Raises:
        CommandRefusedError: it is not blocked, or the name is unknown.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring) as store:
        for _ in range(_ROUNDS):  # once more if it has moved between the reads
            _, found, layout = _read_handler(wiring, store, handler)
            if partition >= layout.partitions:
                raise refuse_partition(handler, partition, layout)
            status = found.partitions[partition]
            partition_id = store.partitions.partition_id(handler, layout.term, partition)
            change = _fetch_change(store, partition_id, status)
            if change is not None or status.stored is None:
                break
        if change is None and not status.is_blocked:
            raise CommandRefusedError(
                f"Partition {partition} of {handler} is not blocked and has no stored change, so there is no change to "
                "show."
            )
        traceback = store.partitions.read_traceback(partition_id) if status.state == "halted" else ""
    refusal = change.refusal.reason if change is not None and change.refusal is not None else None
    return BlockedChange(
        handler=handler,
        status=status,
        key=status.key if change is None or status.key is not None else describe(change.raw),
        token=status.key_token if change is None else change.data,
        error=status.error or refusal,
        attempts=status.retries + status.crashes + (status.state == "halted" and refusal is None),
        traceback=traceback,
        since=status.since if status.since or status.stored is None else status.stored.since,
        bytes=None if change is None else len(change.raw),
        **event_as_json(None if change is None else change.raw, with_types=with_types),
    )


def _fetch_change(store: Store, partition_id: str, status: PartitionStatus) -> StoredChange | None:
    """Return the stored change that blocks a partition, or its first stored one."""
    if status.state == "halted" and status.key_token is not None:
        return store.backlog.fetch(partition_id, [status.key_token]).get(status.key_token)
    if status.stored is None:
        return None
    return next(iter(store.backlog.read(partition_id, status.token or "", status.stored.to, 1)), None)


def _read_handler(wiring: Wiring, store: Store, name: str) -> tuple[BridgeSnapshot, HandlerStatus, Layout]:
    """Read a bridge, a handler of it, and the partitioning in force."""
    snapshot = shape(read_facts(wiring, GLANCE_SECONDS))
    found = next((each for each in snapshot.handlers if each.name == name), None)
    if found is None:
        raise refuse_unknown(wiring, name, [each.name for each in snapshot.handlers])
    layout = layouts_in_force(store.subscriptions.read_all()).get(name)
    if layout is None or len(found.partitions) != layout.partitions:
        names = ", ".join(each.name for each in snapshot.handlers if each.partitions)
        raise CommandRefusedError(
            f"Handler {name!r} of bridge {wiring.name} has no partitions yet, because no listener has started with it. "
            f"Handlers with partitions: {names or 'none'}."
        )
    return snapshot, found, layout


def event_as_json(raw: bytes | None, *, with_types: bool = False) -> dict[str, Any]:
    """
    Return `event` as Extended JSON, without the bridge's own flags, or `raw` if it is unreadable.

    Args:
        with_types: True for canonical JSON, which keeps the type of each number. By default it is relaxed, for people.
    """
    if raw is None:
        return {"event": None, "raw": None}
    try:
        event = {name: value for name, value in decode_event(raw).items() if name != FLAGS}
        options = json_util.CANONICAL_JSON_OPTIONS if with_types else json_util.RELAXED_JSON_OPTIONS
        found = json.loads(json_util.dumps(event, json_options=options))
    except Exception:  # noqa: BLE001 - whatever users' documents hold: then its bytes are all that can be shown
        return {"event": None, "raw": base64.b64encode(raw).decode()}
    return {"event": found, "raw": None}


def find_whereabouts(wiring: Wiring, handler: str, text: str, source: str | None = None) -> Whereabouts:
    """
    Find out if the changes of a key have reached a handler.

    Args:
        text: the key, as typed.
        source: the collection of the document, as `db.collection`, if the handler has several.

    Raises:
        CommandRefusedError: the handler does not exist, or the key's partition is ambiguous.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring) as store:
        snapshot, found, layout = _read_handler(wiring, store, handler)
        key, hash_ = find_key(wiring, handler, layout, text, source)
        status = found.partitions[hash_ % layout.partitions]
        partition_id = store.partitions.partition_id(handler, layout.term, status.partition)
        stored, running = _look_through(store, partition_id, status, hash_)
        head = status.key_token
        blocking = store.backlog.fetch(partition_id, [head]).get(head) if head is not None else None
        letters = store.dead_letters.find(Selection(subscription=handler, hash=hash_), [handler], _LETTERS_MAX)
        parked = hash_ in store.partitions.collect_parked_hashes(handler, layout.term)
    is_led = snapshot.leader is not None and handler in snapshot.leader.handlers
    lasts = snapshot.caught_up and found.is_registered and is_led
    return Whereabouts(
        handler=handler,
        key=quote_key(key),
        status=status,
        handled_until=_find_handled_until(snapshot, found, status, lasts=lasts),
        lasts=lasts,
        blocked=status.is_blocked and blocking is not None and blocking.hash == hash_,
        running=running,
        stored=stored,
        parked=parked,
        dead_letters=tuple(each.id for each in letters),
    )


def _look_through(store: Store, partition_id: str, status: PartitionStatus, hash_: int) -> tuple[int | None, bool]:
    """Return the number of a key's stored changes, and whether one of them runs. No change counts twice."""
    if status.stored is None:
        return 0, status.is_running
    lines = store.backlog.outline(partition_id, status.token or "", status.stored.to, STORED_MAX + 1)
    last = max(status.handled or 0, status.claim.last if status.is_running and status.claim else 0)
    runs, rest = lines[: max(last - status.committed, 0)], lines[max(last - status.committed, 0) :]
    waits = [each for each in rest if not (status.is_blocked and each.data == status.key_token)]
    stored = sum(each.hash == hash_ for each in waits) if len(lines) <= STORED_MAX else None
    return stored, any(each.hash == hash_ for each in runs)


def _find_handled_until(
    snapshot: BridgeSnapshot, handler: HandlerStatus, status: PartitionStatus, *, lasts: bool
) -> datetime | None:
    """Return the time up to which a partition is completely handled."""
    if lasts:
        return snapshot.reported_at
    own = time_of_token({"_data": status.token}, None) if status.token else None
    at = None if own is None else own.as_datetime()
    if status.is_blocked or status.stored is not None or status.is_running:
        return at
    return max((each for each in (at, handler.watermark_at) if each is not None), default=None)
