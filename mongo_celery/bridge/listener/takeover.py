"""
Taking over: the first thing a new term does, before it reads or dispatches.

In this order, each step safe to repeat after a crash:

1. subscriptions and partitions are raised to the new version; from then on no message of an older term
   can claim. A larger epoch (after a rewind, or a lease that was restored from a backup) raises the
   lease's version above it, and the step begins again. All generations but the one in force are closed. Each
   is one write and one read for all handlers, and of bulk writes it does not matter where one was interrupted:
   what they made is read afterwards, by majority. A partition that an open transaction has locked is left out:
   see `LockedPartitions`.
2. the layout is compared with the options; another layout means that this term drains the old one.
3. the start is pinned where there is none (`starts`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.tracker import Tracker
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import HASH_NAME
from mongo_celery.bridge.state.leases import Layout, layout_of
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import name_in
from mongo_celery.errors import LeaseLostError

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_ROUNDS = 10
_LOCKED_PAUSE = 1.0
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class OrphanedSubscription:
    """A subscription that has no handler in this process, and its partitions."""

    name: str
    document: Mapping[str, Any]
    images: Sequence[Image]


@dataclass(frozen=True, slots=True)
class Takeover:
    """
    What a take-over found.

    Attributes:
        layout: under which this term runs.
        wanted: the layout of the options; another one than `layout` means that this term only drains.
        documents: the subscriptions' documents by name.
        images: the partitions' images by subscription.
        orphans: subscriptions without a handler, if this term drains the old layout; nothing can begin there any
            more, and what runs may finish.
    """

    version: int
    layout: Layout
    wanted: Layout
    documents: Mapping[str, Mapping[str, Any]]
    images: Mapping[str, Sequence[Image]]
    orphans: Sequence[OrphanedSubscription] = ()


def take_over(store: Store, renewal: Renewal, options: BridgeOptions, handlers: Sequence[Handler]) -> Takeover:
    """
    Win every subscription and partition for the term.

    Raises:
        LeaseLostError: the term ended meanwhile.
    """
    stored = layout_of(renewal.term.document)
    wanted = _wanted_layout(stored, options, handlers)
    layout = wanted if stored is None or _same(stored, wanted) else stored
    if layout is wanted and stored != wanted and not store.leases.set_layout(renewal.term, wanted):
        raise LeaseLostError
    names = [handler.name for handler in handlers]
    for _ in range(_ROUNDS):
        version = renewal.term.version
        documents = store.subscriptions.take_over(names, version)
        positions = {name: documents[name]["resumeToken"] for name in names}
        store.partitions.prepare(positions, layout.generation, layout.partitions, version)
        images = _won(store, names, layout, version)
        orphans = [] if layout is wanted else _orphans(store, names, layout, version)
        largest = max([store.partitions.largest_epoch()] + [document["epoch"] for document in documents.values()])
        if largest <= version:
            store.partitions.close_others(layout.generation, version)
            return Takeover(version, layout, wanted, documents, images, orphans)
        logger.warning(
            "an epoch of %d is larger than version %d; raising the version",
            largest,
            version,
            extra={"event": "version_raised"},
        )
        if not renewal.raise_version(largest):
            break
    raise LeaseLostError


def _won(store: Store, names: Sequence[str], layout: Layout, version: int) -> dict[str, Sequence[Image]]:
    """A listener with other options, whose flip came too late, may have left partitions that belong to nobody."""
    images: dict[str, list[Image]] = {name: [] for name in names}
    for image in store.partitions.take_over(names, layout.generation, version):
        if image.index < layout.partitions:
            images[image.subscription].append(image)
    return dict(images)


def _orphans(store: Store, names: Sequence[str], layout: Layout, version: int) -> list[OrphanedSubscription]:
    documents = {name_in(document): document for document in store.subscriptions.read_all()}
    left = [name for name in documents if name not in names]
    images = _won(store, left, layout, version)
    return [OrphanedSubscription(name, documents[name], images[name]) for name in left]


class LockedPartitions:
    """
    The partitions that a take-over could not win, because a transaction that nobody ends has written them.

    Most often its client died in the middle of a transactional handler; the server ends it after
    `transactionLifetimeLimitSeconds`. Until then the partition keeps its older epoch. Messages of that term may still
    claim and commit there, in order, as they might have before the take-over; this term dispatches nothing there,
    and its tracker counts the partition as outstanding, so that no watermark passes it but by what is committed.

    Args:
        store: of the bridge.
        version: of this term.
        trackers: all partitions of this term.
    """

    def __init__(self, store: Store, version: int, trackers: Iterable[Tracker]) -> None:
        self._store = store
        self._version = version
        self._locked = [tracker for tracker in trackers if not tracker.won]
        self._tried_at = time.monotonic()
        if self._locked:
            logger.warning(
                "%d partitions are locked by open transactions, among them %s: they are taken over when these end, "
                "which the server does after transactionLifetimeLimitSeconds at the latest, or when a server that is "
                "too slow for all of them has answered. All others are led",
                len(self._locked),
                ", ".join(self.names[:_NAMED_MAX]),
                extra={"event": "partitions_locked", "count": len(self._locked)},
            )

    @property
    def names(self) -> list[str]:
        """The `_id`s of the partitions that are not won yet."""
        return [tracker.partition_id for tracker in self._locked]

    def win(self, now: float) -> list[Image]:
        """Once a second, try again, without waiting for any of them; their images."""
        self._locked = [tracker for tracker in self._locked if not tracker.won]
        if not self._locked or now - self._tried_at < _LOCKED_PAUSE:
            return []
        try:
            images = self._store.partitions.win(self.names, self._version)
        finally:
            self._tried_at = time.monotonic()  # a slow server may have taken more than the pause for it
        won = [f"{image.subscription}/{image.index}" for image in images if image.epoch == self._version]
        if won:
            logger.info(
                "took over %d partitions that had been locked, among them %s",
                len(won),
                ", ".join(won[:_NAMED_MAX]),
                extra={"event": "partitions_unlocked", "count": len(won)},
            )
        return images


def _wanted_layout(stored: Layout | None, options: BridgeOptions, handlers: Sequence[Handler]) -> Layout:
    """Keys of subscriptions that are not registered now are kept: they may come back."""
    keys = {handler.name: f"{HASH_NAME}:{handler.partitioner(options).name}" for handler in handlers}
    kept = dict(stored.keys) if stored else {}
    return Layout(stored.generation if stored else 0, options.partitions, {**kept, **keys})


def _same(stored: Layout, wanted: Layout) -> bool:
    """Whether every subscription that both know is spread alike."""
    return stored.partitions == wanted.partitions and all(
        wanted.keys[name] == key for name, key in stored.keys.items() if name in wanted.keys
    )
