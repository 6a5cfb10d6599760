"""
What a handler that is late would gain from runs of several changes (`run_size`), said with the figure.

From claim to commit, a change takes its handler's own time and that of the protocol. A run pays the second once. So
where handlers are quick, runs help far more than workers do; where they are slow, they do not, and nothing is said.
The time between a commit and the next claim, of which runs save as much, is not counted, and the handler's is known in
whole milliseconds, of which the longest that it may be is taken: so it is at least so much.

That is for chains. Inline, what is written with the success cannot say how long that took: nothing is said.

Pure but for the log record: fed with times and counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.options import BridgeOptions

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.activity import Activity, HandlerActivity
    from mongo_celery.bridge.listener.subscription import Subscription

logger = logging.getLogger("mongo_celery.listener")

LATE_CHANGES = 1000
"""A handler of which so many changes wait, at two looks in a row, is late."""

LEAST_GAIN = 2.0
"""What is less is not worth a sentence."""

_SIZE = 100
_UNKNOWN = 0.0005
"""Seconds that a time in whole milliseconds may leave out."""

_LOOK_SECONDS = 30.0
_REPEAT_SECONDS = 3600.0


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

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "handler_seconds": round(self.handler, 3),
            "change_seconds": round(self.whole, 3),
            "run_size": self.size,
            "factor": round(self.factor, 1),
            "sentence": self.sentence,
        }


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


class RunAdvice:
    """
    Tells the log which handlers that are late would gain from runs; each at most once an hour.

    Args:
        options: of the bridge.
        activity: knows how long handlers and commits take.
    """

    def __init__(self, options: BridgeOptions, activity: Activity) -> None:
        self._options = options
        self._activity = activity
        self._looked_at = 0.0
        self._seen: Mapping[str, tuple[int, float, float]] = {}
        self._told: dict[str, float] = {}

    def turn(self, subscriptions: Iterable[Subscription], now: float) -> None:
        """Look now and then; a handler counts as late that was so at the look before, too."""
        if self._options.run_size > 1 or now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        seen = {}
        for each in subscriptions:
            if each.window.count >= LATE_CHANGES:
                seen[each.name] = _measured(self._activity.of(each.name))
                self._weigh(each, seen[each.name], now)
        self._seen = seen

    def _weigh(self, subscription: Subscription, measured: tuple[int, float, float], now: float) -> None:
        name, before = subscription.name, self._seen.get(subscription.name)
        count = measured[0] - before[0] if before is not None else 0
        if before is None or count <= 0 or now < self._told.get(name, now):
            return
        handler, commit = ((new - old) / count for new, old in zip(measured[1:], before[1:], strict=True))
        plan = subscription.plan
        takes_runs = plan.handler.takes_runs(is_rate_limited=plan.is_rate_limited)
        gain = run_gain(handler, handler + commit, self._options, takes_runs=takes_runs)
        if gain is None:
            return
        self._told[name] = now + _REPEAT_SECONDS
        logger.info(
            "handler %s is late (%d changes wait): %s",
            name,
            subscription.window.count,
            gain.sentence,
            extra={"event": "runs_would_help", "handler": name, "factor": round(gain.factor, 1)},
        )


def _measured(activity: HandlerActivity) -> tuple[int, float, float]:
    """How many runs were measured, and the seconds of their handlers and of all that follows, as sums."""
    return sum(activity.handler.counts), activity.handler.sum, activity.commit.sum
