"""The options of two-phase commit: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from mongo_celery.arguments import check_texts
from mongo_celery.errors import ConfigurationError

PROTOCOLS = ("auto", "documents")

RETENTION = timedelta(days=90)
"""For so long a repeated id is known, unless an application chooses otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPhaseOptions:
    """
    What a `TwoPhaseCommit` was told, durations in seconds; it says what each option means.

    Raises:
        ConfigurationError: a value cannot work; the message names the option.
    """

    application: str
    name: str
    older_than: float
    timeout: float
    recover_every: float | None
    protocol: str
    deadline: float
    retention: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.application, str) or not self.application:
            raise ConfigurationError(f"application={self.application!r} must be a name, such as 'shop'.")
        check_texts(name=self.name)
        if self.protocol not in PROTOCOLS:
            raise ConfigurationError(f"protocol={self.protocol!r} must be one of {', '.join(map(repr, PROTOCOLS))}.")
        if self.retention is not None and self.retention < self.deadline:
            raise ConfigurationError(
                f"retention={self.retention:g} is less than the deadline of {self.deadline:g} s: whoever got no answer "
                "may ask for the same transaction again, and it would be done twice. Give more."
            )
