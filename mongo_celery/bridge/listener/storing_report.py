"""The report of stored changes: logged once when they begin, end or near their limit, and shown by `status`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.state.claims import name_place
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import NEAR

logger = logging.getLogger("mongo_celery.listener")

_MISSING_MAX = 50
_NOT_STORED_MAX = 10


class StoringReport:
    """
    One term's report of stored changes.

    Args:
        bound: limit of the stored bytes.
    """

    def __init__(self, bound: int, line: CommandLine) -> None:
        self._freeing = (
            "Resume, retry or skip the blocked partitions, or raise spill_bytes. To see them: "
            f"`{line.changes('status', '--all')}`"
        )
        self._bound = bound
        self._begun = set[str]()
        self._throttle = LogThrottle()
        self._is_near = False

    def note_begun(self, partition: Partition, reason: str) -> None:
        """Log that changes of a partition were stored, if they are its first ones."""
        if partition.partition_id in self._begun or partition.image.stored is not None:
            return
        self._begun.add(partition.partition_id)
        where, extra = partition.place, {"partition": partition.partition_id, "reason": reason}
        sentence = (
            "from now on, changes of partition %s are stored in the state database (%s). Other partitions continue"
        )
        if partition.image.state != "flowing":
            logger.warning(sentence, where, reason, extra={"event": "spill_begun", **extra})
        else:
            logger.info(sentence, where, reason, extra={"event": "spill_begun", **extra})

    def note_ended(self, partition_id: str) -> None:
        """Log that a partition runs from the stream without a mark, if it ran from stored changes before."""
        if partition_id in self._begun:
            self._begun.discard(partition_id)
            logger.info(
                "partition %s has handled its stored changes and gets changes from the stream again",
                name_place(partition_id),
                extra={"event": "spill_ended", "partition": partition_id},
            )

    def note_size(self, size: int) -> None:
        """Log once that stored changes are near their limit, until they fall below it again."""
        was_near, self._is_near = self._is_near, size >= NEAR * self._bound
        if self._is_near and not was_near:
            logger.warning(
                "stored changes take %d of the %d bytes that spill_bytes allows. At this limit the listener stops "
                "storing, and then reading. %s",
                size,
                self._bound,
                self._freeing,
                extra={"event": "spill_bound", "bytes": size},
            )

    def complain(self, partition: Partition, size: int) -> str:
        """Return the sentence about a change that the limit keeps from being stored. Log it from time to time."""
        first = partition.queue.first
        wanted = first.weight if first is not None else 0
        sentence = (
            f"the next {wanted} bytes of changes of partition {partition.place} cannot be stored: "
            f"{size} bytes are stored, and spill_bytes allows {self._bound}. When the listener's memory is full, it "
            f"stops reading. {self._freeing}"
        )
        if self._throttle.may_log():
            extra = {"partition": partition.partition_id, "bytes": wanted}
            logger.error("%s", sentence, extra={"event": "spill_full", **extra})
        return sentence

    def report(self, subscriptions: Iterable[Subscription], size: int, waits: str) -> dict[str, Any]:
        """
        Return the stored changes for `status`.

        Args:
            size: size of the stored changes in bytes.
            waits: reason why a change that should be stored is not. Empty if none waits.
        """
        partitions = [
            (f"{subscription.name}/{index}", partition)
            for subscription in subscriptions
            for index, partition in subscription.partitions.items()
        ]
        missing = [name for name, each in partitions if each.backlog is not None and each.backlog.missing]
        failed = [(name, each.not_stored) for name, each in partitions if each.not_stored is not None]
        return {
            "storedLimit": self._bound,
            "storedBytes": size,
            "storingWaits": waits or None,
            "storedMissing": missing[:_MISSING_MAX],
            "notStoredCount": len(failed),
            "notStored": [
                {"partition": name, "error": failure.error, "since": failure.since}
                for name, failure in failed[:_NOT_STORED_MAX]
            ],
        }
