"""The base of all outboxes of an app, and the task that sweeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from pymongo.collection import Collection

from mongo_celery.app import Registry, add_task, check_app, schedule
from mongo_celery.arguments import Duration, not_negative
from mongo_celery.mongo.opening import Source
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.entries import Entry, list_given, make_event_entry, make_task_entries
from mongo_celery.outbox.options import parse_options
from mongo_celery.outbox.runtime import OutboxRuntime, OutboxStatus
from mongo_celery.outbox.sweep import SWEEP_TASK, OutboxSweep, sweep_all, take_turns


class BaseOutbox:
    """
    The common part of all outboxes of an app: name, sweep, status, dead letters.

    Args:
        app: the Celery app, which then knows the outbox by name.
        collection: the entries' collection, or a callable that returns it.
        given: options of the outbox.
        is_own: True if the collection belongs to the outbox alone, so that empty documents are deleted.

    Raises:
        ConfigurationError: it is not a collection, or the app has an outbox of this name.
    """

    def __init__(self, app: Celery, collection: Source, given: Mapping[str, Any], *, is_own: bool = False) -> None:
        check_app(app)
        options = parse_options(given)
        self.app = app
        self.runtime = OutboxRuntime(app, collection, options, is_own=is_own)
        OUTBOXES.add(app, self, self.runtime.known_name)
        add_task(app, SWEEP_TASK, _make_sweep_task(app), acks_late=False)
        if options.sweep_every is not None:
            schedule(app, SWEEP_TASK, options.sweep_every)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.runtime.known_name or '(not opened yet)'}>"

    @property
    def name(self) -> str:
        """The name for commands and logs."""
        return self.runtime.name

    @property
    def collection(self) -> Collection[Any]:
        """The collection of the entries, with majority writes and reads from the primary."""
        return self.runtime.collection

    def prepare(self) -> None:
        """
        Read the signing key now, so that the first write of this process does not wait for it.

        Later writes read it again once a minute, but never in an event loop. For asyncio, call it at the start in a
        thread: `await asyncio.to_thread(outbox.prepare)`.

        Raises:
            DeploymentError, PyMongoError: it could not be read.
        """
        self.runtime.signer.prepare()

    def sweep(self, *, older_than: Duration | None = None) -> Delivery:
        """
        Deliver pending entries of this collection.

        Args:
            older_than: least age of a document's oldest entry in seconds. By default the option `sweep_after`.

        Returns:
            The total of the results.

        Raises:
            PyMongoError: MongoDB did not answer.
        """
        sweep = OutboxSweep(self.runtime, None if older_than is None else not_negative(older_than, "older_than"))
        take_turns([sweep])
        if sweep.failure is not None:
            raise sweep.failure
        return sweep.total

    def status(self) -> OutboxStatus:
        """Return counts and ages of pending entries. It reads only documents with pending entries."""
        return self.runtime.read_status()

    def _make_entries(self, tasks: Sequence[Any], events: Sequence[Any], document_id: Any) -> list[Entry]:
        """
        Return signed entries of tasks and events, in this order.

        Raises:
            OutboxRefusedError: as in `make_task_entries` and `make_event_entry`, and if it is not a list.
            DeploymentError, PyMongoError: the process has not read the signing key, and cannot read it.
        """
        now, tasks, events = datetime.now(UTC), list_given(tasks), list_given(events)
        found = [entry for task in tasks for entry in make_task_entries(self.app, task, now, document_id)]
        if events:
            source = "/" + self.collection.full_name.replace(".", "/", 1)
            found += [make_event_entry(event, now, source=source, document_id=document_id) for event in events]
        return [self.runtime.signer.sign(self.runtime.origin.stamp(entry)) for entry in found]


OUTBOXES: Registry[BaseOutbox] = Registry(
    "outbox",
    create="mongo_celery.Outbox(app, client.shop.orders) where the app or its tasks are made",
    rename="use that one, or give the new one another name with name='...'",
)
"""The outboxes of all apps."""


def _make_sweep_task(app: Celery) -> Callable[[], Any]:
    def sweep_outboxes() -> Any:
        """Deliver pending entries in all outboxes of this app."""
        return sweep_all([outbox.runtime for outbox in OUTBOXES.of(app)])

    return sweep_outboxes
