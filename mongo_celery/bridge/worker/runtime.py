"""A bridge's runtime in one worker process: the heartbeats of its claims, the key of its envelopes."""

from __future__ import annotations

import logging
import threading
import time

from pymongo.errors import PyMongoError

from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.envelope import Run, unseal
from mongo_celery.bridge.worker.heartbeat import Heartbeats
from mongo_celery.errors import InvalidEnvelopeError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import explained

logger = logging.getLogger("mongo_celery.worker")

_KEY_SECONDS = 5.0


class WorkerRuntime:
    """
    A bridge inside one worker process, used by all threads of the process: `wiring.of_process(WorkerRuntime)`.

    Args:
        wiring: of the bridge.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.heartbeats = Heartbeats(wiring.store.claims, wiring.options.claim_ttl)
        self._wiring = wiring
        self._leases = wiring.store.leases
        self._key: bytes | None = None
        self._key_read = 0.0
        self._lock = threading.Lock()

    def open(self, kind: str, envelope: object, subscription: str | None) -> Run | None:
        """
        A verified run, or None for a message that must be dropped; the reason is logged.

        A signature that does not fit makes it read the key again, at most every few seconds: the state
        database may have been made anew.
        """
        try:
            run = self._unseal(kind, envelope)
        except InvalidEnvelopeError:
            logger.warning(
                "dropped a %s message for bridge %s that is forged, damaged or from another installation",
                kind,
                self._wiring.name,
                extra={"event": "envelope_refused"},
            )
            return None
        except PyMongoError as error:
            said = explained(error, self._wiring.state_concern) or short(error)
            logger.warning(
                "cannot verify a message for bridge %s: %s",
                self._wiring.name,
                said,
                extra={"event": "envelope_unverified"},
            )
            return None
        if run.bridge != self._wiring.name or (subscription is not None and run.subscription != subscription):
            logger.warning(
                "dropped a message of %s that was sent to another handler",
                run.partition_id,
                extra={"event": "envelope_misdirected"},
            )
            return None
        return run

    def _unseal(self, kind: str, envelope: object) -> Run:
        key = self._key
        if key is not None:
            try:
                return unseal(kind, envelope, key)
            except InvalidEnvelopeError:
                if time.monotonic() - self._key_read < _KEY_SECONDS:
                    raise
        return unseal(kind, envelope, self._read_key())

    def _read_key(self) -> bytes:
        with self._lock:
            self._key_read = time.monotonic()
            self._key = self._leases.signing_key()
        if self._key is None:
            raise InvalidEnvelopeError
        return self._key
