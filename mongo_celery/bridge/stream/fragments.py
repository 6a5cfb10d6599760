"""
Events that a server has cut into fragments (`$changeStreamSplitLargeEvent`), joined to one again.

Each fragment has some of the event's top-level fields, whole, and says in `splitEvent` which one of how many it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.errors import InvalidOperation

SPLIT_STAGE: Mapping[str, Any] = {"$changeStreamSplitLargeEvent": {}}
_MARK = "splitEvent"


def can_split(version: Sequence[int]) -> bool:
    """Whether a server of this version has the stage: since 6.0.9 and 7.0, but none of the releases between."""
    return tuple(version[:2]) >= (7, 0) or (tuple(version[:2]) == (6, 0) and tuple(version[:3]) >= (6, 0, 9))


def joined(fragments: Iterable[RawBSONDocument], token: Mapping[str, Any]) -> RawBSONDocument | None:
    """
    The whole event, under the token that it has in a stream that does not split; None where there is none.

    Reads no more fragments than belong to it. It may be larger than 16 MB: no server takes it back.

    Raises:
        InvalidOperation: the fragments are not those of one event, from the first to the last.
    """
    whole: dict[str, Any] = {"_id": dict(token)}
    for expected, fragment in enumerate(fragments, start=1):
        mark = fragment.get(_MARK)
        if mark is None and expected == 1:
            return fragment  # small enough to come as it is
        if mark is None or mark["fragment"] != expected:
            break
        whole.update((name, value) for name, value in fragment.items() if name not in {"_id", _MARK})
        if mark["of"] == expected:
            return RawBSONDocument(bson.encode(whole))
    if len(whole) == 1:
        return None
    raise InvalidOperation("The fragments of a large event did not come one after the other.")
