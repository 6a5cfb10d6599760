"""Filters for untrusted text, such as errors and keys. Django escapes the result."""

from __future__ import annotations

from django import template

from mongo_celery.quantities import number
from mongo_celery.visible import visible, visible_lines

_LINE_MAX = 1000
_LINES_MAX = 100_000


def to_line(text: object) -> str:
    """Return text as one line of limited length. Hidden characters appear as their numbers."""
    whole = str(text)
    more = len(whole) - _LINE_MAX
    rest = f"... and {number(more, 'character', 'characters')} more" if more > 0 else ""
    return visible(" ".join(whole[:_LINE_MAX].split())) + rest


def to_lines(text: str) -> str:
    """Return text of several lines, such as a traceback or a document, with `to_line` for each."""
    return visible_lines(text[:_LINES_MAX].rstrip()) + ("\n..." if len(text) > _LINES_MAX else "")


register = template.Library()
register.filter("line", to_line)
register.filter("lines", to_lines)
