"""
Taking over: the first work of a new term, before it reads or dispatches.

Each step is safe to repeat after a crash. In this order:

1. subscriptions, then snapshots, then partitions are raised to the new version. From then on no message of an older
   term can claim. If a partition's term is larger (after a rewind, or because the lease was restored from a backup),
   the lease's version is raised above it, and the step begins again. Each is one write and one read for all handlers.
   A bulk write may be interrupted anywhere, because its result is then read by majority. A partition that an open
   transaction has locked is skipped: see `LockedPartitions` of the poller.
2. each subscription's partitioning is compared with the options. If they differ, this term begins with the old one, and
   changes it (`repartitioning`).
3. a missing start is pinned (`starts`).
4. the stored undeliverable changes that will be read again are read, so that each keeps its partition.

A handler's partition rule usually comes from its code. After a change of `partition_by` the old rule applies until the
handler has new partitions (`repartitioning`), because it assigned the changes in the old ones. If the old rule is no
longer registered, the handler is led but stopped: nothing more is read for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.handlers import Handler, token_seconds
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.starts import Start, find_starts
from mongo_celery.bridge.listener.subscription import Subscription, make_partitions
from mongo_celery.bridge.listener.term_facts import TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import Partitioner
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import Layout, parse_layout
from mongo_celery.errors import ConfigurationError, LeaseLostError

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.state.store import Store
    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.window import Mark
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Takeover:
    """
    The results of a take-over.

    Attributes:
        layouts: the partitionings with which this term begins, by subscription.
        wanted: the partitionings of the options, with their future term, or the present ones if these are equivalent.
        documents: the subscriptions' documents by name.
        images: the partitions' images by subscription.
    """

    version: int
    layouts: Mapping[str, Layout]
    wanted: Mapping[str, Layout]
    documents: Mapping[str, Mapping[str, Any]]
    images: Mapping[str, Sequence[Image]]

    @property
    def moving(self) -> list[str]:
        """The subscriptions whose partitioning will change."""
        return [name for name, layout in self.layouts.items() if layout is not self.wanted[name]]


def take_over(store: Store, renewal: Renewal, options: BridgeOptions, handlers: Sequence[Handler]) -> Takeover:
    """
    Take over every subscription and partition for the term.

    Raises:
        LeaseLostError: the term ended meanwhile.
    """
    for _ in range(_ROUNDS):
        version = renewal.term.number
        keys = {handler.name: handler.partitioner(options).layout_key for handler in handlers}
        wanted = {name: Layout(version, options.partitions, key) for name, key in keys.items()}
        documents = store.subscriptions.take_over(wanted, version)
        layouts = {name: parse_layout(documents[name]) for name in wanted}
        newest = store.snapshots.take_over(version)  # before any partition: see `state/snapshots.py`
        store.partitions.prepare({name: documents[name].get("resumeToken") for name in wanted}, layouts, version)
        images = _win_all(store, layouts, version)
        largest = max([newest, store.partitions.largest_term()] + [document["term"] for document in documents.values()])
        if largest <= version:
            wanted = {
                name: layouts[name] if layouts[name].is_equivalent(each) else each for name, each in wanted.items()
            }
            return Takeover(version, layouts, wanted, documents, images)
        logger.warning(
            "the state has a later term (%d) than the lease (%d), so the listener raises the lease's term",
            largest,
            version,
            extra={"event": "version_raised"},
        )
        if not renewal.raise_version(largest):
            break
    raise LeaseLostError


def list_partitioning_terms(layouts: Mapping[str, Layout]) -> dict[str, int]:
    """Return the terms of some partitionings, by handler."""
    return {name: layout.term for name, layout in layouts.items()}


def _win_all(store: Store, layouts: Mapping[str, Layout], version: int) -> dict[str, Sequence[Image]]:
    images: dict[str, list[Image]] = {name: [] for name in layouts}
    for image in store.partitions.take_over(list_partitioning_terms(layouts), version):
        images[image.subscription].append(image)
    return dict(images)


def find_undeliverable(
    store: Store, renewal: Renewal, takeover: Takeover, name: str, rule: Partitioner, watermark: Mark | None
) -> dict[str, int]:
    """
    Return the partitions of the stored undeliverable changes that will be read again, by place.

    Args:
        name: the name of the subscription.
        rule: the partition rule in force. If it is the document key, the result is empty, because each change goes to
            the partition that stores it anyway.
        watermark: the place from which the stream is read again. None for its start.
    """
    found: dict[str, int] = {}
    partitioning = takeover.layouts[name].term
    for image in () if rule.is_by_document else takeover.images[name]:
        until = max(image.stored["to"] if image.stored is not None else "", image.data)
        after = watermark.data if watermark is not None else ""
        if until > after:  # includes finished ones: under a corrected rule they would run again elsewhere
            where = store.partitions.partition_id(name, partitioning, image.index)
            for places in store.backlog.undeliverable(where, after, until):
                found |= dict.fromkeys(places, image.index)
                renewal.alive()
    return found


@dataclass(frozen=True, slots=True)
class Beginning:
    """
    The handlers, starts and take-over at the beginning of a term.

    Attributes:
        takeover: the result of the take-over.
        subscriptions: the subscriptions that the term leads, by name.
        starts: the places to read from, by name.
    """

    takeover: Takeover
    subscriptions: Mapping[str, Subscription]
    starts: Mapping[str, Start]

    @property
    def owed_snapshots(self) -> list[tuple[TermFacts, Timestamp]]:
        """Return subscriptions that begin with snapshots, each with the start pinned for that."""
        starts = [(each.plan, self.starts[each.name].owed_from) for each in self.subscriptions.values()]
        return [(plan, owed_from) for plan, owed_from in starts if owed_from is not None]


def begin_term(
    wiring: Wiring, renewal: Renewal, led: Sequence[tuple[Handler, Selector]], handlers: Sequence[Handler]
) -> Beginning:
    """
    Take over, and find the place from which each handler is read.

    Args:
        led: the handlers in the stream, each with its source and filter.
        handlers: all handlers of the bridge.

    Raises:
        LeaseLostError: the term has ended.
    """
    store, options = wiring.store, wiring.options
    takeover = take_over(store, renewal, options, handlers)
    renewal.alive()
    starts = find_starts(store, wiring.client, renewal, options, handlers, takeover.documents)
    subscriptions: dict[str, Subscription] = {}
    for handler, selector in led:
        name = handler.name
        start, layout = starts[name], takeover.layouts[name]
        rule = find_rule(handler, layout, options, handlers)
        plan = TermFacts(
            handler,
            selector,
            rule,
            layout,
            takeover.version,
            start.time,
            start.watermark,
            find_undeliverable(store, renewal, takeover, name, rule, start.watermark),
            token_seconds=token_seconds(wiring.app, handler.task_name),
        )
        images = takeover.images[name]
        partitions = make_partitions(images, store.partitions, layout.term, takeover.version, options)
        subscriptions[name] = Subscription(options, plan, partitions)
    renewal.alive()
    return Beginning(takeover, subscriptions, {name: starts[name] for name in subscriptions})


def find_rule(handler: Handler, layout: Layout, options: BridgeOptions, handlers: Sequence[Handler]) -> Partitioner:
    """Return the rule of a handler in a partitioning. If it is not registered, return the rule of its code."""
    rule = handler.partitioner(options)
    if layout.key == rule.layout_key:
        return rule
    try:
        return handler.partitioner_named(layout.key.partition(":")[2], options, handlers)
    except ConfigurationError:
        return rule
