"""
Keeping the lease: a thread that renews it, and the verdict whether it may still be trusted.

The thread renews only while the leading thread makes progress: a listener that hangs, or that cannot read partitions,
must not keep a standby from taking over. While an outage fails the renewals too, the time without progress does not
count.
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
"""Longer than one step of the leading thread takes, also with a broker that is frozen."""
_FRAMES = 4


class Renewal:
    """
    Renews the lease of one term from a thread of its own.

    Args:
        leases: the lease.
        keys: by which messages are signed.
        term: as acquired.
        ttl: seconds.
        patience: seconds without progress after which the lease is given up. By default the ttl, or 15 if that is more.
    """

    def __init__(
        self,
        leases: Leases,
        keys: SigningKeys,
        term: Term,
        ttl: float,
        patience: float | None = None,
    ) -> None:
        self._leases = leases
        self._keys = keys
        self._sealing: Sealing | None = None
        self._term = term
        self._ttl = ttl
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
        """The term, with its newest version and trusted time."""
        return self._term

    @property
    def sealing(self) -> Sealing:
        """The keys by which messages are signed, as of the last renewal."""
        return self._sealing or self.read_key()

    def read_key(self) -> Sealing:
        """Read what messages are signed with now, and put an announced key in force. Raises `PyMongoError`."""
        self._sealing = self._keys.sealing(self._term.document)
        return self._sealing

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def is_trusted(self) -> bool:
        """Return True if this process may act as the listener at this moment. Asks nobody."""
        return not self._lost and time.monotonic() < self._term.trusted_until

    def alive(self) -> None:
        """Note that the leading thread, which calls this, makes progress."""
        self._leading = threading.get_ident()
        self._alive_at = time.monotonic()

    def raise_version(self, above: int) -> bool:
        """Let this term's version pass an epoch that is larger. False when the term has ended."""
        with self._lock:
            term = self._leases.raise_version(self._term, above)
            if term is None:
                self._lost = True
                return False
            self._term = term
            return True

    def stop(self) -> None:
        """End the thread, and wait for it: release comes after the last renewal."""
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
                    "the listener has made no progress for %.0f s, so it gives the lease up and another one may lead. "
                    "Its thread is in %s. If that is code of yours, bound its time and restart this listener",
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
                    "lease renewal failed, trying again: %s", brief(error), extra={"event": "renewal_failed"}
                )
                pause = self._ttl / 10

    def _renew(self) -> bool:
        """Renew once. False if the term has ended."""
        with self._lock:
            try:
                renewed = self._leases.renew(self._term)
            except PyMongoError:
                self._alive_at = time.monotonic()  # the outage explains why there is no progress
                raise
            if renewed is None:
                self._lost = True
                return False
            self._term = renewed
        try:
            self.read_key()
        except PyMongoError:
            raise
        except Exception as error:  # noqa: BLE001 - a key must not end a term
            if self._throttle.may_log():
                logger.error(
                    "the signing key cannot be read, so the one before is used: %s: %s. Report this error",
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
