"""The opposite of a transaction."""

from __future__ import annotations

from typing import Any

from mongo_celery.errors import TransactionStateError
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import Transaction


def opposite(done: Transaction) -> dict[str, Any]:
    """What a transaction that takes another back has beside its id and state."""
    if "source" not in done.document:
        turned = [
            Part(each.cluster, each.namespace, each.id, each.revert, each.apply, each.revert_require, each.require)
            for each in reversed(done.parts)
        ]
        return {"participants": [part.to_document() for part in turned]}
    document = done.document
    return {"source": document["destination"], "destination": document["source"], "value": document["value"]}


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
