"""
The buffer of one term: what its partitions have in memory, measured as `shares` judges it.

No client; the time comes in. How long something is as it is counts from when it was first measured so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mongo_celery.bridge.listener.shares import AT_RISK, TAIL_BYTES, TAIL_CHANGES, Key, Share, Since, standing_of
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.options import BridgeOptions


class Buffer:
    """
    What the partitions of one term have in memory. Used by the leading thread.

    Args:
        options: of the bridge.
        share_behind: which share of the oplog's window lies behind a subscription.

    Attributes:
        subscriptions: those that this term leads, by their names.
    """

    def __init__(self, options: BridgeOptions, share_behind: Callable[[Subscription], float]) -> None:
        self.subscriptions: Mapping[str, Subscription] = {}
        self._options = options
        self._share_behind = share_behind
        self._stands, self._first = Since(), Since()

    @property
    def size(self) -> int:
        """Bytes of memory that changes take, of all subscriptions."""
        return sum(subscription.size for subscription in self.subscriptions.values())

    @property
    def has_room(self) -> bool:
        """Whether these are fewer than may be."""
        return self.size < self._options.buffer_bytes

    def is_at_risk(self, subscription: Subscription) -> bool:
        """Whether a subscription's watermark is too far back in the oplog."""
        return self._share_behind(subscription) >= AT_RISK

    def fed(self) -> set[Key]:
        """Partitions with something buffered, stored or under way."""
        return {
            (subscription.name, index)
            for subscription in self.subscriptions.values()
            for index, partition in subscription.partitions.items()
            if partition.is_busy
        }

    def idle(self) -> dict[Key, bool]:
        """Flowing partitions without anything to do; whether anything was ever committed there."""
        return {
            (subscription.name, index): partition.image.committed > 0
            for subscription in self.subscriptions.values()
            if not subscription.lost
            for index, partition in subscription.partitions.items()
            if partition.image.state == "flowing" and not partition.is_busy
        }

    def shares(self, now: float) -> dict[Key, Share]:
        """Of those partitions that have anything: of thousands most have not."""
        return {
            (subscription.name, index): self.share(subscription, index, now)
            for subscription in self.subscriptions.values()
            for index, partition in subscription.partitions.items()
            if partition.has_next and partition.won
        }

    def share(self, subscription: Subscription, index: int, now: float) -> Share:
        """What one partition has of the buffer now."""
        key, partition = (subscription.name, index), subscription.partitions[index]
        first, oldest = partition.queue.first, subscription.window.oldest
        why = standing_of(partition)
        stands = self._stands.seconds(key, partition.image.committed, now) if why else 0.0
        if first is None:
            return Share(key, 0, 0)
        age = self._first.seconds(key, first.data, now)
        holds = oldest is not None and oldest.index == index
        is_spilled = partition.spilled is not None
        has_stood = (stands if is_spilled else min(stands, age)) >= self._options.spill_after
        size, count = partition.queue.size, len(partition.queue)
        return Share(
            key,
            size,
            count,
            age=age,
            is_tail=count >= TAIL_CHANGES or size >= min(TAIL_BYTES, self._options.buffer_bytes // 8),
            holds=holds or (partition.is_awaited and why != "running"),
            stands=why if has_stood else None,
            spilled=is_spilled,
            blocks=subscription.must_store_again(partition),
            at_risk=holds and self.is_at_risk(subscription),
            undeliverable=partition.must_store,
        )
