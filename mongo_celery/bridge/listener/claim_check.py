"""
The claim check: a run that is too large for a message is stored, and its message says where.

Brokers take messages of some size only, and keep all of them in memory. So the changes of such a run are inserted among
the stored changes (`state.spill`), by majority, before the message is published, and the message carries a `Reference`
to them: their tokens, and a digest of the bytes that are stored. Nothing is marked, for nothing reads such a document
but the worker that has the reference; and it is removed with all others when its change is committed.

What is stored already stays as it is: a change that is read again may have another look-up by then, and what was read
first is as good. The digest is of what is stored, so the worker does not mind.

| failure | what happens |
|---|---|
| the insert fails | the partition waits, and the run is tried again; no other waits (`publishing`) |
| the broker does not take the message | it is sent again without another insert |
| the document is gone when the worker wants it | the change waits, uncharged, and is stored again before it is sent |
| the listener ends in between | the next one finds the document, or stores it |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pymongo.errors import OperationFailure

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.listener.dispatcher import Dispatch
from mongo_celery.bridge.listener.spilled import stored_change
from mongo_celery.bridge.state.spill import Spill, StoredChange
from mongo_celery.bridge.window import PendingChange
from mongo_celery.bridge.worker.envelope import Reference, Run


class ClaimCheck:
    """
    The claim check of one term. Used by one thread.

    Args:
        spill: where changes are stored.
        max_bytes: of the changes in one message.

    Attributes:
        stored: ids of the partitions for which this term has stored changes, or has tried to: there is something to
            remove when they are committed.
    """

    def __init__(self, spill: Spill, max_bytes: int) -> None:
        self.stored = set[str]()
        self._spill = spill
        self._max_bytes = max_bytes
        self._checked: dict[str, Dispatch] = {}

    def needs(self, dispatch: Dispatch) -> bool:
        """Whether its changes are too large for a message."""
        return dispatch.size > self._max_bytes

    def check_in(self, dispatch: Dispatch) -> Dispatch:
        """
        Store the changes of a run; the same dispatch, by reference.

        Raises:
            PyMongoError: some of them may not be stored.
        """
        run, where = dispatch.run, dispatch.run.partition_id
        tokens = tuple(token_data(run.token_of(change)) for change in run.changes)
        known = self._checked.get(where)
        if known is not None and _is_same(known, dispatch, tokens):
            return known
        changes = self._stored(run, tokens, dispatch.buffered) if dispatch.buffered else run.changes
        reference = Reference.to(tokens, changes)
        checked = replace(dispatch, run=replace(run, changes=(), reference=reference), buffered=())
        self._checked[where] = checked
        return checked

    def _stored(self, run: Run, tokens: tuple[str, ...], buffered: Sequence[PendingChange]) -> Sequence[bytes]:
        """The bytes of these changes as they are stored from now on."""
        where = run.partition_id
        self.stored.add(where)
        added = self._spill.insert(where, map(stored_change, buffered), run.version)
        if added.count == len(tokens):
            return run.changes
        found = self._spill.fetch(where, tokens)
        # What the buffer has is whole; what was refused for another reason was replaced by the insert.
        damaged = [each for each in buffered if each.refusal is None and _is_refused(found.get(each.data))]
        if damaged:
            self._spill.replace(where, map(stored_change, damaged), run.version)
            found = self._spill.fetch(where, tokens)
        if len(found) < len(tokens):
            raise OperationFailure("stored changes were removed while they were inserted")
        return [found[token].raw for token in tokens]


def _is_same(known: Dispatch, dispatch: Dispatch, tokens: tuple[str, ...]) -> bool:
    """Whether nobody can have missed what was stored: the message of this attempt was never sent."""
    assert known.run.reference is not None, "what was checked in is a reference"
    return (
        known.attempt == dispatch.attempt
        and known.run.first == dispatch.run.first
        and known.run.reference.tokens == tokens
    )


def _is_refused(change: StoredChange | None) -> bool:
    return change is not None and change.refusal is not None
