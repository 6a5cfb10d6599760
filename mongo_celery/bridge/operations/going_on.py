"""
An operator's decision on lost history: one subscription goes on, and what it has not read is given up.

What was read is not: it is stored, and runs whatever became of the oplog.

The command records the decision; the listener acts on it within seconds, or the next one when it begins. So a place is
moved by one hand only, and the oldest entry is looked up when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bson import Timestamp

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.acts import audited, reached
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import layouts_in_force, lost_in, name_in
from mongo_celery.errors import CommandRefusedError
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
        decided: `oldest` or `now` where somebody has decided already, and no listener has acted on it yet.
        stored: partitions of which something is stored: that runs, whatever is decided.
        seen: the record as it was read; only this one is decided.
    """

    subscription: str
    at: Timestamp
    oldest: Timestamp | None
    error: str
    decided: str | None
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
        documents = {name_in(document): document for document in store.subscriptions.read_all()}
        stored = _stored(store, subscription) if subscription in documents else ()
    if subscription not in documents:
        raise CommandRefusedError(
            f"Bridge {wiring.name} has no subscription {subscription!r}{nearest(subscription, list(documents))}; "
            f"it has {', '.join(sorted(documents)) or 'none yet'}.",
        )
    lost = lost_in(documents[subscription])
    if not lost:
        raise CommandRefusedError(
            f"Subscription {subscription} has not lost its history, as far as a listener has seen: nothing to decide.",
        )
    decided = (lost.get("goOn") or {}).get("policy")
    return LostPlace(subscription, lost["at"], lost.get("oldest"), str(lost.get("error")), decided, stored, lost)


def _stored(store: Store, subscription: str) -> tuple[int, ...]:
    layouts = layouts_in_force(store.subscriptions.read_all())
    images = store.partitions.of({subscription: layouts[subscription].generation}) if subscription in layouts else []
    return tuple(sorted(image.index for image in images if image.spilled))


def go_on(wiring: Wiring, lost: LostPlace, policy: str, *, reason: str | None = None) -> None:
    """
    Decide that a subscription goes on; what lies between its place and there, and is not stored, will not be handled.

    Afterwards the decision is stored, and a listener acts on it once one leads. What partitions have committed, and
    where they are halted or paused, stays.

    Args:
        lost: as the operator has seen it.
        policy: `oldest`, from the oldest entry of the oplog when a listener acts on it; `now`, from this moment.
        reason: why, for people.

    Raises:
        CommandRefusedError: it is no longer as it was seen.
        ServerUnavailableError, DeploymentError: as for `read_lost`.
    """
    with audited(wiring, "go-on", lost.subscription, from_=policy, reason=reason) as act:
        if policy == "oldest":
            read_oplog(wiring.client)
        now = operation_time(wiring.client)
        later = Timestamp(now.time, now.inc + 1)
        if not wiring.store.subscriptions.decide(lost.subscription, lost.seen, policy, later):
            raise CommandRefusedError(
                f"Subscription {lost.subscription} has changed meanwhile; look at status, then repeat the command.",
            )
        act.count("handlers", lost.subscription)
