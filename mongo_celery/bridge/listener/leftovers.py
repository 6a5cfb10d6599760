"""
Removing what is left of layouts that are over, or never were in force: a little a turn, in no hurry.

Nobody reads it, so nothing waits for it. A term removes of each subscription all generations but the one that it has
seen in force under its own epoch, up to its own version: a larger generation is a later term's, and so is whatever a
later term has stored or prepared in a smaller one. What a listener adds there that wakes too late is found by the next
walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store

_CHUNK = 500
_STEP_SECONDS = 0.02
_AGAIN_SECONDS = 1.0
_WALK_SECONDS = 600.0


class Leftovers:
    """
    The leftovers of one bridge, as one term removes them.

    Args:
        version: of the term.
    """

    def __init__(self, store: Store, version: int) -> None:
        self._store = store
        self._version = version
        self._at: str | None = None
        self._next_at = 0.0

    def look_again(self) -> None:
        """A layout is over: walk at once."""
        self._at, self._next_at = None, 0.0

    def remove(self, in_force: Mapping[str, int], now: float) -> str | None:
        """
        Do a step, if it is time for one.

        Args:
            in_force: generations by subscription, of those that are not on their way to another one.

        Returns:
            The `_id` of a partition of which all that this term may remove is removed; None where there is none.

        Raises:
            PyMongoError: the state database gave no answer; the next step tries it again.
        """
        if now < self._next_at:
            return None
        self._next_at = now + _AGAIN_SECONDS
        found = self._store.spill.next_partition(self._at)
        if found is None:
            self._store.partitions.discard_others(in_force, self._version)
            self._at, self._next_at = None, now + _WALK_SECONDS
            return None
        is_over = self._is_over(found, in_force)
        is_more = is_over and self._store.spill.discard(found, self._version, limit=_CHUNK)
        self._at, self._next_at = self._at if is_more else found, now + _STEP_SECONDS
        return found if is_over and not is_more else None

    def _is_over(self, partition_id: str, in_force: Mapping[str, int]) -> bool:
        """Whether it belongs to a layout that is over; what is no partition's is left alone."""
        _, _, rest = partition_id.partition("/")
        name, _, place = rest.partition("/")
        generation, _, _ = place.partition("/")
        return name in in_force and generation.isdecimal() and in_force[name] != int(generation) <= self._version
