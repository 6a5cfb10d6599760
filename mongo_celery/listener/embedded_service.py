"""A listener inside a worker: the counterpart of Celery's embedded beat."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from billiard.context import Process
from celery import Celery
from celery.platforms import set_process_title

from mongo_celery.listener.process import run_listeners
from mongo_celery.listener.service import Listener
from mongo_celery.registry import chosen_bridges

logger = logging.getLogger("mongo_celery.listener")

_STOP_SECONDS = 5
_WATCH_SECONDS = 0.5


def embedded_listener(app: Celery, *, as_process: bool) -> Any:
    """A service with `start` and `stop` for the worker's step."""
    return _ListenerProcess(app) if as_process else _ListenerThreads(app)


class _ListenerProcess:
    """The listeners of an app in a process of their own, as the prefork pool's worker embeds beat."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._process = Process(target=_main, args=(app, os.getpid()), daemon=True)

    def start(self, *_: Any) -> None:
        self._process.start()

    def stop(self, *_: Any) -> None:
        self._process.terminate()
        self._process.join(_STOP_SECONDS)

    terminate = stop


def _main(app: Celery, worker: int) -> None:
    """Listen until the worker ends this process, or has itself been killed: nobody else could end it."""
    set_process_title("celery", info="listener")
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # not the worker's own handler, which was inherited
    threading.Thread(target=_end_with, args=(worker,), name="mongo_celery-worker-watch", daemon=True).start()
    raise SystemExit(run_listeners(app, []))


def _end_with(worker: int) -> None:
    pause = threading.Event()
    while os.getppid() == worker:
        pause.wait(_WATCH_SECONDS)
    logger.warning("the worker is gone: stepping down", extra={"event": "worker_gone"})
    os.kill(os.getpid(), signal.SIGTERM)


class _ListenerThreads:
    """The listeners of an app in threads, for pools without processes."""

    def __init__(self, app: Celery) -> None:
        self._listeners = [Listener(bridge) for bridge in chosen_bridges(app, [])]
        self._threads = [
            threading.Thread(target=self._run, args=(listener,), name="mongo_celery-listener", daemon=True)
            for listener in self._listeners
        ]

    def start(self, *_: Any) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, *_: Any) -> None:
        for listener in self._listeners:
            listener.stop()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)

    terminate = stop

    def _run(self, listener: Listener) -> None:
        try:
            listener.run()
        except Exception:
            logger.exception("the embedded listener has ended", extra={"event": "listener_failed"})
