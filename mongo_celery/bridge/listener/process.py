"""The listener process: one thread per bridge. It ends on SIGTERM or SIGINT, or when all bridges have failed."""

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

_STOP_SECONDS = 3.0
"""Time limit for all hand-overs of a process. MongoDB's answers take less, and without an answer the leases expire."""

_LEAVING_SECONDS = 0.5
"""Time limit for a listener without a lease. A call to an unavailable server would end much later, without use."""

_SIGNAL_SECONDS = 0.1

Beside = Callable[[Celery, Sequence[Activity]], AbstractContextManager[object]]
"""A context beside a process's listeners that observes them. An error on entry ends the start."""

FAILED_BRIDGE = Pauses(first=30.0, longest=600.0)
"""Pauses for a bridge that failed permanently while others continue. A person must fix it, so there is no hurry."""


class ListenerThreads:
    """
    One thread for each bridge's listener. It starts a failed listener again after a pause.

    Args:
        listeners: the listeners of the bridges.
        pauses: the pauses before the restart of a failed listener.
        beside: runs as long as the listeners.
        ends_with_all: True to end when every bridge has failed: then `ended` is set, and nothing is restarted.
        is_ending: returns True if the process is ending, so that nothing is started any more.
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
        """Return True if no bridge is running, and the last end of each was a failure."""
        with self._lock:
            return len(self._failed) == len(self._listeners)

    def start(self) -> None:
        """Start all threads. Errors of `beside` are raised."""
        self._beside.__enter__()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Step down, and restart no listener. If MongoDB does not answer, abandon the hand-over after some seconds."""
        self._stopping.set()
        for listener in self._listeners:
            listener.stop()
        until = time.monotonic() + _STOP_SECONDS
        for listener, thread in zip(self._listeners, self._threads, strict=True):
            thread.join(max(until - time.monotonic(), 0.0) if listener.has_lease else _LEAVING_SECONDS)
        self._beside.__exit__(None, None, None)

    terminate = stop  # the name in services of a worker

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

    A bridge that fails permanently is logged as critical and started again after a pause, while another bridge of this
    process continues: a failed bridge must not cost the others their lease each time. When every bridge has failed, the
    process ends, and a supervisor may restart it. With one bridge this is its first failure.

    Args:
        app: the Celery app, with its task modules imported. Another import would make Django replace Celery's logging
            by its own.
        names: the bridges' names. None for all.
        on_history_lost: overrides the option of this name.
        take_over: lead once, even if a bridge belongs to another environment or app.
        reason: the reason of the take-over, for the audit record.
        pauses: the pauses before the restart of a failed bridge.
        beside: runs as long as the listeners.

    Returns:
        The exit status: 0 after a signal, 1 if every bridge has failed.

    Raises:
        ConfigurationError: the app has no bridge, a name is unknown, or an option is wrong. Or an error of `beside`.
    """
    app.finalize()
    listeners = [
        Listener(wiring, on_history_lost, take_over=take_over, reason=reason) for wiring in BRIDGES.select(app, names)
    ]
    context = beside(app, [each.activity for each in listeners]) if beside is not None else None
    threads = ListenerThreads(listeners, pauses, beside=context, ends_with_all=True)
    received: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        received.append(number)  # nothing more: it may interrupt a thread that holds the lock of an event or a log

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)
    # A backlog creates tens of thousands of objects, so garbage collection is frequent. Imported objects are most of
    # its work: a fifth of the listener's CPU time. With the default threshold, the backlog itself costs a tenth more.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
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
        "the listener of bridge %s has failed: %s%s%s",
        name,
        without_credentials(str(error)) if known else f"{type(error).__name__}: {short(error)}",
        "" if pause is None else f" (it starts again in {pause:.0f} s)",
        "" if known else Lines(f"\n{traceback_text(error)}"),  # `exc_info` would show the driver's full text
        extra={"event": "listener_failed", "bridge": name},
    )
