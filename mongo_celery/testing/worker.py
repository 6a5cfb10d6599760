"""One message run in this process, as a worker's pool would run it: by Celery's request and tracer."""

from __future__ import annotations

import socket
from typing import Any

from celery import Celery
from kombu.utils.imports import symbol_by_name

HOSTNAME = f"bridge_runner@{socket.gethostname()}"


def run_message(app: Celery, message: Any) -> None:
    """
    Run a message's task to its end, with its links sent; what the task raises is Celery's to deal with.

    Not the limits of time: there is no pool to enforce them.

    Raises:
        BaseException: what ends a process.
        LookupError: the app has no such task.
    """
    name = message.headers["task"]
    task = app.tasks.get(name)
    if task is None:
        raise LookupError(
            f"The message names the task {name}, which the app {app.main} has not: import the module that defines it."
        )
    made = symbol_by_name(task.Request)
    made(message, app=app, task=task, hostname=HOSTNAME, connection_errors=()).execute()
