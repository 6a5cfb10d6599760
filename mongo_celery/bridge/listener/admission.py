"""
Assign each event to a partition of the subscription, or refuse it.

No user value or function can raise an exception through this module. It only refuses one change, in one partition's
order (P12).

| problem | partition | consequence |
|---|---|---|
| the event could not be read as requested (`ChangeEvent.read_error`) | by document key | failure policy |
| it was not read, because its `_id` is too large (`oversized`) | of no key | a dead letter instead of `halt` |
| only this handler's `match` failed on it | by the rule | failure policy |
| `partition_by` raises, or returns an unhashable value | by document key | failure policy |

If an event with a read error has a flag that shows that a handler's `match` is false, the handler does not get it.

**An undeliverable change is stored immediately**, with its reason, and keeps its partition. After a fix (a corrected
`partition_by` and a new term) the same event gets another key. That key's partition may already have committed later
changes, so the event would count as done there. So no change after an undeliverable one runs before that one is stored
and marked. A later term judges the stored bytes again (`judge_again`). If it reads the event again, the event goes to
the partition where it is stored, whatever the rule returns by then. So the change stays stored until the watermark has
passed it, even when done: until then the event counts as done. Not promised: a change that was handled before the
problem began, and is read again because of it, may run once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
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


class Admission:
    """
    The gate of one subscription in one term.

    Args:
        selector: selects the events of the subscription.
        partitioner: the partition rule of the subscription.
        layout: the partitioning in force.
        undeliverable: partitions of the stored undeliverable changes of earlier terms that will be read again, by their
            places.
    """

    def __init__(
        self, selector: Selector, partitioner: Partitioner, layout: Layout, undeliverable: Mapping[str, int]
    ) -> None:
        self._selector = selector
        self._is_simple = selector.is_simple
        self._known: dict[bytes, bool | None] = {}  # by operation and namespace: None if its contents decide
        self._partitioner = partitioner
        self._layout = layout
        self._hash_of = document_hash if partitioner.is_by_document else partitioner.hash
        self._undeliverable = undeliverable
        self._throttle = LogThrottle()

    def admit(self, event: ChangeEvent) -> PendingChange | None:
        """Return the event's change for the subscription, refused or not. None if there is none. It never raises."""
        is_owed, refusal = self._judge(event)
        if not is_owed:
            return None
        is_whole = refusal is None or (event.read_error is not None and event.read_error.only_match)
        hash_, failure = self._hash(event, by_rule=is_whole)  # otherwise the rule might see too little
        index = hash_ % self._layout.partitions
        if self._undeliverable:
            index = self._undeliverable.get(token_place(event.mark.data), index)
        return PendingChange(event.mark, index, event.raw, refusal or failure, hash_)

    def admit_existing(self, event: ChangeEvent) -> PendingChange:
        """
        Return the change of an existing document for the subscription, refused or not. It never raises.

        It is always delivered: the snapshot requests it, and its conditions were checked when it was read. Any thread
        may call this.
        """
        refusal = Refusal.because(event.read_error.sentence, lasts=True) if event.read_error is not None else None
        hash_, failure = self._hash(event, by_rule=refusal is None)
        return PendingChange(event.mark, hash_ % self._layout.partitions, event.raw, refusal or failure, hash_)

    def _hash(self, event: ChangeEvent, *, by_rule: bool) -> tuple[int, Refusal | None]:
        """Return the hash of the partition key, or of the document key with the error of the rule."""
        failure = None
        if by_rule:
            try:
                return self._hash_of(event.document), None
            except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                failure = keyless(self._selector.name, error)
        return document_hash(event.document), failure

    def _judge(self, event: ChangeEvent) -> tuple[bool, Refusal | None]:
        """Return True if the event must be delivered, as far as known, and the reason of a refusal."""
        read_error, selector = event.read_error, self._selector
        try:
            if read_error is not None and not (read_error.only_match and self._is_judged(event)):
                is_owed = self._flag(event.document) is not False and selector.may_select(event.document)
                return is_owed, Refusal.because(read_error.sentence, lasts=True)
            return self._selects(event.document), None
        except Exception as error:  # noqa: BLE001 - whatever bytes do to a decoder
            return True, _unfiltered(selector.name, error)

    def _selects(self, document: Mapping[str, Any]) -> bool:
        """Return True if the selector accepts it. A result for all changes of its operation is cached."""
        origin = document.origin if self._is_simple and isinstance(document, RawEvent) else None
        if origin is None:
            return self._selector.selects(document)
        if origin not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            is_wanted = self._selector.wants(document)
            self._known[origin] = None if is_wanted and self._selector.may_be_bookkeeping(document) else is_wanted
        known = self._known[origin]
        return not self._selector.is_bookkeeping(document) if known is None else known

    def _still_selects(self, document: Mapping[str, Any]) -> bool:
        is_matched = self._selector.filter.match is None or self._flag(document) is not False
        return is_matched and self._selector.may_select(document)

    def _is_judged(self, event: ChangeEvent) -> bool:
        """Return True unless this handler's `match` failed. A failed event has only the flags of other handlers."""
        return self._selector.filter.match is None or self._flag(event.document) is not None

    def _flag(self, document: Mapping[str, Any]) -> Any:
        """Return the server's result of this handler's `match`. None if it is unknown, or there is no `match`."""
        flags = document.get(FLAGS)
        return flags.get(self._selector.name) if isinstance(flags, Mapping) else None

    def judge_again(self, change: StoredChange) -> StoredChange:
        """
        Return a stored change with its current reason, or without one if the handler can get it.

        It keeps its partition. If it was read incomplete, or its bytes are damaged, it does not change. A `match` that
        was deployed after the reading has no flag, and omits nothing: the handler wanted the change when it was read.
        """
        if change.refusal is None or change.refusal.lasts or not change.raw:
            return change
        event = wrap_event(change.raw)
        try:
            if opens_stream(change.data) and not self._still_selects(event):
                return change
        except Exception as error:  # noqa: BLE001 - whatever bytes do to a decoder
            return change if change.refusal.halts else replace(change, refusal=_unfiltered(self._selector.name, error))
        try:
            self._partitioner.hash(event)
        except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
            return change if change.refusal.halts else replace(change, refusal=keyless(self._selector.name, error))
        return replace(change, refusal=None)

    def report(self, change: PendingChange) -> None:
        """Log an accepted undeliverable change: the first one immediately, later ones every 30 s."""
        assert change.refusal is not None, "only an undeliverable change is reported"
        if is_unread(change.data):
            return  # the reader has logged it
        if not self._throttle.may_log():
            return
        logger.error(
            "%s cannot be given to handler %s, partition %d%s: %s",
            describe(change.raw),
            self._selector.name,
            change.index,
            self._throttle.describe_left_out(),
            change.refusal.reason,
            extra={"event": "change_refused", "partition": change.index},
        )


def _unfiltered(handler: str, error: Exception) -> Refusal:
    """Return the refusal of a change on which the filters failed."""
    return Refusal.because(f"the filters of handler {handler} fail on this change: {error_text(error)}", halts=True)


def keyless(handler: str, error: Exception) -> Refusal:
    """Return the refusal of a change for which the partition rule failed."""
    return Refusal.because(
        f"partition_by of handler {handler} failed: {error_text(error)}. It must return a key for every event"
    )
