"""Checks of users' arguments: durations, names, choices, and the words `did you mean`."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeGuard, TypeVar

from mongo_celery.errors import ConfigurationError

Duration = float | timedelta
T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def seconds(value: object, name: str) -> float:
    """Return a duration in seconds from a number or a `timedelta`. Other values raise ConfigurationError."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not is_number(value):
        raise ConfigurationError(f"{name}={value!r} must be a number of seconds or a timedelta.")
    return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value is a finite number. A bool is not a number, nor is NaN, which passes every comparison."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def check_count(name: str, value: object) -> int:
    """Return a whole number of at least 1. Other values raise ConfigurationError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1.")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return True or False. Other values raise ConfigurationError: a string such as `"no"` would count as True."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be True or False.")
    return value


def check_flags(**given: object) -> None:
    """Refuse values other than True and False."""
    for name, value in given.items():
        check_flag(name, value)


def check_texts(**given: object) -> None:
    """Refuse values that are not strings, and empty strings."""
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{name}={value!r} must be a non-empty string.")


def positive(value: Duration, name: str) -> float:
    """Return a duration of more than 0 in seconds. Other values raise ConfigurationError."""
    found = seconds(value, name)
    if found <= 0:
        raise ConfigurationError(f"{name}={value!r} must be more than 0 seconds.")
    return found


def not_negative(value: Duration, name: str) -> float:
    """Return a duration of 0 or more in seconds. Other values raise ConfigurationError."""
    found = seconds(value, name)
    if found < 0:
        raise ConfigurationError(f"{name}={value!r} must be 0 seconds or more.")
    return found


def check_name(value: object, what: str) -> str:
    """Return a name for queues, task ids and document ids. Other values raise ConfigurationError."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigurationError(f"{what} {value!r} is not allowed. Use 1 to 64 letters, digits, '_' or '-'.")
    return value


def check_choice(name: str, value: T, choices: Sequence[object]) -> T:
    """Return one of the choices. Other values raise ConfigurationError, which names the nearest choice."""
    if value not in choices:
        raise ConfigurationError(
            f"{name}={value!r} is unknown{nearest(str(value), [str(c) for c in choices])}. Choose one of "
            f"{', '.join(repr(choice) for choice in choices)}.",
        )
    return value


def check_known(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Refuse an unknown or misspelt option name."""
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{what} {name!r} is unknown{nearest(name, known)}.")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean ...?)` if a similar word is known, otherwise an empty string."""
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
