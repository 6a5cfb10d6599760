"""
The notes of sweeps. They show people and writers whether an outbox is swept.

A sweep stores its note in the state database, one document per outbox. The note delays the outbox's next sweep until
this one ends. Nothing else depends on it: a sweep without the right to write it still works.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

import pymongo
from bson import ObjectId
from pymongo.errors import PyMongoError

from mongo_celery import periodic
from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.expressions import REMOVED, after
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.periodic import PeriodicNotes, PeriodicWatch

logger = logging.getLogger("mongo_celery.outbox")

COLLECTION = "outbox_sweeps"

_HELD_SECONDS = 20.0
"""Seconds after its last note for which a sweep delays others. After that it may have died."""

_LONGEST_SECONDS = 2 * _HELD_SECONDS
"""A later `until` is of a clock that was ahead, and counts as past."""


def patience(every: float | None) -> float:
    """Return the seconds without a sweep after which a process reports it."""
    return periodic.patience(every, least=60.0, periods=12)


class SweepRecords(PeriodicNotes):
    """The notes on the sweeps of one outbox."""

    _noted_at = -math.inf

    def note(self, every: float, sweep: ObjectId | None = None, *, has_run: bool = True) -> bool:
        """
        Note that this process sweeps, unless it has done so within these seconds.

        Args:
            every: seconds between two notes.
            sweep: id of the sweep, if no other sweep may run at the same time.
            has_run: False for a sweep that has delivered nothing yet. It only delays others: a sweep that fails each
                time must not look like one that runs.

        Returns:
            False if another sweep delays this one. Then only its time is noted, if it has run.
        """
        now = time.monotonic()
        if now - self._noted_at < every:
            return True
        # Whoever holds the outbox: of two long sweeps, each may have taken the hold of the other.
        note: dict[str, object] = {} if has_run else {"at": "$at", "process": "$process"}
        if sweep is not None:
            is_ahead = {"$gt": ["$until", after(_LONGEST_SECONDS)]}
            is_held = {"$and": [{"$gt": ["$until", "$$NOW"]}, {"$not": [is_ahead]}, {"$ne": ["$sweep", sweep]}]}
            hold = {"sweep": sweep, "until": after(_HELD_SECONDS)}
            note |= {name: {"$cond": [is_held, f"${name}", value]} for name, value in hold.items()}
        try:
            written = self.write(note)
        except PyMongoError as error:
            logger.debug("The sweep of an outbox could not be recorded: %s", short(error))
            return True
        is_delayed = sweep is not None and written["sweep"] != sweep
        if has_run or not is_delayed:
            self._noted_at = now
        return not is_delayed

    def end(self, sweep: ObjectId, *, has_run: bool = True) -> None:
        """Let the next sweep begin, unless another one runs. Note this one's time if it has run."""
        change: dict[str, object] = {"until": {"$cond": [{"$eq": ["$sweep", sweep]}, REMOVED, "$until"]}}
        if has_run:
            change["at"] = "$$NOW"
        with suppress(PyMongoError), pymongo.timeout(ANSWER_SECONDS):
            self.collection.update_one(self._this, [{"$set": change}])
        self._noted_at = -math.inf

    def read_age(self) -> float | None:
        """
        Return the seconds since the last delivering sweep. None if there is no note.

        Raises:
            PyMongoError: MongoDB did not answer, or refused it.
        """
        found = self.read()
        return None if found is None or "at" not in found else float(found["seconds"])


def make_sweep_watch(
    name: Callable[[], str],
    records: Callable[[], SweepRecords],
    every: float | None,
    is_broker_down: Callable[[], bool],
) -> PeriodicWatch:
    """
    Return the watch with which a writer notices missing sweeps.

    Args:
        name: returns the outbox's name for logs.
        records: returns the notes of its sweeps.
        every: seconds between two sweeps.
        is_broker_down: returns True if the broker is known to be down, so that beat cannot send a sweep.
    """

    def report(since: str) -> None:
        logger.error(
            "outbox %s: no sweep has run %s. Tasks that a crash or an outage leaves behind are never sent. Run "
                "`%s` or the listener of a bridge, and a worker. Both must import the outbox. To check, run `%s`.",
            name(), since, ANY_APP.celery("beat"), ANY_APP.celery("outbox", "status", "--check"),
            extra={"event": "nobody_sweeps"},
        )  # fmt: skip

    return PeriodicWatch(
        "mongo-celery-sweep-watch", lambda: records().read_age(), report, patience(every), is_broker_down
    )
