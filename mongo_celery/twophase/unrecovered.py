"""
A process whose transactions nobody recovers says so, and loudly.

All looks well without any recovery, until a crash or an outage leaves something half done. So a process that begins
what may have to be recovered looks now and then whether a recovery has noted itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pymongo.errors import PyMongoError

from mongo_celery.quantities import duration
from mongo_celery.twophase.recoveries import RecoveryRecords

logger = logging.getLogger("mongo_celery.twophase")

_LOOK_SECONDS = 60.0
_REPEAT_SECONDS = 600.0


class RecoveryWatch:
    """
    Looks from time to time, while transactions are begun, whether somebody recovers them.

    Args:
        name: what logs call the `TwoPhaseCommit`.
        records: gives the notes of recoveries.
        patience: seconds without a recovery after which it is said; also those from this process's first transaction
            until its first look, so that a worker may be started after the others.
    """

    def __init__(self, name: str, records: Callable[[], RecoveryRecords], patience: float) -> None:
        self._name = name
        self._records = records
        self._patience = patience
        self._due: float | None = None

    def begun(self) -> None:
        """A transaction was begun that may have to be recovered. Costs nothing, but for a thread once a minute."""
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._patience
        elif now >= self._due:
            self._due = now + _LOOK_SECONDS  # threads that race for it look twice
            with suppress(RuntimeError):  # the interpreter is ending
                threading.Thread(target=self.look, name="mongo-celery-recovery-watch", daemon=True).start()

    def look(self) -> bool | None:
        """Whether somebody recovers; None where that cannot be told. Says so where nobody does."""
        try:
            last = self._records().last()
        except PyMongoError:
            return None  # an outage has louder witnesses, and whoever may not read the notes knows nothing
        if last is not None and last.sign_seconds <= self._patience:
            return True
        self._due = time.monotonic() + _REPEAT_SECONDS
        since = "yet" if last is None else f"for {duration(last.sign_seconds)}"
        logger.error(
            "transactions %s: no recovery has noted itself %s, so what a crash or an outage leaves may stay half done; "
            "run `celery beat`, or the listener of a bridge, and a worker that import them, or `transactions recover`. "
            "If one runs, grant it find, insert and update on %s",
            self._name, since, self._records().full_name,
            extra={"event": "nobody_recovers"},
        )  # fmt: skip
        return False
