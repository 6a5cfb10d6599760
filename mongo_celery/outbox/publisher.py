"""
Publishing entries: bounded connections of the outbox's own, made anew after a fork.

Entries go one by one, or some together: then each is made by Celery as ever, and the broker gets all by one command.
Nothing is taken before that, so whatever goes wrong earlier costs nothing but that each goes by itself. If the command
itself fails, what was taken of it is unknown, and all is sent again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery, signals
from celery.exceptions import BackendError, SoftTimeLimitExceeded
from kombu import Connection, Exchange
from kombu.exceptions import OperationalError
from kombu.pools import ProducerPool

from mongo_celery.app import shared
from mongo_celery.broker.connection import bounded_connection, count_retries, reach_broker
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.canvas import leaves
from mongo_celery.outbox.capture import capture_sends
from mongo_celery.outbox.entries import Entry, bound_event, decode_canvas
from mongo_celery.tracing import sending_for, trace_headers

_BROKER_SECONDS = 5
_PRODUCERS_MAX = 16
_ONCE_AGAIN = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""A connection that the broker has closed while it was idle costs one repetition."""

_ABOUT_THE_ENTRY = {403, 406}
"""AMQP's numbers for an exchange or queue that is not allowed, or of another kind."""

_NOT_FOUND = 404
_FRAME_SYNTAX = 502
"""What AMQP cannot hold, such as a set in the headers."""

_LOST = (OperationalError, OSError, BackendError)

_COMMANDS_MAX = 100_000
"""More than some messages ever are: what is collected is sent when this says so, and not before."""

_ALONE = Pauses(first=60.0, longest=3600.0)
"""
For so long messages go one by one after one of them was refused, and those beside it were sent twice; longer each time
that no command was taken in between. A broker out of memory would be filled with copies, each time by twice as many.
"""


class BrokerUnavailableError(Exception):
    """
    The broker, or the result backend that Celery asks before it publishes, failed; the entry waits.

    Attributes:
        answers: whether the broker answers, so that it makes sense to go on with other documents.
    """

    def __init__(self, cause: BaseException | str, *, answers: bool = False) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.answers = answers


class _EntryRefusedError(Exception):
    """The broker took nothing of this entry, and would take others."""


class BatchAbandonedError(Exception):
    """Messages did not go together; each is to be published by itself, though the broker may have some of them."""


class UnknownTaskError(Exception):
    """No task of that name is registered in this process."""


class OtherAppError(Exception):
    """The entry belongs to an app that this process does not deliver for."""


