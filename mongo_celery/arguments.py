"""What users give, checked once: durations, names, choices, and the words `did you mean`."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeGuard

from mongo_celery.errors import ConfigurationError

Duration = float | timedelta

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def seconds(value: object, name: str) -> float:
    """Return a duration in seconds from a number or a `timedelta`; anything else is a ConfigurationError."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not is_number(value):
        raise ConfigurationError(f"{name}={value!r} must be a number of seconds or a timedelta.")
    return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value is a finite number; a bool is none, and neither is NaN, which no comparison refuses."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}.")


def check_flags(**given: object) -> None:
    """Refuse what is neither True nor False: a text such as `"no"` would count as True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} must be True or False.")


def check_texts(**given: object) -> None:
    """Refuse what is no text, or an empty one."""
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{name}={value!r} must be a text.")


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


def check_name(value: object, what: str) -> str:
    """A name for queues, task ids and document ids, or a ConfigurationError."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigurationError(f"{what} {value!r} must be 1 to 64 letters, digits, '_' or '-'.")
    return value


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """
    Refuse a value that is not among the choices, with the nearest one where there is one.

    Args:
        name: of the option.
        value: as given.
        choices: what it may be.
    """
    if value in choices:
        return
    raise ConfigurationError(
        f"{name}={value!r} is unknown{nearest(str(value), [str(c) for c in choices])}; choose one of "
        f"{', '.join(repr(choice) for choice in choices)}.",
    )


def check_known(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Refuse an unknown or misspelt option name."""
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{what} {name!r} is unknown{nearest(name, known)}.")


def nearest(word: str, known: Sequence[str]) -> str:
    """The words ` (did you mean ...?)` where something similar is known, else nothing."""
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
