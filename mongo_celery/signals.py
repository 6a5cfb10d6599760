"""
Signals for people: a bridge needs you, or has a new leader.

They are signals of Celery. Connect a function in a module that listeners and workers import, such as that of the
handlers, and a team without Prometheus is paged::

    from mongo_celery.signals import change_halted

    @change_halted.connect
    def page(sender, handler, key, error, command, **_):
        pager.send(f"{sender}/{handler} is halted at {key}: {error}. Run: {command}")

`sender` is the name of the bridge. A receiver runs in the process in which the event happens, in a separate thread, so
it may be slow or fail without any effect on changes. An error is logged (`signal_receiver_failed`). If 1000 signals
wait for a slow receiver, further ones are dropped and logged (`signal_dropped`), as are those that wait when the
process ends. Celery keeps a weak reference to a receiver, unless you connect it with `weak=False`.

Each event is signalled at most once. If the process dies between the write of the state and the signal, there is none.
So also look at `changes status`, which shows the state itself. No argument contains a document, except for text that a
handler's error quotes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from celery.utils.dispatch import Signal

from mongo_celery.exits import close_at_exit
from mongo_celery.forking import PerProcess

logger = logging.getLogger("mongo_celery.signals")

__all__ = ["change_dead_lettered", "change_halted", "handler_blocked", "history_lost", "leader_changed"]


def _make_signal(name: str, *arguments: str) -> Signal:
    made: Any = Signal  # its type hints lack the name
    signal: Signal = made(name=name, providing_args=set(arguments))
    return signal


change_halted = _make_signal("change_halted", "handler", "partition", "key", "error", "command")
"""
A worker has halted a partition at a change that failed. Later changes of the partition wait.

Arguments: `handler`, `partition` (number), `key` (namespace, operation and `_id` of the change), `error`, `command`
(retries the change).
"""

change_dead_lettered = _make_signal(
    "change_dead_lettered", "handler", "partition", "key", "reason", "error", "dead_letter", "command"
)
"""
A worker has moved a change to the dead letters, or the replay of a dead letter has failed in it.

The commands `skip` and `discard` send nothing, because a person types them. The policy `discard` keeps nothing, and
sends nothing.

Arguments: `handler`, `partition` (number), `key`, `reason` (`failed`, `skipped` by the failure policy, `parked`,
`parked_behind` or `replay_failed`), `error`, `dead_letter` (its id), `command` (shows it).
"""

handler_blocked = _make_signal(
    "handler_blocked", "handler", "partition", "state", "seconds", "partitions", "error", "command"
)
"""
The leading listener has seen a partition blocked for five minutes. If it is paused or retrying, for an hour.

It is sent once for a handler and state, and again after the handler has left the state. A new leader counts from its
own beginning.

Arguments: `handler`, `partition` (the one that is blocked longest), `state` (`halted`, `paused`, `waiting`, `retrying`
or `rejected` by the broker), `seconds`, `partitions` (number of partitions in this state for that long), `error` (None
without one), `command` (shows them).
"""

history_lost = _make_signal("history_lost", "handler", "reason", "continues_at", "command")
"""
The leading listener has found that the oplog no longer reaches the position of a handler: changes are lost.

Arguments: `handler`, `reason`, `continues_at` (a datetime if an option has moved the handler, None if it is stopped
until you decide), `command` (shows the possible decisions).
"""

leader_changed = _make_signal("leader_changed", "term", "host", "pid", "previous_host", "previous_pid")
"""
This listener has begun to lead, after a deploy, a failure or its first start.

Arguments: `term`, `host` and `pid` of this process, `previous_host` and `previous_pid` of the last leader (None for the
first).
"""

WAITING_MAX = 1000
"""Signals of one process that wait for slow receivers."""

_ENDING_SECONDS = 3.0


class SignalQueue:
    """The signals of one process that wait, and the thread that sends them while there are any."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[Signal, str, Mapping[str, Any]]]()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        close_at_exit(self)

    def add(self, signal: Signal, bridge: str, arguments: Mapping[str, Any]) -> None:
        """Let the thread send a signal. If too many wait, or the process ends, drop and log it."""
        with self._lock:
            has_room = len(self._waiting) < WAITING_MAX
            if has_room:
                self._waiting.append((signal, bridge, arguments))
                has_room = self._thread is not None or self._start()
        if not has_room:
            _log_drop(signal, bridge, arguments)

    def close_soon(self) -> None:
        """Do nothing: the thread ends after the last signal."""

    def close(self) -> None:
        """Wait a short time for the last signal to be sent. Drop and log those that still wait."""
        thread = self._thread
        if thread is not None:
            thread.join(_ENDING_SECONDS)
        with self._lock:
            dropped = [*self._waiting]
            self._waiting.clear()
        for each in dropped:
            _log_drop(*each)

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="mongo_celery-signals", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can start while the interpreter ends
            self._waiting.clear()
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                signal, bridge, arguments = self._waiting.popleft()
            try:
                for receiver, answer in signal.send(bridge, **arguments):
                    if isinstance(answer, Exception):
                        _log_failure(signal, receiver, answer)
            except BaseException as error:  # noqa: BLE001 - Celery passes SystemExit, which would end this thread
                _log_failure(signal, "a receiver", error)


def send_signal(signal: Signal, bridge: str, **arguments: Any) -> None:
    """Send a signal soon, in another thread. It never raises or waits."""
    if signal.receivers:
        _QUEUE.get().add(signal, bridge, arguments)


def _name(signal: Signal) -> str:
    return str(getattr(signal, "name", signal))


def _log_drop(signal: Signal, bridge: str, arguments: Mapping[str, Any]) -> None:
    logger.error(
        "the signal %s of bridge %s was dropped, because a receiver is slow or the process ends: %s",
        _name(signal),
        bridge,
        dict(arguments),
        extra={"event": "signal_dropped", "signal": _name(signal)},
    )


def _log_failure(signal: Signal, receiver: object, error: BaseException) -> None:
    from mongo_celery.mongo.redaction import short

    logger.error(
        "a receiver of the signal %s has failed, so its notification may be missing. Correct %r: %s: %s",
        _name(signal),
        receiver,
        type(error).__name__,
        short(error),
        extra={"event": "signal_receiver_failed", "signal": _name(signal)},
    )


_QUEUE = PerProcess(SignalQueue)
