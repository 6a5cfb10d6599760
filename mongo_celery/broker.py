"""The broker's connection, bounded: a frozen server must not hold a process for ever."""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery
from kombu import Connection

_BOUNDS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("read_timeout", "write_timeout"),
}
"""What bounds a call, by the kind of transport."""


def bounded_connection(app: Celery, seconds: int) -> Connection:
    """
    A connection of its own to publish with, every call of which ends within a bound.

    Neither Redis nor RabbitMQ has a bound by itself. What the app's `broker_transport_options` say about it
    counts more.
    """
    with app.connection_for_write() as plain:
        names = _BOUNDS.get(plain.transport.driver_type, ())
    given = app.conf.broker_transport_options or {}
    bounds = {name: seconds for name in names if name not in given}
    return app.connection_for_write(connect_timeout=seconds, transport_options=bounds)


def declare_queues(app: Celery, names: Sequence[str]) -> None:
    """Make the partition queues known to this app, beside whatever queues it has."""
    for name in names:
        if name not in app.amqp.queues:
            app.amqp.queues.select_add(app.amqp.queues.new_missing(name))
