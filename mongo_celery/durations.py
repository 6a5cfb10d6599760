"""Durations that users give."""

from __future__ import annotations

from datetime import timedelta

from mongo_celery.errors import ConfigurationError

Duration = float | timedelta


def seconds(value: object, name: str) -> float:
    """A duration in seconds from a number or a `timedelta`; anything else is a ConfigurationError."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name}={value!r} must be a number of seconds or a timedelta.")
    return float(value)


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
