"""The opposite of a transaction."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from mongo_celery.errors import TransactionStateError
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import Transaction

_TAKES_BACK = "takesBack"


def opposite(done: Transaction) -> dict[str, Any]:
    """What a transaction that takes another back has beside its id and state."""
    if "source" not in done.document:
        turned = [
            Part(each.cluster, each.namespace, each.id, each.revert, each.apply, each.revert_require, each.require)
            for each in reversed(done.parts)
        ]
        return {"participants": [part.to_document() for part in turned], _TAKES_BACK: _mark_of(done)}
    document = done.document
    return {
        "source": document["destination"],
        "destination": document["source"],
        "value": document["value"],
        _TAKES_BACK: _mark_of(done),
    }


def takes_back(compensation: Transaction, done: Transaction) -> bool:
    """
    Whether a compensation belongs to this transaction: its id may have been another's before, that was removed.

    One that says nothing of it, since an older version has stored it, has not taken its last step before this one.
    """
    if _TAKES_BACK in compensation.document:
        return bool(compensation.document[_TAKES_BACK] == _mark_of(done))
    ended, begun = done.document.get("lastModified"), compensation.document.get("lastModified")
    return not (isinstance(ended, datetime) and isinstance(begun, datetime) and begun < ended)


def _mark_of(done: Transaction) -> Any:
    """What tells it from all others of its id, as long as it is there."""
    return done.key or done.driver or done.document.get("lastModified")


def compensation_id(transaction_id: Any, attempt: int) -> dict[str, Any]:
    """The id of an attempt to compensate a transaction, from 1; always the same one."""
    return {"compensates": transaction_id, **({"attempt": attempt} if attempt > 1 else {})}


def noted_attempt(done: Transaction) -> int | None:
    """Which attempt a transaction says has compensated it; None where none has been noted."""
    noted = done.document.get("compensatedBy")
    if noted is None:
        return None
    if isinstance(noted, bool) or not isinstance(noted, int):
        raise TransactionStateError(
            f"transaction {done.id!r} says that {noted!r} has compensated it, which is no attempt; put it right.",
            id=done.id,
        )
    return noted
