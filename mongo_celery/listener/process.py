"""The listener process: one thread for each bridge, ended together by SIGTERM, SIGINT or a failure."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from types import FrameType

from celery import Celery

from mongo_celery.errors import MongoCeleryError
from mongo_celery.listener.service import Listener
from mongo_celery.registry import chosen_bridges

logger = logging.getLogger("mongo_celery.listener")

_STOP_SECONDS = 10.0


def run_listeners(app: Celery, names: Sequence[str], on_history_lost: str | None = None) -> int:
    """
    Listen for the named bridges, or all of the app, until a signal ends the process.

    A bridge that fails for good ends the process with status 1, loudly: a supervisor restarts it, and
    meanwhile standbys elsewhere lead the others.

    Args:
        app: the Celery app.
        names: of bridges; none for all.
        on_history_lost: takes the place of the option of that name.

    Returns:
        The exit status: 0 after a signal, 1 after a failure.

    Raises:
        ConfigurationError: the app has no bridge, or a name is unknown.
    """
    app.loader.import_default_modules()
    app.finalize()
    listeners = [Listener(bridge, on_history_lost) for bridge in chosen_bridges(app, names)]
    ended = threading.Event()
    failures: list[BaseException] = []

    def run(listener: Listener) -> None:
        try:
            listener.run()
        except MongoCeleryError as error:
            failures.append(error)
            logger.critical("%s", error, extra={"event": "listener_failed"})
        except BaseException as error:
            failures.append(error)
            logger.exception("the listener failed", extra={"event": "listener_failed"})
        finally:
            ended.set()

    def told_to_end(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: stepping down", signal.Signals(number).name)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told_to_end)
    threads = [
        threading.Thread(target=run, args=(listener,), name="mongo_celery-listener", daemon=True)
        for listener in listeners
    ]
    for thread in threads:
        thread.start()
    while not ended.wait(1.0):
        pass
    for listener in listeners:
        listener.stop()
    for thread in threads:
        thread.join(_STOP_SECONDS)
    return 1 if failures else 0
