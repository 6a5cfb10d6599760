"""
The messages of a runner: a broker in memory in the place of an app's own, and a worker that runs one message.

The broker is kombu's memory transport, with queues of its own: messages that the process has sent by `memory://` are
not among them. They stay until the runner takes them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any

from celery import Celery
from celery._state import _tls  # type: ignore[attr-defined] # Celery has no other way to take it back
from kombu import Connection
from kombu.serialization import prepare_accept_content
from kombu.transport import memory, virtual
from kombu.utils.imports import symbol_by_name

_REPLACED = ("connection_for_write", "connection_for_read", "connection")
HOSTNAME = f"bridge_runner@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class SentTask:
    """
    One message that nobody has taken yet.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            send_receipt.delay(4)
            task: SentTask = runner.sent("shop.send_receipt")[0]
        assert task.args == (4,)

    Attributes:
        name: of the task.
        args: as a worker would give them.
        kwargs: as a worker would give them.
        id: of the task; of an outbox's, the same in each delivery.
        queue: where it lies.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    id: str
    queue: str

    @classmethod
    def of(cls, queue: str, message: Any) -> SentTask:
        """From a message of Celery's."""
        headers = message.headers
        args, kwargs, _ = message.payload
        return cls(headers["task"], tuple(args), dict(kwargs), headers["id"], queue)

    def fits(self, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> bool:
        """Whether it is of this task, with these arguments; None for any."""
        return (
            self.name == name
            and (args is None or tuple(args) == self.args)
            and (kwargs is None or dict(kwargs) == self.kwargs)
        )

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(given)})"


class RunnerChannel(memory.Channel):
    """Its queues are those of all runners of this process, of which one runs at a time."""

    queues: dict[str, Any] = {}  # noqa: RUF012 - kombu's own has it so, and so share all channels what lies there

    def close(self) -> None:
        """Leave the queues to the other channels."""
        virtual.Channel.close(self)


class RunnerTransport(memory.Transport):
    """kombu's transport, with these channels."""

    Channel = RunnerChannel
    global_state = virtual.BrokerState()


class MemoryBroker:
    """What the apps of one runner send to, from any thread; taken by the runner's own thread."""

    def __init__(self) -> None:
        self._connection = _connect()
        self._channel: Any = None

    @contextlib.contextmanager
    def serving(self, apps: Iterable[Celery]) -> Iterator[None]:
        """Inside, these apps send to it, and nothing is sent eagerly."""
        _forget()
        self._channel = self._connection.default_channel
        with contextlib.ExitStack() as stack:
            for app in apps:
                stack.enter_context(_replaced(app))
            stack.callback(_forget)
            stack.callback(self._connection.release)
            yield

    def take(self, queue: str) -> Any:
        """The next message of a queue, as a consumer would be given it; None where there is none."""
        try:
            return self._channel.basic_get(queue, no_ack=True)
        except Empty:
            return None

    def queues(self) -> list[str]:
        """Those with messages, in the order of their names."""
        return sorted(name for name, each in list(RunnerChannel.queues.items()) if each.qsize())

    def look(self, queue: str) -> list[Any]:
        """The messages of a queue, which stay there."""
        found = RunnerChannel.queues.get(queue)
        bodies = list(found.queue) if found is not None else []
        return [self._channel.message_to_python(body) for body in bodies]


def _connect(*_args: Any, **_options: Any) -> Connection:
    return Connection(transport=RunnerTransport)


def _forget() -> None:
    RunnerChannel.queues.clear()
    RunnerTransport.global_state.clear()


@contextlib.contextmanager
def _replaced(app: Celery) -> Iterator[None]:
    """An app whose connections are ours; the pools that it has made are there again afterwards."""
    amqp: Any = app.amqp
    pools = app._pool, amqp._producer_pool  # type: ignore[attr-defined] # noqa: SLF001 - Celery has no other way
    eager = app.conf.task_always_eager
    app._pool = amqp._producer_pool = None  # type: ignore[attr-defined] # noqa: SLF001
    app.conf.task_always_eager = False
    before = {name: app.__dict__[name] for name in _REPLACED if name in app.__dict__}
    app.__dict__.update(dict.fromkeys(_REPLACED, _connect))
    try:
        yield
    finally:
        for name in _REPLACED:
            del app.__dict__[name]
        app.__dict__.update(before)
        app.conf.task_always_eager = eager
        app._pool, amqp._producer_pool = pools  # type: ignore[attr-defined] # noqa: SLF001


def run_message(app: Celery, message: Any) -> None:
    """
    Run a message's task to its end, with its links sent; what the task raises is Celery's to deal with.

    The app is the current one meanwhile, as in its worker, for a `shared_task` that is sent. Not the limits of time:
    there is no pool to enforce them.

    Raises:
        BaseException: what ends a process.
        ContentDisallowed: its serializer is none of `accept_content`.
        LookupError: the app has no such task.
    """
    name = message.headers["task"]
    task = app.tasks.get(name)
    if task is None:
        raise LookupError(
            f"The message names the task {name}, which the app {app.main} has not: import the module that defines it."
        )
    message.accept = prepare_accept_content(app.conf.accept_content)
    made = symbol_by_name(task.Request)
    with _current(app):
        made(message, app=app, task=task, hostname=HOSTNAME, connection_errors=()).execute()


@contextlib.contextmanager
def _current(app: Celery) -> Iterator[None]:
    """Inside, an app is this thread's current one."""
    before = _tls.current_app
    app.set_current()
    try:
        yield
    finally:
        _tls.current_app = before
