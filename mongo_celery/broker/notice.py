"""
A notice: what a few processes say to each other through one small message at the broker.

It stands in a queue of its own, which no worker consumes. Whoever reads it takes it out and puts it back, so that it
may be missing for a moment; nothing may rest on its being there. It vanishes by itself some time after the last use
where the transport can do that (RabbitMQ; Redis with kombu 5.7).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery
from kombu import Connection, Exchange, Producer, Queue

from mongo_celery.broker.connection import bounded_connection, demand_answer, write_connection

_TRANSPORTS = {"redis", "amqp"}
_AT_ONCE = 8
_BYTES_MAX = 4096
_EXPIRES_SECONDS = 60.0
_TRANSIENT = 1


class NoticeBoard:
    """
    The place of one notice. Used by one thread; nothing connects before the first use.

    Every call ends within a bound, and raises what the transport raises. The next one makes a new connection.

    Args:
        app: the Celery app, for its broker.
        name: of the queue.
        seconds: the bound of one call to the broker.
    """

    def __init__(self, app: Celery, name: str, seconds: int) -> None:
        self._app = app
        self._name = name
        self._seconds = seconds
        self._connection: Connection | None = None
        self._queue: Any = None

    @property
    def where(self) -> str:
        """The broker, without its password."""
        with write_connection(self._app) as connection:
            return str(connection.as_uri())

    @property
    def is_possible(self) -> bool:
        """Whether this kind of broker can hold a notice: Redis and RabbitMQ."""
        with write_connection(self._app) as connection:
            return connection.transport.driver_type in _TRANSPORTS

    def take(self) -> list[dict[str, Any]]:
        """Take down what is there, the oldest first; what is no notice is thrown away, and so is a heap of them."""
        queue = self._ready_queue()
        found: list[Any] = []
        for _ in range(_AT_ONCE):
            message = queue.get(no_ack=True)
            if message is None:
                return _read(found)
            found.append(message)
        queue.purge()
        return _read(found)

    def put(self, notice: Mapping[str, Any]) -> None:
        """Put one up, beside what is there."""
        queue = self._ready_queue()
        Producer(queue.channel, auto_declare=False).publish(
            dict(notice), routing_key=self._name, serializer="json", delivery_mode=_TRANSIENT, retry=False
        )

    def close(self) -> None:
        """Drop the connection."""
        connection, self._connection, self._queue = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()

    def _ready_queue(self) -> Any:
        if self._queue is None:
            self._connection = bounded_connection(self._app, self._seconds)
            demand_answer(self._connection, self._seconds)
            queue = Queue(self._name, Exchange(""), routing_key=self._name, expires=_EXPIRES_SECONDS)
            bound: Any = queue(self._connection.default_channel)
            bound.queue_declare()
            self._queue = bound
        return self._queue


def _read(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Anybody may have written them: nothing but small JSON objects is read."""
    notices = []
    for message in messages:
        body = message.body
        if message.content_type != "application/json" or len(body) > _BYTES_MAX:
            continue
        try:
            notice = json.loads(body)
        except (ValueError, RecursionError):
            continue
        if isinstance(notice, dict):
            notices.append(notice)
    return notices
