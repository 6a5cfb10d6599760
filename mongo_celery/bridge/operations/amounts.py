"""
How much is stored of what stands still: of partitions, of handlers, and beside the bound (`spill_bytes`).

The listener that leads knows what it has stored, and its report has the figures. Where nobody has reported, the
documents of the marked partitions are counted, within a time: what takes longer is not known, and said to be so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.spill import Amount, Spill

_COUNTING_SECONDS = 2.0

Place = tuple[str, int]
"""Subscription and index of a partition."""


@dataclass(frozen=True, slots=True)
class StoredAmounts:
    """
    What is stored of a bridge.

    Attributes:
        amounts: of partitions, as far as it is known.
        total: of all; None where it is not known.
        bytes_per_second: how fast it grows, below zero while it shrinks; None where no listener says so.
        uncounted: how many partitions could not be counted within the time.
        waits: why something is not stored that should be, as a sentence.
        missing: partitions of which the listener finds nothing, although something should be stored.
    """

    amounts: Mapping[Place, Amount] = field(default_factory=dict)
    total: Amount | None = field(default_factory=Amount)
    bytes_per_second: float | None = None
    uncounted: int = 0
    waits: str | None = None
    missing: frozenset[Place] = frozenset()

    def of(self, place: Place) -> dict[str, Any]:
        """`count` and `bytes` of one partition, None where they are not known; and whether it is `missing`."""
        return {**_figures(self.amounts.get(place)), "missing": place in self.missing}

    def sum(self, places: Iterable[Place]) -> dict[str, Any]:
        """How many of these partitions have something stored, and how much; None for what is not known of all."""
        marked = list(places)
        known = [self.amounts[place] for place in marked if place in self.amounts]
        whole = sum(known, Amount()) if len(known) == len(marked) else None
        return {"partitions": len(marked), **_figures(whole)}

    def beside(self, limit: int) -> dict[str, Any]:
        """The whole, beside so many bytes; and how long these last at the present rate, where it grows."""
        share = lasts = None
        if self.total is not None:
            share = round(self.total.size / limit, 3)
            if self.bytes_per_second and self.bytes_per_second > 0:
                lasts = round(max(limit - self.total.size, 0) / self.bytes_per_second)
        return {
            **_figures(self.total),
            "limit": limit,
            "share": share,
            "bytes_per_second": self.bytes_per_second,
            "lasts_seconds": lasts,
            "uncounted": self.uncounted,
            "waits": self.waits,
        }


def reported(report: Mapping[str, Any]) -> StoredAmounts | None:
    """As the listener's report has it; None where it does not say."""
    if report.get("spilledBytes") is None:
        return None
    named = {_place(each["partition"]): each for each in report.get("spilled", ())}
    return StoredAmounts(
        {place: Amount(int(each["count"]), int(each["size"])) for place, each in named.items()},
        Amount(int(report.get("spilledCount", 0)), int(report["spilledBytes"])),
        report.get("spillBytesPerSecond"),
        waits=report.get("spillWaits"),
        missing=frozenset(place for place, each in named.items() if each.get("missing")),
    )


def counted(spill: Spill, marked: Mapping[Place, str]) -> StoredAmounts:
    """
    What is stored of some partitions, counted in MongoDB for at most some seconds.

    Args:
        marked: the `_id`s of the partitions.
    """
    amounts: dict[Place, Amount] = {}
    try:
        with pymongo.timeout(_COUNTING_SECONDS):
            for place, partition_id in marked.items():
                amounts[place] = spill.amount(partition_id)
    except PyMongoError as error:
        if not error.timeout:
            raise
    uncounted = len(marked) - len(amounts)
    return StoredAmounts(amounts, None if uncounted else sum(amounts.values(), Amount()), None, uncounted)


def _figures(amount: Amount | None) -> dict[str, Any]:
    if amount is None:
        return {"count": None, "bytes": None}
    return {"count": amount.count, "bytes": amount.size}


def _place(partition_id: str) -> Place:
    _, subscription, _, index = partition_id.split("/")
    return subscription, int(index)
