"""All outboxes of an app: what they share, whatever they store their entries in, and the task that sweeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from pymongo.collection import Collection

from mongo_celery.app import Registry, add_task, schedule
from mongo_celery.arguments import Duration, not_negative
from mongo_celery.mongo.opening import Source
from mongo_celery.outbox.backing import Backing, OutboxStatus
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.entries import Entry, EntryMaker
from mongo_celery.outbox.options import options_of
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.sweep import SWEEP_TASK, SweepTarget, sweep_all, sweep_one


class AnyOutbox:
    """
    What every outbox of an app has: a name, a sweep, a status, dead letters; how entries get in is its kind's own.

    Args:
        app: the Celery app; it knows the outbox afterwards, by its name.
        collection: where entries are stored, or a callable that returns it.
        given: options of the outbox.
        is_own: whether the collection is the outbox's own, so that an emptied document is deleted.

    Raises:
        ConfigurationError: the collection is none, or the app has an outbox of this name.
    """

    def __init__(self, app: Celery, collection: Source, given: Mapping[str, Any], *, is_own: bool = False) -> None:
        options = options_of(given)
        self.app = app
        self.sweep_after = options.sweep_after
        self.publisher = Publisher(
            app, options.exchange, foreign_tasks=options.foreign_tasks, delivers=options.delivers
        )
        self.backing = Backing(app, collection, self.publisher, options, is_own=is_own)
        self._name = options.name or (collection.full_name if isinstance(collection, Collection) else None)
        self._maker = EntryMaker(
            app,
            lambda: options.source or "/" + self.collection.full_name.replace(".", "/", 1),
            self._sign,
        )
        _register(app, self, self._name, options.sweep_every)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name or '(not opened yet)'}>"

    @property
    def name(self) -> str:
        """What commands and logs call it."""
        return self._name or self.collection.full_name

    @property
    def collection(self) -> Collection[Any]:
        """Where entries are stored, with majority writes and reads from the primary."""
        return self.backing.collection

    @property
    def dead_letters(self) -> OutboxDeadLetters:
        """Entries that could not be published."""
        return self.backing.dead_letters

    @property
    def sweep_target(self) -> SweepTarget:
        """What a sweep needs of this outbox."""
        return SweepTarget(lambda: self.name, self.backing, self.sweep_after)

    def prepare(self) -> None:
        """
        Read the signing key now, so that no later write of this process waits for it.

        For asyncio, at the start and in a thread: `await asyncio.to_thread(outbox.prepare)`.

        Raises:
            DeploymentError, PyMongoError: it could not be read.
        """
        self.backing.signer.prepare()

    def sweep(self, *, older_than: Duration | None = None, limit: int = 1000) -> Delivery:
        """
        Deliver what was left behind in this collection.

        Args:
            older_than: seconds that the oldest entry of a document has waited; by default `sweep_after`.
            limit: how many documents at most.

        Returns:
            The sum of what was done.
        """
        age = self.sweep_after if older_than is None else not_negative(older_than, "older_than")
        return sweep_one(self.sweep_target, age, limit)

    def status(self) -> OutboxStatus:
        """Counts and ages of what is pending; reads only what is."""
        return self.backing.status()

    def _sign(self, entry: Entry) -> Entry:
        return self.backing.signer.sign(entry)


OUTBOXES: Registry[AnyOutbox] = Registry(
    "outbox",
    create="mongo_celery.Outbox(app, client.shop.orders) where the app or its tasks are made",
    rename="use it, or give this one name='...'",
)
"""Of all apps."""


def _register(app: Celery, outbox: AnyOutbox, name: str | None, sweep_every: float | None) -> None:
    """Note an outbox of an app, with its sweep."""
    OUTBOXES.add(app, outbox, name)
    add_task(app, SWEEP_TASK, _sweep_of(app), acks_late=False)
    if sweep_every is not None:
        schedule(app, SWEEP_TASK, sweep_every)


def _sweep_of(app: Celery) -> Callable[[], Any]:
    def sweep_outboxes() -> Any:
        """Deliver what was left behind in all outboxes of this app."""
        return sweep_all(outbox.sweep_target for outbox in OUTBOXES.of(app))

    return sweep_outboxes
