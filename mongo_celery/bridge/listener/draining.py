"""
Changing the partition layout: drain the old generation, prepare the new one, flip in one write.

A term that finds another layout than its options ask for runs the old generation under its own rules, up
to the largest token that any of its partitions has committed; then everything before that place is done in
every partition, and the place is a position for the new layout. A crash in the middle leaves the old
generation valid, and the next term does it again.

A handler that was running at the take-over may commit a change behind that place, and move it on. What was
read and left for the new layout must then be read again, so the term begins again. A claim behind that place
whose execution has died is ended; its change belongs to the new layout.

Partitions that stand still would be left behind, so they refuse the change; so do those of a subscription
that has no handler now and would do again in the new layout what it has done in the old one.

A listener that was frozen in the middle of its flip may wake when its successor's new layout is at work. It
removes only what no later term has prepared, and a flip goes on only with partitions that carry its own epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.takeover import OrphanedSubscription, Takeover
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import HASH_NAME
from mongo_celery.bridge.state.leases import Layout
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import LayoutError, LeaseLostError
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_ROUNDS = 5


class Drain(Enum):
    """How far the old partitions are, in the order of their ways there."""

    BEGIN_AGAIN = 0
    READING = 1
    RUNNING = 2
    """All is done but what runs, or has died, behind the place."""

    DONE = 3


def check_can_drain(options: BridgeOptions, handlers: Iterable[Handler], takeover: Takeover) -> None:
    """
    Refuse a change of layout that would lose the order of a key.

    Raises:
        LayoutError: a partition stands still, the old key of a handler is no longer known, or a subscription
            without a handler has not been drained.
    """
    for orphan in takeover.orphans:
        _check_is_drained(options, takeover, orphan)
    for name, images in takeover.images.items():
        for image in images:
            _check_flows(options, takeover, name, image)
    for handler in handlers:
        old = takeover.layout.keys.get(handler.name)
        if old is None or old == f"{HASH_NAME}:{handler.partitioner(options).name}":
            continue
        if not _is_drained_by_document(takeover, handler.name):
            raise LayoutError(
                f"partition_by of handler {handler.name} cannot change from {old.partition(':')[2]} now: changes are "
                "still under way in the old partitions. Start with the old rule once more until `status` shows nothing "
                "outstanding, then change it.",
            )


def _check_flows(options: BridgeOptions, takeover: Takeover, name: str, image: Image) -> None:
    if image.state != "flowing":
        raise LayoutError(
            f"The partitions of bridge {options.name} cannot change from {takeover.layout.partitions} to "
            f"{takeover.wanted.partitions}: partition {image.index} of {name} is {image.state}. Resume, retry or "
            "skip it first, with the old layout.",
        )


def check_can_read(options: BridgeOptions, takeover: Takeover, subscriptions: Iterable[Subscription]) -> None:
    """
    Refuse a change of layout that waits for what cannot be read any more.

    Raises:
        LayoutError: a subscription has lost its history in front of what its partitions have done.
    """
    for subscription in subscriptions:
        position = _data_of(takeover.documents[subscription.name])
        if subscription.lost and any(image.data > position for image in takeover.images[subscription.name]):
            raise _lost(options, takeover, subscription.name)


def _lost(options: BridgeOptions, takeover: Takeover, name: str) -> LayoutError:
    return LayoutError(
        f"The partitions of bridge {options.name} cannot change from {takeover.layout.partitions} to "
        f"{takeover.wanted.partitions}: handler {name} has lost its history. Decide first: "
        f"`celery -A ... changes go-on {name} --from oldest` or `--from now`.",
    )


def _check_is_drained(options: BridgeOptions, takeover: Takeover, orphan: OrphanedSubscription) -> None:
    position = _data_of(orphan.document)
    for image in orphan.images:
        reason = _remainder(image, position, takeover.version)
        if reason is None:
            continue
        where = f"{options.name}/{orphan.name}"
        raise LayoutError(
            f"The partitions of bridge {options.name} cannot change from {takeover.layout.partitions} to "
            f"{takeover.wanted.partitions}: partition {image.index} of {orphan.name}, which has no handler here, "
            f"{reason}. Register the handler again, with the old layout, until `status` shows no lag and nothing "
            "halted, paused or outstanding. Or give it up: in the database "
            f"{options.database} delete the document {where!r} from subscriptions, and from partitions those whose "
            f"_id begins with {where + '/'!r}.",
        )


def _remainder(image: Image, position: str, version: int) -> str | None:
    if image.epoch < version:
        return "is locked by an open transaction, which the server ends within a minute"
    if image.state in {"halted", "paused"}:
        return f"is {image.state}"
    if image.claim is not None:
        return "is claimed"
    if image.handled is not None:
        return "holds an outcome"
    return "is ahead of its watermark" if image.data > position else None


def _data_of(document: Mapping[str, Any]) -> str:
    return token_data(document["resumeToken"]) if document["resumeToken"] else ""


def _is_drained_by_document(takeover: Takeover, name: str) -> bool:
    position = _data_of(takeover.documents[name])
    return all(
        image.data <= position and image.claim is None and image.handled is None and image.retries == 0
        for image in takeover.images[name]
    )


def limit(options: BridgeOptions, takeover: Takeover, subscriptions: Iterable[Subscription]) -> Drain:
    """
    Hold each subscription to what its old partitions need, and say how far that is.

    Called again and again while draining.

    Raises:
        LayoutError: a partition has come to a standstill meanwhile, or a subscription has lost its history in front of
            what its partitions have done, and nothing of it is left in the buffer.
    """
    found: list[Drain] = []
    for subscription in subscriptions:
        images = [tracker.image for tracker in subscription.trackers.values()]
        for image in images:
            _check_flows(options, takeover, subscription.name, image)
        last = max(images, key=lambda image: image.data)
        until = subscription.until = _mark(last) if last.token else None
        if until is not None and subscription.left is not None and subscription.left <= until.data:
            return Drain.BEGIN_AGAIN
        watermark = subscription.window.watermark
        reached = until is None or (watermark is not None and watermark.data >= until.data)
        running = any(image.claim is not None or image.handled is not None for image in images)
        if not reached and subscription.lost and not subscription.window.count:
            raise _lost(options, takeover, subscription.name)
        done = reached and not subscription.window.count
        idle = not running and subscription.is_idle
        found.append((Drain.DONE if idle else Drain.RUNNING) if done else Drain.READING)
    return min(found, key=lambda drain: drain.value, default=Drain.DONE)


def end_dead_claims(store: Store, subscriptions: Iterable[Subscription]) -> None:
    """End the claims that have lapsed, once there is nothing left to dispatch in the old layout."""
    for subscription in subscriptions:
        for tracker in subscription.trackers.values():
            image = tracker.image
            if tracker.won and image.claim is not None and image.handled is None and not image.live:
                store.partitions.clear_impossible_claim(tracker.partition_id, image.fence, image.claim["until"])


def _mark(image: Image) -> Mark:
    token = dict(image.token or {})
    return Mark(token, image.data, time_of_token(token, None))


def flip(store: Store, renewal: Renewal, takeover: Takeover, subscriptions: Iterable[Subscription]) -> None:
    """
    Put the new layout in force.

    Raises:
        LeaseLostError: the term ended before the flip; nothing has changed.
    """
    layout = Layout(takeover.layout.generation + 1, takeover.wanted.partitions, takeover.wanted.keys)
    _prepare(store, layout, takeover.version, list(subscriptions))
    if not store.leases.set_layout(renewal.term, layout):
        raise LeaseLostError
    store.partitions.close_others(layout.generation, takeover.version)
    logger.warning(
        "partition layout changed: generation %d, %d partitions",
        layout.generation,
        layout.partitions,
        extra={"event": "layout_changed"},
    )


def _prepare(store: Store, layout: Layout, version: int, subscriptions: Sequence[Subscription]) -> None:
    """
    Make the new partitions of all subscriptions, all of them mine.

    A listener that wakes in between may put its own there, at an older place; then it is done again. Once all
    are mine, nobody can get in between: what is there is not prepared again.
    """
    marks = {subscription.name: subscription.window.watermark for subscription in subscriptions}
    positions = {name: mark.token if mark is not None else None for name, mark in marks.items()}
    mine = {(name, index): version for name in marks for index in range(layout.partitions)}
    for _ in range(_ROUNDS):
        store.partitions.discard(marks, layout.generation, version)
        if any(image.epoch > version for image in store.partitions.of(marks, layout.generation)):
            break
        store.partitions.prepare(positions, layout.generation, layout.partitions, version)
        made = store.partitions.of(marks, layout.generation)
        if {(image.subscription, image.index): image.epoch for image in made} == mine:
            return
    raise LeaseLostError
