"""All outboxes of an app, whatever they store their entries in, and the task that sweeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from celery import Celery
from pymongo.collection import Collection

from mongo_celery.app import Registry, add_task, schedule
from mongo_celery.arguments import Duration
from mongo_celery.outbox.backing import Backing, OutboxStatus
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.sweep import SWEEP_TASK, Backlog, sweep_all


class AnyOutbox(Protocol):
    """What commands, metrics and the sweep need of an outbox."""

    app: Celery
    publisher: Publisher
    sweep_after: float

    @property
    def backing(self) -> Backing:
        """What stands behind it."""

    @property
    def name(self) -> str:
        """What commands and logs call it."""

    @property
    def collection(self) -> Collection[Any]:
        """Where entries are stored."""

    @property
    def dead_letters(self) -> OutboxDeadLetters:
        """Entries that could not be published."""

    @property
    def backlog(self) -> Backlog:
        """What a sweep needs."""

    def sweep(self, *, older_than: Duration | None = None, limit: int = 1000) -> Delivery:
        """Deliver what was left behind."""

    def status(self) -> OutboxStatus:
        """Counts and ages of what is pending."""


OUTBOXES: Registry[AnyOutbox] = Registry(
    "outbox",
    create="mongo_celery.Outbox(app, client.shop.orders) where the app or its tasks are made",
    rename="use it, or give this one name='...'",
)
"""Of all apps."""


def register(app: Celery, outbox: AnyOutbox, name: str | None, sweep_every: float | None) -> None:
    """
    Note an outbox of an app, with its sweep.

    Raises:
        ConfigurationError: the app has another one of this name.
    """
    OUTBOXES.add(app, outbox, name)
    add_task(app, SWEEP_TASK, _sweep_of(app), acks_late=False)
    if sweep_every is not None:
        schedule(app, SWEEP_TASK, sweep_every)


def _sweep_of(app: Celery) -> Callable[[], Any]:
    def sweep_outboxes() -> Any:
        """Deliver what was left behind in all outboxes of this app."""
        return sweep_all(outbox.backlog for outbox in OUTBOXES.of(app))

    return sweep_outboxes
