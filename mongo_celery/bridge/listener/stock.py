"""
How much is stored, of each partition and in all; whether more may be, and how fast it grows.

Pure. What a term finds is counted after its take-over, partition by partition; until then it counts as nothing. What
is removed is known by number only, so the bytes of what is left are an estimate, in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mongo_celery.bridge.state.spill import Amount

LEVELS = (75, 90, 100)
"""Percent of the bound at which people are told."""

_SHARE_OF_ONE = 0.75
_LEVEL_SLACK = 5
_SMOOTHED_SECONDS = 120.0


@dataclass(slots=True)
class _Growth:
    """Bytes a second, smoothed over minutes."""

    rate: float = 0.0
    size: int = 0
    at: float | None = None

    def observe(self, size: int, now: float) -> None:
        if self.at is not None and now > self.at:
            weight = 1 - math.exp((self.at - now) / _SMOOTHED_SECONDS)
            self.rate += weight * ((size - self.size) / (now - self.at) - self.rate)
        self.size, self.at = size, now


class Stock:
    """
    What is stored of one bridge.

    Args:
        bound: bytes that all of it may have; one subscription may have three quarters of them.

    Attributes:
        bound: the same.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._amounts: dict[str, Amount] = {}
        self._total = Amount()
        self._sizes: dict[str, int] = {}
        self._level = 0
        self._counted: set[str] = set()
        self._since: dict[str, Amount] = {}
        self._growth = _Growth()

    @property
    def total(self) -> Amount:
        """All together."""
        return self._total

    @property
    def growth(self) -> float:
        """Bytes a second, smoothed over minutes; below zero while more is removed than stored."""
        return self._growth.rate

    def of(self, partition_id: str) -> Amount:
        """What is stored of one partition."""
        return self._amounts.get(partition_id, Amount())

    def is_counted(self, partition_id: str) -> bool:
        """Whether all that is stored of a partition is known."""
        return partition_id in self._counted

    def added(self, partition_id: str, amount: Amount) -> None:
        """So much was stored."""
        if partition_id in self._since:
            self._since[partition_id] += amount
        self._set(partition_id, self.of(partition_id) + amount)

    def uncount(self, partition_id: str) -> None:
        """What is stored of a partition is to be counted again."""
        self._counted.discard(partition_id)

    def asked(self, partition_id: str) -> None:
        """A partition will be counted; whether that finds what is stored from now on is not known."""
        self._since.setdefault(partition_id, Amount())

    def counted(self, partition_id: str, amount: Amount) -> None:
        """A partition was counted. What was stored meanwhile is added: too much for a while, and never too little."""
        self._counted.add(partition_id)
        self._set(partition_id, amount + self._since.pop(partition_id, Amount()))

    def removed(self, partition_id: str, count: int) -> None:
        """So many changes of a partition were removed."""
        before = self.of(partition_id)
        left = max(before.count - count, 0)
        self._set(partition_id, Amount(left, before.size * left // before.count if before.count else 0))

    def _set(self, partition_id: str, amount: Amount) -> None:
        before, name = self.of(partition_id), partition_id.split("/")[1]
        more = amount.size - before.size
        self._total = Amount(self._total.count + amount.count - before.count, self._total.size + more)
        self._sizes[name] = self._sizes.get(name, 0) + more
        if amount.count:
            self._amounts[partition_id] = amount
        else:
            self._amounts.pop(partition_id, None)

    def room(self, partition_id: str) -> int:
        """How many bytes more may be stored of a partition; none below zero."""
        of_one = self._of_subscription(partition_id)
        return max(0, min(self.bound - self.total.size, int(_SHARE_OF_ONE * self.bound) - of_one))

    def objection(self, partition_id: str) -> str:
        """Why no more may be stored of a partition that has no room, as a sentence."""
        of_one = self._of_subscription(partition_id)
        if of_one > _SHARE_OF_ONE * self.total.size and self.total.size < self.bound:
            return (
                f"{of_one} bytes are stored of handler {partition_id.split('/')[1]} alone, and one may have three "
                f"quarters of the {self.bound} that spill_bytes allows"
            )
        return f"{self.total.size} bytes are stored, and spill_bytes allows {self.bound}"

    def _of_subscription(self, partition_id: str) -> int:
        return self._sizes.get(partition_id.split("/")[1], 0)

    def observe(self, now: float) -> None:
        """Take note of the time, for the growth."""
        self._growth.observe(self.total.size, now)

    @property
    def lasts(self) -> float | None:
        """Seconds for which the bound lasts at the present growth; None while nothing grows."""
        return max(self.bound - self._total.size, 0) / self.growth if self.growth > 0 else None

    def reached(self) -> int | None:
        """The highest of `LEVELS` that was reached since the last call; each once, until it falls well below again."""
        percent = round(100 * self._total.size / max(self.bound, 1))
        kept = max((each for each in LEVELS if each <= percent + _LEVEL_SLACK), default=0)
        level = max((each for each in LEVELS if each <= percent), default=0)
        before = min(self._level, kept)
        self._level = max(before, level)
        return level if level > before else None

    def largest(self, partition_ids: Iterable[str], most: int) -> list[dict[str, Any]]:
        """Some partitions with what is stored of them, the largest first."""
        found = sorted(partition_ids, key=lambda each: (-self.of(each).size, each))[:most]
        return [{"partition": each, "count": self.of(each).count, "size": self.of(each).size} for each in found]
