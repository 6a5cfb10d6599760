"""
An operator's decision on lost history: one handler continues, and what it has not read is given up.

What was read is not given up: it is stored or buffered, and runs whatever happened to the oplog.

The command moves the position itself, in one transaction with its audit record. A listener that leads reads the
position again within a second; else the next one begins there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.acts import audited, reached
from mongo_celery.bridge.operations.rewinding import LOCKED
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import layouts_in_force, parse_lost_history, parse_name
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.oplog import operation_time, read_oplog

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring


@dataclass(frozen=True, slots=True)
class LostPlace:
    """
    Where a subscription has lost its history.

    Attributes:
        at: its place: what came behind it is owed.
        oldest: the oldest entry of the oplog when it was noticed; None where the oplog cannot be read.
        stored: partitions of which something is stored: that runs in any case.
        seen: the record as it was read; only this one is settled.
    """

    subscription: str
    at: Timestamp
    oldest: Timestamp | None
    error: str
    stored: tuple[int, ...]
    seen: Mapping[str, Any] = field(repr=False)


def read_lost(wiring: Wiring, subscription: str) -> LostPlace:
    """
    What there is to decide.

    Raises:
        CommandRefusedError: there is no such subscription, or it has not lost its history.
        ServerUnavailableError: MongoDB did not answer.
        DeploymentError: it cannot serve a bridge, or a right is missing.
    """
    with reached(wiring) as store:
        documents = {parse_name(document): document for document in store.subscriptions.read_all()}
        stored = _stored(store, subscription) if subscription in documents else ()
    if subscription not in documents:
        raise CommandRefusedError(
            f"Bridge {wiring.name} has no subscription {subscription!r}{nearest(subscription, list(documents))}; "
            f"it has {', '.join(sorted(documents)) or 'none yet'}.",
        )
    lost = parse_lost_history(documents[subscription])
    if not lost:
        raise CommandRefusedError(
            f"Subscription {subscription} has not lost its history, as far as a listener has seen: nothing to decide.",
        )
    return LostPlace(subscription, lost["at"], lost.get("oldest"), str(lost.get("error")), stored, lost)


def _stored(store: Store, subscription: str) -> tuple[int, ...]:
    layouts = layouts_in_force(store.subscriptions.read_all())
    images = store.partitions.of({subscription: layouts[subscription].generation}) if subscription in layouts else []
    return tuple(sorted(image.index for image in images if image.spilled))


def go_on(wiring: Wiring, lost: LostPlace, policy: str, *, reason: str | None = None) -> Timestamp:
    """
    Let a subscription continue; what lies between its place and there, and is not stored, will not be handled.

    Afterwards its position and the audit record are stored. What partitions have committed, and where they are halted
    or paused, stays.

    Args:
        lost: as the operator has seen it.
        policy: `oldest`, from the oldest entry of the oplog; `now`, from this moment.
        reason: why, for people.

    Returns:
        Where it continues.

    Raises:
        CommandRefusedError: it is no longer as it was seen, or a partition is locked. Nothing is changed.
        ServerUnavailableError, DeploymentError: as for `read_lost`.
    """
    with audited(wiring, "go-on", lost.subscription, from_=policy, reason=reason) as act:
        now = operation_time(wiring.client)
        place = read_oplog(wiring.client).first if policy == "oldest" else Timestamp(now.time, now.inc + 1)
        start = max(place, lost.at)
        record = act.record(lost.subscription, handlers=1, **{"from": iso(lost.at), "to": iso(start)})
        try:
            is_moved = wiring.store.positions.pass_gap(lost.subscription, lost.seen, start, policy, record)
        except PyMongoError as error:
            if is_lock(error):
                raise CommandRefusedError(LOCKED) from error
            raise
        if not is_moved:
            raise CommandRefusedError(
                f"Subscription {lost.subscription} has changed meanwhile; look at status, then repeat the command.",
            )
        return start
