"""
Route each event to a partition of the subscription, or refuse it.

Nothing a user's value or a user's function does comes out of here as an exception: it becomes the
refusal of one change, in the order of one partition (P12).

| what goes wrong | partition | what happens |
|---|---|---|
| the event could not be read as asked for (`ChangeEvent.read_error`) | by document key | failure policy |
| it was not read, since its `_id` is too large (`oversized`) | that of no key | a dead letter instead of `halt` |
| nothing but this handler's `match` failed on it | by the rule | failure policy |
| `partition_by` raises, or gives what has no hash | by document key | failure policy |

An event with a read error whose flag says that a handler's `match` does not hold is not owed to it.

**An undeliverable change is stored immediately**, with its reason, and keeps its partition. After a fix (a corrected
`partition_by` and a new term) the same event gets another key. The partition of that key may have committed later
changes already, and the event would count as done there. So nothing that was read after an undeliverable change runs
before that change is stored and marked. A later term judges the stored bytes again (`judge_again`). If it reads the
event itself once more, the event goes to the partition where it is stored, whatever the rule says by then. So the
change stays stored until the watermark has passed it, also when it is done: there the event counts as done.
Not promised: a change that was handled before the cause came up, and is read again because of it, may run once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.change import FLAGS, describe, wrap_event
from mongo_celery.bridge.existing import is_unread, opens_stream, token_place
from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.partitioning import Partitioner, document_hash
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.window import PendingChange, Refusal
from mongo_celery.mongo.verdicts import error_text

if TYPE_CHECKING:
    from mongo_celery.bridge.state.backlog import StoredChange
    from mongo_celery.bridge.state.subscriptions import Layout
    from mongo_celery.bridge.stream.items import ChangeEvent
    from mongo_celery.bridge.stream.source import Selector

logger = logging.getLogger("mongo_celery.listener")

_MOST_KNOWN = 4096


class _Answer(Enum):
    """The answer about all changes with one operation in one namespace."""

    UNKNOWN, NO, YES, BY_CONTENTS = range(4)


class Admission:
    """
    The gate of one subscription in one term.

    Args:
        selector: which events belong to it.
        partitioner: its partition rule.
        layout: the layout in force.
        undeliverable: partitions of the undeliverable changes that an earlier term has stored, by their places, as
            far as they are read again.
    """

    def __init__(
        self, selector: Selector, partitioner: Partitioner, layout: Layout, undeliverable: Mapping[str, int]
    ) -> None:
        self._selector = selector
        self._is_simple = selector.is_simple
        self._known: dict[bytes, _Answer] = {}
        self._partitioner = partitioner
        self._layout = layout
        self._hash_of = document_hash if partitioner.is_by_document else partitioner.hash
        self._undeliverable = undeliverable
        self._throttle = LogThrottle()

    def admit(self, event: ChangeEvent) -> PendingChange | None:
        """The change that this event is for the subscription, refused or not. None when it owes none. Never raises."""
        document, answer, refusal = event.document, _Answer.UNKNOWN, None
        if self._is_simple and event.read_error is None and isinstance(document, RawEvent):
            origin = document.origin
            if origin is not None:
                answer = self._known.get(origin, _Answer.UNKNOWN)
        if answer is _Answer.NO:
            return None
        if answer is not _Answer.YES:
            is_owed, refusal = self._judge(event)
            if not is_owed:
                return None
        is_whole = refusal is None or (event.read_error is not None and event.read_error.only_match)
        hash_, failure = self._hash(event, by_rule=is_whole)  # else the rule might see too little
        index = hash_ % self._layout.partitions
        if self._undeliverable:
            index = self._undeliverable.get(token_place(event.mark.data), index)
        return PendingChange(event.mark, index, event.raw, refusal or failure, hash_)

    def admit_existing(self, event: ChangeEvent) -> PendingChange:
        """
        The change that an existing document is for the subscription, refused or not. Never raises.

        It is owed: whoever has asked for the snapshot has said so, and its conditions were judged when it was read.
        Callable from any thread.
        """
        refusal = Refusal.because(event.read_error.sentence, lasts=True) if event.read_error is not None else None
        hash_, failure = self._hash(event, by_rule=refusal is None)
        return PendingChange(event.mark, hash_ % self._layout.partitions, event.raw, refusal or failure, hash_)

    def _hash(self, event: ChangeEvent, *, by_rule: bool) -> tuple[int, Refusal | None]:
        """Return the hash of the partition key, or of the document key, and why the rule failed, if it did."""
        failure = None
        if by_rule:
            try:
                return self._hash_of(event.document), None
            except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                failure = keyless(self._selector.name, error)
        return document_hash(event.document), failure

    def _judge(self, event: ChangeEvent) -> tuple[bool, Refusal | None]:
        """Return True if the event is owed, for all that can be told, and why it is refused if it is."""
        read_error, selector = event.read_error, self._selector
        try:
            if read_error is not None and not (read_error.only_match and self._is_judged(event)):
                is_owed = self._flag(event) is not False and selector.may_select(event.document)
                return is_owed, Refusal.because(read_error.sentence, lasts=True)
            return self._selects(event.document), None
        except Exception as error:  # noqa: BLE001 - whatever bytes do to a decoder
            reason = f"it cannot be told whether handler {selector.name} gets it: {error_text(error)}"
            return True, Refusal.because(reason, halts=True)

    def _selects(self, document: Mapping[str, Any]) -> bool:
        """Return True if the selector takes it. What holds for all changes of its operation there is remembered."""
        origin = document.origin if self._is_simple and isinstance(document, RawEvent) else None
        if origin is None:
            return self._selector.selects(document)
        known = self._known.get(origin)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = _Answer.NO
            if self._selector.wants(document):
                known = _Answer.BY_CONTENTS if self._selector.may_be_bookkeeping(document) else _Answer.YES
            self._known[origin] = known
        return known is not _Answer.NO and not self._selector.is_bookkeeping(document)

    def _is_judged(self, event: ChangeEvent) -> bool:
        """Return True unless the `match` of this handler failed: the event has the flags of the others alone."""
        return self._selector.filter.match is None or self._flag(event) is not None

    def _flag(self, event: ChangeEvent) -> Any:
        """The server's answer about this handler's `match`. None where it could not be asked, or there is none."""
        flags = event.document.get(FLAGS)
        return flags.get(self._selector.name) if isinstance(flags, Mapping) else None

    def judge_again(self, change: StoredChange) -> StoredChange:
        """
        Return a stored change with the reason that it has by now. Without one if the handler can be given it.

        It stays in its partition, and as it was stored if it was read with less than the handler asks for, or if its
        bytes are damaged.
        """
        if change.refusal is None or change.refusal.lasts or not change.raw:
            return change
        event = wrap_event(change.raw)
        try:
            if opens_stream(change.data) and not self._selector.selects(event):
                return change
            self._partitioner.hash(event)
        except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
            return change if change.refusal.halts else replace(change, refusal=keyless(self._selector.name, error))
        return replace(change, refusal=None)

    def report(self, change: PendingChange) -> None:
        """Log an undeliverable change that was taken in: the first one immediately, later ones every 30 s."""
        assert change.refusal is not None, "only undeliverable changes are reported"
        if is_unread(change.data):
            return  # the reader has said so
        if not self._throttle.may_log():
            return
        logger.error(
            "%s is refused before handler %s, in partition %d%s: %s",
            describe(change.raw),
            self._selector.name,
            change.index,
            self._throttle.describe_left_out(),
            change.refusal.reason,
            extra={"event": "change_refused", "partition": change.index},
        )


def keyless(handler: str, error: Exception) -> Refusal:
    """The refusal of a change for which the partition rule has failed."""
    return Refusal.because(
        f"partition_by of handler {handler} failed: {error_text(error)}; it must give a key for every event"
    )
