"""One message run in this process, as a worker's pool would run it: by Celery's request and tracer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from celery import Celery
from celery._state import _tls  # type: ignore[attr-defined] # Celery has no other way to take it back
from kombu.serialization import prepare_accept_content
from kombu.utils.imports import symbol_by_name

HOSTNAME = f"bridge_runner@{socket.gethostname()}"


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
