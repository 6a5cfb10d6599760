"""
Periodic jobs of an app, such as a sweep or a recovery, and a log record if no process runs them.

Without the job, all looks well until a crash or an outage leaves work behind. So a process that may leave work behind
regularly checks when the job was last noted. The notes have no other use.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pymongo
from pymongo import ReturnDocument, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.quantities import duration

_LOOK_SECONDS = 60.0
_REPEAT_SECONDS = 600.0
_UNKNOWN_PERIOD_SECONDS = 900.0

Document = dict[str, Any]


def patience(every: float | None, *, least: float, periods: int) -> float:
    """
    Return the seconds that a job may be missing before this is logged.

    Args:
        every: seconds between two runs in this app's schedule. None if something else schedules it.
        least: smallest result.
        periods: number of periods to wait.
    """
    return _UNKNOWN_PERIOD_SECONDS if every is None else max(least, periods * every)


class PeriodicNotes:
    """
    The note of one periodic job in MongoDB: time and place of its last run, by the server's clock.

    It need not survive an election: the next run writes it again.

    Args:
        collection: the note's collection.
        note_id: `_id` of the note.
    """

    def __init__(self, collection: Collection[Document], note_id: str) -> None:
        self.collection = collection.with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))
        self._this = {"_id": note_id}

    @property
    def full_name(self) -> str:
        """The namespace of the notes."""
        return self.collection.full_name

    def write(self, note: Document) -> Document:
        """
        Write fields of the note, the time and this process. Return the resulting note.

        Args:
            note: expressions for its fields.

        Raises:
            PyMongoError: MongoDB did not answer, or refused it.
        """
        change = {"at": "$$NOW", "process": literal(f"{socket.gethostname()}:{os.getpid()}"), **note}
        with pymongo.timeout(ANSWER_SECONDS):
            return cast(
                "Document",
                self.collection.find_one_and_update(
                    self._this, [{"$set": change}], upsert=True, return_document=ReturnDocument.AFTER
                ),
            )

    def read(self) -> Document | None:
        """
        Return the note, with the `seconds` since it was written. None if there is none.

        Raises:
            PyMongoError: MongoDB did not answer, or refused it.
        """
        age = {"$max": [0, {"$divide": [{"$subtract": ["$$NOW", "$at"]}, 1000]}]}
        with pymongo.timeout(ANSWER_SECONDS):
            return next(iter(self.collection.aggregate([{"$match": self._this}, {"$set": {"seconds": age}}])), None)


class PeriodicWatch:
    """
    Checks regularly that a periodic job runs, while this process may leave work behind.

    Args:
        name: name of its threads.
        age: returns the seconds since the last note of the job, by the server's clock. None if there is none.
        tell: logs the missing job. Its argument says for how long it is missing: "yet", or "for 5 minutes".
        patience: seconds without a note before the log record. The first check also waits this long after the first
            call of `needed`, so a worker may start after this process.
        cannot_tell: returns True if this process has another explanation for a missing note.
    """

    def __init__(
        self,
        name: str,
        age: Callable[[], float | None],
        tell: Callable[[str], None],
        patience: float,
        cannot_tell: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = name
        self._age = age
        self._tell = tell
        self._patience = patience
        self._cannot_tell = cannot_tell
        self._due: float | None = None

    def needed(self) -> None:
        """Begin to check the job, because this process may leave work behind. At most one thread starts per minute."""
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._patience
        elif now >= self._due:
            self._due = now + _LOOK_SECONDS  # threads that race for it check twice
            with suppress(RuntimeError):  # the interpreter is shutting down
                threading.Thread(target=self.look, name=self._name, daemon=True).start()

    def look(self) -> bool | None:
        """Return True if the job runs, and None if that is unknown. If the job is missing, log it."""
        try:
            age = self._age()
        except PyMongoError:
            return None  # others log an outage, and a process without the right to read the notes knows nothing
        if age is not None and age <= self._patience:
            return True
        if self._cannot_tell():
            return None
        self._due = time.monotonic() + _REPEAT_SECONDS
        self._tell("yet" if age is None else f"for {duration(age)}")
        return False
