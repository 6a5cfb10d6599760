"""The items that a reader hands over: events, places between them, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mongo_celery.bridge.window import Mark
from mongo_celery.errors import MongoCeleryError

_UNIT_SHIFT = 15


@dataclass(frozen=True, slots=True)
class ReadError:
    """
    The reason why an event was read with less than was asked for.

    Attributes:
        sentence: what failed and what the server said, for people.
        only_match: whether nothing but `match` expressions failed on it. Then only their handlers are concerned, which
            are those whose flag the event lacks.
    """

    sentence: str
    only_match: bool = False


@dataclass(slots=True)
class ChangeEvent:
    """
    A change event: its place, the document to match on, of which only the top is decoded, and its bytes.

    Nobody changes one. It is not frozen since there is one for each change that is read, and that takes twice the time.

    One with a read error was read with less (no look-up, no images, no flags, in the worst case no document at all).
    The failure policy of the handlers that it concerns decides about it.
    """

    mark: Mark
    document: Mapping[str, Any]
    raw: bytes
    read_error: ReadError | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream has ended for good."""

    error: MongoCeleryError


Item = ChangeEvent | Mark | Failed


def credit_cost(item: Item) -> int:
    """Return the credits that an item takes: one, and one more for each 32 KiB, so that bytes are bounded."""
    return 1 + (len(item.raw) >> _UNIT_SHIFT) if isinstance(item, ChangeEvent) else 1
