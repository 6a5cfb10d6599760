"""
The parts of a run: the changes that the handler gets next.

A run is given in consecutive **parts**, at first as one part. A failed part is halved until the failing change is
alone. By then all changes before it have been given. Changes after it come with the next run.

With **coalescing** the handler gets only the last of several changes of one document, which replaces those before it.
This applies within a part: at its end the last change of each document was given, so a finished part leaves nothing
open. An event without a document (a drop, a rename) replaces nothing, and no change replaces one before such an event.

The class is pure. It identifies changes by their offsets in the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.change import wrap_event


class Parts:
    """
    The parts of one run.

    Args:
        count: number of changes that the handler may get.
        documents: each change's document identity, or None for an event without one. By default nothing is coalesced.
        most: the largest number of changes in a part. By default all.
        head_alone: True if the first change is its own part, because it was tried before.

    Attributes:
        begin: offset of the first change that is not done.
        failed: the failed change, once it is known.
        is_closing: True if only changes before the end of the run are left.
    """

    def __init__(
        self,
        count: int,
        documents: Sequence[bytes | None] | None = None,
        *,
        most: int | None = None,
        head_alone: bool = False,
    ) -> None:
        self.begin = 0
        self.failed: int | None = None
        self.is_closing = False
        self._documents = documents
        self._ends = [count, *reversed(range(most or count, count, most or count))]
        self._finished: set[int] = set()
        if head_alone and self._ends[-1] > 1:
            self._ends.append(1)

    @property
    def has_more(self) -> bool:
        """Return True if a part is left."""
        return bool(self._ends)

    @property
    def is_last(self) -> bool:
        """Return True if the run is complete after the current part."""
        return len(self._ends) == 1 and self.failed is None

    @property
    def end(self) -> int:
        """The offset after the current part."""
        return self._ends[-1]

    def next_offsets(self) -> list[int]:
        """Return the offsets of the current part's changes to give."""
        if self._documents is None and not self._finished:
            return list(range(self.begin, self._ends[-1]))
        return self._last_ones(self._ends[-1])

    def complete(self) -> None:
        """Finish the current part."""
        self.begin = self._ends.pop()

    def split(self, given: Sequence[int]) -> None:
        """Halve the current part: one of these changes failed, but it is unknown which. The first half is next."""
        self._ends.append(given[len(given) // 2 - 1] + 1)

    def finish(self, given: Sequence[int]) -> None:
        """Mark these changes of the unfinished part as finished."""
        self._finished.update(given)

    def fail(self, offset: int) -> None:
        """Note that this change fails. Afterwards the handler gets only earlier ones."""
        self.failed = offset
        self.stop(offset)

    def stop(self, offset: int) -> None:
        """End the run before this change. Afterwards the handler gets only earlier ones."""
        self.is_closing = True
        self._ends = [offset] if offset > self.begin else []

    def reach(self, calls: int) -> int:
        """
        Return the latest offset at which the run can stop after at most this many further handler calls.

        With 0, everything before it is already done.
        """
        found, behind, owed = self.begin, 0, 0
        latest: dict[bytes, bool] = {}
        for each in range(self.begin, self.end):
            document = None if self._documents is None else self._documents[each]
            is_open = each not in self._finished
            if document is None:
                behind, owed, latest = behind + owed + is_open, 0, {}
            else:
                owed += is_open - latest.get(document, False)
                latest[document] = is_open
            if behind + owed <= calls:
                found = each + 1
        return found

    def list_remaining(self, offset: int) -> list[int]:
        """Return the unfinished changes before this one that it does not replace."""
        return [each for each in self._last_ones(offset + 1) if each != offset]

    def list_superseded(self, offset: int) -> list[int]:
        """Return the changes that this one replaces, the last one first."""
        found: list[int] = []
        if self._documents is None or self._documents[offset] is None:
            return found
        for each in range(offset - 1, self.begin - 1, -1):
            if self._documents[each] is None:
                break
            if self._documents[each] == self._documents[offset] and each not in self._finished:
                found.append(each)
        return found

    def _last_ones(self, end: int) -> list[int]:
        """Yield the unfinished, unreplaced changes from `begin` to an offset."""
        if self._documents is None:
            return [each for each in range(self.begin, end) if each not in self._finished]
        found: list[int] = []
        seen: set[bytes] = set()
        for each in range(end - 1, self.begin - 1, -1):
            document = self._documents[each]
            if document is None:
                seen.clear()
            elif document in seen:
                continue
            else:
                seen.add(document)
            if each not in self._finished:
                found.append(each)
        return found[::-1]


def read_document_key(raw: bytes) -> bytes | None:
    """Return the identity of an event's document. None if it has none, or cannot be read."""
    try:
        event = wrap_event(raw)
        namespace, key = event.get("ns"), event.get("documentKey")
        is_there = isinstance(namespace, RawBSONDocument) and isinstance(key, RawBSONDocument) and "_id" in key
        return b"".join((namespace.raw, key.raw)) if is_there else None
    except Exception:  # noqa: BLE001 - whatever broken bytes do: nothing stands for what cannot be read
        return None
