"""Queues that are made known to an app."""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery


def declare_queues(app: Celery, names: Sequence[str]) -> None:
    """Make the partition queues known to this app, beside whatever queues it has."""
    for name in names:
        if name not in app.amqp.queues:
            app.amqp.queues.select_add(app.amqp.queues.new_missing(name))
