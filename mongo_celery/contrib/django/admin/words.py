"""How anything that somebody may have written stands on a page: as text, bounded, with what is hidden made visible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation

from mongo_celery.cli.verdict_view import visible

_SHOWN_MAX = 1000
_CONTENTS_MAX = 100_000
_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


def shown(text: object) -> str:
    """One line, not without end."""
    line = " ".join(str(text)[:_CONTENTS_MAX].split())
    return visible(f"{line[:_SHOWN_MAX]}..." if len(line) > _SHOWN_MAX else line)


def block(text: str) -> str:
    """Lines, such as those of a traceback."""
    lines = "\n".join(map(visible, text[:_CONTENTS_MAX].rstrip().splitlines()))
    return f"{lines}\n..." if len(text) > _CONTENTS_MAX else lines


def document(value: Any) -> str:
    """A document as extended JSON, as much of it as is shown: whole ones of megabytes take seconds to write."""
    parts, length = [], 0
    for part in _ENCODER.iterencode(value):
        parts.append(part)
        length += len(part)
        if length > _CONTENTS_MAX:
            break
    return block("".join(parts))


def _extended(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else json_util.default(value, json_options=_JSON)


_ENCODER = json.JSONEncoder(indent=2, ensure_ascii=False, default=_extended)