class Publisher:
    """
    Publishes entries of one app. Safe for threads and across forks.

    Args:
        app: the Celery app.
        exchange: name of the topic exchange for events.
        foreign_tasks: whether a task that this app does not know is published by its name.
        delivers: names of other apps whose entries are published too.
    """

    def __init__(
        self, app: Celery, exchange: str, *, foreign_tasks: bool = False, delivers: Sequence[str] = ()
    ) -> None:
        self.app = app
        self.delivers = tuple(delivers)
        self._exchange = Exchange(exchange, type="topic", durable=True)
        self._foreign_tasks = foreign_tasks
        self._producers = shared(app, _connect)
        self._batch = threading.local()
        self._alone_until = 0.0
        self._times_alone = 0

    @property
    def apps(self) -> tuple[str | None, ...]:
        """Whose entries this process publishes: its own app's, those that it delivers, and those that name none."""
        return (None, "__main__", self.app.main, *self.delivers)  # a script's name is nobody's

    def delivers_for(self, entry: Entry) -> bool:
        """Return True if this process publishes the entries of an entry's app."""
        return (entry.app or None) in self.apps

    def publish(self, entry: Entry, document_id: object = NO_ID, /) -> None:
        """
        Publish one entry; afterwards the broker has it, as far as the broker promises anything.

        Args:
            entry: what to publish; the caller has verified its signature.
            document_id: `_id` of the document that it was stored with, for an entry that is bound late.

        Raises:
            BrokerUnavailableError: the outcome is unknown; publish it again later.
            UnknownTaskError: the task is not registered here.
            OtherAppError: another app has written it.
            BatchAbandonedError: inside `together`, it cannot go with others.
            SoftTimeLimitExceeded: the task that publishes has run for too long; the outcome is unknown.
            Exception: the entry itself cannot be published.
        """
        if not self.delivers_for(entry):
            raise OtherAppError(
                f"its next entry belongs to app {entry.app!r}, and this process delivers for {self.app.main!r}; run "
                f"that app's sweep, or make the outbox here with delivers=({entry.app!r},).",
            )
        if entry.bind and entry.kind != "task":
            entry = bound_event(entry, document_id)
        is_task = entry.kind == "task"
        name = entry.name if is_task else str(self._exchange.name)  # routing keys may be many
        with sending_for(entry.trace, name, lambda: self._span_attributes(entry), is_task=is_task):
            self._publish(entry, self._decoded(entry, document_id) if is_task else None)

    @contextmanager
    def together(self) -> Iterator[Callable[[], None]]:
        """
        Inside, what this thread publishes is collected; what this gives sends it, in order, by one command each time.

        Sending raises the same, and SoftTimeLimitExceeded: what was taken of what was collected is unknown then, and
        nothing more can be sent inside.

        Raises:
            BatchAbandonedError: it cannot, here or now; publish each entry by itself.
            BrokerUnavailableError: the broker does not answer.
        """
        if _is_listened_to(None) or time.monotonic() < self._alone_until:
            raise BatchAbandonedError
        with self._producer() as producer:
            if not self._collects(producer):
                raise BatchAbandonedError
            self._batch.producer = producer
            try:
                with producer.batch(max_size=_COMMANDS_MAX) as batch:
                    yield lambda: self._send(batch, producer)
            finally:
                self._batch.producer = None

    def _collects(self, producer: Any) -> bool:
        """Whether kombu (5.7 and later) and the transport can; a connection that cannot be made says nothing of it."""
        try:
            producer.channel  # noqa: B018 - connects: what a transport can do depends on its options, too
        except Exception as error:  # noqa: BLE001 - whatever a transport raises, also for a message that goes by itself
            limit = _time_limit(error)
            if limit is not None:
                raise limit from None
            return False
        if getattr(producer, "supports_batch_publish", False):
            return True
        self._alone_until = math.inf
        return False

    def _send(self, batch: Any, producer: Any) -> None:
        connection = producer.connection
        try:
            batch.flush()
        except Exception as error:
            limit = _time_limit(error)
            verdict = None if limit is not None else self._verdict(error, connection)
            is_refusal = any(isinstance(each, connection.channel_errors) for each in _causes(error))
            _forget(producer, connection)  # it may be in the middle of a command
            if limit is not None:
                raise limit from None
            if is_refusal or not isinstance(
                verdict, BrokerUnavailableError
            ):  # not where a connection was lost: one that was idle costs nothing
                self._alone_until = time.monotonic() + _ALONE.nth(self._times_alone)
                self._times_alone += 1
            if isinstance(verdict, BrokerUnavailableError) and not verdict.answers:
                raise verdict from error
            raise BatchAbandonedError from error
        self._times_alone = 0

    def _publish(self, entry: Entry, signature: Any) -> None:
        with self._producer() as producer:
            connection, is_collected = producer.connection, producer is self._collecting
            try:
                if signature is None:
                    self._publish_event(producer, entry, retry=not is_collected)
                elif is_collected and _is_listened_to(signature.task):
                    raise BatchAbandonedError
                else:
                    _carry(signature, trace_headers())
                    with capture_sends(self.app, None):  # a transaction's body may be delivering
                        signature.apply_async(
                            producer=producer, retry=not is_collected, retry_policy=_again(connection)
                        )
            except Exception as error:
                limit = _time_limit(error)
                if limit is not None:
                    _forget(producer, connection)  # it may be in the middle of a message
                    raise limit from None
                if is_collected:
                    raise BatchAbandonedError from error
                verdict = self._verdict(error, connection)
                if isinstance(verdict, BrokerUnavailableError):
                    _forget(producer, connection)
                    raise verdict from error
                raise

    def _decoded(self, entry: Entry, document_id: object) -> Any:
        try:
            return self._signature(entry, document_id)
        except Exception as error:
            limit = _time_limit(error)  # kombu makes an error of decoding of whatever it meets
            if limit is not None:
                raise limit from None
            raise

    def _signature(self, entry: Entry, document_id: object) -> Any:
        signature = decode_canvas(self.app, entry, document_id)
        signature["args"] = tuple(signature["args"])  # monitors show them as `delay` would
        if not self._foreign_tasks:
            for leaf in leaves(signature):
                if leaf["task"] not in self.app.tasks:
                    raise UnknownTaskError(
                        f"task {leaf['task']!r} is not registered in this process; import its module there, or make "
                        "the outbox with foreign_tasks=True if another app runs it.",
                    )
        return signature

    def _publish_event(self, producer: Any, entry: Entry, *, retry: bool) -> None:
        producer.publish(
            entry.payload,
            exchange=self._exchange,
            routing_key=entry.name,
            declare=[self._exchange],
            content_type=entry.content_type,
            content_encoding=entry.content_encoding,
            message_id=entry.id,
            headers=trace_headers(),
            delivery_mode="persistent",
            retry=retry,
            retry_policy=_again(producer.connection),
        )

    def _span_attributes(self, entry: Entry) -> dict[str, Any]:
        return {
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": entry.name if entry.kind == "task" else str(self._exchange.name),
            "messaging.message.id": entry.id,
        }

    @property
    def _collecting(self) -> Any:
        """The producer that collects what this thread publishes; None outside `together`."""
        return getattr(self._batch, "producer", None)

    @contextmanager
    def _producer(self) -> Iterator[Any]:
        if self._collecting is not None:
            yield self._collecting
            return
        try:
            with self._producers.get().acquire(block=True, timeout=_BROKER_SECONDS) as producer:
                try:
                    yield producer
                except (OperationalError, OSError) as error:
                    raise _EntryRefusedError(str(error)) from error  # not to be taken for an error of `acquire`
        except (OperationalError, OSError) as error:
            raise BrokerUnavailableError(error) from error

    def _verdict(self, error: Exception, connection: Any) -> Exception:
        """Whether it is the entry's fault; if not, what to say instead."""
        causes = list(_causes(error))
        if any(getattr(each, "reply_code", None) == _FRAME_SYNTAX for each in causes):
            return error
        if any(isinstance(each, connection.channel_errors) for each in causes):
            answers = self.answers()
            if answers and any(_is_about_the_entry(each) for each in causes):
                return error
            return BrokerUnavailableError(error, answers=answers)
        # kombu's Redis transport counts any KeyError as a lost connection; a damaged entry can raise one too.
        lost = tuple(each for each in connection.connection_errors if each is not KeyError)
        # The result backend, at which Celery listens for the result of any task.
        backend_lost = getattr(self.app.backend, "connection_errors", ())
        backend_refused = getattr(self.app.backend, "channel_errors", ())
        if not any(isinstance(each, (*lost, *backend_lost, *backend_refused, *_LOST)) for each in causes):
            return error
        if any(isinstance(each, (*backend_refused, RuntimeError, BackendError)) for each in causes):
            return BrokerUnavailableError(error, answers=True)
        silent = any(type(each).__name__ == "TimeoutError" for each in causes)  # Python's, and redis-py's of that name
        return BrokerUnavailableError(error, answers=not silent and self.answers())

    def answers(self, seconds: int = _BROKER_SECONDS) -> bool:
        """Whether the broker takes a new connection, within a bound."""
        try:
            reach_broker(self.app, seconds)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - whatever a transport raises
            return False
        return True

    def close(self) -> None:
        """Close the connections that the app's outboxes share in this process; the next publish makes new ones."""
        pool = self._producers.take()
        if pool is not None:
            pool.force_close_all()
            pool.connections.force_close_all()


