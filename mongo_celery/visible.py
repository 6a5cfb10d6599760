"""Text from any source, made safe for a terminal, a page and a log."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that move a cursor, break a line, change the direction of text or are invisible, and lone surrogates."""


class Lines(str):
    """Text of several lines that a log record keeps as lines, such as a traceback."""

    __slots__ = ()


def visible(text: object) -> str:
    r"""
    Return text as one line that a terminal shows completely, without obeying any control character in it.

    Control characters, line breaks, direction changes and invisible characters appear as their numbers: `"a\x1b[2J"`
    becomes `"a\\u001b[2J"`. Other text stays the same.
    """
    return _HIDDEN.sub(_number, str(text))


def visible_lines(text: object, indent: str = "") -> str:
    """Return text with its line feeds. Each line is `visible`, and lines after the first begin with `indent`."""
    return f"\n{indent}".join(visible(line) for line in str(text).replace("\r\n", "\n").split("\n"))


def _number(found: re.Match[str]) -> str:
    units = found.group().encode("utf-16-be", "surrogatepass")  # as in JSON, so that visible JSON is still JSON
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True))


# -- log records -----------------------------------------------------------------------------------

LOGGERS = (
    "mongo_celery.beat",
    "mongo_celery.http",
    "mongo_celery.indexes",
    "mongo_celery.lease",
    "mongo_celery.listener",
    "mongo_celery.locking",
    "mongo_celery.metrics",
    "mongo_celery.outbox",
    "mongo_celery.signals",
    "mongo_celery.stream",
    "mongo_celery.tracing",
    "mongo_celery.twophase",
    "mongo_celery.worker",
)
"""The loggers of the package."""


class _Harmless:
    """A record's value. Its text is made when a handler formats it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return visible(self._value)

    def __repr__(self) -> str:
        return visible(repr(self._value))


class _OneLine(logging.Filter):
    """Makes a record's values visible, so that no error or id begins a new line."""

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
    """Make the records of all loggers of the package safe, whatever sets up logging. You may repeat it."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_ONE_LINE)
