"""Filters for text that anybody may have written, such as errors and keys. Django escapes it afterwards."""

from __future__ import annotations

from django import template

from mongo_celery.quantities import number
from mongo_celery.visible import visible, visible_lines

_LINE_MAX = 1000
_LINES_MAX = 100_000


def to_line(text: object) -> str:
    """Return text as one line of bounded length. Hidden characters are shown as their numbers."""
    whole = str(text)
    more = len(whole) - _LINE_MAX
    rest = f"... and {number(more, 'character', 'characters')} more" if more > 0 else ""
    return visible(" ".join(whole[:_LINE_MAX].split())) + rest


def to_lines(text: str) -> str:
    """Return text of several lines, such as a traceback or a document, as `to_line` does."""
    return visible_lines(text[:_LINES_MAX].rstrip()) + ("\n..." if len(text) > _LINES_MAX else "")


register = template.Library()
register.filter("line", to_line)
register.filter("lines", to_lines)
