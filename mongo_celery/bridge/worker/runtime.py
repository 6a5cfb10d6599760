"""A bridge's runtime in one worker process: the heartbeats of its claims, the keys of its envelopes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.identity import build_identity, ways_out
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MISDIRECTED, TAMPERED
from mongo_celery.bridge.state.signing import KEY_SECONDS, KeyRing
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.dropping import MOVED, Dropper, Repetitions, parse_process
from mongo_celery.bridge.worker.envelope import Carrier, Envelope, Run
from mongo_celery.bridge.worker.heartbeat import Heartbeats
from mongo_celery.errors import ConfigurationError, InvalidEnvelopeError
from mongo_celery.mongo.verdicts import brief, error_text, explain_error
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.view import HandlerView

logger = logging.getLogger("mongo_celery.worker")

UNEXPECTED = "mongo_celery_strange"
"""Request header, never in a message: requests in the message that no listener sends."""


class WorkerRuntime:
    """
    A bridge in one worker process, shared by its threads: `wiring.of_process(WorkerRuntime)`.

    Args:
        wiring: the wiring of the bridge.

    Attributes:
        options: the bridge's options.
        store: the bridge's state.
        codec: decodes documents for handlers.
        heartbeats: the heartbeats of the bridge's claims.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.options = wiring.options
        self.store = wiring.store
        self.codec = wiring.client.codec_options
        self.heartbeats = Heartbeats(self.store.claims, self.options.claim_ttl)
        self._name = wiring.name
        self._views: dict[str, HandlerView] = {}
        self._has_indexed = False
        self._wiring = wiring
        self._signing = wiring.store.signing
        self._dropper = wiring.of_process(Dropper)
        self._repetitions = Repetitions()
        self._ring: KeyRing | None = None
        self._ring_read = 0.0
        self._unserved: frozenset[str] = frozenset()
        self._moved: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def view(self, handler: Handler) -> HandlerView:
        """Return a handler's view of the fields that this package keeps in documents."""
        if handler.name not in self._views:
            self._views[handler.name] = self._wiring.make_view(handler)
        return self._views[handler.name]

    def ensure_indexes(self) -> None:
        """Create the indexes of the dead letters, once per process and best effort. Searches also work without them."""
        if self._has_indexed:
            return
        self._has_indexed = True
        try:
            self._wiring.store.dead_letters.ensure_indexes()
        except PyMongoError as error:
            logger.warning(
                "the worker could not create the indexes of dead_letters, so replays and lists read the whole "
                "collection. Grant createIndex on it to workers: %s",
                error_text(error),
                extra={"event": "index_missing"},
            )

    def open(self, kind: str, given: object, subscription: str | None, request: Any) -> Run | None:
        """
        Return a verified run, or None for a message that must be dropped. The reason is logged and counted.

        Keys that were read some seconds ago are read again. So all workers know a new key before it is used, and they
        find a new state database.

        Args:
            kind: `"run"` or `"commit"`.
            given: the task's argument, or its envelope.
            subscription: the subscription of the handler. None for a commit.
            request: the worker's request for the message.
        """
        envelope = None
        try:
            envelope = given if isinstance(given, Envelope) else Envelope(given)
            if self._ring is None or time.monotonic() - self._ring_read >= KEY_SECONDS:
                self._read_keys()
            run = envelope.verify(kind, self._ring.keys if self._ring else ())
        except InvalidEnvelopeError:
            self._drop_unsigned(kind, envelope, request.origin)
            return None
        except PyMongoError as error:
            if count := self._repetitions.add("unverified"):
                logger.warning(
                    "the worker cannot read the signing key, so it drops %s of bridge %s. The listener sends them "
                    "again: %s",
                    number(count, "message", "messages"),
                    self._wiring.name,
                    explain_error(error, self._wiring.state_concern) or brief(error),
                    extra={"event": "envelope_unverified"},
                )
            return None
        if run.bridge != self._name or (subscription is not None and run.subscription != subscription):
            self._dropper.drop(MISDIRECTED)
            return None
        if run.subscription in self._moved and kind == "run":  # otherwise its effects happen here and count as done
            self._dropper.drop(MOVED, run.subscription)
            return None
        found, unexpected = Carrier.of(str(request.id), request.chain), request.get(UNEXPECTED)
        if unexpected or found != run.carrier:
            moved = [name for name in ("task_id", "links") if getattr(run.carrier, name) != getattr(found, name)]
            self._dropper.drop(TAMPERED, ", ".join([*(unexpected or ()), *moved]))
            return None
        return run

    def _drop_unsigned(self, kind: str, envelope: Envelope | None, origin: object) -> None:
        theirs, ours = "", self._ring.installation if self._ring else ""
        with contextlib.suppress(InvalidEnvelopeError):
            theirs = envelope.installation if envelope is not None else ""
        if theirs and ours and theirs != ours:
            process = parse_process(origin) if kind == "run" else None  # a commit names a worker
            self._dropper.drop(FOREIGN, process or "")
        else:
            self._dropper.drop(FORGED)

    def _read_keys(self) -> None:
        """Read the accepted keys, unless another thread has just read them. Without an answer, keep known ones."""
        with self._lock:
            if self._ring is None or time.monotonic() - self._ring_read >= KEY_SECONDS:
                try:
                    self._adopt_keys(self._signing.read())
                except PyMongoError:
                    if self._ring is None:
                        raise
                self._ring_read = time.monotonic()

    def _adopt_keys(self, ring: KeyRing | None) -> None:
        """Take in the lease's facts. Log once if its listener lacks handlers, or belongs to another environment."""
        known, self._ring = self._ring, ring
        if ring is None or ring.identity is None:
            return
        if known is None or known.identity != ring.identity:
            self._moved = self._compare(ring.identity)
        unserved = frozenset(handler.name for handler in self._wiring.handlers) - ring.identity["handlers"].keys()
        if unserved - self._unserved:
            logger.warning(
                "the running listener does not have %s of bridge %s, so their changes are not handled. Deploy this "
                "worker's code to the listener",
                ", ".join(sorted(unserved)),
                self._wiring.name,
                extra={"event": "handler_unserved"},
            )
        self._unserved = unserved

    def _compare(self, leading: Mapping[str, Any]) -> frozenset[str]:
        """
        Compare everything except the broker address: this worker gets the leader's messages in any case.

        Returns:
            The handlers whose databases belong to another environment.
        """
        try:
            mine = replace(build_identity(self._wiring), broker=None)
        except ConfigurationError:  # a source is not available here, which only the listener needs
            return frozenset()
        difference, moved = mine.difference(leading), mine.find_moved_handlers(leading["handlers"])
        if difference is not None:
            logger.error(
                "the messages of bridge %s that this worker gets come from another app or environment: %s. %s%s",
                self._wiring.name,
                difference,
                f"This worker drops the messages of {', '.join(moved)}. " if moved else "",
                ways_out(self._wiring.line),
                extra={"event": "identity_differs"},
            )
        return frozenset(moved)
