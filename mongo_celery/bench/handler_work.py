"""What a measured handler does with a change, where it does anything: note its latency, wait, compute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch

WRITTEN = "written"
"""The field with the monotonic time of a document's write: the same clock in all processes of a host."""


@dataclass(frozen=True, slots=True)
class HandlerWork:
    """
    A handler's work with one change; in any case it looks at the document.

    Attributes:
        seconds: how long it takes.
        cpu_seconds: how much of that it computes; for the rest it waits.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def plain(self) -> dict[str, float]:
        """As a setting carries it."""
        return asdict(self)


class Performer:
    """Does the work in one process."""

    def __init__(self, setting: BenchSetting) -> None:
        self._work = HandlerWork(**setting.work)
        self._waited = Stopwatch(setting.clock, "waited")

    def on(self, document: Mapping[str, Any] | None, started: float) -> None:
        """Do it for one document, whose handler has started at this time."""
        written = None if document is None else document.get(WRITTEN)
        if written is not None:
            self._waited.note(started - written)
        if self._work.cpu_seconds:
            _compute(self._work.cpu_seconds)
        if self._work.seconds > self._work.cpu_seconds:
            time.sleep(self._work.seconds - self._work.cpu_seconds)


def handler_work(setting: BenchSetting) -> Performer | None:
    """The work that a setting asks for; None for a handler that does nothing."""
    return Performer(setting) if setting.work else None


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
