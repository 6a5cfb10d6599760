"""
The outcomes of an execution, as values: an execution decides for one, and its subject writes it (`RunSubject.write`,
`ReplaySubject.write`).

| outcome | stored | Celery is given |
|---|---|---|
| `Handled` | all changes before `end` are done; the claim ends | success |
| `Advanced` | the same, but the claim continues with the change at `end` | (the run continues) |
| `Retrying` | the claim's first change is tried again at its retry time; the attempt is counted | `Retry` |
| `Waiting` | the same, because infrastructure was away, or may have been; nothing is counted | `Ignore` |
| `Halted`, `DeadLettered`, `Discarded` | its failure policy is applied | the error |
| `ReplayFailed` | a replay failed: its dead letter stays, with the new error | the error |
| `Redirected` | another dead letter of the same key is replayed first | `Ignore` |
| `SplitUp` | the changes of the rest of the run are sent one by one; nothing is counted | `Ignore` |
| `Crashed` | its process ends, and that is counted | (the process ends) |
| `Released` | the claim ends, and nothing else | success, or `Ignore` |

Each is written under the claim, and guarded by its fencing token. One that is refused ends the execution quietly
(`SupersededError`), because a newer execution decides. A decision is a sequence of outcomes, each plainer than the one
before: the first one that can be stored is the outcome. An outcome without an answer is written later by the process
(`deferred`), so no change is charged for an outage.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from celery.exceptions import Ignore, Retry
from celery.utils.time import maybe_make_aware

from mongo_celery.bridge.state.dead_letters import KeptChange
from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.expressions import LONGEST_SECONDS
from mongo_celery.mongo.verdicts import error_text, storable

_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = _EARLIEST + timedelta(seconds=3 * LONGEST_SECONDS)
NOT_STORABLE = "{} cannot be stored; the worker's log says why."


class SupersededError(Ignore):
    """A newer execution decides: nothing more is to be done with this message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    One way in which an execution can end.

    Attributes:
        name: for logs.
        raises: exception that Celery is given. None for a success.
    """

    name: ClassVar[str]
    raises: BaseException | None = None


Decision = Sequence[Outcome]
"""Outcomes in the order in which they are tried; none where the outcome is stored already."""


@dataclass(frozen=True, slots=True)
class Handled(Outcome):
    """All changes before the offset `end` are done, and no more of the run is begun."""

    end: int
    name: ClassVar[str] = "handled"


@dataclass(frozen=True, slots=True)
class Advanced(Outcome):
    """
    All changes before the offset `end` are done. The claim continues with the one there, of which nothing is counted.

    Attributes:
        passed_over: changes before it that were not given, because this one stands for them, as the claim has them.
    """

    end: int
    passed_over: Mapping[str, Any] | None = None
    name: ClassVar[str] = "progress"


@dataclass(frozen=True, slots=True)
class Released(Outcome):
    """The claim ends, and nothing else."""

    name: ClassVar[str] = "release"


@dataclass(frozen=True, slots=True)
class SplitUp(Outcome):
    """The changes of the rest of the run are sent one by one, each with all the time that its handler has."""

    name: ClassVar[str] = "release"


@dataclass(frozen=True, slots=True)
class Retrying(Outcome):
    """The first change is tried again at a time, or after a delay in seconds."""

    retry: Retry
    not_before: datetime | None
    delay: float | None
    name: ClassVar[str] = "retry"


@dataclass(frozen=True, slots=True)
class Waiting(Outcome):
    """
    The first change waits for infrastructure.

    Attributes:
        doubtful: the handler may have caused it.
        delay: seconds until it is tried again.
    """

    cause: str
    doubtful: bool
    delay: float
    name: ClassVar[str] = "waiting"


@dataclass(frozen=True, slots=True)
class Halted(Outcome):
    """The partition halts at the first change. A plain one stores nothing of that change but its place."""

    offset: int
    text: str
    is_plain: bool = False
    name: ClassVar[str] = "halt"


@dataclass(frozen=True, slots=True)
class DeadLettered(Outcome):
    """
    The first change becomes a dead letter.

    Attributes:
        form: builds what is kept of the change.
        error: None for a change that was not tried.
        cause: see `state.dead_letters`.
    """

    offset: int
    form: Callable[[], KeptChange]
    error: Exception | None
    cause: str
    name: ClassVar[str] = "dead_letter"


@dataclass(frozen=True, slots=True)
class Discarded(Outcome):
    """The first change is passed over, and nothing is kept."""

    offset: int
    name: ClassVar[str] = "discard"


@dataclass(frozen=True, slots=True)
class ReplayFailed(Outcome):
    """The replay of a dead letter failed, after so many attempts."""

    text: str
    traceback: str
    attempts: int
    name: ClassVar[str] = "failure"


@dataclass(frozen=True, slots=True)
class Redirected(Outcome):
    """The dead letter that waits first for the key with this hash is replayed instead. `first` names its change."""

    hash: int
    first: str
    name: ClassVar[str] = "redirect"


@dataclass(frozen=True, slots=True)
class Crashed(Outcome):
    """The process ends under the first change, by this error."""

    error: str
    name: ClassVar[str] = "crash"


def ignore(cause: BaseException) -> Ignore:
    """Return the exception after which Celery does nothing more with a message."""
    ignored = Ignore()
    ignored.__cause__ = cause
    return ignored


def retry_text(retry: Retry) -> str:
    """Return why a handler wants to be tried again, as it can be stored."""
    if isinstance(retry.exc, BaseException):
        return error_text(retry.exc)
    return storable(str(retry.message or "retry"))


def retry_time(when: Any) -> tuple[datetime | None, float | None]:
    """
    Return the time of a retry, or its delay in seconds, from what a handler gave to Celery's `retry()`.

    A delay is bounded by a century, an `eta` by the years 1970 and 2269. What is meant to be later waits so long.

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
