"""
What a subscription owes of what was read: which events, in which partitions, and which of them are refused.

Nothing a user's value, a user's function or a user's pipeline does comes out of here as an exception: it becomes the
refusal of one change, in the order of one partition (P12).

| what goes wrong | partition | what happens |
|---|---|---|
| the event could not be read as asked for (`ChangeEvent.flaw`) | by document key | failure policy |
| it was not read, since its `_id` is too large (`oversized`) | that of no key | a dead letter instead of `halt` |
| nothing but this handler's `match` failed on it | by the rule | failure policy |
| `partition_by` raises, or gives what has no hash | by document key | failure policy |
| the bridge's pipeline has removed what the event is judged by | by document key | halt |

A flawed event whose flag says that a handler's `match` does not hold is not owed to it.

A pipeline halts under every policy: it is configuration, it mostly spoils all changes alike, and to skip or set them
aside would lose what a corrected pipeline brings back, since a new one is read again from the watermark.

**A refused change keeps its partition.** When the cause has been cured (a corrected `partition_by` or pipeline, and a
new term), the same event gets another key; its partition by that key may have committed later changes already, and
it would count as done there. So refused changes are noted with the subscription, before anything that was read after
them is dispatched, and an event that was noted goes to the partition where it stands, whatever the rule says by now.
Not promised: that a change which was handled before the cause came up, and is read again because of it, is known as
done; it may then run once more.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.change import FLAGS, describe
from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.partitioning import Partitioner, document_hash
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.refusal import Refusal
from mongo_celery.bridge.window import PendingChange
from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from mongo_celery.bridge.state.subscriptions import Layout
    from mongo_celery.bridge.stream.items import ChangeEvent
    from mongo_celery.bridge.stream.source import Selector

logger = logging.getLogger("mongo_celery.listener")

_TIME_CHARS = 18  # of a token's `_data`: its type, and seconds and increment of its cluster time
_COMPLAINT_SECONDS = 30.0
_SLACK = 1000
_MOST_KNOWN = 4096
_MOST_STORED = 150_000  # some 90 bytes each: they must fit into a document

MOST_REFUSED = 50_000
"""How many refused changes of one subscription may be under way; as many again may have been noted by earlier terms."""


@dataclass(frozen=True, slots=True)
class Notes:
    """
    What is to be stored of refused changes.

    Attributes:
        generation: of the layout whose partitions they name.
        changes: a name for the token and the partition of each.
        is_all: whether they replace what is stored; else they are added to it.
    """

    generation: int
    changes: Sequence[Mapping[str, Any]]
    is_all: bool


class Admission:
    """
    The gate of one subscription in one term.

    Args:
        selector: which events belong to it.
        partitioner: its partition rule.
        layout: the layout in force.
        noted: what an earlier term has noted of refused changes.
    """

    def __init__(
        self,
        selector: Selector,
        partitioner: Partitioner,
        layout: Layout,
        noted: Mapping[str, Any] | None,
    ) -> None:
        self._selector = selector
        self._is_simple = selector.is_simple
        self._known: dict[bytes, bool] = {}
        self._partitioner = partitioner
        self._layout = layout
        self._noted: dict[str, int] = {}
        if noted and noted.get("generation") == layout.generation:
            self._noted = {each["token"]: each["index"] for each in noted["changes"]}
        self._fresh: dict[str, int] = {}
        self._spilled: list[str] = []
        self._stored: int | None = None
        self._bound = 0
        self._complained_at: float | None = None
        self._untold = 0

    def admit(self, event: ChangeEvent) -> PendingChange | None:
        """The change that this event is for the subscription, refused or not; None when it owes none. Never raises."""
        is_owed, refusal = self._judge(event)
        if not is_owed:
            return None
        hash_: int | None = None
        if refusal is None or (event.flaw is not None and event.flaw.only_match):  # else the rule might see too little
            try:
                hash_ = self._partitioner.hash(event.document)
            except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                refusal = refusal or keyless(self._selector.name, error)
        if hash_ is None:
            hash_ = document_hash(event.document)
        index = hash_ % self._layout.partitions
        if self._noted:
            index = self._noted.get(_entry(event.mark.data), index)
        return PendingChange(event.mark, index, event.raw, refusal, hash_)

    def admit_existing(self, event: ChangeEvent) -> PendingChange:
        """
        The change that an existing document is for the subscription, refused or not. Never raises.

        It is owed: whoever has asked for the snapshot has said so, and its conditions were judged when it was read.
        Callable from any thread.
        """
        refusal = Refusal.because(event.flaw.sentence) if event.flaw is not None else None
        hash_: int | None = None
        if refusal is None:
            try:
                hash_ = self._partitioner.hash(event.document)
            except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                refusal = keyless(self._selector.name, error)
        if hash_ is None:
            hash_ = document_hash(event.document)
        return PendingChange(event.mark, hash_ % self._layout.partitions, event.raw, refusal, hash_)

    def _judge(self, event: ChangeEvent) -> tuple[bool, Refusal | None]:
        """Whether the event is owed, for all that can be told, and why it is refused if it is."""
        flaw, selector = event.flaw, self._selector
        try:
            if flaw is not None and not (flaw.only_match and self._is_judged(event)):
                is_owed = self._flag(event) is not False and selector.may_select(event.document)
                return is_owed, Refusal.because(flaw.sentence)
            return self._selects(event.document), None
        except ConfigurationError as error:
            return True, Refusal.because(str(error), halts=True)
        except Exception as error:  # noqa: BLE001 - whatever a pipeline has made of the event
            reason = f"it cannot be told whether handler {selector.name} gets it: {error_text(error)}"
            return True, Refusal.because(reason, halts=True)

    def _selects(self, document: Mapping[str, Any]) -> bool:
        """Whether the selector takes it; said from memory where it was asked about such a change before."""
        origin = document.origin if self._is_simple and isinstance(document, RawEvent) else None
        if origin is None:
            return self._selector.selects(document)
        known = self._known.get(origin)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[origin] = self._selector.asks_for(document)
        return known and not self._selector.is_bookkeeping(document)

    def _is_judged(self, event: ChangeEvent) -> bool:
        """Whether the `match` of this handler, if it has one, did not fail: the event has the flags of those alone."""
        return self._selector.filter.match is None or self._flag(event) is not None

    def _flag(self, event: ChangeEvent) -> Any:
        """What the server says of this handler's `match`; None where it could not be asked, or there is none."""
        flags = event.document.get(FLAGS)
        return flags.get(self._selector.name) if isinstance(flags, Mapping) else None

    # -- refused changes keep their partition ------------------------------------------------------

    def note(self, change: PendingChange) -> None:
        """Remember a refused change that was taken in, and say so: the first at once, more of them now and then."""
        assert change.refusal is not None, "only refused changes are noted"
        entry = _entry(change.mark.data)
        if entry not in self._noted:
            self._noted[entry] = self._fresh[entry] = change.index
        if is_unread(change.data):
            return  # the reader has said so
        now = time.monotonic()
        if self._complained_at is not None and now - self._complained_at < _COMPLAINT_SECONDS:
            self._untold += 1
            return
        logger.error(
            "%s is refused before handler %s, in partition %d%s: %s",
            describe(change.raw),
            self._selector.name,
            change.index,
            f" (and {self._untold} more since the last such line)" if self._untold else "",
            change.refusal.reason,
            extra={"event": "change_refused", "partition": change.index},
        )
        self._complained_at, self._untold = now, 0

    @property
    def is_noted(self) -> bool:
        """Whether all refused changes are noted; until then nothing of the subscription may be dispatched."""
        return not self._fresh

    def spilled(self, data: str) -> None:
        """A refused change was stored with its bytes; its note is kept until the watermark has passed it."""
        heapq.heappush(self._spilled, data)

    def spilled_since(self, watermark: str) -> int:
        """How many refused changes are stored behind the watermark, so that they may be read again."""
        while self._spilled and self._spilled[0] <= watermark:
            heapq.heappop(self._spilled)
        return len(self._spilled)

    def notes(self, positions: Mapping[int, str], watermark: str = "") -> Notes:
        """
        What is to be stored: the new ones, or, from time to time, all that may be read again and still stand.

        Args:
            positions: comparable part of the committed token, by partition; what lies before it is forgotten.
            watermark: that of the stored watermark; nothing before it is read again.
        """
        if self._stored is not None and self._stored + len(self._fresh) <= self._bound:
            return Notes(self._layout.generation, _changes(self._fresh), is_all=False)
        self._noted = {
            entry: index
            for entry, index in self._noted.items()
            if entry in self._fresh or entry[:_TIME_CHARS] >= max(positions.get(index, ""), watermark)[:_TIME_CHARS]
        }
        return Notes(self._layout.generation, _changes(self._noted), is_all=True)

    def noted(self, notes: Notes) -> None:
        """These notes are stored."""
        if notes.is_all:
            self._stored = len(notes.changes)
            self._bound = min(2 * self._stored + _SLACK, _MOST_STORED)
        else:
            self._stored = (self._stored or 0) + len(notes.changes)
        self._fresh.clear()


def keyless(handler: str, error: Exception) -> Refusal:
    """The refusal of a change for which the partition rule has failed."""
    return Refusal.because(
        f"partition_by of handler {handler} failed: {error_text(error)}; it must give a key for every event"
    )


def _changes(entries: Mapping[str, int]) -> list[Mapping[str, Any]]:
    return [{"token": entry, "index": index} for entry, index in entries.items()]


def _entry(data: str) -> str:
    """Names a token within bounds (it carries the document's `_id`), and begins as the token does."""
    return data[:_TIME_CHARS] + hashlib.blake2b(data.encode("utf-8", "replace"), digest_size=16).hexdigest()
