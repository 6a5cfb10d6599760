"""What stands behind an outbox: its collection, opened as the protocol needs it, its relay and its dead letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from mongo_celery.app import shared
from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess, per_process
from mongo_celery.locking import after_commit
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.mongo.opening import Source, plain_types, resolve_collection, with_majority
from mongo_celery.outbox import index, signing, swept
from mongo_celery.outbox.claims import PendingClaims
from mongo_celery.outbox.commands import COMMAND_SECONDS
from mongo_celery.outbox.dead_letters import COLLECTION, OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, Delivery
from mongo_celery.outbox.dispatcher import AppDispatcher, DispatcherState, OutboxDispatcher
from mongo_celery.outbox.failures import FailurePolicy
from mongo_celery.outbox.index import OutboxIndexes
from mongo_celery.outbox.options import OutboxOptions
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.relay import Relay
from mongo_celery.outbox.signing import EntrySigner
from mongo_celery.outbox.swept import SweepRecords, patience, sweep_watch

_PROBE_SECONDS = 5
"""How long a broker may take to answer whether it is back."""


_LOOK = 100
_WAIT_SECONDS_MAX = 5.0
"""How long a write with `at_once="wait"` waits at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """
    One outbox at one moment.

    Attributes:
        outbox: namespace of the collection.
        documents: how many have something pending.
        pending: how many entries wait.
        oldest_seconds: age of the oldest by the server's clock; None when nothing waits.
        failing: how many documents have, as the next one, an entry that has failed through its own fault.
        dead_letters: how many were set aside.
        unsigned: how many of these the outbox had not signed.
        dispatched: by this process since it started.
        failures: of this process since it started.
        stuck: how many of the failing have failed `max_attempts` times: what stands behind waits until somebody acts.
        other_apps: in how many the next entry belongs to an app that this process does not deliver for.
        dispatcher: what waits in this process.
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
    other_apps: int = 0
    dispatcher: DispatcherState = field(default_factory=DispatcherState)


class Backing:
    """
    The parts of one outbox; each process makes each of them when it first needs it.

    Args:
        app: the Celery app.
        source: the user's collection, or a callable that returns it.
        publisher: to the broker.
        options: of the outbox.
        is_own: whether the collection is the outbox's own, so that an emptied document is deleted.
    """

    def __init__(
        self, app: Celery, source: Source, publisher: Publisher, options: OutboxOptions, *, is_own: bool
    ) -> None:
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
        self._options = options
        self.field = PendingField()
        self.is_own = is_own
        self.others_told_at = -math.inf
        self.watch = sweep_watch(
            lambda: self.collection.full_name,
            lambda: self.sweeps,
            patience(options.sweep_every),
            lambda: self.dispatcher.state.broker_down,
        )
        self._dispatcher: PerProcess[OutboxDispatcher] = PerProcess(self._new_dispatcher)

    @per_process
    def collection(self) -> Collection[Any]:
        """The user's collection with its own types, majority writes and majority reads from the primary."""
        return with_majority(resolve_collection(self._source))

    @per_process
    def plain(self) -> Collection[dict[str, Any]]:
        """The same with plain dicts, whatever types the user's collection decodes to."""
        return with_majority(self.collection, plain_types(self.collection))

    @per_process
    def latest(self) -> Collection[dict[str, Any]]:
        """The same, read as updates see it: also what a majority does not have yet."""
        return self.plain.with_options(read_concern=ReadConcern("local"))

    @per_process
    def indexes(self) -> OutboxIndexes:
        """The index, which comes with the first delivery."""
        return OutboxIndexes(index.of_pending(self.plain, self.field))

    @property
    def relay(self) -> Relay:
        """Delivers documents; the index exists afterwards, if it can be created now."""
        self.indexes.ensure(patiently=True)
        return self._relay

    @per_process
    def _relay(self) -> Relay:
        return Relay(
            self.plain,
            self.publisher,
            lambda: self.dead_letters,
            signer=self.signer,
            claims=self.claims,
            claim_ttl=self._options.claim_ttl,
            is_own=self.is_own,
            policy=FailurePolicy(self._options.failure_policy, self._options.max_attempts),
            counters=self.counters,
        )

    @per_process
    def claims(self) -> PendingClaims:
        """Conditions and updates of relays."""
        return PendingClaims(self.field, self.publisher.apps)

    @property
    def dispatcher(self) -> OutboxDispatcher:
        """Publishes what this process writes; its thread starts with the first write."""
        return self._dispatcher.get()

    def _new_dispatcher(self) -> OutboxDispatcher:
        return OutboxDispatcher(
            shared(self.app, AppDispatcher).get(),
            lambda: self.collection.full_name,
            deliver=self._deliver_at_once,
            waiting=lambda limit, refused: self.due(0.0, limit, passing_over=refused, seconds=COMMAND_SECONDS),
            answers=lambda: self.publisher.answers(_PROBE_SECONDS),
            claim_ttl=self._options.claim_ttl,
            codec=lambda: self.collection.codec_options,
            expects=bool(self.at_once),
        )

    def _deliver_at_once(self, document_ids: Sequence[Any]) -> Delivery:
        self.indexes.ensure(patiently=False)  # the other outboxes of the app wait meanwhile
        return self._relay.deliver_all(document_ids, judge=False, turns=1)  # this process need not know the tasks

    @per_process
    def dead_letters(self) -> OutboxDeadLetters:
        """What could not be published."""
        store = self.plain.database.client[self._options.database][COLLECTION]
        retention = self._options.dead_letter_retention
        return OutboxDeadLetters(with_majority(store, self.plain.codec_options), self.collection.full_name, retention)

    @per_process
    def signer(self) -> EntrySigner:
        """Signs and verifies entries."""
        keys = self.plain.database.client[self._options.database][signing.COLLECTION]
        return EntrySigner(
            with_majority(keys, self.plain.codec_options), f"{self.collection.full_name}/{self.field.name}"
        )

    @property
    def options(self) -> OutboxOptions:
        """What the outbox was told."""
        return self._options

    @per_process
    def sweeps(self) -> SweepRecords:
        """The notes of who has swept."""
        notes = self.plain.database.client[self._options.database][swept.COLLECTION]
        name = f"{self.collection.full_name}/{self.field.name}"
        apps = [app or "" for app in self.publisher.apps]
        return SweepRecords(with_majority(notes, self.plain.codec_options), name, self.app.main or "", apps)

    def dispatch(self, document_ids: Sequence[Any], session: ClientSession | None) -> None:
        """
        Hand documents that were written to the dispatcher, after the commit: never blocks, and never fails.

        With `at_once="wait"` it returns when they have had their turn, within a bound.

        Args:
            document_ids: their `_id`s; `NO_ID` for one that is not known, which the index knows.
            session: of the write.
        """
        self.watch.needed()
        if not self.at_once:
            return
        if session is not None and session.in_transaction:
            if not after_commit(lambda: self.dispatch(document_ids, None), session):
                self.dispatcher.expect()  # nobody says when the transaction ends
            return
        known = [each for each in document_ids if each is not NO_ID]
        if self.at_once == "wait":
            known += self.due(0.0, _LOOK) if len(known) < len(document_ids) else []
            self.dispatcher.wait_all(known, self._wait_seconds)
            return
        if known:
            self.dispatcher.hint(*known)
        if len(known) < len(document_ids):
            self.dispatcher.hint()

    def deliver_now(self, document_id: object) -> Delivery:
        """
        Deliver a document before this returns, after what the dispatcher of this process has of it.

        Raises:
            PyMongoError: MongoDB did not answer.
        """
        if self.at_once:
            self.dispatcher.wait_all([document_id], self._wait_seconds)
        if self.dispatcher.state.broker_down:
            return Delivery(broker_down=True, error="the broker does not answer")
        return self.relay.deliver(document_id, judge=False)  # this process need not know the tasks

    @property
    def _stuck_after(self) -> int | None:
        """After how many failures of its own an entry is stuck; None where it is set aside instead."""
        return self._options.max_attempts if self._options.failure_policy == "halt" else None

    @property
    def _wait_seconds(self) -> float:
        """After half its time a claim is not relied on any more."""
        return min(self._options.claim_ttl / 2, _WAIT_SECONDS_MAX)

    def close(self) -> None:
        """End the dispatcher of this process, and close its connections to the broker; the next use makes new ones."""
        dispatcher = self._dispatcher.take()
        if dispatcher is not None:
            dispatcher.close()
        self.publisher.close()

    def is_indexed(self) -> bool | None:
        """Whether the index is there; None where the user may not look."""
        return index.of_pending(self.plain, self.field).exists()

    def due(
        self,
        older_than: float,
        limit: int,
        *,
        passing_over: Sequence[Any] = (),
        by_lot: bool = False,
        seconds: float | None = None,
    ) -> list[Any]:
        """As `index.due_documents`."""
        return index.due_documents(
            self.plain, self.claims, older_than, limit, passing_over=passing_over, by_lot=by_lot, seconds=seconds
        )

    def status(self) -> OutboxStatus:
        """Counts and ages of what is pending; reads only documents in the index."""
        found = index.waiting(self.plain, self.claims, self._stuck_after)
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
            other_apps=found["other_apps"],
            dispatcher=self.dispatcher.state,
        )
