"""
Taking over: the first thing a new term does, before it reads or dispatches.

In this order, each step safe to repeat after a crash:

1. subscriptions and partitions are raised to the new version; from then on no message of an older term
   can claim. A larger epoch (after a rewind, or a lease that was restored from a backup) raises the
   lease's version above it, and the step begins again. All generations but the one in force are closed.
2. the layout is compared with the options; another layout means that this term drains the old one.
3. the start is pinned where there is none: in the lease, before the first read, so that a crash before the first
   commit loses nothing. `oldest` reads the first entry of `local.oplog.rs`, whatever it is: on a young set that is
   the no-op of the set's initiation, from which everything ever written follows, also a write that races the
   bridge's first start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import HASH_NAME
from mongo_celery.bridge.state.leases import Layout, layout_of
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import name_in
from mongo_celery.bridge.stream.reader import Position
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import ConfigurationError, LeaseLostError
from mongo_celery.mongo.oplog import operation_time, read_oplog, time_of_token

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


@dataclass(frozen=True, slots=True)
class Start:
    """Where a subscription stands when a term begins."""

    time: Timestamp
    watermark: Mark | None
    fingerprint: str | None

    @property
    def place(self) -> tuple[Timestamp, str]:
        """Where it must be read from: comparable, by cluster time and then by token."""
        if self.watermark is None:
            return self.time, ""
        return self.watermark.cluster_time or self.time, self.watermark.data


def find_starts(
    store: Store,
    client: MongoClient[dict[str, Any]],
    renewal: Renewal,
    options: BridgeOptions,
    takeover: Takeover,
) -> dict[str, Start]:
    """
    The start of each subscription, pinned where it has none.

    Raises:
        LeaseLostError: the term ended meanwhile.
        AccessError: `oldest` was asked for and the oplog may not be read.
    """
    fresh = [name for name, document in takeover.documents.items() if document["startAtOperationTime"] is None]
    if fresh:
        _pin(store, client, renewal, options, takeover, fresh)
        return read_starts(store, list(takeover.documents), takeover.version)
    return {name: _start(document, takeover.version) for name, document in takeover.documents.items()}


def read_starts(store: Store, names: Sequence[str], version: int) -> dict[str, Start]:
    """
    The starts of some subscriptions, as they are stored now.

    Raises:
        LeaseLostError: a later term has taken one of them.
    """
    documents = store.subscriptions.take_over(names, version)
    return {name: _start(document, version) for name, document in documents.items()}


def _start(document: Mapping[str, Any], version: int) -> Start:
    start, token, time_ = document["startAtOperationTime"], document["resumeToken"], document["clusterTime"]
    if start is None or document["epoch"] != version:
        raise LeaseLostError  # somebody else has taken the epoch meanwhile
    if token is None or (time_ is not None and time_ < start):  # before its start nothing is owed
        return Start(start, None, document["fingerprint"])
    return Start(start, Mark(token, token_data(token), time_), document["fingerprint"])


def _pin(
    store: Store,
    client: MongoClient[dict[str, Any]],
    renewal: Renewal,
    options: BridgeOptions,
    takeover: Takeover,
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
    position = lease if lease["resumeToken"] else given_position(pinned, options.start_from)
    start = (position or {}).get("clusterTime") or pinned
    for name in fresh:
        store.subscriptions.pin(name, takeover.version, start, position)
        if position is lease:
            logger.warning(
                "handler %s is new: it begins where the bridge stands, at %s",
                name,
                start.as_datetime().isoformat(),
                extra={"event": "subscription_added"},
            )


def given_position(pinned: Timestamp, start_from: object) -> Mapping[str, Any] | None:
    """
    The position that `start_from` gives as a resume token, for a bridge that has none yet.

    Only while the start that is pinned is that of the token: a later option changes nothing, as for other starts. The
    token may come from any stream, so this one is opened at its cluster time, and what is not behind it is left out.
    """
    if not isinstance(start_from, Mapping) or time_of_token(start_from, None) != pinned:
        return None
    return {"resumeToken": dict(start_from), "clusterTime": pinned}


def open_position(starts: Mapping[str, Start], fingerprint: str) -> Position:
    """
    Where the stream is opened: at the smallest position of all subscriptions.

    After its token when the token came from a stream with the same fingerprint, else at its cluster time.
    """
    smallest = min(starts.values(), key=lambda start: start.place)
    mark = smallest.watermark
    return Position(mark.token if mark is not None and smallest.fingerprint == fingerprint else None, smallest.place[0])


def start_time(
    client: MongoClient[dict[str, Any]], start_from: str | Timestamp | datetime | Mapping[str, Any]
) -> Timestamp:
    """
    The cluster time that an option `start_from` means at this moment.

    Raises:
        ConfigurationError: a resume token that no stream of this cluster can have given yet.
        AccessError: `oldest` was asked for and the oplog may not be read.
    """
    if isinstance(start_from, Mapping):
        return _time_of_given(start_from, operation_time(client))
    if isinstance(start_from, Timestamp):
        return start_from
    if isinstance(start_from, datetime):
        return Timestamp(start_from, 0)
    if start_from == "now":
        now = operation_time(client)
        return Timestamp(now.time, now.inc + 1)
    return read_oplog(client).first


def _time_of_given(token: Mapping[str, Any], now: Timestamp) -> Timestamp:
    """A stream that is opened ahead of the cluster's time would wait for it, and pass over everything until then."""
    time_ = time_of_token(token, None)
    if time_ is None or time_.time > now.time:
        raise ConfigurationError(
            f"start_from={dict(token)!r} lies ahead of the cluster's time: the token is from another cluster. "
            "Give one of this cluster, or 'oldest', 'now' or a time.",
        )
    return time_
