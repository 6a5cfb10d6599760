"""The listener process: one thread for each bridge, ended together by SIGTERM, SIGINT or when all have failed."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from celery import Celery

from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.listener import Listener
from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.redaction import short, without_credentials
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import traceback_text
from mongo_celery.visible import Lines

logger = logging.getLogger("mongo_celery.listener")

_STOP_SECONDS = 10.0
_SIGNAL_SECONDS = 0.1

Beside = Callable[[Celery, Sequence[Activity]], AbstractContextManager[object]]
"""A context beside the listeners of a process that observes them. An error on entry ends the start."""

FAILED_BRIDGE = Pauses(first=30.0, longest=600.0)
"""For a bridge that has failed permanently while others continue: a person has to fix it, so there is no hurry."""


class ListenerThreads:
    """
    One thread for each bridge's listener. Whichever fails is started again after a pause.

    Args:
        listeners: of its bridges.
        pauses: before a failed one is started again.
        beside: runs as long as they do.
        ends_with_all: set `ended`, and start nothing again, once every bridge has failed.
        is_ending: asked before a start: whether it is too late for that.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        pauses: Pauses,
        *,
        beside: AbstractContextManager[object] | None = None,
        ends_with_all: bool = False,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ended = threading.Event()
        self._listeners = listeners
        self._pauses = pauses
        self._beside = beside if beside is not None else nullcontext()
        self._ends_with_all = ends_with_all
        self._is_ending = is_ending
        self._stopping = threading.Event()
        self._failed: set[Listener] = set()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="mongo_celery-listener", daemon=True)
            for each in listeners
        ]

    @property
    def all_failed(self) -> bool:
        """Return True if no bridge runs, and each one's last end was a failure."""
        with self._lock:
            return len(self._failed) == len(self._listeners)

    def start(self) -> None:
        """Start all threads. Raises what `beside` raises at its start."""
        self._beside.__enter__()
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """Step down and start nothing again. Waits at most so many seconds for each thread."""
        self._stopping.set()
        for listener in self._listeners:
            listener.stop()
        for thread in self._threads:
            thread.join(seconds)
        self._beside.__exit__(None, None, None)

    terminate = stop  # as the services of a worker are called

    def _run(self, listener: Listener) -> None:
        gate = RetryGate(self._pauses)
        while not self._stopping.is_set():
            started = time.monotonic()
            error = _run_listener(listener)
            if error is None:
                return
            with self._lock:
                self._failed.add(listener)
            goes_on = not (self._stopping.is_set() or (self._ends_with_all and self.all_failed))
            pause = gate.note_failure(time.monotonic() - started)
            listener.activity.note_failure(pause)
            _log_failure(listener.activity.bridge, error, pause if goes_on else None)
            if not goes_on:
                self.ended.set()
                return
            if self._stopping.wait(pause) or self._is_ending():
                return
            with self._lock:
                self._failed.discard(listener)


def run_listeners(
    app: Celery,
    names: Sequence[str],
    on_history_lost: str | None = None,
    *,
    take_over: bool = False,
    reason: str | None = None,
    pauses: Pauses = FAILED_BRIDGE,
    beside: Beside | None = None,
) -> int:
    """
    Listen for the named bridges, or all of the app, until a signal ends the process.

    A bridge that fails permanently is logged as critical and started again after a pause, as long as another
    bridge of this process continues: one that fails must not take the lease of the others away each time.
    Once every bridge has failed, the process ends, and a supervisor may restart it. With one bridge that
    is its first failure.

    Args:
        app: the Celery app, with its task modules imported. To import them once more would have Django set up its own
            logging once more, in the place of Celery's.
        names: of bridges. None for all.
        on_history_lost: takes the place of the option of that name.
        take_over: lead once also where a bridge is that of another environment or app.
        reason: why, for the audit record of that.
        pauses: before a failed bridge is started again.
        beside: runs as long as the listeners do.

    Returns:
        The exit status: 0 after a signal, 1 when every bridge has failed.

    Raises:
        ConfigurationError: the app has no bridge, a name is unknown, or an option is wrong. Or what `beside` raises.
    """
    app.finalize()
    listeners = [
        Listener(wiring, on_history_lost, take_over=take_over, reason=reason) for wiring in BRIDGES.named(app, names)
    ]
    context = beside(app, [each.activity for each in listeners]) if beside is not None else None
    threads = ListenerThreads(listeners, pauses, beside=context, ends_with_all=True)
    received: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        received.append(number)  # no more: it may interrupt this thread while it holds the lock of an event or a log

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)
    # A backlog makes objects by the ten thousand, so that there are many garbage collections. What has been imported is
    # most of what they would search: a fifth of the listener's processor time.
    gc.collect()
    gc.freeze()
    threads.start()
    while not received and not threads.ended.wait(_SIGNAL_SECONDS):
        pass
    if received:
        logger.info("%s: stepping down", signal.Signals(received[0]).name, extra={"event": "stepping_down"})
    threads.stop()
    return 1 if threads.all_failed else 0


def _run_listener(listener: Listener) -> BaseException | None:
    try:
        listener.run()
    except BaseException as error:  # noqa: BLE001 - whatever ends a thread unseen would end its bridge unseen
        return error
    return None


def _log_failure(name: str, error: BaseException, pause: float | None) -> None:
    known = isinstance(error, MongoCeleryError)
    logger.critical(
        "bridge %s has failed: %s%s%s",
        name,
        without_credentials(str(error)) if known else f"{type(error).__name__}: {short(error)}",
        "" if pause is None else f" (starting it again in {pause:.0f} s)",
        "" if known else Lines(f"\n{traceback_text(error)}"),  # `exc_info` would show all that the driver says
        extra={"event": "listener_failed", "bridge": name},
    )
