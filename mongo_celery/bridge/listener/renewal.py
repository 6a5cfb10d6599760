"""
Keeping the lease: a thread that renews it, and the verdict whether it may still be trusted.

The thread renews only while the leading thread makes progress: a listener that hangs in a broken
connection must not keep a standby from taking over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.leases import Leases, Term
from mongo_celery.bridge.state.signing import Sealing, SigningKeys
from mongo_celery.mongo.verdicts import brief

logger = logging.getLogger("mongo_celery.lease")

_STALL_TTLS = 3
_LEAST_STALL_SECONDS = 30.0


class Renewal:
    """
    Renews the lease of one term from a thread of its own.

    Args:
        leases: the lease.
        keys: by which messages are signed.
        term: as acquired.
        ttl: seconds.
        report: gives what `status` shows of this listener.
    """

    def __init__(
        self,
        leases: Leases,
        keys: SigningKeys,
        term: Term,
        ttl: float,
        report: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._leases = leases
        self._keys = keys
        self._sealing: Sealing | None = None
        self._term = term
        self._ttl = ttl
        self._report = report
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._lost = False
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mongo_celery-lease", daemon=True)

    @property
    def term(self) -> Term:
        """The term, with its newest version and trusted time."""
        return self._term

    @property
    def sealing(self) -> Sealing:
        """What messages are signed with, as of the last renewal."""
        return self._sealing or self.read_key()

    def read_key(self) -> Sealing:
        """Read what messages are signed with now, and put an announced key in force; raises `PyMongoError`."""
        self._sealing = self._keys.sealing(self._term.document)
        return self._sealing

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def trusted(self) -> bool:
        """Whether this process may act as the listener at this moment. Asks nobody."""
        return not self._lost and time.monotonic() < self._term.trusted_until

    def alive(self) -> None:
        """The leading thread makes progress."""
        self._alive_at = time.monotonic()

    def raise_version(self, above: int) -> bool:
        """Let this term's version pass an epoch that is larger; False when the term has ended."""
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
            if time.monotonic() - self._alive_at > max(_STALL_TTLS * self._ttl, _LEAST_STALL_SECONDS):
                logger.error(
                    "the listener makes no progress; letting the lease go", extra={"event": "listener_stalled"}
                )
                return
            try:
                with self._lock:
                    renewed = self._leases.renew(self._term, self._report())
                    if renewed is None:
                        self._lost = True
                        return
                    self._term = renewed
                self.read_key()
                pause = self._ttl / 3
            except PyMongoError as error:
                logger.warning(
                    "lease renewal failed, trying again: %s", brief(error), extra={"event": "renewal_failed"}
                )
                pause = self._ttl / 10
