"""
The outcome of an execution: one way to end, with the write that records it.

| outcome | stored | Celery receives |
|---|---|---|
| `handled` | all changes before an offset are done, and the claim ends | success |
| `progress` | the same, but the claim continues with the next change, and nothing is counted | (the run continues) |
| `retry` | the claim's first change is retried at its retry time, and the attempt is counted | `Retry` |
| `waiting` | the change waits in the same way for MongoDB or the broker, and nothing is counted | `Ignore` |
| `halt`, `dead_letter`, `discard` | the failure policy is applied | the error |
| `failure` | a replay failed: its dead letter stays, with the new error | the error |
| `redirect` | another dead letter of the same key is replayed first | `Ignore` |
| `split` | the remaining changes of the run are sent one by one, and nothing is counted | `Ignore` |
| `crash` | the process ends, which is counted | (the process ends) |
| `release` | the claim ends, and nothing else | success, or `Ignore` |

The subject of an execution makes outcomes (`RunSubject`, `ReplaySubject`). The execution chooses and writes them, under
the claim and guarded by its fencing token. If an outcome is refused, a newer execution decides and this one ends
quietly (`SupersededError`). A decision is a sequence of outcomes, each simpler than the one before. The first one that
can be stored is the outcome. Without an answer or a right the process writes it later (`deferred`), so neither counts
against a change.

These functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.exceptions import Ignore, Retry
from celery.utils.time import maybe_make_aware

from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.expressions import LONGEST_SECONDS
from mongo_celery.mongo.verdicts import error_text, storable

_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = _EARLIEST + timedelta(seconds=3 * LONGEST_SECONDS)
NOT_STORABLE = "{} could not be stored. The worker's log has the reason."


class SupersededError(Ignore):
    """A newer execution has replaced this one, so this message needs no further work."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    One way to end an execution.

    Attributes:
        name: name of the outcome in logs.
        write: records it under the claim. Returns False if a newer execution decides.
        raises: the exception for Celery. None for success.
        report: logs it after it is written, and sends its signal. None for routine outcomes.
    """

    name: str
    write: Callable[[], bool]
    raises: BaseException | None = None
    report: Callable[[], None] | None = None


Decision = Sequence[Outcome]
"""Outcomes in the order to try. Empty if the outcome is already stored."""


def ignore(cause: BaseException) -> Ignore:
    """Return the exception that makes Celery ignore a message."""
    ignored = Ignore()
    ignored.__cause__ = cause
    return ignored


def retry_text(retry: Retry) -> str:
    """Return the handler's reason for a retry, short enough to store."""
    if isinstance(retry.exc, BaseException):
        return error_text(retry.exc)
    return storable(str(retry.message or "retry"))


def retry_time(when: Any) -> tuple[datetime | None, float | None]:
    """
    Return the time or the delay in seconds of a retry, from the arguments of Celery's `retry()`.

    A delay is at most a century. An `eta` is limited to the years 1970 to 2269.

    Raises:
        HandlerUsageError: it is neither a time nor a number.
    """
    try:
        if isinstance(when, datetime):
            return min(max(maybe_make_aware(when), _EARLIEST), _LATEST), None
        delay = float(min(max(when or 0, 0), LONGEST_SECONDS))
        if not math.isnan(delay):
            return None, delay
    except (TypeError, ValueError, ArithmeticError):
        pass
    raise HandlerUsageError(f"retry() needs a number of seconds or a datetime, not {type(when).__name__}.")
