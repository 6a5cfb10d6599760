"""
Publishing runs: one message a run, with the commit task as the link behind it unless its handler commits inline.

A message is a hint. If publishing fails the outcome is unknown, and the run is dispatched again later.
The claim in MongoDB drops whatever arrives twice.

A broker that is away takes nothing, a broker that is there may reject one message: too large, or not to be
serialised. What is too large for a message by `max_message_bytes` is stored, and travels by reference. For a broker
that takes less, a change that is larger than `run_bytes` never travels with others. A batch that fails on two
connections is tried run by run, the smallest first, on connections that work. A run that fails on two of them while
the broker takes a third is rejected (Redis ends the connection on which a message was too large). At the first
connection that cannot be made all attempts end, so an absence costs no more than before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from kombu import Connection

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.signing import Sealing
from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.connection import bounded_connection, declare_queues, demand_answer
from mongo_celery.tracing import is_heard, sending, trace_headers

logger = logging.getLogger("mongo_celery.listener")

_BROKER_SECONDS = 5
_ATTEMPTS = 2  # the first connection may have been cut while it was idle, or a broker started again
_REJECTIONS_AT_FIRST = 3
"""So many rejections before anything was taken mean that the broker takes nothing, as when its memory is full."""
_SECRET_BYTES = 8
"""Of a task id: remote control revokes by ids, so that they must not be guessed."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """
    A run on its way to its partition's queue.

    Attributes:
        task_name: the handler's task.
        attempt: how often this head was dispatched before.
        label: what logs and monitors show instead of the arguments. No document contents.
        queue: of its partition.
        commits: whether the commit task follows. Else the execution writes what there is to be written.
        size: bytes of the changes that travel with it. The message is larger by its encoding.
    """

    run: Run
    task_name: str
    attempt: int
    label: str
    queue: str
    commits: bool = True
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(len, self.run.changes)))


@dataclass(slots=True)
class Published:
    """
    The results of some dispatches. Those in neither list have an unknown result.

    Attributes:
        sent: the broker has taken them.
        rejected: the broker takes others, but not these.
        failure: why the rest has to wait: the broker is away, or takes nothing.
    """

    sent: list[Dispatch] = field(default_factory=list)
    rejected: list[tuple[Dispatch, Exception]] = field(default_factory=list)
    failure: Exception | None = None


class Dispatcher:
    """
    Publishes for one bridge. Used by one thread.

    Args:
        app: the Celery app.
        options: of the bridge.
        sealing: gives what messages are signed with now.
        queues: that it publishes to.
    """

    def __init__(
        self, app: Celery, options: BridgeOptions, sealing: Callable[[], Sealing], queues: Sequence[str]
    ) -> None:
        self._app = app
        self._options = options
        self._queues = queues
        self._find_sealing = sealing
        self._sealing = Sealing(b"", "")
        self._is_traced = True
        self._key: bytes | None = None
        self._connection: Connection | None = None
        self._producer: Any = None
        self._is_amqp = False
        self._careful: Connection | None = None
        self._announces = bool(app.conf.task_send_sent_event)  # Celery's settings are slow to read
        self._origin = f"listener.{options.name}.{os.getpid()}@{socket.gethostname()}"
        declare_queues(app, queues)

    def publish(self, together: Sequence[Dispatch], alone: Sequence[Dispatch] = ()) -> Published:
        """
        Publish, most of it in one batch where the transport can. Ends within a bound, also when the broker is frozen.

        Args:
            together: what may share a batch.
            alone: what the broker has rejected before, and what may therefore harm only itself.
        """
        done = Published()
        usual: list[Dispatch] = []
        large: list[Dispatch] = []
        for dispatch in together:
            (large if dispatch.size > self._options.run_bytes else usual).append(dispatch)
        try:
            self._sealing, self._is_traced = self._read_sealing(), is_heard()
            self._publish_together(usual, done)
            for dispatch in large:
                self._publish_alone(dispatch, done)
            for dispatch in alone:
                self._publish_alone(dispatch, done, attempts=1)
        except Exception as error:  # noqa: BLE001 - whatever the broker's client raises: the outcome is unknown
            self.close()
            done.failure = error
        if self._careful is not None:
            self._release_careful()
        return done

    def close(self) -> None:
        """Drop the connection. The next publish makes a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()

    def _publish_together(self, dispatches: Sequence[Dispatch], done: Published) -> None:
        if not dispatches:
            return
        for _ in range(_ATTEMPTS):
            producer = self._producer or self._make_producer()
            # One round trip for many messages where kombu (5.7 and later) and the transport can.
            batch = producer.batch() if hasattr(producer, "batch") else contextlib.nullcontext()
            try:
                with batch:
                    for dispatch in dispatches:
                        self._publish(producer, dispatch)
                if self._is_amqp:
                    self._demand_verdict()
            except Exception:  # noqa: BLE001 - of the broker's client; what follows finds out what it means
                self.close()
                continue
            done.sent += dispatches
            return
        for dispatch in sorted(dispatches, key=lambda each: each.size):
            self._publish_alone(dispatch, done)
            if len(done.rejected) >= _REJECTIONS_AT_FIRST and not done.sent:
                raise done.rejected[-1][1]

    def _publish_alone(self, dispatch: Dispatch, done: Published, attempts: int = _ATTEMPTS) -> None:
        """Publish one message on a connection that is known to work. Raises when there is none."""
        rejections: list[Exception] = []
        while len(rejections) < attempts:
            producer = self._careful_producer()
            try:
                self._publish(producer, dispatch)
            except Exception as error:  # noqa: BLE001 - of the broker's client, or of what makes the message
                rejections.append(error)
                self._release_careful()
                continue
            done.sent.append(dispatch)
            return
        self._careful_producer()  # raises where the broker is away: then nothing was rejected
        done.rejected.append((dispatch, rejections[-1]))

    def _make_producer(self) -> Any:
        """On a new connection the queues are declared: RabbitMQ drops a message to an unknown queue silently."""
        self._connection = bounded_connection(self._app, _BROKER_SECONDS, as_text=True)
        demand_answer(self._connection, _BROKER_SECONDS)
        self._is_amqp = self._connection.transport.driver_type == "amqp"
        channel = self._connection.default_channel
        for name in self._queues:
            self._app.amqp.queues[name].bind(channel).declare()
        self._producer = self._app.amqp.Producer(channel, auto_declare=False)
        return self._producer

    def _demand_verdict(self) -> None:
        """RabbitMQ answers no publishing: what it rejected, with all behind it, shows at the channel's next call."""
        assert self._connection is not None, "something was published"
        channel: Any = self._connection.default_channel
        channel.queue_declare(self._queues[0], passive=True)

    def _careful_producer(self) -> Any:
        """
        A producer on a connection that is made anew in each call of `publish`, and after each failure.

        RabbitMQ rejects a message by closing its channel some time later, so there it has to confirm each one.
        """
        if self._careful is None:
            if self._producer is None:
                self._make_producer()  # the queues are declared there
            self._careful = bounded_connection(self._app, _BROKER_SECONDS, confirm=True, as_text=True)
            demand_answer(self._careful, _BROKER_SECONDS)
        return self._app.amqp.Producer(self._careful.default_channel, auto_declare=False)

    def _release_careful(self) -> None:
        connection, self._careful = self._careful, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()

    def _read_sealing(self) -> Sealing:
        sealing = self._find_sealing()
        if self._key is not None and self._key != sealing.key:
            logger.info("signing with a new key", extra={"event": "key_exchanged"})
        self._key = sealing.key
        return sealing

    def _publish(self, producer: Any, dispatch: Dispatch) -> None:
        run = dispatch.run
        task_id = f"{run.bridge}.{run.subscription}.{run.index}.{run.first}"
        if dispatch.attempt:
            task_id += f".d{dispatch.attempt}"
        task_id += f".{secrets.token_hex(_SECRET_BYTES)}"
        if not self._is_traced:
            self._send(producer, dispatch, task_id, {})
            return
        with sending(f"{run.bridge}/{run.subscription}", lambda: _span_attributes(dispatch, task_id)):
            self._send(producer, dispatch, task_id, trace_headers())

    def _send(self, producer: Any, dispatch: Dispatch, task_id: str, headers: Mapping[str, str]) -> None:
        """Send the handler's message with the link behind it, if there is one, which carries the same trace."""
        run, sealing, amqp = dispatch.run, self._sealing, self._app.amqp
        links = [_commit_link(run, task_id, dispatch.queue, sealing, headers)] if dispatch.commits else []
        message = amqp.as_task_v2(
            task_id,
            dispatch.task_name,
            (sign_run("run", run, sealing.key, sealing.installation, Carrier.of(task_id, links)),),
            {},
            chain=links or None,
            root_id=task_id,
            ignore_result=True,
            argsrepr=dispatch.label,
            kwargsrepr="{}",
            origin=self._origin,
            create_sent_event=self._announces,
        )
        amqp.send_task_message(
            producer,
            dispatch.task_name,
            message,
            queue=amqp.queues[dispatch.queue],
            serializer="json",
            declare=[],
            retry=False,
            headers=headers,
        )


def _span_attributes(dispatch: Dispatch, task_id: str) -> dict[str, Any]:
    run = dispatch.run
    return {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": dispatch.queue,
        "messaging.destination.partition.id": str(run.index),
        "messaging.message.id": task_id,
        "mongo_celery.first": run.first,
        "mongo_celery.last": run.last,
        "mongo_celery.attempt": dispatch.attempt,
    }


def _commit_link(run: Run, task_id: str, queue: str, sealing: Sealing, headers: Mapping[str, str]) -> dict[str, Any]:
    """The commit task behind a run."""
    commit_id = f"{task_id}.commit"
    commit = Run(run.bridge, run.subscription, run.generation, run.index, run.version, run.first, run.last)
    options = {"queue": queue, "task_id": commit_id, "argsrepr": f"('{run.partition_id}',)"}
    return {
        "task": COMMIT_TASK,
        "args": [sign_run("commit", commit, sealing.key, sealing.installation, Carrier(commit_id))],
        "kwargs": {},
        "options": {**options, "headers": dict(headers)} if headers else options,
        "subtask_type": None,
        "immutable": True,
    }
