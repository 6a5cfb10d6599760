"""
The intake of a worker drops messages in a bridge's queues that Celery cannot handle, before Celery tries.

Some of these messages end Celery, which puts them back and ends again at each start. It logs others one by one with
their whole content. Messages in other queues stay with Celery.

On Redis a message names its own queue, and some are too broken to name one. A worker that consumes only queues of
bridges does not need the name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from kombu.transport.virtual import Channel as VirtualChannel
from kombu.utils.uuid import uuid

from mongo_celery.bridge.state.leases import MALFORMED
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.dropping import Dropper, Repetitions, parse_process
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.late_notes import note_late
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.worker")

_TASK = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_PAYLOADS = (list, tuple, dict)
_REDIS_READ = "BRPOP"
"""Name of the handler that kombu's channel calls when Redis has an answer."""


class IntakeStep(bootsteps.StartStopStep):
    """Puts an intake in front of the message handling of the consumer."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        """Prepare a connection: each has its own channel, and its event loop creates a new handler."""
        intake = Intake(consumer)
        if "create_task_handler" not in vars(consumer):
            create = consumer.create_task_handler
            consumer.create_task_handler = lambda *args, **options: partial(intake.take, create(*args, **options))
        channel = consumer.task_consumer.channel
        handlers: dict[str, Callable[[], object]] = getattr(channel, "handlers", {})
        if _REDIS_READ in handlers:
            note_late(channel, consumer.timer, intake.is_from_bridge)
        if isinstance(channel, VirtualChannel) and intake.default is not None:
            base: Any = channel.Message
            channel.Message = _tolerant(base)
            if _REDIS_READ in handlers:
                handlers[_REDIS_READ] = partial(intake.read, handlers[_REDIS_READ])


class Intake:
    """
    The intake of one consumer.

    Args:
        consumer: Celery's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._repetitions = Repetitions()
        bridges = BRIDGES.of(consumer.app)
        self._bridges = {name: bridge for bridge in bridges for name in bridge.queue_names}
        self._tasks = {COMMIT_TASK} | {handler.task_name for bridge in bridges for handler in bridge.handlers}

    @property
    def default(self) -> Wiring | None:
        """The bridge of a message without a queue name. None unless the worker consumes only queues of bridges."""
        consumed = [self._bridges.get(name) for name in self._consumer.app.amqp.queues.consume_from]
        return consumed[0] if consumed and None not in consumed else None

    def read(self, read: Callable[[], object]) -> object:
        """Read a message from Redis. Drop a message that is not JSON, which has already left the queue."""
        try:
            return read()
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            bridge = self.default
            if bridge is None:
                raise
            bridge.of_process(Dropper).drop(MALFORMED)
            return True

    def take(self, handle: Callable[[Any], object], message: Any) -> None:
        """Hand a message to Celery's handler, or drop it."""
        bridge = self._find_bridge(message)
        if bridge is None:
            handle(message)
        elif not _is_celerys(message):
            bridge.of_process(Dropper).drop(MALFORMED)
            message.reject_log_error(logger, self._consumer.connection_errors)
        elif message.headers["task"] not in self._consumer.strategies:
            self._tell_unknown(bridge, message.headers)
            message.reject_log_error(logger, self._consumer.connection_errors)
        else:
            handle(message)

    def is_from_bridge(self, message: Any) -> bool:
        """Return True if a message of a bridge's queue is for a handler or a commit. The listener can send it again."""
        headers = message.headers
        task = headers.get("task") if isinstance(headers, Mapping) else None
        return isinstance(task, str) and task in self._tasks and self._find_bridge(message) is not None

    def _find_bridge(self, message: Any) -> Wiring | None:
        """Return the bridge whose queue contains a message. None if it may come from another queue."""
        info = message.delivery_info
        key = info.get("routing_key") if isinstance(info, Mapping) else None
        return self._bridges[key] if isinstance(key, str) and key in self._bridges else self.default

    def _tell_unknown(self, bridge: Wiring, headers: Mapping[str, Any]) -> None:
        if count := self._repetitions.add(bridge.name):
            task = headers["task"]
            logger.error(
                "the worker has dropped %s in the queues of bridge %s, because it does not have their task (the last "
                "one: %s, from process %s). The listener sends them again. Deploy the same code to all workers and "
                "listeners. If another app sends them, give each bridge a different name",
                number(count, "message", "messages"),
                bridge.name,
                task if _TASK.fullmatch(task) else "an invalid name",
                parse_process(headers.get("origin")) or "unknown",
                extra={"event": "foreign_task", "bridge": bridge.name},
            )


@cache
def _tolerant(base: Any) -> type[Any]:
    """Return a message class. Its messages are empty if kombu cannot read the broker's data."""

    class TolerantMessage(base):  # type: ignore[misc]
        """A message from a queue of a bridge."""

        errors: list[Any] | None

        def __init__(self, payload: Any, *args: Any, **options: Any) -> None:
            try:
                super().__init__(payload, *args, **options)
                info = self.delivery_info
                is_whole = {type(name) for name in (self.delivery_tag, info["exchange"], info["routing_key"])} == {str}
            except Exception:  # noqa: BLE001 - whatever kombu does with values of anybody
                is_whole = False
            if self.errors or not is_whole:
                self.errors = None
                properties = {"delivery_tag": uuid(), "delivery_info": {"exchange": "", "routing_key": ""}}
                empty = {"headers": {}, "properties": properties}
                super().__init__(empty, *args, **options)

    return TolerantMessage


def _is_celerys(message: Any) -> bool:
    """Return True if a message has the form that listeners send: Celery's second protocol."""
    if not isinstance(message.headers, Mapping) or not isinstance(message.headers.get("task"), str):
        return False
    try:
        return isinstance(message.payload, _PAYLOADS)
    except Exception:  # noqa: BLE001 - whatever a decoder does with bytes of anybody
        return False


def install_intake(app: Celery) -> None:
    """Give an app's workers an intake."""
    app.steps["consumer"].add(IntakeStep)
