"""
Which partitions' changes are stored now: the shares of one buffer, and what stands in it.

Pure: what is measured comes in, with the time. A normal backlog stays in memory, and the stream waits for it; storing
it would cost the state database twice what the changes cost anyway. A partition's changes are stored only

| why | when |
|---|---|
| it stands | for `spill_after` (halted, paused, parked, waiting, running, rejected), and holds the watermark |
| it stands in the way | as before, and the buffer is full, wherever the watermark is |
| it stood | what comes behind stored changes collects for a second |
| others starve | the buffer is full, and one that was fed before had nothing to do for two seconds, or most of more |
| the oplog | a quarter of the oplog's window lies behind the watermark that it holds |
| undeliverable | one of them cannot be given to its handler: at once, before anything that was read after it runs |
| read again | what it has in the buffer must be stored before it can go on |

Whether it helps to read on is judged by its effect: as long as somebody has work who was idle before, what comes
behind stored changes is stored too, before anybody is idle again. Once the buffer was stored, and as much again,
without one of those that had nothing to do being fed, no more than that is stored in a minute for their sake. So most
of a backlog of a few busy keys does not take the way through the state database, and whoever waits behind it does not
wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.state.partitions import state_of

Key = tuple[str, int]
"""A partition: the name of its subscription, and its index."""

AT_RISK = 0.25
"""Share of the oplog's window that may lie behind a watermark before what holds it is stored."""

UNDELIVERABLE = "undeliverable"
"""Why an undeliverable change is stored, with what is before it in its partition."""

TAIL_CHANGES = 1000
TAIL_BYTES = 1 << 20
"""So much of what comes behind stored changes is stored at once, or an eighth of a smaller buffer."""

_TAIL_SECONDS = 1.0
_STARVED_SECONDS = 2.0
_CREDIT_SECONDS = 60.0
_STARVED = 0.999 * (1 - math.exp(-1))
"""Idleness after so many seconds without a pause; less of it, for longer, comes to the same."""


@dataclass(frozen=True, slots=True)
class Share:
    """
    What one partition has of the buffer.

    Attributes:
        size: bytes that its buffered changes take.
        count: how many these are.
        age: seconds for which the first of them has been the first.
        is_tail: whether enough has collected to be stored behind what is stored.
        holds: whether it holds its subscription's watermark, or stands with documents that a snapshot waits for.
        stands: why it stands, where it has for long enough; None for all others.
        spilled: whether it runs from stored changes.
        blocks: whether nothing that is stored can be run before what is buffered was stored again.
        at_risk: whether its subscription's watermark is too far back in the oplog.
        undeliverable: whether one of them cannot be given to its handler.
    """

    key: Key
    size: int
    count: int
    age: float = 0.0
    is_tail: bool = False
    holds: bool = False
    stands: str | None = None
    spilled: bool = False
    blocks: bool = False
    at_risk: bool = False
    undeliverable: bool = False


def reason_of(part: Share, *, eager: bool, pressed: bool = False) -> str | None:
    """
    Why a partition's changes are to be stored now, whatever the others need; None where they are not.

    Args:
        eager: whether it has shown to help others that the stream is read on.
        pressed: whether the buffer is full: then what stands leaves it, wherever the watermark is.
    """
    if part.count and (part.blocks or part.undeliverable):
        return "read again" if part.blocks else UNDELIVERABLE
    if part.count and part.spilled and part.stands and (part.is_tail or part.age >= _TAIL_SECONDS):
        return part.stands
    if part.spilled and eager and part.is_tail:
        return "starving"
    if part.count and part.stands and not part.spilled and (part.holds or pressed):
        return part.stands
    if not part.count or not part.holds:
        return None
    return "oplog" if part.at_risk else None


def victim(parts: Collection[Share], buffer_bytes: int) -> Share | None:
    """Whose changes are stored so that others are read: the largest above half of an equal share; None without one."""
    largest = max(parts, key=lambda part: part.size, default=None)
    filled = sum(bool(part.count) for part in parts)
    return largest if largest is not None and largest.size > buffer_bytes / (2 * max(filled, 1)) else None


