"""
The publisher of an app: it publishes entries over its own bounded connections, which are new after a fork.

Entries go one by one, or several with one command. In both cases Celery makes each message. If an error occurs before
the command, the broker has nothing, and each entry goes alone. If the command itself fails, it is unknown which
messages the broker accepted, so all are sent again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery, signals
from celery.exceptions import BackendError, SoftTimeLimitExceeded
from kombu import Connection, Exchange
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.pools import ProducerPool

from mongo_celery.broker.connection import bounded_connection, count_retries, reach_broker
from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction.scopes import outside_transactions
from mongo_celery.outbox.canvas import ELSEWHERE, leaves
from mongo_celery.outbox.capture import IS_MESSAGE
from mongo_celery.outbox.entries import Entry, bind_event, decode_canvas
from mongo_celery.tracing import sending_for, trace_headers

_BROKER_SECONDS = 5
_PRODUCERS_MAX = 16
_ONCE_AGAIN = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""Repeat once, because the broker may have closed an idle connection."""

_ABOUT_THE_ENTRY = {403, 406}
"""AMQP's codes for an exchange or queue that is not allowed, or of another kind."""

_NOT_FOUND = 404
_FRAME_SYNTAX = 502
"""AMQP cannot encode it, for example a set in the headers."""

_LOST = (OperationalError, OSError, BackendError)

_COMMANDS_MAX = 100_000
"""More messages than ever occur: kombu sends nothing before `Publisher.together` requests it."""

_ALONE_SECONDS = 600.0
"""Seconds of sending one by one after a refused command: a broker without memory would get more and more copies."""


class BrokerUnavailableError(Exception):
    """
    The broker failed, or the result backend that Celery queries before publishing. The entry waits.

    Attributes:
        answers: True if the broker answers, so that other documents may be published.
    """

    def __init__(self, cause: BaseException | str, *, answers: bool = False) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.answers = answers


class UnknownTaskError(Exception):
    """
    A task is unknown to this process, and a worker would drop the message. The entry waits for a process
    that knows it.
    """


class BatchAbandonedError(Exception):
    """Messages were not sent together. Publish each alone, although the broker may have some."""


