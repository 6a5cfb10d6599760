"""
Taking over: the first thing a new term does, before it reads or dispatches.

In this order, each step safe to repeat after a crash:

1. subscriptions, then snapshots, then partitions are raised to the new version. From then on no message of an older
   term can claim. A larger epoch (after a rewind, or a lease that was restored from a backup) raises the lease's
   version above it, and the step begins again. Each is one write and one read for all handlers, and of bulk
   writes it does not matter where one was interrupted: what they made is read afterwards, by majority. A partition that
   an open transaction has locked is left out: see `LockedPartitions`.
2. the layout of each subscription is compared with the options. Where they ask for another one, this term begins
   under the old one, and changes it (`repartitioning`).
3. the start is pinned where there is none (`starts`).
4. the undeliverable changes that are stored and will be read again are read, so that each keeps its partition.

The partition rule of a handler is that of its code, as a rule. After `partition_by` was changed it is the one before,
until the handler has other partitions (`repartitioning`): what is under way in the old ones belongs to them by that one
alone. If the old rule is not registered any more, the handler is led, but stopped: nothing more is read for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.handlers import Handler, token_seconds
from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.starts import Start, find_starts
from mongo_celery.bridge.listener.subscription import Subscription, TermFacts, make_partitions
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
_LOCKED_PAUSE = 0.5  # they are tried with each sweep, unless a slow server has taken most of the time between two
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class Takeover:
    """
    The findings of a take-over.

    Attributes:
        layouts: under which this term begins, by subscription.
        wanted: the layouts of the options, with the generation that they would have. The one in force where that is
            alike.
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
        """The subscriptions whose layout is to change."""
        return [name for name, layout in self.layouts.items() if layout is not self.wanted[name]]


def take_over(store: Store, renewal: Renewal, options: BridgeOptions, handlers: Sequence[Handler]) -> Takeover:
    """
    Win every subscription and partition for the term.

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
            "an epoch of %d is larger than version %d; raising the version",
            largest,
            version,
            extra={"event": "version_raised"},
        )
        if not renewal.raise_version(largest):
            break
    raise LeaseLostError


def list_generations(layouts: Mapping[str, Layout]) -> dict[str, int]:
    """The generations of some layouts, by subscription."""
    return {name: layout.term for name, layout in layouts.items()}


def _win_all(store: Store, layouts: Mapping[str, Layout], version: int) -> dict[str, Sequence[Image]]:
    images: dict[str, list[Image]] = {name: [] for name in layouts}
    for image in store.partitions.take_over(list_generations(layouts), version):
        images[image.subscription].append(image)
    return dict(images)


class LockedPartitions:
    """
    The partitions that a take-over could not win, because a transaction that nobody ends has written them.

    Most often its client died in the middle of a transactional handler, or while it set a change aside: this is ended
    once the claim has lapsed, anything else by the server, after `transactionLifetimeLimitSeconds`. Until then the
    partition keeps its older epoch. Messages of that term may still
    claim and commit there, in order, as they might have before the take-over. This term dispatches nothing there,
    and counts the partition as in flight, so that no watermark passes it but by what is committed.

    Args:
        store: of the bridge.
        version: of this term.
        partitions: all partitions of this term.
    """

    def __init__(self, store: Store, version: int, partitions: Iterable[Partition]) -> None:
        self._store = store
        self._version = version
        self._locked = [partition for partition in partitions if not partition.won]
        self._tried_at = time.monotonic()
        if self._locked:
            logger.warning(
                "%d partitions are locked by open transactions, among them %s: they are taken over when these end, "
                "with the claim of a worker that died, else by the server after transactionLifetimeLimitSeconds, or "
                "when a server that is too slow for all of them has answered. All others are led",
                len(self._locked),
                ", ".join(self.names[:_NAMED_MAX]),
                extra={"event": "partitions_locked", "count": len(self._locked)},
            )

    @property
    def names(self) -> list[str]:
        """The `_id`s of the partitions that are not won yet."""
        return [partition.partition_id for partition in self._locked]

    def win(self, now: float) -> list[Image]:
        """Try again, without waiting for any of them. Their images."""
        self._locked = [partition for partition in self._locked if not partition.won]
        if not self._locked or now - self._tried_at < _LOCKED_PAUSE:
            return []
        try:
            self._store.claims.end_transactions(self.names)
            images = self._store.partitions.win(self.names, self._version)
        finally:
            self._tried_at = time.monotonic()  # a slow server may have taken more than the pause for it
        won = [f"{image.subscription}/{image.index}" for image in images if image.term == self._version]
        if won:
            logger.info(
                "took over %d partitions that had been locked, among them %s",
                len(won),
                ", ".join(won[:_NAMED_MAX]),
                extra={"event": "partitions_unlocked", "count": len(won)},
            )
        return images


def find_undeliverable(
    store: Store, renewal: Renewal, takeover: Takeover, name: str, rule: Partitioner, watermark: Mark | None
) -> dict[str, int]:
    """
    Return the partitions of the undeliverable changes that are stored and will be read again, by their places.

    Args:
        name: of the subscription.
        rule: in force. By document key each change goes where it is stored, and nothing is looked up.
        watermark: from where the stream is read again. None for its start.
    """
    found: dict[str, int] = {}
    generation = takeover.layouts[name].term
    for image in () if rule.is_by_document else takeover.images[name]:
        until = max(image.spilled["to"] if image.spilled is not None else "", image.data)
        after = watermark.data if watermark is not None else ""
        if until > after:  # what is done is among them: under a corrected rule it would run elsewhere, once more
            where = store.partitions.partition_id(name, generation, image.index)
            for places in store.backlog.undeliverable(where, after, until):
                found |= dict.fromkeys(places, image.index)
                renewal.alive()
    return found


@dataclass(frozen=True, slots=True)
class Beginning:
    """
    The handlers, starts and take-over that a term begins with.

    Attributes:
        takeover: what its take-over has found.
        subscriptions: those that it leads, by name.
        starts: from where it reads, by name.
    """

    takeover: Takeover
    subscriptions: Mapping[str, Subscription]
    starts: Mapping[str, Start]

    @property
    def owed_snapshots(self) -> list[tuple[TermFacts, Timestamp]]:
        """Subscriptions that begin with snapshots, each with the start that was pinned with that."""
        starts = [(each.plan, self.starts[each.name].owed_from) for each in self.subscriptions.values()]
        return [(plan, owed_from) for plan, owed_from in starts if owed_from is not None]


def begin_term(
    wiring: Wiring, renewal: Renewal, led: Sequence[tuple[Handler, Selector]], handlers: Sequence[Handler]
) -> Beginning:
    """
    Take over, and find out from where each handler is read.

    Args:
        led: those whose changes the stream gives, each with its source and filter.
        handlers: all of the bridge.

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
    """Return the rule by which a handler's changes are spread in a layout. That of its code if it is not registered."""
    rule = handler.partitioner(options)
    if layout.key == rule.layout_key:
        return rule
    try:
        return handler.partitioner_named(layout.key.partition(":")[2], options, handlers)
    except ConfigurationError:
        return rule