def standing_of(partition: Partition) -> str | None:
    """Why a partition does not go on by itself at this moment; None where it flows, or waits for a worker."""
    state = state_of(partition.image)
    if state != "flowing":
        return state
    if partition.rejection is not None:
        return "rejected"
    return "running" if partition.image.claim is not None else None


@dataclass(slots=True)
class Since:
    """Since when something is as it is, for each partition."""

    _known: dict[Key, tuple[object, float]] = field(default_factory=dict)

    def seconds(self, key: Key, what: object, now: float) -> float:
        """For how long it has been this; 0 where it has just become so."""
        before = self._known.get(key)
        if before is None or before[0] != what:
            self._known[key] = what, now
            return 0.0
        return now - before[1]


class Starvation:
    """
    Who has nothing to do because the buffer is full of others, and whether reading on helps.

    Args:
        bound: the buffer's bytes.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._idle: set[Key] = set()
        self._idleness: dict[Key, float] = {}
        self._known: set[Key] = set()
        self._pressed_at: float | None = None
        self._helped: set[Key] = set()
        self._helped_at: int | None = None
        self._stored = 0
        self._credit = 2.0 * bound  # the buffer, and as much again: what it had is read for nobody's sake
        self._observed_at: float | None = None

    @property
    def is_pressed(self) -> bool:
        """Whether the buffer was full, and has not been half empty since."""
        return self._pressed_at is not None

    @property
    def is_eager(self) -> bool:
        """Whether storing has shown to help: of the last bytes that were stored, as many as the buffer has."""
        return self._credit > 0 and self._helped_at is not None and self._stored - self._helped_at < self._bound

    def stored(self, size: int) -> None:
        """So many bytes were taken out of the buffer and stored, because others starve."""
        self._stored += size
        self._credit -= size

    def observe(self, fed: AbstractSet[Key], idle: Mapping[Key, bool], size: int, now: float) -> None:
        """
        Take in who has something to do, and who has not.

        Args:
            fed: partitions with something buffered, stored or under way.
            idle: flowing partitions without; whether anything was ever committed there.
            size: bytes in the buffer.
        """
        self._pass(now)
        self._helped = self._helped | (self._idle & fed) if self.is_eager else set()
        if (self._idle | self._helped) & fed:
            self._credit = 2.0 * self._bound
        if self._helped & fed:
            self._helped_at = self._stored
        self._known |= fed
        self._idle -= fed
        self._idle |= {key for key, committed in idle.items() if committed or key in self._known}
        if idle:  # what has moved, stands or is no more does not wait for the stream
            self._idle &= idle.keys()
        self.fill(size, now)

    def _pass(self, now: float) -> None:
        """
        Time has passed: credit was earned, and who was idle has been so for a share of the last seconds.

        What was seen last has held since.
        """
        elapsed = now - self._observed_at if self._observed_at is not None else 0.0
        self._observed_at = now
        self._credit = min(self._credit + 2.0 * self._bound * elapsed / _CREDIT_SECONDS, 2.0 * self._bound)
        if self._pressed_at is None:
            return
        fading = math.exp(-elapsed / _STARVED_SECONDS)
        for key in self._idle | self._idleness.keys():
            self._idleness[key] = self._idleness.get(key, 0.0) * fading + (1 - fading) * (key in self._idle)

    def fill(self, size: int, now: float) -> None:
        """So many bytes are in the buffer."""
        if size >= self._bound:
            self._pressed_at = now if self._pressed_at is None else self._pressed_at
        elif size < self._bound / 2:
            self._pressed_at = None
            self._idleness.clear()

    def starving(self) -> list[Key]:
        """Partitions for whose sake others' changes are to be stored."""
        if self._pressed_at is None or self._credit <= 0:
            return []
        found = [key for key in self._idle if self._idleness.get(key, 0.0) >= _STARVED]
        if found and not self.is_eager:
            self._helped_at = self._stored
        return sorted(found)