class Publisher:
    """
    Publishes the entries of one app in one process. Safe for threads.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._producers = PerProcess(lambda: _connect(app))
        self._batch = threading.local()
        self._alone_until = 0.0

    def publish(self, entry: Entry, document_id: object = NO_ID, exchange: str = "", /) -> None:
        """
        Publish one entry. Afterwards the broker has it, as far as brokers promise.

        Args:
            entry: the entry. The caller has verified its signature.
            document_id: its document's `_id`, for an entry that is bound late.
            exchange: the topic exchange of an event.

        Raises:
            BrokerUnavailableError: the outcome is unknown. Publish it again later.
            UnknownTaskError: the task or a later step is not registered here. Nothing was sent.
            BatchAbandonedError: inside `together`, it cannot go with others.
            SoftTimeLimitExceeded: the publishing task has reached its time limit. The outcome is unknown.
            Exception: the entry itself cannot be published.
        """
        is_task = entry.kind == "task"
        if entry.bind and not is_task:
            entry = bind_event(entry, document_id)
        name = entry.name if is_task else exchange  # there may be many routing keys
        attributes = {
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": name,
            "messaging.message.id": entry.id,
        }
        with sending_for(entry.trace, name, lambda: attributes, is_task=is_task):
            self._publish(entry, self._decode(entry, document_id) if is_task else None, exchange)

    @contextmanager
    def together(self) -> Iterator[Callable[[], None]]:
        """
        In the block, collect this thread's messages. The yielded function sends them in order, by one command each
        time.

        Sending raises the same errors, and SoftTimeLimitExceeded. Afterwards it is unknown which messages the broker
        accepted, and nothing more can be sent in the block.

        Raises:
            BatchAbandonedError: a batch is impossible now. Publish each entry alone.
            BrokerUnavailableError: the broker does not answer.
        """
        if _has_listeners(None) or time.monotonic() < self._alone_until:
            raise BatchAbandonedError
        with self._producer() as producer:
            if not _can_collect(producer):
                raise BatchAbandonedError
            self._batch.producer = producer
            try:
                with producer.batch(max_size=_COMMANDS_MAX) as batch:
                    yield lambda: self._send(batch, producer)
            finally:
                self._batch.producer = None

    def _send(self, batch: Any, producer: Any) -> None:
        connection = producer.connection
        try:
            batch.flush()
        except Exception as error:
            verdict = _find_time_limit(error) or self._judge(error, connection)
            is_refusal = any(isinstance(each, connection.channel_errors) for each in _causes(error))
            _forget(producer, connection)  # it may be in the middle of a command
            if isinstance(verdict, SoftTimeLimitExceeded):
                raise verdict from None
            if is_refusal or verdict is error:  # not after a lost connection: an idle one costs nothing
                self._alone_until = time.monotonic() + _ALONE_SECONDS
            if isinstance(verdict, BrokerUnavailableError) and not verdict.answers:
                raise verdict from error
            raise BatchAbandonedError from error

    def _publish(self, entry: Entry, signature: Any, exchange: str) -> None:
        with self._producer() as producer:
            connection, is_collected = producer.connection, producer is self._collecting
            retries = {"retry": not is_collected, "retry_policy": _retry_policy(connection)}
            try:
                if signature is None:
                    topic = Exchange(exchange, type="topic", durable=True)
                    producer.publish(
                        entry.payload,
                        exchange=topic,
                        routing_key=entry.name,
                        declare=[topic],
                        content_type=entry.content_type,
                        content_encoding=entry.content_encoding,
                        message_id=entry.id,
                        headers=trace_headers(),
                        delivery_mode="persistent",
                        **retries,
                    )
                elif is_collected and _has_listeners(signature.task):
                    raise BatchAbandonedError
                else:
                    _add_headers(signature, trace_headers())
                    with outside_transactions(), _hidden_task(self.app):  # a transaction's body may be delivering
                        self._send_task(signature, producer=producer, **retries)
            except Exception as error:
                if is_collected and _find_time_limit(error) is None:
                    raise BatchAbandonedError from error
                verdict = _find_time_limit(error) or self._judge(error, connection)
                if verdict is error:
                    raise
                _forget(producer, connection)  # it may be in the middle of a message
                raise verdict from error

    def _send_task(self, signature: Any, **options: Any) -> None:
        if IS_MESSAGE not in signature:
            signature.apply_async(**options)
            return
        name = signature.task
        task = self.app.tasks[name] if signature[IS_MESSAGE] else None
        options = {**signature.options, **options}  # the user's `retry` may be among them
        self.app.send_task(name, signature.args, signature.kwargs, task_type=task, **options)

    def _decode(self, entry: Entry, document_id: object) -> Any:
        try:
            signature = decode_canvas(self.app, entry, document_id)
        except Exception as error:
            limit = _find_time_limit(error)  # kombu converts any error into one of decoding
            if limit is not None:
                raise limit from None
            raise
        signature["args"] = tuple(signature["args"])  # monitors show them as for `delay`
        for leaf in leaves(signature):
            if leaf["task"] not in self.app.tasks and leaf["task"] not in signature.get(ELSEWHERE, ()):
                raise UnknownTaskError(f"Task {leaf['task']!r} is not registered in this process. Import its module.")
        return signature

    @property
    def _collecting(self) -> Any:
        """The producer that collects this thread's messages. None outside `together`."""
        return getattr(self._batch, "producer", None)

    @contextmanager
    def _producer(self) -> Iterator[Any]:
        if self._collecting is not None:
            yield self._collecting
            return
        try:
            producer = self._producers.get().acquire(block=True, timeout=_BROKER_SECONDS)
        except (OperationalError, OSError) as error:
            raise BrokerUnavailableError(error) from error
        except (LimitExceeded, RuntimeError) as error:  # other threads use all of them, or one has closed them
            raise BrokerUnavailableError(error, answers=True) from error
        with producer:
            yield producer

    def _judge(self, error: Exception, connection: Any) -> Exception:
        """Return the error itself if it is the entry's own fault, otherwise a BrokerUnavailableError."""
        causes = list(_causes(error))
        if any(getattr(each, "reply_code", None) == _FRAME_SYNTAX for each in causes):
            return error
        if any(isinstance(each, connection.channel_errors) for each in causes):
            answers = self.answers()
            if answers and any(_is_about_the_entry(each) for each in causes):
                return error
            return BrokerUnavailableError(error, answers=answers)
        # kombu's Redis transport counts any KeyError as a lost connection. A damaged entry can also raise one.
        lost = tuple(each for each in connection.connection_errors if each is not KeyError)
        # The result backend, where Celery listens for any task's result.
        backend_lost = getattr(self.app.backend, "connection_errors", ())
        backend_refused = getattr(self.app.backend, "channel_errors", ())
        if not any(isinstance(each, (*lost, *backend_lost, *backend_refused, *_LOST)) for each in causes):
            return error
        if any(isinstance(each, (*backend_refused, RuntimeError, BackendError)) for each in causes):
            return BrokerUnavailableError(error, answers=True)
        silent = any(
            type(each).__name__ == "TimeoutError" for each in causes
        )  # Python's, and redis-py's with the same name
        return BrokerUnavailableError(error, answers=not silent and self.answers())

    def answers(self, seconds: int = _BROKER_SECONDS) -> bool:
        """Return True if the broker accepts a new connection within these seconds."""
        try:
            reach_broker(self.app, seconds)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - whatever a transport raises
            return False
        return True

    def close(self) -> None:
        """Close the connections of this process. The next publish makes new ones."""
        pool = self._producers.take()
        if pool is not None:
            pool.force_close_all()
            pool.connections.force_close_all()


