"""Recovery: finishing what a driver that died has left."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pymongo.errors import PyMongoError

from mongo_celery.errors import MongoCeleryError
from mongo_celery.redaction import short
from mongo_celery.twophase.driving import Driving
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.states import State

logger = logging.getLogger("mongo_celery.twophase")


@dataclass(frozen=True, slots=True)
class Recovery:
    """
    What became of one abandoned transaction.

    Attributes:
        id: its `_id`.
        before: its state when it was found.
        after: its state now; the same if it could not be driven on.
        error: why not, in words; None if it is done, or canceled as it should be.
    """

    id: Any
    before: str
    after: str
    error: str | None = None


def recover(log: TransactionLog, driving: Driving, age: float, *, anybodys: bool, limit: int) -> list[Recovery]:
    """
    Finish what was left: pending and applied go forward, canceling goes back.

    Args:
        log: of the transactions.
        driving: to the end.
        age: seconds since the last step, by the server's clock.
        anybodys: also those of other applications.
        limit: how many at most.
    """
    found = driving.persist(lambda: log.abandoned(age, anybodys=anybodys, limit=limit))
    report = (_recover_one(log, driving, document, age, anybodys=anybodys) for document in found)
    return [each for each in report if each is not None]


def _recover_one(
    log: TransactionLog, driving: Driving, document: Mapping[str, Any], age: float, *, anybodys: bool
) -> Recovery | None:
    identity, before = document["_id"], str(document["state"])
    try:
        seen, driver = log.read(document), driving.new_driver()
        if seen.state is State.INITIAL:
            taken = log.claim(seen, driver.identity)
        else:
            taken = log.take_over(seen, driver.identity, older_than=age, anybodys=anybodys)
        if taken is None:
            return None  # another was faster
        after = str(driving.to_the_end(taken).state)
    except (MongoCeleryError, PyMongoError) as error:
        logger.error("transaction %r could not be recovered: %s", identity, short(error))
        return Recovery(identity, before, _state_of(log, identity, before), short(error))
    logger.warning("transaction %r was recovered: %s, now %s", identity, before, after)
    return Recovery(identity, before, after)


def _state_of(log: TransactionLog, identity: Any, before: str) -> str:
    try:
        found = log.collection.find_one({"_id": identity}, {"state": 1})
    except PyMongoError:
        return before
    return str((found or {}).get("state", before))
