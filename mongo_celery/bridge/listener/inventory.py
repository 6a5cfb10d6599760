"""
The inventory of one term: which partitions have anything stored, with or without a mark, and how much.

What is committed of it is removed, by a thread of its own (`removal`), which also counts. Everything here belongs to
the leading thread, which asks for both and takes in what was done once a second. A partition is let go of only when a
count has said that nothing is left: nothing else would remove what is forgotten here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mongo_celery.bridge.listener.removal import Done, Removal
from mongo_celery.bridge.listener.stock import Stock
from mongo_celery.bridge.state.spill import EVERYTHING, Amount, Spill

if TYPE_CHECKING:
    from mongo_celery.bridge.state.partitions import Image


class Inventory:
    """
    What one term knows to be stored. Used by the leading thread.

    Args:
        spill: where the changes are stored.
        bound: bytes that all of them may have.

    Attributes:
        stock: how much is stored.
    """

    def __init__(self, spill: Spill, bound: int) -> None:
        self.stock = Stock(bound)
        self._spill = spill
        self._removal: Removal | None = None
        self._documents: dict[str, Done | None] = {}  # what was asked to be removed; None for nothing
        self._additions: Counter[str] = Counter()
        self._empty: set[str] = set()
        self._halts: dict[str, int] = {}

    def begin(self, version: int) -> None:
        """Find what is stored, and remove what is committed, in a term with this version."""
        self._removal = Removal(self._spill, version)
        self._removal.start()

    def close(self) -> None:
        """Remove nothing more."""
        if self._removal is not None:
            self._removal.stop()

    def has_documents(self, partition_id: str, amount: Amount | None = None) -> None:
        """
        Something is stored of a partition, with or without a mark: it is removed when it is committed.

        Args:
            amount: what was added; None where that is not known, so that all of it is counted.
        """
        self._additions[partition_id] += 1
        self._empty.discard(partition_id)
        if amount is None:
            self.stock.uncount(partition_id)
            self._documents[partition_id] = None
        else:
            self.stock.added(partition_id, amount)
            self._documents.setdefault(partition_id, None)

    def sweep(self, images: Mapping[str, Image], watermarks: Mapping[str, str]) -> None:
        """
        Take in what was removed, and ask for what is to be.

        Args:
            images: of all partitions that are led, by their `_id`s.
            watermarks: the stored ones, by subscription: from there a later term reads.
        """
        self._take_in_removals()
        for partition_id, image in images.items():
            self._note_halt(partition_id, image)
        handlers = {partition_id.rsplit("/", 2)[0] for partition_id in images}
        for partition_id, removed in list(self._documents.items()):
            found = images.get(partition_id)
            is_over = found is None and partition_id.rsplit("/", 2)[0] in handlers
            committed = found.data if found is not None else EVERYTHING if is_over else ""
            watermark = EVERYTHING if is_over else watermarks.get(partition_id.split("/")[1], "")
            done = Done(committed, min(committed, watermark))
            self._want(partition_id, done, removed, is_marked=found is not None and found.spilled is not None)

    def _take_in_removals(self) -> None:
        assert self._removal is not None, "a term has begun"
        for finding in self._removal.findings():
            if finding.is_met:
                if finding.partition_id not in self._documents:  # to count reads all of it
                    self.has_documents(finding.partition_id)
            elif finding.amount is not None:
                self.stock.counted(finding.partition_id, finding.amount)
                if not finding.amount.count and finding.additions == self._additions[finding.partition_id]:
                    self._empty.add(finding.partition_id)
            else:
                self.stock.removed(finding.partition_id, finding.removed)

    def _note_halt(self, partition_id: str, image: Image) -> None:
        """An execution that halts stores its change."""
        halted_at = image.committed if image.state == "halted" else None
        if halted_at is None or self._halts.get(partition_id) != halted_at:
            self._halts.pop(partition_id, None)
        if halted_at is not None and partition_id not in self._halts:
            self._halts[partition_id] = halted_at
            self.has_documents(partition_id)

    def _want(self, partition_id: str, done: Done, removed: Done | None, *, is_marked: bool) -> None:
        """
        Ask for a removal where a partition has moved; let go of one of which nothing is left.

        All that is stored goes of a partition that its handler no longer has, since it was repartitioned.

        Nothing else would remove what is forgotten here. So only a count says that nothing is left, and one that was
        asked for after the last addition: any other number may miss what was stored meanwhile.
        """
        assert self._removal is not None, "a term has begun"
        is_counted = self.stock.is_counted(partition_id)
        if is_counted and not self.stock.of(partition_id).count and not is_marked:
            if partition_id in self._empty:
                self._empty.discard(partition_id)
                del self._documents[partition_id], self._additions[partition_id]
                return
            self.stock.uncount(partition_id)
            is_counted, removed = False, None
        if done != removed:
            self._documents[partition_id] = done
            additions = None if is_counted else self._additions[partition_id]
            if additions is not None:
                self.stock.asked(partition_id)
            after = removed.committed if removed is not None else ""
            self._removal.want(partition_id, done, additions, after=after)
