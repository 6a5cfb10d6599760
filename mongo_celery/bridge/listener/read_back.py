"""
Find the next stored changes of each partition that runs from them, in batches, without their bytes.

All reads use the session that has read the partitions' images, so that its marked changes are visible on any primary.
The reader forgets a blocked partition's changes, and reads them again when the partition runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pymongo.client_session import ClientSession

from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.listener.stored_range import StoredRange
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.errors import LeaseLostError

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_TURN_SECONDS = 0.1
_SOON_SECONDS = 1.0
_SOON_AGAIN_SECONDS = 0.1
_AGAIN_SECONDS = 1.0
_BATCH = 100


class ReadBack:
    """
    The reading of stored changes in one term.

    Args:
        session: the session of the images.
    """

    def __init__(self, store: Store, session: ClientSession) -> None:
        self._store = store
        self._session = session

    def read(self, subscriptions: Iterable[Subscription], now: float) -> bool:
        """
        Find the next changes for partitions, in bounded time.

        Returns:
            True if all were found.

        Raises:
            LeaseLostError: a partition was removed, so the term has ended.
            PyMongoError: the state database gave no answer. Try again.
        """
        until = time.monotonic() + _TURN_SECONDS
        wanting = []
        for subscription in subscriptions:
            for partition, backlog in subscription.backlogs:
                if _is_blocked(partition, now):
                    backlog.forget(partition.image.data)
                elif partition.won and now >= backlog.read_at and len(backlog.ahead) < subscription.run_size:
                    wanting.append((subscription, partition, backlog))
        for subscription, partition, backlog in sorted(wanting, key=lambda each: len(each[2].ahead)):
            self._read(subscription, partition, backlog)
            if time.monotonic() > until:
                return False
        return True

    def _read(self, subscription: Subscription, partition: Partition, backlog: StoredRange) -> None:
        until = subscription.last_readable_place(partition)
        if until <= backlog.read_to:
            return
        limit = max(_BATCH, 2 * subscription.run_size)
        found = self._store.backlog.outline(partition.partition_id, backlog.read_to, until, limit, self._session)
        if found:
            subscription.add_stored(partition, [self._judge(subscription, partition, each) for each in found])
            return
        backlog.read_at = time.monotonic() + _SOON_AGAIN_SECONDS
        if until < backlog.to:
            backlog.read_to = until
        elif not backlog.ahead:
            self._find_missing(partition, backlog)

    def _judge(self, subscription: Subscription, partition: Partition, change: StoredChange) -> StoredChange:
        """Check from its bytes whether an undeliverable change is deliverable now."""
        if change.refusal is None or change.refusal.lasts:
            return change
        whole = self._store.backlog.fetch(partition.partition_id, [change.data]).get(change.data, change)
        return replace(subscription.admission.judge_again(whole), raw=b"")

    def _find_missing(self, partition: Partition, backlog: StoredRange) -> None:
        """
        Report that nothing is stored although the mark promises it, unless the partition has continued meanwhile.

        The mark stays. This package only removes committed changes, so a person must check.
        """
        backlog.read_at = time.monotonic() + _AGAIN_SECONDS
        found = self._store.partitions.look([partition.partition_id], self._session)
        if not found:  # a later term has removed it, or a person
            raise LeaseLostError
        image = found[0]
        if image.data != partition.image.data or image.stored is None:
            return
        was_missing, backlog.missing = backlog.missing, True
        if was_missing:
            return
        logger.error(
            "partition %s is blocked: its stored changes between the resume tokens %s and %s are missing. Restore the "
            "collection backlog of the state database from a backup. Without one these changes are lost. Then stop all "
            "listeners, run `db.partitions.updateOne({_id: %s}, {$unset: {stored: 1}})` in that database, and start a "
            "listener. Repair the effects of the lost changes manually",
            partition.place,
            image.data or "(none)",
            backlog.to,
            json.dumps(partition.partition_id),
            extra={"event": "stored_changes_missing", "partition": partition.partition_id},
        )


def _is_blocked(partition: Partition, now: float) -> bool:
    """Return True if the next run of a partition cannot be sent soon."""
    is_late = partition.in_flight is None and partition.ready_at > now + _SOON_SECONDS
    return partition.image.state != "flowing" or is_late