def _connect(app: Celery) -> Any:
    """Return the producers of an app in this process."""
    try:
        connection = bounded_connection(app, _BROKER_SECONDS, confirm=True)
    except (ConfigurationError, KeyError, ImportError, ValueError) as error:
        raise BrokerUnavailableError(f"the broker's URL of this app is not usable: {short(error)}") from None
    connection.transport_options = {**(connection.transport_options or {}), **_again(connection)}  # of connecting
    return ProducerPool(connection.Pool(_PRODUCERS_MAX), limit=_PRODUCERS_MAX, Producer=app.amqp.Producer)


def _carry(signature: Any, headers: Mapping[str, str]) -> None:
    """Let each message of a canvas carry these headers, also what a worker sends later; the user's own stand."""
    for leaf in leaves(signature) if headers else ():
        own = leaf["options"].get("headers") or {}
        if isinstance(own, Mapping):
            leaf["options"]["headers"] = {**headers, **own}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from: kombu and Celery wrap what a transport says."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _time_limit(error: BaseException | None) -> SoftTimeLimitExceeded | None:
    """The soft time limit of the task that publishes, wherever it has struck: it is about no entry."""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_about_the_entry(error: BaseException) -> bool:
    """A refusal that no other entry would get: a queue's name that is taken by something else, or not allowed."""
    code, text = getattr(error, "reply_code", None), str(error)
    absent = code == _NOT_FOUND and ("no exchange" in text or "no queue" in text)  # else its node is down
    return absent or code in _ABOUT_THE_ENTRY or "WRONGTYPE " in text


def _again(connection: Connection) -> dict[str, Any]:
    """Return how a connection and publishing with it are tried again: once, or at each server of `broker_url`."""
    return {**_ONCE_AGAIN, "max_retries": count_retries(connection)}


def _forget(producer: Any, connection: Any) -> None:
    """Close a connection that has failed, whatever it was about: the pool opens it again when it is asked for next."""
    with suppress(Exception):
        producer.channel = None
    with suppress(Exception):
        connection.close()


def _is_listened_to(task: str | None) -> bool:
    """Whether somebody is told what was published of a task, or of all: that is said of what the broker has."""
    return any(signal.has_listeners(task) for signal in (signals.after_task_publish, signals.task_sent))
