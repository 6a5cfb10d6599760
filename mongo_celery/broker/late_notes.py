"""
Redis gets a note of a message only if a worker holds the message for longer.

Redis has no acknowledgements. So kombu notes each taken message in a hash, and removes the note after the work. These
two round trips are two fifths of a message's cost in the worker's main process. A bridge does not need them, because
its listener sends a lost message again. If a worker holds a message for `HELD_SECONDS`, for example behind slow
handlers, the note tells the listener that it is not lost (`occupancy`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kombu.transport import virtual

HELD_SECONDS = 0.2
"""Seconds for which a worker holds a message before Redis gets a note of it."""


class LateNotes(virtual.QoS):
    """The messages that one consumer holds. Thread-safe, because a thread of a pool may acknowledge them."""

    def __init__(self, channel: Any, prefetch_count: int, timer: Any, is_ours: Callable[[Any], bool]) -> None:
        super().__init__(channel, prefetch_count)
        self._timer = timer
        self._is_ours = is_ours
        self._taken: dict[str, float] = {}
        self._is_scheduled = False
        self._lock = threading.Lock()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold a message."""
        if not self._is_ours(message):
            super().append(message, delivery_tag)
            return
        virtual.QoS.append(self, message, delivery_tag)
        self._taken[delivery_tag] = time.monotonic()
        self._schedule()

    def ack(self, delivery_tag: str) -> None:
        """Forget a message after its work."""
        with self._lock:
            is_noted = self._taken.pop(delivery_tag, None) is None
        if is_noted:
            super().ack(delivery_tag)
        else:
            virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Forget a message, or put it back."""
        self._note(delivery_tag)
        super().reject(delivery_tag, requeue=requeue)

    def restore_unacked(self, *args: Any) -> Any:
        """Put all messages back."""
        for delivery_tag in [*self._taken]:
            self._note(delivery_tag)
        return super().restore_unacked(*args)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._timer.call_after(HELD_SECONDS, self._note_held)

    def _note_held(self) -> None:
        """Note the messages that have been held for long enough."""
        self._is_scheduled = False
        if self.channel.closed:
            return
        since = time.monotonic() - HELD_SECONDS
        for delivery_tag, taken in [*self._taken.items()]:
            if taken <= since:
                self._note(delivery_tag)
        if self._taken:
            self._schedule()

    def _note(self, delivery_tag: str) -> None:
        with self._lock:
            if self._taken.pop(delivery_tag, None) is not None:
                super().append(self.get(delivery_tag), delivery_tag)


def note_late(channel: Any, timer: Any, is_ours: Callable[[Any], bool]) -> None:
    """
    Let a channel of Redis note some messages late. Call it before the channel consumes.

    Args:
        channel: the channel of a consumer.
        timer: the timer of the consumer.
        is_ours: returns True for a message whose loss does no harm.
    """
    before = channel.qos
    kind: Any = type("LateNotes", (LateNotes, type(before)), {})
    channel._qos = kind(channel, before.prefetch_count, timer, is_ours)  # noqa: SLF001 - kombu has no public way
