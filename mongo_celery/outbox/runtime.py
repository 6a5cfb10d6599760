"""The parts of one outbox: its collection with the protocol's concerns, relay, dispatcher and dead letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bson.codec_options import DatetimeConversion
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from mongo_celery.app import shared
from mongo_celery.forking import PerProcess, per_process
from mongo_celery.locking import after_commit
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.mongo.opening import Source, check_source, plain_types, resolve_collection, with_majority
from mongo_celery.outbox.dead_letters import COLLECTION as DEAD_LETTERS
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, Delivery
from mongo_celery.outbox.dispatcher import AppDispatcher, DispatcherState, OutboxDispatcher
from mongo_celery.outbox.options import OutboxOptions
from mongo_celery.outbox.origin import EntryOrigin, read_origin
from mongo_celery.outbox.pending_documents import PendingDocuments, UnknownTask
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.relay import Relay
from mongo_celery.outbox.signing import COLLECTION as KEYS
from mongo_celery.outbox.signing import EntrySigner
from mongo_celery.outbox.sweep_records import COLLECTION as SWEEPS
from mongo_celery.outbox.sweep_records import SweepRecords, make_sweep_watch


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """
    One outbox at one moment.

    Attributes:
        outbox: namespace of the collection.
        documents: number of documents with pending entries.
        pending: number of pending entries.
        oldest_seconds: age of the oldest entry, by the server's clock. None if none is pending.
        failing: number of documents whose next entry has failed through its own fault.
        dead_letters: number of dead letters.
        unsigned: number of dead letters that the outbox had not signed.
        dispatched: entries of this process since it started.
        failures: failures of this process since it started.
        stuck: number of documents whose next entry failed `max_attempts` times. Later entries wait until a person acts.
        other_brokers: number of documents that wait for another app with another broker.
        dispatcher: this process's queue.
    """

    outbox: str
    documents: int
    pending: int
    oldest_seconds: float | None
    failing: int
    dead_letters: int
    dispatched: int
    failures: int
    unsigned: int = 0
    stuck: int = 0
    other_brokers: int = 0
    dispatcher: DispatcherState = field(default_factory=DispatcherState)


class OutboxRuntime:
    """
    The parts of one outbox. Each process makes them when needed.

    Args:
        app: the Celery app.
        source: the user's collection, or a callable that returns it.
        options: the options of the outbox.
        is_own: True if the collection belongs to the outbox alone, so that empty documents are deleted.
    """

    def __init__(self, app: Celery, source: Source, options: OutboxOptions, *, is_own: bool) -> None:
        check_source("The collection of the outbox", source)
        self.app = app
        self.options = options
        self.at_once = options.at_once
        self.is_own = is_own
        self.known_name = options.name or (source.full_name if isinstance(source, Collection) else None)
        """The name, if known without opening the collection."""
        self.counters = Counters()
        self.unknown_logged_at = -math.inf
        self._source = source
        self.watch = make_sweep_watch(
            lambda: self.collection.full_name,
            lambda: self.sweeps,
            options.sweep_every,
            lambda: self.dispatcher.state.broker_down,
        )
        self._dispatcher: PerProcess[OutboxDispatcher] = PerProcess(
            lambda: OutboxDispatcher(shared(app, AppDispatcher).get(), self)
        )

    @property
    def name(self) -> str:
        """The name for commands and logs. It may open the collection."""
        return self.known_name or self.collection.full_name

    @property
    def label(self) -> str:
        """The name for log records, even if the collection cannot be opened."""
        try:
            return self.name
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - whatever the user's callable raises
            return f"(not opened: {getattr(self._source, '__qualname__', type(self._source).__name__)})"

    @per_process
    def collection(self) -> Collection[Any]:
        """The user's collection with its own types, majority writes and majority reads from the primary."""
        return with_majority(resolve_collection(self._source))

    @per_process
    def plain(self) -> Collection[dict[str, Any]]:
        """The collection with plain dicts, whatever types the user's collection has. It can read any stored time."""
        return with_majority(
            self.collection, plain_types(self.collection, datetime_conversion=DatetimeConversion.DATETIME_AUTO)
        )

    @per_process
    def latest(self) -> Collection[dict[str, Any]]:
        """The collection as updates see it, including documents that a majority does not have yet."""
        return self.plain.with_options(read_concern=ReadConcern("local"))

    @property
    def publisher(self) -> Publisher:
        """Publishes the entries of all outboxes of the app."""
        found: Publisher = shared(self.app, Publisher).get()
        return found

    @per_process
    def origin(self) -> EntryOrigin:
        """App and broker of the entries that this process writes."""
        return read_origin(self.app)

    @per_process
    def pending(self) -> PendingDocuments:
        """Finds documents with something pending."""
        return PendingDocuments(self.plain, self.origin)

    @property
    def relay(self) -> Relay:
        """The relay, which delivers documents. Reading it also creates the index, if MongoDB allows it now."""
        self.pending.indexes.ensure(patiently=True)
        return self._relay

    @per_process
    def _relay(self) -> Relay:
        return Relay(
            collection=self.plain,
            options=self.options,
            counters=self.counters,
            publisher=self.publisher,
            signer=self.signer,
            origin=self.origin,
            dead_letters=self.dead_letters,
            is_own=self.is_own,
        )

    @property
    def dispatcher(self) -> OutboxDispatcher:
        """Delivers what this process writes. Its thread starts with the first write."""
        return self._dispatcher.get()

    def deliver_queued(self, document_ids: Sequence[Any]) -> Delivery:
        """Deliver documents for the dispatcher, while the app's other outboxes wait."""
        self.pending.indexes.ensure(patiently=False)
        return self._relay.deliver_all(document_ids)

    def find_due(self, limit: int) -> Sequence[Any]:
        """
        Return up to this many `_id`s of documents that may be claimed.

        Raises:
            PyMongoError: MongoDB did not answer in time, for example without the index.
        """
        return self.pending.poll_due(limit)

    def _open_state_collection(self, name: str) -> Collection[dict[str, Any]]:
        """Return a collection of the state database, on the cluster of the outbox."""
        return with_majority(self.plain.database.client[self.options.database][name], self.plain.codec_options)

    @per_process
    def dead_letters(self) -> OutboxDeadLetters:
        """Entries that could not be published."""
        return OutboxDeadLetters(
            self._open_state_collection(DEAD_LETTERS), self.collection.full_name, self.options.dead_letter_retention
        )

    @per_process
    def signer(self) -> EntrySigner:
        """Signs and verifies entries."""
        return EntrySigner(self._open_state_collection(KEYS), self.pending.place)

    @per_process
    def sweeps(self) -> SweepRecords:
        """The notes of sweeps."""
        return SweepRecords(self._open_state_collection(SWEEPS), self.pending.place)

    def dispatch(self, document_ids: Sequence[Any], session: ClientSession | None) -> None:
        """
        Pass written documents to the dispatcher, after the commit. It never blocks and never fails.

        Args:
            document_ids: `_id`s of the documents. `NO_ID` for an unknown one, which the index finds.
            session: the write's session.
        """
        self.watch.needed()
        if not self.at_once:
            return
        if session is not None and session.in_transaction:
            if not after_commit(lambda: self.dispatch(document_ids, None), session):
                self.dispatcher.expect()  # nothing reports the end of this transaction
            return
        known = [each for each in document_ids if each is not NO_ID]
        if known:
            self.dispatcher.hint(*known)
        if len(known) < len(document_ids):
            self.dispatcher.hint()

    def find_unknown_tasks(self) -> list[UnknownTask]:
        """Return the tasks that documents wait for and that this process does not know."""
        return self.pending.find_unknown_tasks(self.app.tasks)

    def deliver_now(self, document_id: object) -> Delivery:
        """
        Deliver a document before returning, unless the broker is known to be down.

        Raises:
            PyMongoError: MongoDB did not answer.
        """
        if self.dispatcher.state.broker_down:
            return Delivery(broker_down=True, error="the broker does not answer")
        return self.relay.deliver(document_id)

    def close(self) -> None:
        """Close this process's dispatcher and broker connections. The next use makes new ones."""
        dispatcher = self._dispatcher.take()
        if dispatcher is not None:
            dispatcher.close()
        self.publisher.close()

    def read_status(self) -> OutboxStatus:
        """Return counts and ages of pending entries."""
        stuck_after = self.options.max_attempts if self.options.failure_policy == "halt" else None
        found = self.pending.count(stuck_after)
        return OutboxStatus(
            outbox=self.collection.full_name,
            documents=found["documents"],
            pending=found["pending"],
            oldest_seconds=found["seconds"],
            failing=found["failing"],
            dead_letters=self.dead_letters.count(),
            unsigned=self.dead_letters.count_unsigned(),
            dispatched=self.counters.dispatched,
            failures=self.counters.failures,
            stuck=found["stuck"],
            other_brokers=found["other_brokers"],
            dispatcher=self.dispatcher.state,
        )
