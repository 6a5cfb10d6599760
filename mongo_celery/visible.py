"""Text that anybody may have written, made harmless for a terminal, a page and a log."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that move a cursor, break a line, turn the direction of text or cannot be seen, and lone surrogates."""


class Lines(str):
    """Text of several lines that one log record keeps as lines, such as a traceback."""

    __slots__ = ()


def visible(text: object) -> str:
    r"""
    Return text as one line that a terminal can neither obey nor hide.

    Control characters, line breaks, characters that turn the direction of text and those that nobody sees are shown
    as their numbers: `"a\x1b[2J"` becomes `"a\\u001b[2J"`. All other text stays as it is.
    """
    return _HIDDEN.sub(_number, str(text))


def visible_lines(text: object, indent: str = "") -> str:
    """Return text whose line feeds stay; each line is `visible`, and the lines after the first begin with `indent`."""
    return f"\n{indent}".join(visible(line) for line in str(text).replace("\r\n", "\n").split("\n"))


def visible_in(value: Any) -> Any:
    """Return a copy of plain mappings, lists and tuples in which each text, also of a key, is `visible`."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible_in(key): visible_in(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [visible_in(each) for each in value]
    return value


def _number(found: re.Match[str]) -> str:
    units = found.group().encode("utf-16-be", "surrogatepass")  # as JSON writes it, so that visible JSON is still JSON
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True))


# -- log records -----------------------------------------------------------------------------------

LOGGERS = (
    "mongo_celery.http",
    "mongo_celery.lease",
    "mongo_celery.listener",
    "mongo_celery.locking",
    "mongo_celery.outbox",
    "mongo_celery.stream",
    "mongo_celery.tracing",
    "mongo_celery.twophase",
    "mongo_celery.worker",
)
"""The loggers of the package."""


class _Harmless:
    """A value of a record; its text is made when a handler asks for it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return visible(self._value)

    def __repr__(self) -> str:
        return visible(repr(self._value))


class _OneLine(logging.Filter):
    """Makes the values of a record visible, so that no error and no id begins a line of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, Mapping):
            record.args = {name: _harmless(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_harmless, record.args))
        return True


def _harmless(value: object) -> object:
    if isinstance(value, Lines):
        return visible_lines(value, "  ")
    if isinstance(value, str):
        return visible(value)
    return value if value is None or isinstance(value, int | float) else _Harmless(value)


_ONE_LINE = _OneLine()


def guard_logs() -> None:
    """Make the records of all loggers of the package harmless, whatever sets up logging. It may be called again."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_ONE_LINE)
