"""How many changes a second are committed, from readings of a status. Pure: times are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

_WINDOW_SECONDS = 10.0


class Rates:
    """
    Rates over the last ten seconds, by handler.

    A handler whose count has gone back (a new layout counts anew) has no rate for a while, and never one below 0.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, int]]] = deque()

    def remember(self, overview: Mapping[str, Any], at: float) -> None:
        """Take in an overview that was read at a monotonic time."""
        committed = {each["name"]: each["committed"] for each in overview["handlers"]}
        last = self._kept[-1][1] if self._kept else {}
        if any(count < last.get(name, count) for name, count in committed.items()):
            self._kept.clear()
        self._kept.append((at, committed))
        while len(self._kept) > 2 and at - self._kept[1][0] >= _WINDOW_SECONDS:  # noqa: PLR2004 - two make a rate
            self._kept.popleft()

    def of(self, handler: str) -> float | None:
        """Of one handler; None where it was not seen twice."""
        if not self._kept:
            return None
        (began, first), (ended, last) = self._kept[0], self._kept[-1]
        if ended <= began or handler not in first or handler not in last:
            return None
        return (last[handler] - first[handler]) / (ended - began)

    @property
    def total(self) -> float | None:
        """Of all handlers."""
        rates = [rate for rate in map(self.of, self._kept[-1][1] if self._kept else ()) if rate is not None]
        return sum(rates) if rates else None
