"""
The start and the end of a worker.

At its start, the worker declares the queues of bridges. At its end, a Celery signal notifies its main process, and a
shared byte its children.

Prefork children do not notice a warm shutdown: the main process waits for them until a supervisor kills all of them.
The byte is made before the fork, so it reaches every child. A pool that starts its children as new programs (spawn)
shares no byte, so `is_leaving` stays False there. `celery control shutdown` sends no signal either.

A cold shutdown, a restart of the pool, `revoke --terminate` and `worker_cancel_long_running_tasks_on_connection_loss`
give no notice either. They send the children a signal, which billiard turns into a `SystemExit`.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import traceback
from collections.abc import Mapping
from typing import Any

from celery import current_task, signals

from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.limits import call_limit, hard_limit, worker_limits
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import keep_commands_out_of_logs
from mongo_celery.mongo.verdicts import error_text

logger = logging.getLogger("mongo_celery.worker")

_SERVING, _TOLD = b"\0", b"\1"
_byte = mmap.mmap(-1, 1)
_worker: int | None = None
_SIGNALLED = range(-255, -191)
"""Statuses with which billiard ends a child: a signal's number, minus 256."""

_NEAR = 0.9
"""Share of a hard time limit after which a signal counts as the limit's own."""

_GREEN_POOLS = ("gevent", "eventlet")
"""Pools in which all threads are one, so that no second one can run an event loop."""

_START_SECONDS = 1.0
"""Seconds that a task may need to start, while the clock of its limit runs."""


def is_leaving() -> bool:
    """Return True if the worker of this process was asked to shut down."""
    return _byte[:1] == _TOLD


def is_sent_away(error: BaseException, seconds: float) -> bool:
    """
    Return True if a process ends during a handler, but the handler did not cause it.

    Args:
        error: the error that ends the process.
        seconds: time since the handler's task was called. A hard time limit sends the same signal as a shutdown.
    """
    is_signalled = _read_signal(error) is not None and not _has_reached_hard_limit(seconds)
    return is_leaving() or is_signalled or is_raised_by_shutdown(error)


def is_raised_by_shutdown(error: BaseException) -> bool:
    """
    Return True if Celery's handler of a signal raised the error while a handler ran.

    A cold shutdown of `-P solo` raises `NotImplementedError` there, before it announces itself.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "celery.apps.worker" for frame, _ in frames)


def describe_end(error: BaseException, seconds: float) -> str:
    """
    Return the reason why a process ends under a handler, for people.

    Args:
        error: the error that ends the process.
        seconds: the seconds since the handler's task was called.
    """
    number = _read_signal(error)
    if number is None:
        return error_text(error)
    if _has_reached_hard_limit(seconds):
        limit = call_limit(current_task) or hard_limit(current_task)
        return f"the handler exceeded its hard time limit of {limit:g} s"
    return f"{_name_signal(number)} ended the process"


def _read_signal(error: BaseException) -> int | None:
    """Return the number of the signal by which billiard ends a child. None for another end."""
    status = error.code if isinstance(error, SystemExit) else None
    return status + 256 if isinstance(status, int) and status in _SIGNALLED else None


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _has_reached_hard_limit(seconds: float) -> bool:
    limit = hard_limit(current_task)
    return limit is not None and seconds >= limit * _NEAR - _START_SECONDS


@signals.worker_init.connect(weak=False)
def begin_service(**_: Any) -> None:
    """Begin a worker with its own byte, because its process may have had another one."""
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
    End a pool's child if its worker was killed before the child could ask the kernel for a signal at that event.

    Celery asks for the signal just before, and does not check. Such a child would wait for tasks forever.
    """
    if _worker is not None and _worker not in (os.getpid(), os.getppid()):
        os._exit(1)


@signals.worker_process_init.connect(weak=False)
def freeze_inherited_objects(**_: Any) -> None:
    """
    Exclude the imported objects of a pool's child from garbage collection.

    Lists of changes cause many collections. They would scan these objects, a quarter of the child's CPU time.
    """
    if _worker is not None and _worker != os.getpid():
        gc.freeze()


@signals.celeryd_init.connect(weak=False)
def _declare_partition_queues(instance: Any = None, options: Mapping[str, Any] | None = None, **_: Any) -> None:
    """
    Declare the queues after imports and configuration, and before -Q and -X apply.

    Celery would only log an exception here and start a worker without partitions. Only `SystemExit` stops it.
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
                "the worker ends, because bridge %s cannot work: %s",
                wiring.name,
                error,
                extra={"event": "configuration_refused", "bridge": wiring.name},
            )
            raise SystemExit(1) from None
        declare_queues(instance.app, names)


def _set_up_logging(worker: Any, options: Mapping[str, Any]) -> None:
    """Set up logging earlier than the worker does: a detached worker has only its log file to report why it ends."""
    worker.app.log.setup(logging.INFO, options.get("logfile"), redirect_stdouts=False, hostname=worker.hostname)


@signals.celeryd_after_setup.connect(weak=False)
def _note_limits(instance: Any = None, **_: Any) -> None:
    """Note the worker's time limits from command line or configuration. They also apply to handlers."""
    if instance is not None:
        worker_limits[instance.app] = (instance.time_limit, instance.soft_time_limit)


@signals.celeryd_after_setup.connect(weak=False)
def _refuse_pool(instance: Any = None, **_: Any) -> None:
    """End a worker whose pool has no place for an event loop, if it consumes a queue of a coroutine handler."""
    pool = instance and instance.pool_cls.__module__.rpartition(".")[2]
    if pool not in _GREEN_POOLS:
        return
    consumed = instance.app.amqp.queues.consume_from
    for wiring in BRIDGES.of(instance.app):
        names = [
            handler.name
            for handler in wiring.handlers
            if handler.is_async and not consumed.keys().isdisjoint(wiring.options.queue_names(handler.group))
        ]
        if names:
            logger.critical(
                "the worker ends, because its pool %s cannot run the coroutine handlers %s of bridge %s. Use --pool "
                "prefork, threads or solo, or leave their queues to another worker with -Q",
                pool,
                ", ".join(names),
                wiring.name,
                extra={"event": "pool_refused", "bridge": wiring.name},
            )
            raise SystemExit(1)


@signals.after_setup_logger.connect(weak=False)
def _keep_commands_out_of_logs(**_: Any) -> None:
    keep_commands_out_of_logs()
