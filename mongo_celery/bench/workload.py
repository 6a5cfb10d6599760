"""What a user's own changes and handlers are like: the size of a document, and the time of a handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bson
from bson import ObjectId, json_util

from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.handler_work import HandlerWork
from mongo_celery.bench.payload import order
from mongo_celery.quantities import size

_BYTES_MAX = 15 << 20
"""An event has some more than the document, and MongoDB's bound is 16 MiB."""

_FILLER = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    Changes and handlers as somebody has them.

    Attributes:
        content: of each document, without its `_id`.
        work: what the handler does with one.
    """

    content: Mapping[str, Any] = field(default_factory=lambda: content_of(None))
    work: HandlerWork = field(default_factory=HandlerWork)

    def document(self) -> dict[str, Any]:
        """A new one."""
        return {"_id": ObjectId(), **self.content}

    @property
    def document_bytes(self) -> int:
        """Size of one document in BSON."""
        return len(bson.encode(self.document()))


def content_of(given: str | None) -> dict[str, Any]:
    """
    The content of a document as `--payload` names it.

    Args:
        given: a number of bytes, the path of a file with one document in (Extended) JSON, or None for an order as
            in all modes.

    Raises:
        BenchError: it is neither, or MongoDB would not take it.
    """
    if given is None:
        content = order(0)
    elif given.strip().isdecimal():
        return _filled(int(given))
    else:
        content = _read(Path(given))
    content.pop("_id", None)
    try:
        count = len(bson.encode({"_id": ObjectId(), **content}))
    except (bson.errors.BSONError, OverflowError, RecursionError) as error:
        raise BenchError(f"--payload {given} is not what MongoDB can store: {error}.") from error
    _check(count, f"--payload {given}")
    return content


def _filled(count: int) -> dict[str, Any]:
    least = len(bson.encode({"_id": ObjectId(), _FILLER: ""}))
    if count < least:
        raise BenchError(f"--payload {count} is too small: a document with an _id and one field has {least} bytes.")
    _check(count, f"--payload {count}")
    return {_FILLER: "x" * (count - least)}


def _check(count: int, what: str) -> None:
    if count > _BYTES_MAX:
        raise BenchError(f"{what} is too large: the bench takes documents of up to {size(_BYTES_MAX)}.")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json_util.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(
            f"--payload {path} is neither a number of bytes nor a file that can be read: {error.strerror}."
        ) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, bson.errors.BSONError) as error:
        raise BenchError(f"--payload {path} is not one document in JSON: {error}.") from error
    if not isinstance(found, dict):
        raise BenchError(f"--payload {path} has a {type(found).__name__}, and must have one document: {{...}}.")
    return found
