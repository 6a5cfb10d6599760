"""When a retry is due, from whatever a handler gave to Celery's `retry()`: a time that can be stored and read."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.utils.time import maybe_make_aware

from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.expressions import LONGEST_SECONDS

_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = _EARLIEST + timedelta(seconds=3 * LONGEST_SECONDS)


def retry_time(when: Any) -> tuple[datetime | None, float | None]:
    """
    The time of a retry, or else its delay in seconds.

    A delay is bounded by a century, an `eta` by the years 1970 and 2269; what is meant to be later waits so long.

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
    raise HandlerUsageError(f"retry() needs a number of seconds or a datetime; this {type(when).__name__} is neither.")
