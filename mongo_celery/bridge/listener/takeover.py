"""
Taking over: the first thing a new term does, before it reads or dispatches.

In this order, each step safe to repeat after a crash:

1. subscriptions and partitions are raised to the new version; from then on no message of an older term
   can claim. A larger epoch (after a rewind, or a lease that was restored from a backup) raises the
   lease's version above it, and the step begins again. All generations but the one in force are closed.
2. the layout is compared with the options; another layout means that this term drains the old one.
3. the start is pinned where there is none (`starts`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.renewal import Renewal
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
        images: dict[str, Sequence[Image]] = {}
        for name in names:
            token = documents[name]["resumeToken"]
            store.partitions.prepare(name, layout.generation, layout.partitions, version, token)
            images[name] = _won(store, name, layout, version)
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


def _won(store: Store, name: str, layout: Layout, version: int) -> list[Image]:
    """A listener with other options, whose flip came too late, may have left partitions that belong to nobody."""
    images = store.partitions.take_over(name, layout.generation, version)
    return [image for image in images if image.index < layout.partitions]


def _orphans(store: Store, names: Sequence[str], layout: Layout, version: int) -> list[OrphanedSubscription]:
    documents = {name_in(document): document for document in store.subscriptions.read_all()}
    return [
        OrphanedSubscription(name, document, _won(store, name, layout, version))
        for name, document in documents.items()
        if name not in names
    ]


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
