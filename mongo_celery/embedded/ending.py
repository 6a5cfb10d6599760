"""Ending a command by a signal: what it started is ended in the right order, and then it says so by its status."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL = 128


class EndedBySignal(BaseException):
    """Raised in the main thread where the signal met it; no `except Exception` may hold it up."""


@dataclass(slots=True)
class Ending:
    """Which signal has ended the block, if one has."""

    number: int | None = None

    @property
    def status(self) -> int:
        """The exit status, as shells know it."""
        return 0 if self.number is None else _BY_SIGNAL + self.number


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """
    Let SIGINT, SIGTERM and SIGHUP end the block, so that its context managers clean up.

    The first one counts; while things are being ended further ones are ignored, so that nothing is left behind.
    Afterwards the old handlers are back. In the main thread only.
    """
    ending = Ending()

    def end(number: int, _frame: FrameType | None) -> None:
        if ending.number is None:
            ending.number = number
            raise EndedBySignal

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield ending
    except EndedBySignal:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
