"""
A writer whose entries nobody sweeps says so, and loudly.

A web process that dispatches at once looks well without any sweep, until a crash or an outage leaves something
behind. So a process that writes looks now and then whether a sweep has noted itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pymongo.errors import PyMongoError

from mongo_celery.outbox.swept import SweepRecords
from mongo_celery.quantities import duration

logger = logging.getLogger("mongo_celery.outbox")

_LOOK_SECONDS = 60.0
_REPEAT_SECONDS = 600.0


class SweepWatch:
    """
    Looks from time to time, while there are writes, whether an outbox is swept.

    Args:
        name: gives what logs call the outbox.
        records: gives the notes of its sweeps.
        patience: seconds without a sweep after which it is said; also those from this process's first write until
            its first look, so that a worker may be started after the writers.
        is_broker_down: whether this process knows that the broker does not answer: then beat can send no sweep.
    """

    def __init__(
        self,
        name: Callable[[], str],
        records: Callable[[], SweepRecords],
        patience: float,
        is_broker_down: Callable[[], bool],
    ) -> None:
        self._name = name
        self._records = records
        self._patience = patience
        self._is_broker_down = is_broker_down
        self._due: float | None = None

    def written(self) -> None:
        """A write has left entries. Costs nothing, but for a thread once a minute."""
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._patience
        elif now >= self._due:
            self._due = now + _LOOK_SECONDS  # threads that race for it look twice
            with suppress(RuntimeError):  # the interpreter is ending
                threading.Thread(target=self.look, name="mongo-celery-sweep-watch", daemon=True).start()

    def look(self) -> bool | None:
        """Whether somebody sweeps; None where that cannot be told. Says so where nobody does."""
        try:
            last = self._records().last()
        except PyMongoError:
            return None  # an outage has louder witnesses, and a missing right is what `outbox check` tells
        if last is not None and last.seconds <= self._patience:
            return True
        if self._is_broker_down():
            return None
        self._due = time.monotonic() + _REPEAT_SECONDS
        since = "yet" if last is None else f"for {duration(last.seconds)}"
        logger.error(
            "outbox %s: nobody has swept it %s, so what a crash or an outage leaves in it is never sent; run `celery "
            "beat` and a worker that both import it, then see `outbox check`",
            self._name(), since,
            extra={"event": "nobody_sweeps"},
        )  # fmt: skip
        return False
