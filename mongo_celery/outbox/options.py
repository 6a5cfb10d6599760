"""The options of an outbox: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from mongo_celery.arguments import Duration, check_count, check_flags, check_known, check_texts, positive, seconds
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.outbox.failures import FAILURE_POLICIES

_SECONDS_MAX = 3600.0
_CLAIM_SECONDS_MIN = 1.0
"""A relay relies on half of it; a claim that a majority has to acknowledge may take as long as less."""

_DURATIONS = ("sweep_after", "sweep_every", "claim_ttl")

AtOnce = bool | Literal["wait"]


class SharedOptions(TypedDict, total=False):
    """
    What may be given to an outbox of either kind; each has a default.

    Attributes:
        name: what commands and logs call it; by default the collection's full name.
        sweep_after: seconds after which the sweep takes an entry.
        sweep_every: seconds between two sweeps, which `celery beat` asks for, and the listener of a bridge of the app;
            None where something else calls `sweep`.
        at_once: whether this process dispatches what it has written, or committed, by a thread of its own; `"wait"` to
            have a write wait for that, half of `claim_ttl` and 5 s at most.
        claim_ttl: seconds for which a document, or a key, belongs to one relay.
        max_attempts: how often an entry may fail through its own fault before it is stuck, or may be set aside.
        database: where dead letters, notes of sweeps and signing keys are kept.
        exchange: topic exchange of the events.
        source: CloudEvents' source; by default `/<database>/<collection>`.
        foreign_tasks: publish tasks that this app does not know, for another app to run.
        failure_policy: `"halt"` tries an entry with a fault of its own for ever, in front of what stands behind it;
            `"dead_letter"` sets it aside after `max_attempts` and ten minutes.
        delivers: names of other apps that write to this collection, whose entries this app publishes too.
        dead_letter_retention: seconds for which a dead letter is kept; None until it is replayed or discarded.
    """

    name: str | None
    sweep_after: Duration
    sweep_every: Duration | None
    at_once: AtOnce
    claim_ttl: Duration
    max_attempts: int
    database: str
    exchange: str
    source: str | None
    foreign_tasks: bool
    failure_policy: str
    delivers: Sequence[str]
    dead_letter_retention: Duration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """
    What an outbox was told, durations in seconds; `SharedOptions` and `Outbox` say what each option means.

    Raises:
        ConfigurationError: a value cannot work; the message names the option.
    """

    name: str | None = None
    sweep_after: float = 5.0
    sweep_every: float | None = 15.0
    at_once: AtOnce = True
    claim_ttl: float = 10.0
    max_attempts: int = 5
    database: str = DEFAULT_DATABASE
    exchange: str = "mongo_celery.events"
    source: str | None = None
    foreign_tasks: bool = False
    failure_policy: str = "halt"
    delivers: Sequence[str] = ()
    dead_letter_retention: float | None = None

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            if getattr(self, name) is not None or name != "sweep_every":
                object.__setattr__(self, name, _check_duration(getattr(self, name), name))
        if self.dead_letter_retention is not None:
            kept = positive(self.dead_letter_retention, "dead_letter_retention")
            object.__setattr__(self, "dead_letter_retention", kept)
        check_count("max_attempts", self.max_attempts)
        optional = {name: getattr(self, name) for name in ("name", "source") if getattr(self, name) is not None}
        check_texts(database=self.database, exchange=self.exchange, **optional)
        check_flags(foreign_tasks=self.foreign_tasks)
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


def options_of(given: Mapping[str, Any]) -> OutboxOptions:
    """
    Return the options of one outbox from its keyword arguments.

    Raises:
        ConfigurationError: there is no such option, or a value cannot work.
    """
    check_known(list(given), list(SharedOptions.__annotations__), "option")
    return OutboxOptions(**given)


def _check_duration(value: Duration, name: str) -> float:
    """A duration in seconds: more than none, and at most an hour."""
    found = seconds(value, name)
    if not 0 < found <= _SECONDS_MAX:
        raise ConfigurationError(f"{name}={value!r} must be more than 0 seconds and at most an hour.")
    return found
