"""
A broker in memory, in the place of an app's own: its messages are kombu's, and stay until somebody takes them.

It is kombu's memory transport, with queues of its own: whatever a process has sent by `memory://` is not among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from queue import Empty
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.transport import memory, virtual

_REPLACED = ("connection_for_write", "connection_for_read", "connection")


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
