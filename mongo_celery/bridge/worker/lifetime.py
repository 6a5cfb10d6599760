"""
The start and the end of a worker.

At its start it declares the queues of bridges. Of its end a signal of Celery tells
its main process, and a shared byte tells its children.

Prefork children hear nothing of a warm shutdown: the main process waits for them, until a supervisor loses patience and
kills all of them. The byte is made before the fork, so it reaches every child. A pool that starts its children as new
programs (spawn) shares no byte: `is_leaving` stays false there. `celery control shutdown` sends no signal either.

A cold shutdown, a restart of the pool, `revoke --terminate` and `worker_cancel_long_running_tasks_on_connection_loss`
announce nothing in time either. They send a signal to the children, which billiard turns into a `SystemExit`.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from typing import Any

from celery import current_task, signals

from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.limits import hard_limit, worker_limits
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import keep_commands_out_of_logs

logger = logging.getLogger("mongo_celery.worker")

_SERVING, _TOLD = b"\0", b"\1"
_byte = mmap.mmap(-1, 1)
_worker: int | None = None
_SIGNALLED = range(-255, -191)
"""Statuses by which billiard ends a child: the number of a signal, less 256."""

_NEAR = 0.9
"""Share of a hard time limit from which on a signal is taken for the limit's own."""

_START_SECONDS = 1.0
"""Seconds that the start of a task may take: the clock of its limit runs meanwhile."""


def is_leaving() -> bool:
    """Return True if the worker of this process was told to shut down."""
    return _byte[:1] == _TOLD


def is_sent_away(error: BaseException, seconds: float) -> bool:
    """
    Return True if a process ends under a handler by no doing of this handler.

    Args:
        error: by which it ends.
        seconds: since the handler's task was called. A hard time limit sends the same signal as a shutdown.
    """
    limit = hard_limit(current_task)
    is_signalled = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in _SIGNALLED
    return is_leaving() or (is_signalled and (limit is None or seconds < limit * _NEAR - _START_SECONDS))


@signals.worker_init.connect(weak=False)
def begin_service(**_: Any) -> None:
    """Begin a worker, which may be the second one of its process: the byte of the first is not for it."""
    global _worker  # noqa: PLW0603 - children inherit it by their fork
    _byte[:1] = _SERVING
    _worker = os.getpid()


@signals.worker_shutting_down.connect(weak=False)
def announce_departure(**_: Any) -> None:
    """Note that a warm or a cold shutdown begins, in the main process of the worker."""
    _byte[:1] = _TOLD


@signals.worker_process_init.connect(weak=False)
def end_orphan(**_: Any) -> None:
    """
    End a pool's child whose worker was killed before the child had asked the kernel for a signal at that.

    Celery asks for it just before this, and does not look. Such a child would wait for tasks forever.
    """
    if _worker is not None and _worker not in (os.getpid(), os.getppid()):
        os._exit(1)


@signals.celeryd_init.connect(weak=False)
def _declare_partition_queues(instance: Any = None, options: Mapping[str, Any] | None = None, **_: Any) -> None:
    """
    After imports and configuration, before -Q and -X are applied.

    Celery turns an exception in here into a line of its log and starts the worker, which would then
    consume no partition: only `SystemExit` gets through.
    """
    from mongo_celery.broker.connection import declare_queues

    if instance is None:
        return
    for wiring in BRIDGES.of(instance.app):
        try:
            names = wiring.queue_names
        except ConfigurationError as error:
            _set_up_logging(instance, options or {})
            logger.critical(
                "the worker ends, for bridge %s cannot work: %s",
                wiring.name,
                error,
                extra={"event": "configuration_refused", "bridge": wiring.name},
            )
            raise SystemExit(1) from None
        declare_queues(instance.app, names)


def _set_up_logging(worker: Any, options: Mapping[str, Any]) -> None:
    """As the worker would do it later: a detached one has nothing but its log file to say why it ends."""
    worker.app.log.setup(logging.INFO, options.get("logfile"), redirect_stdouts=False, hostname=worker.hostname)


@signals.celeryd_after_setup.connect(weak=False)
def _note_limits(instance: Any = None, **_: Any) -> None:
    """The time limits of the whole worker, by its command line or configuration: handlers have them, too."""
    if instance is not None:
        worker_limits[instance.app] = (instance.time_limit, instance.soft_time_limit)


@signals.after_setup_logger.connect(weak=False)
def _keep_commands_out_of_logs(**_: Any) -> None:
    keep_commands_out_of_logs()
