"""The options of an outbox: one frozen value, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from mongo_celery.arguments import Duration, check_count, check_flags, check_known, check_texts, positive, seconds
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.outbox.failures import FAILURE_POLICIES

_SECONDS_MAX = 3600.0
_CLAIM_SECONDS_MIN = 1.0
"""A relay relies on half of it. With less time, a majority may acknowledge the claim too late."""

_DURATIONS = ("sweep_after", "sweep_every", "claim_ttl")


class SharedOptions(TypedDict, total=False):
    """
    The options of both kinds of outbox. Each has a default.

    Attributes:
        name: the outbox's name in commands and logs. By default the collection's full name.
        sweep_after: age in seconds at which the sweep sends an entry.
        sweep_every: seconds between two sweeps, which `celery beat` or the listener of a bridge of the app requests.
            None if you call `sweep`.
        at_once: True if a thread of the writing process sends its entries immediately.
        claim_ttl: seconds for which one relay has a document, or a key, to itself. At least 1.
        max_attempts: failures that an entry itself causes until it is stuck, or may become a dead letter.
        database: the database of dead letters, signing keys and the last sweep.
        exchange: topic exchange of events. Their CloudEvents source is `/<database>/<collection>`.
        failure_policy: `"halt"` tries a failing entry forever, before later entries. `"dead_letter"` moves it to the
            dead letters after `max_attempts` and ten minutes.
        dead_letter_retention: seconds for which an unchanged dead letter is kept. None until it is replayed or
            discarded.
    """

    name: str | None
    sweep_after: Duration
    sweep_every: Duration | None
    at_once: bool
    claim_ttl: Duration
    max_attempts: int
    database: str
    exchange: str
    failure_policy: str
    dead_letter_retention: Duration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """
    The options of one outbox, with durations in seconds. `SharedOptions` explains them.

    Raises:
        ConfigurationError: a value cannot work. The message names the option.
    """

    name: str | None = None
    sweep_after: float = 5.0
    sweep_every: float | None = 15.0
    at_once: bool = True
    claim_ttl: float = 10.0
    max_attempts: int = 5
    database: str = DEFAULT_DATABASE
    exchange: str = "mongo_celery.events"
    failure_policy: str = "halt"
    dead_letter_retention: float | None = None

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            if getattr(self, name) is not None or name != "sweep_every":
                object.__setattr__(self, name, _check_duration(getattr(self, name), name))
        if self.dead_letter_retention is not None:
            kept = positive(self.dead_letter_retention, "dead_letter_retention")
            object.__setattr__(self, "dead_letter_retention", kept)
        check_count("max_attempts", self.max_attempts)
        check_texts(
            database=self.database, exchange=self.exchange, **({} if self.name is None else {"name": self.name})
        )
        check_flags(at_once=self.at_once)
        if self.failure_policy not in FAILURE_POLICIES:
            raise ConfigurationError(
                f"failure_policy={self.failure_policy!r} is unknown. Choose "
                f"{' or '.join(map(repr, FAILURE_POLICIES))}.",
            )
        if self.claim_ttl < _CLAIM_SECONDS_MIN:
            raise ConfigurationError(
                f"claim_ttl={self.claim_ttl!r} is too short to publish an entry. Give at least 1 s."
            )


def parse_options(given: Mapping[str, Any]) -> OutboxOptions:
    """
    Return an outbox's options from its keyword arguments.

    Raises:
        ConfigurationError: an option does not exist, or a value cannot work.
    """
    check_known(list(given), list(SharedOptions.__annotations__), "option")
    return OutboxOptions(**given)


def _check_duration(value: Duration, name: str) -> float:
    """Return a duration in seconds, above zero and at most an hour."""
    found = seconds(value, name)
    if not 0 < found <= _SECONDS_MAX:
        raise ConfigurationError(f"{name}={value!r} must be more than 0 seconds and at most an hour.")
    return found
