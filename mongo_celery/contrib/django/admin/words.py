"""How anything that somebody may have written stands on a page: as text, bounded, with what is hidden made visible."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from bson import Code, json_util
from bson.binary import UuidRepresentation

from mongo_celery.quantities import number
from mongo_celery.visible import visible

_SHOWN_MAX = 1000
_CONTENTS_MAX = 100_000
_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


def line(text: object) -> str:
    """On one line, and all of it: for the log."""
    return visible(" ".join(str(text).split()))


def shown(text: object, most: int = _SHOWN_MAX) -> str:
    """One line of so many characters, with how many more there are."""
    whole = str(text)
    more = len(whole) - most
    return line(whole) if more <= 0 else f"{line(whole[:most])}... and {number(more, 'character', 'characters')} more"


def block(text: str) -> str:
    """Lines, such as those of a traceback."""
    lines = "\n".join(map(visible, text[:_CONTENTS_MAX].rstrip().splitlines()))
    return f"{lines}\n..." if len(text) > _CONTENTS_MAX else lines


def document(value: Any) -> str:
    """A document as extended JSON, as much of it as is shown: whole ones of megabytes take seconds to write."""
    parts, length = [], 0
    for part in _ENCODER.iterencode(_extended(value)):
        parts.append(part)
        length += len(part)
        if length > _CONTENTS_MAX:
            break
    return block("".join(parts))


class _Fields(dict[str, Any]):
    """Fields, each of which becomes extended JSON when it is written."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = given

    def __bool__(self) -> bool:
        return bool(self._given)

    def items(self) -> Any:
        return ((name, _extended(value)) for name, value in self._given.items())


class _Elements(list[Any]):
    """Elements, in the same way."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self._given = given

    def __bool__(self) -> bool:
        return bool(self._given)

    def __iter__(self) -> Iterator[Any]:
        return map(_extended, self._given)


def _extended(value: Any) -> Any:
    """Not left to an encoder's `default`: code is text to it, and infinity a number."""
    if isinstance(value, Mapping):
        return _Fields(value)
    if isinstance(value, list | tuple):
        return _Elements(value)
    is_plain = value is None or (isinstance(value, str | int) and not isinstance(value, Code))
    if is_plain or (isinstance(value, float) and isfinite(value)):
        return value
    return json_util.default(value, json_options=_JSON)


_ENCODER = json.JSONEncoder(indent=2, ensure_ascii=False)
