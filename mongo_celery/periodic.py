"""
A process that counts on what others do periodically says so, and loudly, where nobody does it.

All looks well without a sweep or a recovery, until a crash or an outage leaves something behind. So a process that may
leave something looks now and then whether somebody has noted that it was done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pymongo.errors import PyMongoError

from mongo_celery.quantities import duration

_LOOK_SECONDS = 60.0
_REPEAT_SECONDS = 600.0


class PeriodicWatch:
    """
    Looks from time to time, while there is something to be left behind, whether what is periodic is done.

    Args:
        name: of its threads.
        age: seconds since somebody noted that it was done, by the server's clock; None if nobody ever has.
        tell: says that nobody does it, as an error; it is told since when: "yet", or "for 5 minutes".
        patience: seconds without a note after which that is said; also those from the first call of `needed` until the
            first look, so that a worker may be started after this process.
        cannot_tell: whether a note that is missing has another reason, as this process knows.
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
        """Something may be left behind from now on. Costs nothing, but for a thread once a minute."""
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._patience
        elif now >= self._due:
            self._due = now + _LOOK_SECONDS  # threads that race for it look twice
            with suppress(RuntimeError):  # the interpreter is ending
                threading.Thread(target=self.look, name=self._name, daemon=True).start()

    def look(self) -> bool | None:
        """Whether somebody does it; None where that cannot be told. Says so where nobody does."""
        try:
            age = self._age()
        except PyMongoError:
            return None  # an outage has louder witnesses, and whoever may not read the notes knows nothing
        if age is not None and age <= self._patience:
            return True
        if self._cannot_tell():
            return None
        self._due = time.monotonic() + _REPEAT_SECONDS
        self._tell("yet" if age is None else f"for {duration(age)}")
        return False
