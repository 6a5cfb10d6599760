"""
Limits of a handler for a run of several changes. Users set limits for one call, but Celery knows only messages.

- `rate_limit`: the listener sends runs of one change. If a worker gets a limit later (`celery control rate_limit`), it
  begins no second change of a run.
- `time_limit`, `soft_time_limit`: no change of a run begins later than `seconds` after the message, and the message's
  limits are that much longer. So each change has all its time, and at most a tenth more. (Coalescing may begin one more
  change if nothing could be recorded without it. Without any limit, it may begin all that are due.)

A list is one call, and so is a run of a transactional handler: Celery's own limits apply. The worker's parent process
decides. It knows the current limits, including those of the worker as a whole.

The module only reads settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from celery.utils.time import rate

_ANSWER_SECONDS = 30.0
"""Seconds for which an execution waits for MongoDB to store its outcome."""

RUN_SECONDS = "mongo_celery_run_seconds"
"""Request header, never in a message: seconds after which no further change of the run begins."""

_SHARE = 10
"""Divisor of the smaller time limit. Changes begin during this share of it."""

TimeLimits = tuple[float | None, float | None]
"""Hard and soft limit, in seconds."""

worker_limits: WeakKeyDictionary[Any, TimeLimits] = WeakKeyDictionary()
"""The time limits of the worker as a whole, by its app. A task's own limits override them."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """
    The limits of one message.

    Attributes:
        seconds: seconds after which no further change of the run begins.
        time_limits: the time limits of the message. None if Celery's own limits apply.
    """

    seconds: float
    time_limits: TimeLimits = (None, None)


def time_limit(task: Any) -> float | None:
    """Return the seconds after which Celery ends a call of a task, by its or the app's limits. None for never."""
    if task is None:
        return None
    conf = task.app.conf
    limits = (task.time_limit or conf.task_time_limit, task.soft_time_limit or conf.task_soft_time_limit)
    return min((float(each) for each in limits if each), default=None)


def hard_limit(task: Any) -> float | None:
    """Return the seconds after which Celery kills the process of a running task. None for never."""
    given = (task.request.timelimit or (None, None))[0] if task else None
    return float(given) if given else call_limit(task)


def wait_seconds(task: Any) -> float:
    """Return the seconds for which a task may wait for MongoDB, well before its hard limit kills its process."""
    hard = hard_limit(task)
    return min(_ANSWER_SECONDS, hard / 4) if hard else _ANSWER_SECONDS


def call_limit(task: Any) -> float | None:
    """Return the hard limit that users have set for one call of a task, in seconds. None for none."""
    if not task:
        return None
    limit = task.time_limit or worker_limits.get(task.app, (None, None))[0] or task.app.conf.task_time_limit
    return float(limit) if limit else None


def run_limits(task: Any) -> RunLimits:
    """Return the limits of a message for a handler's task in this worker."""
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
