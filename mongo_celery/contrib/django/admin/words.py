"""How anything that somebody may have written stands on a page: as text, bounded, with what is hidden made visible."""

from __future__ import annotations

import json
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation

from mongo_celery.cli.verdict_view import visible

_SHOWN_MAX = 1000
_CONTENTS_MAX = 100_000
_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


def shown(text: object) -> str:
    """One line, not without end."""
    line = " ".join(str(text).split())
    return visible(f"{line[:_SHOWN_MAX]}..." if len(line) > _SHOWN_MAX else line)


def block(text: str) -> str:
    """Lines, such as those of a traceback."""
    lines = "\n".join(map(visible, text.rstrip().splitlines()))
    return f"{lines[:_CONTENTS_MAX]}\n..." if len(lines) > _CONTENTS_MAX else lines


def document(value: Any) -> str:
    """A document as extended JSON."""
    plain = json.loads(json_util.dumps(value, json_options=_JSON))
    return block(json.dumps(plain, indent=2, ensure_ascii=False))
