"""Who may have kept a transaction from getting on: the open transactions of its cluster, where it met a conflict."""

from __future__ import annotations

import logging
from contextvars import Context
from typing import Any

import pymongo
from celery.exceptions import SoftTimeLimitExceeded
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mongo_celery.locking.holders import OpenTransaction, open_transactions
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Code

logger = logging.getLogger("mongo_celery.twophase")

_ANSWER_SECONDS = 1.0


def in_the_way(error: BaseException, client: MongoClient[Any]) -> tuple[OpenTransaction, ...]:
    """
    Those that may hold what an error speaks of; none where it met no conflict, or they cannot be asked for now.

    It fails only by a soft time limit. The time of the call is used up by then, so it has a moment of its own.
    """
    if not _has_met_a_conflict(error):
        return ()
    try:
        return Context().run(_asked, client)
    except SoftTimeLimitExceeded:
        raise
    except Exception as failure:  # noqa: BLE001 - whatever it is, the caller is to be told what it waited for
        logger.debug("who holds a participant could not be asked: %s", short(failure))
        return ()


def _asked(client: MongoClient[Any]) -> tuple[OpenTransaction, ...]:
    with pymongo.timeout(_ANSWER_SECONDS):
        return tuple(open_transactions(client))


def _has_met_a_conflict(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OperationFailure) and error.code == Code.WriteConflict:
            return True
        error = error.__cause__
    return False
