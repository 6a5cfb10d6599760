"""Words of drivers without the credentials of URLs."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(://)?[^\s\"'(]*@")
"""Also the pieces into which drivers cut a URL whose password is not escaped."""

_TAILS = (" (configured timeouts:", ", Timeout:", ", full error:")


def without_credentials(text: str) -> str:
    """A text whose URLs show no user and no password."""
    return _USER_INFO.sub(r"\1***@", text)


def short(error: BaseException) -> str:
    """An error's own words, without what drivers append, and without credentials."""
    text = str(error) or type(error).__name__
    for tail in _TAILS:
        text = text.split(tail, 1)[0]
    return without_credentials(text.rstrip("."))
