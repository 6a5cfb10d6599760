"""
Taking over: the first thing a new term does, before it reads or dispatches.

In this order, each step safe to repeat after a crash:

1. subscriptions and partitions are raised to the new version; from then on no message of an older term
   can claim. A larger epoch (after a rewind, or a lease that was restored from a backup) raises the
   lease's version above it, and the step begins again.
2. the layout is compared with the options; another layout means that this term drains the old one.
3. the start is pinned where there is none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.errors import LeaseLostError
from mongo_celery.listener.renewal import Renewal
from mongo_celery.options import BridgeOptions
from mongo_celery.partitioning import HASH_NAME
from mongo_celery.registration import Handler
from mongo_celery.state.leases import Layout, layout_of
from mongo_celery.state.partitions import Image
from mongo_celery.stream.reader import Position
from mongo_celery.stream.start import start_time
from mongo_celery.window import Mark

if TYPE_CHECKING:
    from mongo_celery.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Taken:
    """
    What a take-over found.

    Attributes:
        layout: under which this term runs.
        wanted: the layout of the options; another one than `layout` means that this term only drains.
        documents: the subscriptions' documents by name.
        images: the partitions' images by subscription.
    """

    version: int
    layout: Layout
    wanted: Layout
    documents: Mapping[str, Mapping[str, Any]]
    images: Mapping[str, Sequence[Image]]


def take_over(store: Store, renewal: Renewal, options: BridgeOptions, handlers: Sequence[Handler]) -> Taken:
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
            images[name] = store.partitions.take_over(name, layout.generation, version)
        largest = max(
            [document["epoch"] for document in documents.values()]
            + [image.epoch for found in images.values() for image in found],
        )
        if largest <= version:
            return Taken(version, layout, wanted, documents, images)
        logger.warning("an epoch of %d is larger than version %d; raising the version", largest, version)
        if not renewal.raise_version(largest):
            break
    raise LeaseLostError


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


@dataclass(frozen=True, slots=True)
class Start:
    """Where a subscription stands when a term begins."""

    time: Timestamp
    watermark: Mark | None
    fingerprint: str | None


def find_starts(
    store: Store,
    client: MongoClient[dict[str, Any]],
    renewal: Renewal,
    options: BridgeOptions,
    taken: Taken,
) -> dict[str, Start]:
    """
    The start of each subscription, pinned where it has none.

    Raises:
        LeaseLostError: the term ended meanwhile.
        AccessError: `oldest` was asked for and the oplog may not be read.
    """
    fresh = [name for name, document in taken.documents.items() if document["startAtOperationTime"] is None]
    if fresh:
        _pin(store, client, renewal, options, taken, fresh)
        documents: Mapping[str, Mapping[str, Any]] = store.subscriptions.take_over(list(taken.documents), taken.version)
    else:
        documents = taken.documents
    return {name: _start(document) for name, document in documents.items()}


def _start(document: Mapping[str, Any]) -> Start:
    token = document["resumeToken"]
    mark = Mark(token, token["_data"], document["clusterTime"]) if token else None
    if document["startAtOperationTime"] is None:
        raise LeaseLostError  # somebody else has taken the epoch meanwhile
    return Start(document["startAtOperationTime"], mark, document["fingerprint"])


def _pin(
    store: Store,
    client: MongoClient[dict[str, Any]],
    renewal: Renewal,
    options: BridgeOptions,
    taken: Taken,
    fresh: Sequence[str],
) -> None:
    lease = renewal.term.document
    pinned = lease["startAtOperationTime"]
    if pinned is None:
        pinned = store.leases.pin_start(renewal.term, start_time(client, options.start_from))
        if pinned is None:
            raise LeaseLostError
        age = max(0, int(time.time()) - pinned.time)
        logger.warning(
            "bridge %s starts for the first time, at %s (%s, %d s ago)",
            options.name,
            pinned.as_datetime().isoformat(),
            options.start_from if isinstance(options.start_from, str) else "as given",
            age,
            extra={"event": "start_pinned", "age_seconds": age},
        )
    position = lease if lease["resumeToken"] else None
    start = (position or {}).get("clusterTime") or pinned
    for name in fresh:
        store.subscriptions.pin(name, taken.version, start, position)
        if position is not None:
            logger.warning(
                "handler %s is new: it begins where the bridge stands, at %s",
                name,
                start.as_datetime().isoformat(),
                extra={"event": "subscription_added"},
            )


def open_position(starts: Mapping[str, Start], fingerprint: str) -> Position:
    """
    Where the stream is opened: at the smallest position of all subscriptions.

    After its token when the token came from a stream with the same fingerprint, else at its cluster time.
    """

    def place(start: Start) -> tuple[Timestamp, str]:
        if start.watermark is None:
            return start.time, ""
        return start.watermark.cluster_time or start.time, start.watermark.data

    smallest = min(starts.values(), key=place)
    if smallest.watermark is None:
        return Position(None, smallest.time)
    time_ = smallest.watermark.cluster_time or smallest.time
    return Position(smallest.watermark.token if smallest.fingerprint == fingerprint else None, time_)
