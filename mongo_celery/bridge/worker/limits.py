"""
Limits of a handler for a run of several changes: users set them for one call, Celery knows messages.

- `rate_limit`: the listener sends runs of one change. A worker that has been given a limit since (`celery control
  rate_limit`) begins no second change of a run.
- `time_limit`, `soft_time_limit`: no change of a run is begun later than `seconds` after the message, and the message's
  limits are longer by that. So each change has all of its time, and at most a tenth more. (Where changes are coalesced
  one more may be begun, if nothing could be recorded without it. Where nothing limits them, all that is owed.)

A list is one call, and so is a run of a transactional handler: their limits are Celery's own. Decided in the worker's
parent process, which has the limits that hold at this moment, also those of the worker as a whole.

Reads settings, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from celery.utils.time import rate

RUN_SECONDS = "mongo_celery_run_seconds"
"""Header of a request, never of a message: seconds after which no further change of the run is begun."""

_SHARE = 10
"""Of the smaller time limit: for so long changes are begun."""

TimeLimits = tuple[float | None, float | None]
"""Hard and soft, in seconds."""

worker_limits: WeakKeyDictionary[Any, TimeLimits] = WeakKeyDictionary()
"""The time limits of the worker as a whole, by its app; a task's own hold before them."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """
    The limits of one message.

    Attributes:
        seconds: after which no further change of its run is begun.
        time_limits: the message's own. None where Celery's hold.
    """

    seconds: float
    time_limits: TimeLimits = (None, None)


def time_limit(task: Any) -> float | None:
    """Return the seconds after which Celery ends a call of a task, by its own limits or the app's. None for never."""
    if task is None:
        return None
    conf = task.app.conf
    limits = (task.time_limit or conf.task_time_limit, task.soft_time_limit or conf.task_soft_time_limit)
    return min((float(each) for each in limits if each), default=None)


def hard_limit(task: Any) -> float | None:
    """Return the seconds after which Celery ends the running message of a task with its process. None for never."""
    if not task:
        return None
    given, worker = (task.request.timelimit or (None, None))[0], worker_limits.get(task.app, (None, None))[0]
    limit = given or task.time_limit or worker or task.app.conf.task_time_limit
    return float(limit) if limit else None


def run_limits(task: Any) -> RunLimits:
    """Return the limits of a message for a handler's task, as the worker has it."""
    handler, options = task.handler, task.wiring.options
    if handler.batch_size is not None or handler.transactional:
        return RunLimits(options.run_seconds)
    hard, soft = worker_limits.get(task.app, (None, None))
    hard, soft = task.time_limit or hard, task.soft_time_limit or soft
    limits = [each for each in (hard, soft) if each]
    if (task.rate_limit and rate(task.rate_limit)) or (limits and handler.run_size(options) == 1):
        return RunLimits(0.0)
    if not limits:
        return RunLimits(options.run_seconds)
    seconds = min(options.run_seconds, min(limits) / _SHARE)
    return RunLimits(seconds, (hard and hard + seconds, soft and soft + seconds))
