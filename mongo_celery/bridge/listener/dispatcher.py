"""
Publishing runs: one message a run, with the commit task as the link behind it.

A message is a hint. If publishing fails the outcome is unknown, and the run is dispatched again later;
the claim in MongoDB drops whatever arrives twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery import Celery
from kombu import Connection

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.signing import Sealing
from mongo_celery.bridge.worker.envelope import Carrier, Run, seal
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.connection import bounded_connection, demand_answer
from mongo_celery.broker.queues import declare_queues

logger = logging.getLogger("mongo_celery.listener")

_BROKER_SECONDS = 5
_SECRET_BYTES = 8
"""Of a task id: remote control revokes by ids, so that they must not be guessed."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """
    A run on its way to its partition's queue.

    Attributes:
        task_name: the handler's task.
        attempt: how often this head was dispatched before.
        label: what logs and monitors show instead of the arguments; no document contents.
    """

    run: Run
    task_name: str
    attempt: int
    label: str


class Dispatcher:
    """
    Publishes for one bridge. Used by one thread.

    Args:
        app: the Celery app.
        options: of the bridge.
        sealing: gives what messages are signed with now.
    """

    def __init__(self, app: Celery, options: BridgeOptions, sealing: Callable[[], Sealing]) -> None:
        self._app = app
        self._options = options
        self._sealing = sealing
        self._key: bytes | None = None
        self._connection: Connection | None = None
        self._producer: Any = None
        self._origin = f"listener.{options.name}.{os.getpid()}@{socket.gethostname()}"
        declare_queues(app, options.queue_names)

    def publish(self, dispatches: Sequence[Dispatch]) -> None:
        """
        Publish in one batch where the transport can. Ends within a bound, also when the broker is frozen.

        Raises:
            Exception: of the broker's client; none, some or all of the messages may have been published.
        """
        try:
            producer = self._ready_producer()
            with _batch(producer):
                for dispatch in dispatches:
                    self._publish(producer, dispatch)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection; the next publish makes a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()

    def _ready_producer(self) -> Any:
        """On a new connection the queues are declared: RabbitMQ drops a message to an unknown queue silently."""
        if self._producer is None:
            self._connection = bounded_connection(self._app, _BROKER_SECONDS)
            demand_answer(self._connection, _BROKER_SECONDS)
            channel = self._connection.default_channel
            for name in self._options.queue_names:
                self._app.amqp.queues[name].bind(channel).declare()
            self._producer = self._app.amqp.Producer(channel, auto_declare=False)
        return self._producer

    def _sealed_with(self) -> Sealing:
        sealing = self._sealing()
        if self._key is not None and self._key != sealing.key:
            logger.info("signing with a new key", extra={"event": "key_exchanged"})
        self._key = sealing.key
        return sealing

    def _publish(self, producer: Any, dispatch: Dispatch) -> None:
        run = dispatch.run
        queue = self._options.queue_of(run.index)
        task_id = f"{run.bridge}.{run.subscription}.{run.index}.{run.first}"
        if dispatch.attempt:
            task_id += f".d{dispatch.attempt}"
        task_id += f".{secrets.token_hex(_SECRET_BYTES)}"
        sealing = self._sealed_with()
        commit_id = f"{task_id}.commit"
        commit = replace(run, changes=(), carrier=Carrier.of(commit_id, None))
        link = {
            "task": COMMIT_TASK,
            "args": [seal("commit", commit, sealing.key, sealing.installation)],
            "kwargs": {},
            "options": {"queue": queue, "task_id": commit_id, "argsrepr": f"('{run.partition_id}',)"},
            "subtask_type": None,
            "immutable": True,
        }
        run = replace(run, carrier=Carrier.of(task_id, [link]))
        message = self._app.amqp.as_task_v2(
            task_id,
            dispatch.task_name,
            (seal("run", run, sealing.key, sealing.installation),),
            {},
            chain=[link],
            root_id=task_id,
            ignore_result=True,
            argsrepr=dispatch.label,
            kwargsrepr="{}",
            origin=self._origin,
            create_sent_event=self._app.conf.task_send_sent_event,
        )
        self._app.amqp.send_task_message(
            producer,
            dispatch.task_name,
            message,
            queue=self._app.amqp.queues[queue],
            serializer="json",
            declare=[],
            retry=False,
        )


@contextlib.contextmanager
def _batch(producer: Any) -> Iterator[None]:
    """One round trip for many messages where kombu (5.7 and later) and the transport can."""
    if hasattr(producer, "batch"):
        with producer.batch():
            yield
    else:
        yield
