"""
What is said of stored changes: logged once when they begin, end or near their bound, and shown by `status`.

`SpillReport.report` is called by the thread that renews the lease, too; all else by the leading thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from mongo_celery.bridge.listener.shares import Key
from mongo_celery.bridge.listener.stock import LEVELS, Stock
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.command_line import CommandLine

logger = logging.getLogger("mongo_celery.listener")

_COMPLAINT_SECONDS = 30.0
_REPORTED_MAX = 50


class SpillReport:
    """
    What one term says of stored changes.

    Args:
        stock: how much is stored.
    """

    def __init__(self, stock: Stock, line: CommandLine) -> None:
        self._freeing = (
            "resume, retry or move to the dead letters what is blocked, or raise spill_bytes: "
            f"`{line.changes('status', '--all')}` shows it"
        )
        self._stock = stock
        self._begun: dict[Key, tuple[str, datetime]] = {}
        self._complained_at = -math.inf

    def forget(self, subscription: Subscription) -> None:
        """Nothing was said yet of a subscription's partitions: they may be new ones."""
        for index in [index for name, index in self._begun if name == subscription.name]:
            del self._begun[subscription.name, index]

    def begun(self, subscription: Subscription, index: int, reason: str) -> None:
        """Changes of a partition were stored; said where they are the first ones."""
        key, partition = (subscription.name, index), subscription.partitions[index]
        if key in self._begun or partition.image.spilled is not None:
            self._begun.setdefault(key, (reason, datetime.now(UTC)))
            return
        self._begun[key] = reason, datetime.now(UTC)
        sentence = "changes of partition %s are stored in the state database from here on (%s), so that others go on"
        extra = {"partition": partition.partition_id, "reason": reason}
        if partition.image.state != "flowing":
            logger.warning(sentence, partition.partition_id, reason, extra={"event": "spill_begun", **extra})
        else:
            logger.info(sentence, partition.partition_id, reason, extra={"event": "spill_begun", **extra})

    def ended(self, subscription: Subscription, index: int) -> None:
        """A partition runs from the stream, and has no mark; said where it ran from stored changes before."""
        if self._begun.pop((subscription.name, index), None) is None:
            return
        partition_id = subscription.partitions[index].partition_id
        logger.info(
            "what was stored of partition %s is done: it runs from the stream again",
            partition_id,
            extra={"event": "spill_ended", "partition": partition_id},
        )

    def level(self) -> None:
        """Say where what is stored has come near to its bound."""
        level = self._stock.reached()
        if level is None:
            return
        lasts, share = self._stock.lasts, f"{level} % of spill_bytes ({self._stock.total.size} bytes)"
        logger.log(
            logging.ERROR if level > LEVELS[0] else logging.WARNING,
            "changes that are stored have reached %s; %s. At the bound nothing more is stored, and the stream waits. "
            "Before that, %s",
            share,
            f"at the present rate the rest lasts for {lasts:.0f} s" if lasts is not None else "they do not grow now",
            self._freeing,
            extra={"event": "spill_bound", "percent": level, "lasts_seconds": lasts},
        )

    def no_room(self, subscription: Subscription, index: int) -> str:
        """The sentence about a change that the bound keeps from being stored; logged now and then."""
        partition = subscription.partitions[index]
        first = partition.queue.first
        size = first.weight if first is not None else 0
        sentence = (
            f"the next {size} bytes of changes of partition {partition.partition_id} cannot be stored: "
            f"{self._stock.objection(partition.partition_id)}. When the buffer is full the stream waits for them: "
            f"{self._freeing}"
        )
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            extra = {"partition": partition.partition_id, "bytes": size}
            logger.error("%s", sentence, extra={"event": "spill_full", **extra})
        return sentence

    def report(self, subscriptions: Iterable[Subscription], waits: str) -> dict[str, Any]:
        """
        What `status` shows of stored changes.

        Args:
            waits: why something is not stored that should be; empty while nothing waits.
        """
        led = {
            partition.partition_id: (subscription, index)
            for subscription in subscriptions
            for index, partition in subscription.partitions.items()
            if partition.spilled is not None
        }
        total = self._stock.total
        return {
            "spillLimit": self._stock.bound,
            "spilledCount": total.count,
            "spilledBytes": total.size,
            "spillBytesPerSecond": _rounded(self._stock.growth),
            "spillWaits": waits or None,
            "spilled": [
                {**row, **self._mark(*led[row["partition"]])} for row in self._stock.largest(led, _REPORTED_MAX)
            ],
        }

    def _mark(self, subscription: Subscription, index: int) -> dict[str, Any]:
        """Since when and why a partition has a mark, and whether what it promises is there."""
        marked = subscription.partitions[index].image.spilled or {}
        reason, since = self._begun.get((subscription.name, index), (None, None))
        spilled = subscription.partitions[index].spilled
        return {
            "since": marked.get("since", since),
            "reason": marked.get("reason", reason),
            "missing": spilled is not None and spilled.missing,
        }


def _rounded(number: float) -> int:
    """Two digits: each report that differs from the last is written."""
    return int(float(f"{number:.2g}"))
