"""Recovery: finishing what a coordinator that died has left."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.twophase.completion import Completion
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.states import State, Transaction

logger = logging.getLogger("mongo_celery.twophase")


@dataclass(frozen=True, slots=True)
class Recovery:
    """
    What became of one abandoned transaction.

    Attributes:
        id: its `_id`.
        before: its state when it was found.
        after: its state now; the same if it got no further.
        error: why not, in words; None if it is done, or canceled as it should be.
    """

    id: Any
    before: str
    after: str
    error: str | None = None


def recover(log: TransactionLog, completion: Completion, age: float, *, anybodys: bool, limit: int) -> list[Recovery]:
    """
    Finish what was left: pending and applied go forward, canceling goes back.

    Args:
        log: of the transactions.
        completion: of transactions of this log.
        age: seconds since the last step, by the server's clock.
        anybodys: also those of other applications.
        limit: how many are taken over at most. What cannot be read does not count: it stays the oldest for ever,
            and would keep all others from their turn.
    """
    report: list[Recovery] = []
    seen: list[Any] = []
    left = limit
    while left > 0:
        wanted = left
        found = completion.persist(
            lambda wanted=wanted: log.abandoned(age, anybodys=anybodys, limit=wanted, without=seen),  # type: ignore[misc]
            hint="recover again",
        )
        for document in found:
            seen.append(document["_id"])
            taken, became = _recover_one(log, completion, document, age, anybodys=anybodys)
            left -= taken
            if became is not None:
                report.append(became)
        if len(found) < wanted:
            break
    return report


def _recover_one(
    log: TransactionLog, completion: Completion, document: Mapping[str, Any], age: float, *, anybodys: bool
) -> tuple[bool, Recovery | None]:
    """Whether it was taken over, and what to report; nothing if another was faster."""
    identity, before = document["_id"], str(document["state"])
    taken: Transaction | None = None
    try:
        read, coordinator = log.read(document), completion.new_coordinator()
        if read.state is State.INITIAL:
            taken = log.claim(read, coordinator.identity, anybodys=anybodys)
        else:
            taken = log.take_over(read, coordinator.identity, older_than=age, anybodys=anybodys)
        if taken is None:
            return False, None
        after = str(completion.to_the_end(taken).state)
    except Exception as error:  # noqa: BLE001 - whatever one transaction does, the others have their turn
        logger.error(
            "transaction %r could not be recovered: %s", identity, short(error), extra={"event": "recovery_failed"}
        )
        return taken is not None, Recovery(identity, before, _state_of(log, identity, before), short(error))
    logger.warning(
        "transaction %r was recovered: %s, now %s", identity, before, after, extra={"event": "transaction_recovered"}
    )
    return True, Recovery(identity, before, after)


def _state_of(log: TransactionLog, identity: Any, before: str) -> str:
    try:
        found = log.collection.find_one({"_id": {"$eq": identity}}, {"state": 1})
    except PyMongoError:
        return before
    return str((found or {}).get("state", before))
