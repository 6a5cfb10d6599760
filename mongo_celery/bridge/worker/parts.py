"""
The parts of a run: which of its changes the handler is given next.

A run is given in **parts**, one behind the other: at first all of it. A part that fails is cut in halves, until the
change that fails is alone. What stands before it has been given by then, and what is behind it comes with the next run.

With **coalescing** only the last of several changes of one document is given, and stands for those before it. That
holds within a part: at its end each document's last change in it is given, so a part that is done leaves nothing
behind. An event without a document (a drop, a rename) stands for nothing, and nothing stands for a change across it.

Pure. Changes are known by their offsets in the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.change import wrap_event


class Parts:
    """
    The parts of one run.

    Args:
        count: of its changes that may be given.
        documents: what tells the document of each. None for each that has none. None where nothing is coalesced.
        most: of the changes of one part. All of them by default.
        head_alone: whether the first change is a part of its own: it has been tried before.

    Attributes:
        begin: everything before this offset is done.
        failed: the change that has failed, once it is known.
        is_closing: whether what is left is only what stands before a change at which the run ends.
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
        """True if a part is left."""
        return bool(self._ends)

    @property
    def is_last(self) -> bool:
        """True if the present part is the last one, and the run ends well with it."""
        return len(self._ends) == 1 and self.failed is None

    @property
    def end(self) -> int:
        """The offset behind the present part."""
        return self._ends[-1]

    def next_offsets(self) -> list[int]:
        """Return the changes of the present part that are to be given."""
        if self._documents is None and not self._finished:
            return list(range(self.begin, self._ends[-1]))
        return self._last_ones(self._ends[-1])

    def complete(self) -> None:
        """The present part is done."""
        self.begin = self._ends.pop()

    def split(self, given: Sequence[int]) -> None:
        """The present part has failed, and it is not known by which of these, two or more: the first half is next."""
        self._ends.append(given[len(given) // 2 - 1] + 1)

    def finish(self, given: Sequence[int]) -> None:
        """These changes of the present part are finished, though it is not done."""
        self._finished.update(given)

    def fail(self, offset: int) -> None:
        """It is this change that fails: only what stands before it is given now."""
        self.failed = offset
        self.stop(offset)

    def stop(self, offset: int) -> None:
        """The run ends before this change: only what stands before it is given now."""
        self.is_closing = True
        self._ends = [offset] if offset > self.begin else []

    def reach(self, calls: int) -> int:
        """
        Return the latest offset at which the run can stop after at most so many more handler calls.

        With 0, everything before it is done.
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
        """Return the changes that must be given before this one: neither finished nor superseded by it."""
        return [each for each in self._last_ones(offset + 1) if each != offset]

    def list_superseded(self, offset: int) -> list[int]:
        """Return the changes that are not done because this one stands for them, the last one first."""
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
        """Of the changes from `begin` to an offset those that are not finished, and for which no other one stands."""
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
    """Return what tells the document of an event from all others. None if it has none, or cannot be read."""
    try:
        event = wrap_event(raw)
        namespace, key = event.get("ns"), event.get("documentKey")
        is_there = isinstance(namespace, RawBSONDocument) and isinstance(key, RawBSONDocument) and "_id" in key
        return b"".join((namespace.raw, key.raw)) if is_there else None
    except Exception:  # noqa: BLE001 - whatever broken bytes do: nothing stands for what cannot be read
        return None
