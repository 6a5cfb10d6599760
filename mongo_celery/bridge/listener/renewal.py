"""
The renewal of the lease: a thread renews it, and decides if it can still be trusted.

The thread renews only while the leading thread makes progress. A listener that hangs, or cannot read partitions, must
not keep a standby from taking over. While an outage also fails the renewals, time without progress does not count.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.state.leases import Leases, Term
from mongo_celery.bridge.state.signing import Sealing, SigningKeys
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import brief

logger = logging.getLogger("mongo_celery.lease")

_LEAST_PATIENCE_SECONDS = 15.0
"""Longer than one step of the leading thread, even with a frozen broker."""
_FRAMES = 4


class Renewal:
    """
    Renews the lease of one term in its own thread.

    Args:
        leases: the lease.
        keys: the keys for signing messages. None if the holder signs nothing.
        term: the acquired term.
        ttl: seconds.
        patience: seconds without progress before the lease is given up. By default the ttl, but at least 15.
        holder: the word for the process in log records.
    """

    def __init__(
        self,
        leases: Leases,
        keys: SigningKeys | None,
        term: Term,
        ttl: float,
        patience: float | None = None,
        holder: str = "listener",
    ) -> None:
        self._leases = leases
        self._keys = keys
        self._sealing: Sealing | None = None
        self._term = term
        self._ttl = ttl
        self._holder = holder
        self._patience = max(ttl, _LEAST_PATIENCE_SECONDS) if patience is None else patience
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._lost = False
        self._throttle = LogThrottle()
        self._leading = threading.get_ident()
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mongo_celery-lease", daemon=True)

    @property
    def term(self) -> Term:
        """The term with its latest version and trusted time."""
        return self._term

    @property
    def sealing(self) -> Sealing:
        """The signing keys as of the last renewal."""
        return self._sealing or self.read_key()

    @property
    def clock_ahead(self) -> float:
        """Seconds from this process's monotonic clock to the server's clock. A little too small, never too large."""
        return self._term.clock_ahead

    def read_key(self) -> Sealing:
        """Read the current signing key, and put an announced key in force. Raises `PyMongoError`."""
        assert self._keys is not None, "this holder signs nothing"
        self._sealing = self._keys.sealing(self._term.document)
        return self._sealing

    def start(self) -> None:
        """Start renewing."""
        self._thread.start()

    def is_trusted(self) -> bool:
        """Return True if this process may act as the listener now, without querying a server."""
        return not self._lost and time.monotonic() < self._term.trusted_until

    def alive(self) -> None:
        """Note progress of the leading thread, which calls this."""
        self._leading = threading.get_ident()
        self._alive_at = time.monotonic()

    def raise_version(self, above: int) -> bool:
        """Raise the number of this term above a larger stored one. Return False if the term has ended."""
        with self._lock:
            term = self._leases.raise_version(self._term, above)
            if term is None:
                self._lost = True
                return False
            self._term = term
            return True

    def stop(self) -> None:
        """End the thread and wait for it, so that the release follows the last renewal."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = self._ttl / 3
        while not self._stopping.wait(pause):
            seconds = time.monotonic() - self._alive_at
            if seconds > self._patience:
                self._lost = True
                logger.error(
                    "the %s has made no progress for %.0f s, so it gives up the lease and another process may "
                    "lead. Its thread is in %s. If that is your code, limit its time and restart this process",
                    self._holder,
                    seconds,
                    _describe_call(self._leading),
                    extra={"event": "listener_stalled"},
                )
                return
            pause = self._ttl / 3
            try:
                if not self._renew():
                    return
            except PyMongoError as error:
                logger.warning(
                    "the %s could not renew its lease, and tries again: %s",
                    self._holder,
                    brief(error),
                    extra={"event": "renewal_failed"},
                )
                pause = self._ttl / 10

    def _renew(self) -> bool:
        """Renew once. Return False if the term has ended."""
        with self._lock:
            try:
                renewed = self._leases.renew(self._term)
            except PyMongoError:
                self._alive_at = time.monotonic()  # the outage explains the lack of progress
                raise
            if renewed is None:
                self._lost = True
                return False
            self._term = renewed
        if self._keys is None:
            return True
        try:
            self.read_key()
        except PyMongoError:
            raise
        except Exception as error:  # noqa: BLE001 - a key must not end a term
            if self._throttle.may_log():
                logger.error(
                    "a bug: the signing key cannot be read, so the listener uses the previous one. Report this error: "
                    "%s: %s",
                    type(error).__name__,
                    short(error),
                    extra={"event": "key_unread"},
                )
        return True


def _describe_call(thread: int) -> str:
    """Return the innermost calls of a thread, the last one first."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001
    calls = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
    return " < ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in reversed(calls)) or "no call"
