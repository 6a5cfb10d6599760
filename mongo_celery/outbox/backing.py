"""What stands behind an outbox: its collection, opened as the protocol needs it, its relay and its dead letters."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from celery import Celery
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from mongo_celery.app import app_name
from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import per_process
from mongo_celery.locking import after_commit
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.mongo.opening import Source, collection_of, plain_types, strict
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox import index, swept
from mongo_celery.outbox.dead_letters import COLLECTION, OutboxDeadLetters
from mongo_celery.outbox.document_write import Written
from mongo_celery.outbox.entries import FIELD
from mongo_celery.outbox.options import OutboxOptions
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.relay import Counters, Relay
from mongo_celery.outbox.swept import SweepRecords, patience
from mongo_celery.outbox.unswept import SweepWatch
from mongo_celery.outbox.writes import Writer

logger = logging.getLogger("mongo_celery.outbox")

_SLOW_SECONDS = 1.0
"""A dispatch that fails after so long has kept a writer waiting: its broker does not answer."""

_OPEN_SECONDS = 5.0
"""For so long the circuit breaker then keeps other writers from waiting for that broker in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """
    One outbox at one moment.

    Attributes:
        outbox: namespace of the collection.
        documents: how many have something pending.
        pending: how many entries wait.
        oldest_seconds: age of the oldest by the server's clock; None when nothing waits.
        failing: how many documents hold an entry that has failed through its own fault.
        dead_letters: how many were set aside.
        dispatched: by this process since it started.
        failures: of this process since it started.
    """

    outbox: str
    documents: int
    pending: int
    oldest_seconds: float | None
    failing: int
    dead_letters: int
    dispatched: int
    failures: int


class Backing:
    """
    The parts of one outbox; each process makes each of them when it first needs it.

    Args:
        app: the Celery app.
        source: the user's collection, or a callable that returns it.
        publisher: to the broker.
        options: of the outbox.
    """

    def __init__(self, app: Celery, source: Source, publisher: Publisher, options: OutboxOptions) -> None:
        if not isinstance(source, Collection) and (isinstance(source, type) or not callable(source)):
            raise ConfigurationError(
                f"{source!r} is no PyMongo collection and no callable that returns one; pass client.db.collection, or "
                "for a Django model lambda: connection.get_collection(Model._meta.db_table).",
            )
        self.app = app
        self.publisher = publisher
        self.at_once = options.at_once
        self.counters = Counters()
        self._source = source
        self.options = options
        self.watch = SweepWatch(lambda: self.collection.full_name, lambda: self.sweeps, patience(options.sweep_every))
        self._indexed = False
        self._circuit_open_until = 0.0

    @per_process
    def collection(self) -> Collection[Any]:
        """The user's collection with its own types, majority writes and majority reads from the primary."""
        return strict(collection_of(self._source))

    @per_process
    def plain(self) -> Collection[dict[str, Any]]:
        """The same with plain dicts, whatever types the user's collection decodes to."""
        return strict(self.collection, plain_types(self.collection))

    @per_process
    def latest(self) -> Collection[dict[str, Any]]:
        """The same, read as updates see it: also what a majority does not have yet."""
        return self.plain.with_options(read_concern=ReadConcern("local"))

    @per_process
    def writer(self) -> Writer:
        """Writes changes and entries."""
        return Writer(self.collection, max_pending=self.options.max_pending, claim_ttl=self.options.claim_ttl)

    @property
    def relay(self) -> Relay:
        """Delivers documents; the index exists afterwards."""
        relay = self._relay
        if not self._indexed:
            index.ensure(self.collection)
            self._indexed = True
        return relay

    @per_process
    def _relay(self) -> Relay:
        return Relay(
            self.plain,
            self.publisher,
            lambda: self.dead_letters,
            claim_ttl=self.options.claim_ttl,
            max_attempts=self.options.max_attempts,
            counters=self.counters,
        )

    @property
    def dead_letters(self) -> OutboxDeadLetters:
        """What could not be published."""
        store = self.plain.database.client[self.options.database][COLLECTION]
        return OutboxDeadLetters(strict(store, self.plain.codec_options), self.collection.full_name)

    @property
    def apps(self) -> tuple[str, ...]:
        """Whose entries this process delivers, by the names of their apps; empty for an app without one."""
        return (app_name(self.app) or "",)

    @per_process
    def sweeps(self) -> SweepRecords:
        """The notes of who has swept."""
        notes = self.plain.database.client[self.options.database][swept.COLLECTION]
        name = f"{self.collection.full_name}/{FIELD}"
        return SweepRecords(strict(notes, self.plain.codec_options), name, self.apps[0], self.apps)

    def may_claim(self, session: ClientSession | None) -> bool:
        """Whether a write may claim its document in order to dispatch at once."""
        return self.at_once and not self._is_circuit_open and not (session is not None and session.in_transaction)

    @property
    def _is_circuit_open(self) -> bool:
        """Whether a broker has kept a writer waiting a moment ago: not every write shall wait for it in turn."""
        return time.monotonic() < self._circuit_open_until

    def dispatch_at_once(self, written: Written, session: ClientSession | None) -> None:
        """The fast path: whatever goes wrong, the entries are in the document, and the sweep finds them."""
        document_id = written.document_id
        self.watch.written()
        if not self.at_once or not (written.matched or written.upserted) or document_id is NO_ID:
            return
        if session is not None and session.in_transaction:
            after_commit(session, lambda: self.dispatch_at_once(Written(document_id, matched=True), None))
            return
        if self._is_circuit_open and written.owner is None:
            return
        started = time.monotonic()
        try:
            if written.owner is None or written.events is None:
                delivery = self.relay.deliver(document_id, judge=False)
            else:
                delivery = self.relay.deliver_claimed(
                    document_id, written.events, written.owner, written.claimed_at, judge=False
                )
            if delivery.error is not None and time.monotonic() - started > _SLOW_SECONDS:
                self._circuit_open_until = time.monotonic() + _OPEN_SECONDS
        except Exception as error:  # noqa: BLE001 - the write is acknowledged: nothing that comes after it may say otherwise
            logger.warning(
                "outbox: document %r is left to the sweep: %s",
                document_id,
                short(error),
                extra={"event": "left_to_sweep"},
            )

    def status(self) -> OutboxStatus:
        """Counts and ages of what is pending; reads only documents in the index."""
        found = index.waiting(self.plain)
        return OutboxStatus(
            outbox=self.collection.full_name,
            documents=found["documents"],
            pending=found["pending"],
            oldest_seconds=found["seconds"],
            failing=found["failing"],
            dead_letters=self.dead_letters.count(),
            dispatched=self.counters.dispatched,
            failures=self.counters.failures,
        )
