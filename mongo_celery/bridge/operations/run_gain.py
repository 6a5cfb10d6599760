"""
The gain of runs of several changes (`run_size`) for one handler, as `status` and the verdict show it.

From claim to commit, a change takes its handler's own time and that of the protocol. A run pays the second once. So
where handlers are quick, runs help far more than workers do; where they are slow, they do not, and nothing is said.
The time between a commit and the next claim, of which runs save as much, is not counted, and the handler's is known in
whole milliseconds, of which the longest that it may be is taken: so it is at least so much.

That is for chains. Inline, what is written with the success cannot say how long that took: nothing is said.

Pure: fed with times.
"""

from __future__ import annotations

from dataclasses import dataclass

from mongo_celery.bridge.options import BridgeOptions

LEAST_GAIN = 2.0
"""Smallest gain that is worth a sentence."""

_SIZE = 100
_UNKNOWN = 0.0005
"""Seconds that a time in whole milliseconds may leave out."""


@dataclass(frozen=True, slots=True)
class RunGain:
    """
    What runs would bring a handler.

    Attributes:
        handler: seconds of a change that are the handler's own.
        whole: seconds of a change from claim to commit.
        size: the `run_size` to set.
        factor: how many times as many changes one partition would handle, at least.
    """

    handler: float
    whole: float
    size: int
    factor: float

    @property
    def sentence(self) -> str:
        """For people, behind what says that the handler is late."""
        return (
            f"run_size={self.size} would handle at least {int(self.factor)} times as many changes of a partition: of "
            f"the {self.whole * 1000:.0f} ms of one from claim to commit its handler takes {self.handler * 1000:.0f} ms"
        )


def run_gain(handler: float, whole: float, options: BridgeOptions, *, takes_runs: bool = True) -> RunGain | None:
    """
    The gain of a handler; None where there is little, or where `run_size` is not for it.

    Args:
        handler: seconds that it takes for a change, of whole milliseconds.
        whole: seconds from claim to commit of a change.
        options: of the bridge; who has set `run_size` knows of it.
        takes_runs: whether it is called for each change, in no transaction and under no rate limit.
    """
    if not takes_runs or options.run_size > 1 or whole <= 0:
        return None
    handler = min(max(handler, 0.0), whole)
    size = _SIZE if handler * _SIZE <= options.run_seconds else int(options.run_seconds / handler)
    if size <= 1:
        return None
    longest = min(handler + _UNKNOWN, whole)
    factor = whole / (longest + (whole - longest) / size)
    return RunGain(handler, whole, size, factor) if factor >= LEAST_GAIN else None
