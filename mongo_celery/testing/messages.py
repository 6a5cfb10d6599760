"""
The messages of a runner: a broker in memory replaces the app's, and a worker runs one message.

The broker is kombu's memory transport with its own queues, separate from `memory://`. Messages stay until the runner
takes them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any
from unittest.mock import patch

from celery import Celery
from celery._state import _tls  # type: ignore[attr-defined] # Celery has no other way to take it back
from kombu import Connection
from kombu.serialization import prepare_accept_content
from kombu.transport import memory, virtual
from kombu.utils.imports import symbol_by_name

HOSTNAME = f"bridge_runner@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A task and its arguments, in the form in which workers get them."""

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def fits(self, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> bool:
        """Return True if the task has this name and these arguments. None means any."""
        has_args = args is None or tuple(args) == self.args
        return self.name == name and has_args and (kwargs is None or dict(kwargs) == self.kwargs)

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class SentTask(TaskCall):
    """
    A sent message that no worker has taken yet.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            send_receipt.delay(4)
            task: SentTask = runner.sent("shop.send_receipt")[0]
        assert task.args == (4,)

    Attributes:
        name: name of the task.
        args: the arguments, as a worker would pass them.
        kwargs: the keyword arguments, as a worker would pass them.
        id: id of the task. A task of an outbox has the same id in each delivery.
        queue: name of its queue.
    """

    queue: str = ""

    @classmethod
    def of(cls, queue: str, message: Any) -> SentTask:
        """Return the task of a Celery message."""
        headers = message.headers
        args, kwargs, _ = message.payload
        return cls(headers["task"], tuple(args), dict(kwargs), headers["id"], queue)


class RunnerChannel(memory.Channel):
    """A channel whose queues all runners of this process share. One runner is active at a time."""

    queues: dict[str, Any] = {}  # noqa: RUF012 - kombu's own has it so, and so share all channels what lies there

    def close(self) -> None:
        """Keep the queues for other channels."""
        virtual.Channel.close(self)


class RunnerTransport(memory.Transport):
    """kombu's memory transport with these channels."""

    Channel = RunnerChannel
    global_state = virtual.BrokerState()


class MemoryBroker:
    """The broker of a runner's apps. Any thread sends, only the runner's thread takes."""

    def __init__(self) -> None:
        self._connection = _connect()
        self._channel: Any = None

    @contextlib.contextmanager
    def serving(self, apps: Iterable[Celery]) -> Iterator[None]:
        """Make these apps send to this broker in the block, never eagerly."""
        _forget()
        self._channel = self._connection.default_channel
        with contextlib.ExitStack() as stack:
            for app in apps:
                stack.enter_context(_replace_broker(app))
            stack.callback(_forget)
            stack.callback(self._connection.release)
            yield

    def take(self, queue: str) -> Any:
        """Return the next message of a queue in a consumer's form. None if there is none."""
        try:
            return self._channel.basic_get(queue, no_ack=True)
        except Empty:
            return None

    def queues(self) -> list[str]:
        """Return the names of queues with messages, in order."""
        return sorted(name for name, each in list(RunnerChannel.queues.items()) if each.qsize())

    def look(self, queue: str) -> list[Any]:
        """Return the messages of a queue without removing them."""
        found = RunnerChannel.queues.get(queue)
        bodies = list(found.queue) if found is not None else []
        return [self._channel.message_to_python(body) for body in bodies]


def _connect(*_args: Any, **_options: Any) -> Connection:
    return Connection(transport=RunnerTransport)


_REPLACED: Any = dict.fromkeys(("connection_for_write", "connection_for_read", "connection"), _connect)


def _forget() -> None:
    RunnerChannel.queues.clear()
    RunnerTransport.global_state.clear()


@contextlib.contextmanager
def _replace_broker(app: Celery) -> Iterator[None]:
    """Give an app our connections for the block, then restore its own pools."""
    eager, app.conf.task_always_eager = app.conf.task_always_eager, False
    try:  # Celery has no other way to replace the broker temporarily
        with (
            patch.multiple(app, _pool=None, **_REPLACED),
            patch.object(app.amqp, "_producer_pool", None),
        ):
            yield
    finally:
        app.conf.task_always_eager = eager


def run_message(app: Celery, message: Any) -> None:
    """
    Run a message's task to its end, and send its links. Celery handles the task's errors.

    The app is the current one meanwhile, like in its worker, so that a `shared_task` can be sent. Time limits have no
    effect, because there is no pool.

    Raises:
        BaseException: an error that ends a process.
        ContentDisallowed: `accept_content` does not include its serializer.
        LookupError: the app does not have the task.
    """
    name = message.headers["task"]
    task = app.tasks.get(name)
    if task is None:
        raise LookupError(
            f"The message names the task {name}, which the app {app.main} does not know. Import the module that "
            "defines it."
        )
    message.accept = prepare_accept_content(app.conf.accept_content)
    made = symbol_by_name(task.Request)
    with _current(app):
        made(message, app=app, task=task, hostname=HOSTNAME, connection_errors=()).execute()


@contextlib.contextmanager
def _current(app: Celery) -> Iterator[None]:
    """Make an app the current one of this thread for the block."""
    before = _tls.current_app
    app.set_current()
    try:
        yield
    finally:
        _tls.current_app = before