def _connect(app: Celery) -> Any:
    """Return an app's producers in this process."""
    try:
        connection = bounded_connection(app, _BROKER_SECONDS, confirm=True)
    except (ConfigurationError, KeyError, ImportError, ValueError) as error:
        raise BrokerUnavailableError(f"broker_url of this app cannot be used: {short(error)}") from None
    connection.transport_options = {**(connection.transport_options or {}), **_retry_policy(connection)}
    return ProducerPool(connection.Pool(_PRODUCERS_MAX), limit=_PRODUCERS_MAX, Producer=app.amqp.Producer)


def _can_collect(producer: Any) -> bool:
    """Return True if kombu (5.7 and later) and the transport can send many messages with one command."""
    try:
        producer.channel  # noqa: B018 - connects: what a transport can do depends on its options, too
    except Exception as error:  # noqa: BLE001 - whatever a transport raises, also for a message that goes by itself
        limit = _find_time_limit(error)
        if limit is not None:
            raise limit from None
        return False
    return bool(getattr(producer, "supports_batch_publish", False))


def _add_headers(signature: Any, headers: Mapping[str, str]) -> None:
    """
    Add headers to each message of a canvas, including those that a worker sends later. The user's take
    precedence.
    """
    for leaf in leaves(signature) if headers else ():
        own = leaf["options"].get("headers") or {}
        if isinstance(own, Mapping):
            leaf["options"]["headers"] = {**headers, **own}


@contextmanager
def _hidden_task(app: Celery) -> Iterator[None]:
    """
    Hide the running task, such as the sweep, from Celery.

    Otherwise it would become the parent of each task that has none, and pass on its priority.
    """
    hidden: list[Any] = []
    try:
        while (task := app.current_worker_task) is not None:
            hidden.append(task.request)
            task.request.called_directly = True  # Celery takes only a worker's own task for a parent
        yield
    finally:
        for request in hidden:
            request.called_directly = False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return an error and its causes: kombu and Celery wrap a transport's errors."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _find_time_limit(error: BaseException | None) -> SoftTimeLimitExceeded | None:
    """Return the publishing task's soft time limit, if it is among the causes. It is no failure of an entry."""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_about_the_entry(error: BaseException) -> bool:
    """Return True if the broker refuses only this entry, because its queue's name is taken or not allowed."""
    code, text = getattr(error, "reply_code", None), str(error)
    absent = code == _NOT_FOUND and ("no exchange" in text or "no queue" in text)  # otherwise its node is down
    return absent or code in _ABOUT_THE_ENTRY or "WRONGTYPE " in text


def _retry_policy(connection: Connection) -> dict[str, Any]:
    """Return the retry policy of connecting and publishing: once, or once per server of `broker_url`."""
    return {**_ONCE_AGAIN, "max_retries": count_retries(connection)}


def _forget(producer: Any, connection: Any) -> None:
    """Close a failed connection. The pool opens it again at its next use."""
    with suppress(Exception):
        producer.channel = None
    with suppress(Exception):
        connection.close()


def _has_listeners(task: str | None) -> bool:
    """Return True if something is notified of published messages, so that the broker must have them."""
    return any(signal.has_listeners(task) for signal in (signals.after_task_publish, signals.task_sent))
