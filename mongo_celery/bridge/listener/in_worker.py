"""
A listener inside a worker, like Celery's embedded beat.

No other process watches this listener. So if it ends without `stop`, the worker logs this as critical, and starts the
listener again after a pause. A worker that is about to end starts nothing.

`worker --listener` embeds a listener as `-B` embeds beat: in its own process with the prefork pool, otherwise in a
thread. It is a worker step, not a consumer step: a consumer restarts with every broker reconnect, and the lease must
not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import click
from billiard.context import Process
from celery import Celery, bootsteps
from celery.platforms import set_process_title

from mongo_celery.bridge.listener.listener import Listener
from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.listener.process import Beside, ListenerThreads, run_listeners
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.listener")

EMBEDDED = Pauses(first=5.0, longest=60.0)
"""
Pauses for an embedded listener. They are shorter than for a failed bridge, because the cause may be an unavailable
server.
"""

_STOP_SECONDS = 5.0
_WATCH_SECONDS = 0.5
_ENDING_STATES = ("closing", "terminating")
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ListenerProcess:
    """
    The listeners of an app in their own process, as the prefork worker embeds beat.

    Args:
        app: the worker's app.
        is_ending: returns True if the worker is shutting down. Then an ended process is not replaced.
        beside: runs in the same process, as long as the listeners.
    """

    def __init__(self, app: Celery, is_ending: Callable[[], bool], beside: Beside | None) -> None:
        self._app = app
        self._beside = beside
        self._is_ending = is_ending
        self._process: Any = None
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._keep_running, name="mongo_celery-listener-watch", daemon=True)

    def start(self) -> None:
        """Start the process, and watch it."""
        self._launch()
        self._watch.start()

    def stop(self) -> None:
        """End the process."""
        self._stopping.set()
        self._watch.join()  # first: then nothing starts another process
        self._process.terminate()
        self._process.join(_STOP_SECONDS)

    terminate = stop

    def _launch(self) -> None:
        """Start the process with signals blocked: the worker's handlers, which it inherits, would swallow them."""
        process = Process(target=_main, args=(self._app, os.getpid(), self._beside), daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._process = process

    def _keep_running(self) -> None:
        gate = RetryGate(EMBEDDED)
        started = time.monotonic()
        while not self._stopping.wait(_WATCH_SECONDS):
            if self._process.is_alive():
                continue
            if self._is_ending():
                return
            pause = gate.note_failure(time.monotonic() - started)
            logger.critical(
                "the embedded listener has ended with exit status %s. The worker starts it again in %.0f s",
                self._process.exitcode,
                pause,
                extra={"event": "listener_failed"},
            )
            if self._stopping.wait(pause) or self._is_ending():
                return
            started = time.monotonic()
            self._relaunch()

    def _relaunch(self) -> None:
        """Start it again. After a failed fork, keep the ended process, so that the start is repeated."""
        ended = self._process
        try:
            self._launch()
        except OSError as error:
            logger.critical(
                "the worker cannot start the embedded listener, and tries again: %s",
                error,
                extra={"event": "listener_failed"},
            )
            return
        ended.join(0)  # it has ended: this frees its resources in the worker


def _main(app: Celery, worker: int, beside: Beside | None) -> None:
    """Listen until the worker ends this process, or the worker itself was killed."""
    for number in (signal.SIGQUIT, *_ENDING_SIGNALS):
        signal.signal(number, signal.SIG_DFL)  # not the worker's inherited handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
    set_process_title("celery", info="listener")
    threading.Thread(target=_watch_worker, args=(worker,), name="mongo_celery-worker-watch", daemon=True).start()
    raise SystemExit(run_listeners(app, [], beside=beside))


def _watch_worker(worker: int) -> None:
    pause = threading.Event()
    while os.getppid() == worker:
        pause.wait(_WATCH_SECONDS)
    logger.warning("the listener stops, because its worker has ended", extra={"event": "worker_gone"})
    os.kill(os.getpid(), signal.SIGTERM)


LISTENER_OPTION = click.Option(
    ("--listener",),
    is_flag=True,
    help="Also run a listener in this worker, as -B runs beat. It is safe on several workers: one listener leads.",
)
"""One object for all apps, like the next one: Celery keeps a set of options by identity."""

HTTP_OPTION = click.Option(
    ("--listener-http",),
    metavar="[HOST:]PORT",
    help="With --listener: serve health probes, metrics and a status page at this address.",
)


Serving = Callable[..., Beside]
"""Makes the server of an address, like `bridge.http.make_http_service`. Errors are `ConfigurationError`."""


class ListenerStep(bootsteps.StartStopStep):
    """Runs the listeners inside a worker with the option `--listener`."""

    label = "Listener"
    conditional = True
    serving: ClassVar[Serving | None] = None

    def __init__(self, parent: Any, listener: bool = False, listener_http: str | None = None, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.enabled = bool(listener)
        if listener_http is not None and not listener:
            raise click.UsageError("--listener-http works only together with --listener. Add --listener.")
        self._http = listener_http

    def create(self, worker: Any) -> Any:
        """Return the service that the worker starts and stops."""
        app, is_ending, beside = worker.app, partial(_is_ending, worker), self._beside()
        if worker.pool_cls.__module__.endswith("prefork"):
            return ListenerProcess(app, is_ending, beside)
        listeners = [Listener(wiring) for wiring in BRIDGES.select(app, [])]
        context = beside(app, [each.activity for each in listeners]) if beside is not None else None
        return ListenerThreads(listeners, EMBEDDED, beside=context, is_ending=is_ending)

    def _beside(self) -> Beside | None:
        if self._http is None:
            return None
        assert self.serving is not None, "it is installed"
        try:
            return self.serving(self._http, tried=True)
        except ConfigurationError as error:
            raise click.ClickException(str(error)) from None


def _is_ending(worker: Any) -> bool:
    """Return True if a worker is shutting down, by a signal or by stopping its steps."""
    from celery.worker import state as worker_state  # a web server does not need all its imports

    signals: tuple[Any, ...] = (worker_state.should_stop, worker_state.should_terminate)
    if any(each is not None and each is not False for each in signals):  # an exit status, which may be 0
        return True
    return worker.blueprint.human_state() in _ENDING_STATES


def install(app: Celery, serving: Serving) -> None:
    """Add the options and the step to an app's workers, once per app."""
    ListenerStep.serving = staticmethod(serving)
    app.user_options["worker"].update({LISTENER_OPTION, HTTP_OPTION})
    app.steps["worker"].add(ListenerStep)
