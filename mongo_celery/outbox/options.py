"""The options of an outbox: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mongo_celery.arguments import Duration, seconds
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.entries import FIELD
from mongo_celery.outbox.failures import FAILURE_POLICIES

_SECONDS_MAX = 3600.0
_CLAIM_SECONDS_MIN = 1.0
"""A relay relies on half of it; a claim that a majority has to acknowledge may take as long as less."""

AtOnce = bool | Literal["wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """
    What an outbox was told, durations in seconds; `Outbox` says what each option means.

    Raises:
        ConfigurationError: a value cannot work; the message names the option.
    """

    name: str | None
    sweep_after: float
    sweep_every: float | None
    at_once: AtOnce
    claim_ttl: float
    max_pending: int
    max_attempts: int
    database: str
    exchange: str
    source: str | None
    foreign_tasks: bool
    field: str = FIELD
    failure_policy: str = "halt"
    delivers: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("max_pending", "max_attempts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1.")
        if not isinstance(self.at_once, bool) and self.at_once != "wait":
            raise ConfigurationError(f"at_once={self.at_once!r} is none of True, False and 'wait'.")
        if self.failure_policy not in FAILURE_POLICIES:
            raise ConfigurationError(
                f"failure_policy={self.failure_policy!r} is none of {' and '.join(map(repr, FAILURE_POLICIES))}.",
            )
        if not isinstance(self.delivers, (list, tuple)) or not all(
            isinstance(name, str) and name for name in self.delivers
        ):
            raise ConfigurationError(f"delivers={self.delivers!r} must list names of apps: delivers=('web',).")
        if self.claim_ttl < _CLAIM_SECONDS_MIN:
            raise ConfigurationError(
                f"claim_ttl={self.claim_ttl!r} leaves no time to publish in; give it at least 1 s."
            )
        if not _is_name(self.field):
            raise ConfigurationError(
                f"field={self.field!r} must be the name of a field at the top of a document: not _id, no $ at its "
                "beginning and no dot in it."
            )


def _is_name(field: object) -> bool:
    if not isinstance(field, str) or not field or field == "_id":
        return False
    return not field.startswith("$") and "." not in field and "\0" not in field


def bounded(value: Duration, name: str) -> float:
    """
    A duration in seconds.

    Raises:
        ConfigurationError: not more than 0, or more than an hour.
    """
    found = seconds(value, name)
    if not 0 < found <= _SECONDS_MAX:
        raise ConfigurationError(f"{name}={value!r} must be more than 0 seconds and at most an hour.")
    return found
