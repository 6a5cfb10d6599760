"""The broker's connection, bounded: a frozen server must not hold a process for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.serialization import dumps

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import short

_BOUNDS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("read_timeout", "write_timeout"),
}
"""What bounds a call, by the kind of transport."""


def write_connection(app: Celery, **options: Any) -> Connection:
    """
    Return a new connection of the app to publish with.

    Raises:
        ConfigurationError: `broker_url` is no URL, or kombu refuses it. The message shows nothing of a URL that cannot
            be read: kombu's own shows a part of the password, where that has an unescaped `/`.
    """
    try:
        return app.connection_for_write(**options)
    except ValueError:
        raise ConfigurationError(
            "broker_url is not valid: its host or port cannot be read, often since a character of its password is not "
            "escaped. Write the password as urllib.parse.quote(password, safe='')."
        ) from None
    except (KeyError, TypeError) as error:  # a transport or an option of the URL that kombu does not know
        raise ConfigurationError(
            f"broker_url is refused by kombu: {short(error)}. Options of the connection go to broker_transport_options."
        ) from None


def bounded_connection(app: Celery, seconds: int, *, confirm: bool = False, as_text: bool = False) -> Connection:
    """
    A connection of its own to publish with, every call of which ends within a bound.

    Neither Redis nor RabbitMQ has a bound by itself. What the app's `broker_transport_options` say about it
    counts more.

    Args:
        app: the Celery app, for its broker.
        seconds: the bound of a call.
        confirm: whether RabbitMQ confirms each message; Redis always answers.
        as_text: whether bodies, which are JSON, go to Redis as they are. Kombu puts them into base64 otherwise, which
            is needed for bytes alone, and a third longer. Each message says which of them it is, to consumers of all
            versions.
    """
    with write_connection(app) as plain:
        kind = plain.transport.driver_type
    given = app.conf.broker_transport_options or {}
    bounds: dict[str, Any] = {name: seconds for name in _BOUNDS.get(kind, ()) if name not in given}
    if confirm and kind == "amqp":
        bounds.setdefault("confirm_publish", given.get("confirm_publish", True))
    if as_text and kind == "redis" and "body_encoding" not in given and _is_text(app):
        bounds["body_encoding"] = None
    return write_connection(app, connect_timeout=seconds, transport_options=bounds)


def _is_text(app: Celery) -> bool:
    """Return True if a body is text: it is not compressed, and Celery's own serializer makes it."""
    return not app.conf.task_compression and isinstance(dumps([], serializer="json")[2], str)


def demand_answer(connection: Connection, seconds: int) -> None:
    """Have one of the broker's servers answer, each within a bound; raises what its transport raises."""
    retries = count_retries(connection)
    connection.ensure_connection(
        max_retries=retries, interval_start=0, interval_step=0, timeout=seconds * max(retries - 1, 1)
    )


def count_retries(connection: Connection) -> int:
    """Return how often a connection is tried again: each server of `broker_url` has its turn, and a single one two."""
    return max(1, len(connection.alt))


def reach_broker(app: Celery, seconds: int) -> None:
    """Have the broker take a new connection, within a bound; raises what its transport raises."""
    with bounded_connection(app, seconds) as connection:
        demand_answer(connection, seconds)


def declare_queues(app: Celery, names: Sequence[str]) -> None:
    """Make the partition queues known to this app, beside whatever queues it has."""
    for name in names:
        if name not in app.amqp.queues:
            app.amqp.queues.select_add(app.amqp.queues.new_missing(name))
