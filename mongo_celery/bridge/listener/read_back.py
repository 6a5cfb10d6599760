"""
Reading stored changes back: the next ones of each partition that runs from them, a batch at a time.

Only partitions that flow are read for. What stands costs no memory: what was read of it before is forgotten, however
large, once its next run cannot go out soon, or has been out for `spill_after`. All reads are made in the session that
has read the partitions' images, so that what it has seen as marked is there, whoever is the primary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pymongo.client_session import ClientSession

from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.listener.spilled import Limit, Spilled
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.options import BridgeOptions

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_TURN_SECONDS = 0.1
_SOON_SECONDS = 1.0
_SOON_AGAIN_SECONDS = 0.1
_AGAIN_SECONDS = 1.0
_COMPLAINT_SECONDS = 30.0
_BATCH = 100
_BATCH_BYTES = 1 << 20


class ReadBack:
    """
    The reading back of one term.

    Args:
        session: in which the images are read.
        share: bytes of memory that each partition is sure of.
    """

    def __init__(self, store: Store, options: BridgeOptions, session: ClientSession, share: int) -> None:
        self._store = store
        self._options = options
        self._session = session
        self._share = share
        self._not_before: dict[str, float] = {}
        self._complained_at: dict[str, float] = {}

    def read(self, subscriptions: Iterable[Subscription], now: float, *, is_full: bool) -> bool:
        """
        Read what partitions need next, within a bound of time.

        Args:
            is_full: whether memory has room for nothing but the next run of each.

        Returns:
            Whether all was read.

        Raises:
            PyMongoError: the state database gave no answer; to be tried again.
        """
        until = time.monotonic() + _TURN_SECONDS
        wanting = []
        for subscription in subscriptions:
            for partition, spilled in subscription.spilled:
                if self._stands(partition, now):
                    if spilled.ahead:
                        spilled.forget(partition.image.data)
                elif self._is_wanting(subscription, partition, spilled, now, is_full=is_full):
                    wanting.append((subscription, partition, spilled))
        for subscription, partition, spilled in sorted(wanting, key=lambda each: len(each[2].ahead)):
            self._read(subscription, partition, spilled, is_full=is_full)
            if time.monotonic() > until:
                return False
        return True

    def _stands(self, partition: Partition, now: float) -> bool:
        """Whether its next run cannot go out soon, or is out and has been for long."""
        if partition.in_flight is not None:
            return now - partition.in_flight.sent_at >= self._options.spill_after
        return partition.image.state != "flowing" or partition.ready_at > now + _SOON_SECONDS

    def _is_wanting(
        self, subscription: Subscription, partition: Partition, spilled: Spilled, now: float, *, is_full: bool
    ) -> bool:
        not_before = self._not_before.get(partition.partition_id, 0.0)
        if not partition.won or partition.image.state != "flowing" or now < not_before:
            return False
        has_room = not is_full and spilled.size < self._share
        return spilled.wants(subscription.readable(partition), 2 * subscription.run_size if has_room else 1)

    def _read(self, subscription: Subscription, partition: Partition, spilled: Spilled, *, is_full: bool) -> None:
        limit = subscription.readable(partition)
        count, size = self._batch(partition, spilled, subscription.run_size, is_full=is_full)
        found = self._store.spill.read(
            partition.partition_id,
            spilled.read_to,
            limit.place,
            limit=count,
            max_bytes=size,
            inclusive=limit.inclusive,
            session=self._session,
        )
        if not found and not spilled.ahead and limit == Limit(spilled.to, inclusive=True):
            self._find_missing(partition, spilled)
            return
        subscription.found(partition, found, limit)
        if not found:  # the limit moves with every event that is read
            self._not_before[partition.partition_id] = time.monotonic() + _SOON_AGAIN_SECONDS

    def _batch(self, partition: Partition, spilled: Spilled, run_size: int, *, is_full: bool) -> tuple[int, int]:
        """How many changes to read, and of how many bytes: a run that may go out now, whole, else within the share."""
        share = min(_BATCH_BYTES, self._share)
        if is_full:
            return run_size, share
        if partition.in_flight is None and not spilled.ahead and self._options.run_bytes > share:
            return run_size, self._options.run_bytes
        return max(_BATCH, 2 * run_size), share - spilled.size

    def _find_missing(self, partition: Partition, spilled: Spilled) -> None:
        """
        Nothing is stored although the mark promises it: say so, unless the partition has gone on meanwhile.

        The mark stays. Nobody of ours removes what is not committed, so a person has to look.
        """
        now = time.monotonic()
        self._not_before[partition.partition_id] = now + _AGAIN_SECONDS
        (image,) = self._store.partitions.look([partition.partition_id], self._session)
        if image.data != partition.image.data or image.spilled is None:
            return
        spilled.missing = True
        if now - self._complained_at.get(partition.partition_id, -_COMPLAINT_SECONDS) < _COMPLAINT_SECONDS:
            return
        self._complained_at[partition.partition_id] = now
        logger.error(
            "stored changes of partition %s are missing: it is marked up to %s and committed up to %s, and nothing "
            "lies between. It stands until they are there: restore the collection spill from a backup. Where there is "
            "none they are lost: end the listener, set `spilled` of the partition's document to null, start it again, "
            "and make up for them by hand",
            partition.partition_id,
            spilled.to,
            image.data or "nothing",
            extra={"event": "stored_changes_missing", "partition": partition.partition_id},
        )
