"""The items that a reader delivers: events, places between them, and the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mongo_celery.bridge.window import Mark
from mongo_celery.errors import MongoCeleryError


@dataclass(frozen=True, slots=True)
class ReadError:
    """
    The reason why an event was read with less than requested.

    Attributes:
        sentence: the failure and the server's error, for people.
        only_match: True if only `match` expressions failed on it. Then it concerns only their handlers, whose flags the
            event lacks.
    """

    sentence: str
    only_match: bool = False


@dataclass(slots=True)
class ChangeEvent:
    """
    A change event: its place, a document for matching with only the top level decoded, and its bytes.

    Items never change. The class is not frozen, because that would double the time for each change.

    An event with a read error is incomplete (no lookup, no images, no flags, in the worst case no document). The
    failure policy of its handlers decides about it.
    """

    mark: Mark
    document: Mapping[str, Any]
    raw: bytes
    read_error: ReadError | None = None

    @property
    def data(self) -> str:
        """Comparable part of its token."""
        return self.mark.data


@dataclass(frozen=True, slots=True)
class Failed:
    """The permanent end of the stream."""

    error: MongoCeleryError


Item = ChangeEvent | Mark | Failed

_WEIGHT_SHIFT = 15


def weigh(item: Item) -> int:
    """Return the weight of an item: one, plus one for each 32 KiB of an event."""
    return 1 + (len(item.raw) >> _WEIGHT_SHIFT) if isinstance(item, ChangeEvent) else 1
