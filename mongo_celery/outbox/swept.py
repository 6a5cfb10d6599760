"""
Who sweeps an outbox, and when: what a person and a writer go by who want to know whether anybody sweeps at all.

A sweep notes itself in the state database, one document for each outbox and app. The note keeps the app's next sweep
of the outbox away until it ends. Nothing else rests on it: a sweep that may not write there sweeps all the same.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pymongo
from bson import ObjectId
from pymongo import WriteConcern
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.expressions import after, literal
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.periodic import PeriodicWatch

logger = logging.getLogger("mongo_celery.outbox")

COLLECTION = "outbox_sweeps"

_HELD_SECONDS = 20.0
"""For so long after its last note a sweep keeps others away: it may have died."""

_PATIENCE_SECONDS = 60.0
_PERIODS = 12
_UNKNOWN_PERIOD_SECONDS = 900.0


def patience(every: float | None) -> float:
    """
    For how many seconds nobody need have swept, before it is said that nobody does.

    Args:
        every: seconds between two sweeps by this app's beat; None where others see to it, nobody knows how often.
    """
    return _UNKNOWN_PERIOD_SECONDS if every is None else max(_PATIENCE_SECONDS, _PERIODS * every)


@dataclass(frozen=True, slots=True)
class LastSweep:
    """
    The last sweep of an outbox that somebody has noted.

    Attributes:
        seconds: how long ago it began, by the server's clock.
        app: name of the app that swept; empty for one without.
        process: host and pid of the process.
    """

    seconds: float
    app: str
    process: str


class SweepRecords:
    """
    The notes on one outbox.

    Args:
        collection: where they are kept.
        outbox: namespace and field of the entries.
        app: name of this process's app; empty for one without.
        apps: whose entries a sweep of this process delivers.
    """

    def __init__(self, collection: Collection[dict[str, Any]], outbox: str, app: str, apps: Sequence[str]) -> None:
        # None of this need outlast an election: the next sweep notes itself, too.
        self._collection = collection.with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))
        self._outbox = outbox
        self._app = app
        self._apps = list(apps)
        self._noted_at = float("-inf")

    @property
    def full_name(self) -> str:
        """The namespace of the notes on all outboxes of a database."""
        return self._collection.full_name

    def note(self, every: float, sweep: ObjectId | None = None) -> bool:
        """
        Note that this process sweeps; not if it has done so within these seconds.

        Args:
            every: the seconds.
            sweep: which one, where no other may sweep beside it.

        Returns:
            False if another sweep of the app keeps this one away; nothing was noted then.
        """
        now = time.monotonic()
        if now - self._noted_at < every:
            return True
        note = {
            "outbox": literal(self._outbox),
            "app": literal(self._app),
            "apps": literal(self._apps),
            "process": literal(f"{socket.gethostname()}:{os.getpid()}"),
            "at": "$$NOW",
            **({} if sweep is None else {"sweep": sweep, "until": after(_HELD_SECONDS)}),
        }
        is_held = {"$and": [{"$gt": ["$until", "$$NOW"]}, {"$ne": ["$sweep", sweep]}]}
        change = {"$cond": [sweep is not None and is_held, "$$ROOT", {"$mergeObjects": ["$$ROOT", note]}]}
        try:
            with pymongo.timeout(ANSWER_SECONDS):
                found = self._collection.find_one_and_update(
                    {"_id": self._id}, [{"$replaceWith": change}], {"sweep": 1}, upsert=True, return_document=True
                )
        except PyMongoError as error:
            logger.debug("outbox %s: its sweep is not noted: %s", self._outbox, short(error))
            return True
        if sweep is not None and found is not None and found["sweep"] != sweep:
            return False
        self._noted_at = now
        return True

    def end(self, sweep: ObjectId) -> None:
        """Let the next sweep begin."""
        with suppress(PyMongoError), pymongo.timeout(ANSWER_SECONDS):
            self._collection.update_one({"_id": self._id, "sweep": sweep}, {"$unset": {"until": ""}})
        self._noted_at = float("-inf")

    @property
    def _id(self) -> str:
        return f"{self._outbox}/{self._app}"

    def last(self) -> LastSweep | None:
        """
        The last sweep that delivers what this process's app writes; None where there is no note of one.

        Raises:
            PyMongoError: MongoDB did not answer, or refused it.
        """
        pipeline: list[dict[str, Any]] = [
            {"$match": {"outbox": self._outbox, "apps": self._app}},
            {"$sort": {"at": -1}},
            {"$limit": 1},
            {"$set": {"seconds": {"$max": [0, {"$divide": [{"$subtract": ["$$NOW", "$at"]}, 1000]}]}}},
        ]
        with pymongo.timeout(ANSWER_SECONDS):
            found = next(iter(self._collection.aggregate(pipeline)), None)
        if found is None:
            return None
        return LastSweep(float(found["seconds"]), str(found.get("app", "")), str(found.get("process", "?")))


def sweep_watch(
    name: Callable[[], str],
    records: Callable[[], SweepRecords],
    patience: float,
    is_broker_down: Callable[[], bool],
) -> PeriodicWatch:
    """
    What a writer looks by, whether somebody sweeps what it writes.

    Args:
        name: gives what logs call the outbox.
        records: gives the notes of its sweeps.
        patience: seconds without a sweep after which it is said that nobody does.
        is_broker_down: whether this process knows that the broker does not answer: then beat can send no sweep.
    """

    def age() -> float | None:
        last = records().last()
        return None if last is None else last.seconds

    def tell(since: str) -> None:
        logger.error(
            "outbox %s: nobody has swept it %s, so what a crash or an outage leaves in it is never sent; run `%s`, "
            "or the listener of a bridge, and a worker that import it, then `%s`",
            name(), since, ANY_APP.celery("beat"), ANY_APP.celery("outbox", "check"),
            extra={"event": "nobody_sweeps"},
        )  # fmt: skip

    return PeriodicWatch("mongo-celery-sweep-watch", age, tell, patience, is_broker_down)
