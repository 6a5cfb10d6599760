"""Durations that users give."""

from __future__ import annotations

from datetime import timedelta

from mongo_celery.errors import ConfigurationError
from mongo_celery.options import seconds

Duration = float | timedelta


def positive(value: Duration, name: str) -> float:
    """Seconds, of which there must be some; else ConfigurationError."""
    found = seconds(value, name)
    if found <= 0:
        raise ConfigurationError(f"{name}={value!r} must be more than 0 seconds.")
    return found


def not_negative(value: Duration, name: str) -> float:
    """Seconds, or none at all; else ConfigurationError."""
    found = seconds(value, name)
    if found < 0:
        raise ConfigurationError(f"{name}={value!r} must not be negative.")
    return found
