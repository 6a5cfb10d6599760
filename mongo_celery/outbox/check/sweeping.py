"""Preflight of the sweep: whether somebody sweeps, and where nobody does, what is missing of beat and workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from celery import Celery

from mongo_celery.broker.workers import WorkerReplies, ask_workers
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.outbox.swept import LastSweep
from mongo_celery.quantities import duration

INSPECT_SECONDS = 1.5
"""How long workers have to answer each of two questions."""


@dataclass(frozen=True, slots=True)
class Sweeping:
    """
    What is known of the sweep of one outbox.

    Attributes:
        last: the last one that was noted.
        patience: seconds after which somebody should have swept.
        is_scheduled: whether this app has a beat entry for it.
        queue: to which its task is sent.
        line: how commands of this app are typed.
    """

    last: LastSweep | None
    patience: float
    is_scheduled: bool
    queue: str
    line: CommandLine = ANY_APP


def sweep_queue(app: Celery) -> str:
    """The queue to which the app sends its sweep."""
    queue = app.amqp.router.route({}, SWEEP_TASK).get("queue")
    return str(getattr(queue, "name", queue) or app.conf.task_default_queue)


def ask_about_sweeps(app: Celery) -> WorkerReplies | str:
    """What workers say, or why they cannot be asked."""
    try:
        return ask_workers(app, INSPECT_SECONDS)
    except Exception as failure:  # noqa: BLE001 - every transport raises its own; some have no remote control
        return short(failure)


def judge_sweeping(sweeping: Sweeping, said: WorkerReplies | str | None) -> Iterator[Finding]:
    """
    Whether somebody sweeps.

    Args:
        sweeping: what is known of it.
        said: what workers say, why they cannot be asked, or None where the broker does not answer.
    """
    last = sweeping.last
    if last is not None and last.seconds <= sweeping.patience:
        by = f"{last.app}, " if last.app else ""
        yield ok("sweep", f"Swept {duration(last.seconds)} ago ({by}{last.process}).")
    else:
        since = "has swept this outbox yet" if last is None else f"has swept this outbox for {duration(last.seconds)}"
        yield failing(
            "sweep",
            f"Nobody {since}: what a crash or an outage leaves in it is never sent. {_cure(sweeping, said)}",
        )
    if isinstance(said, str):
        yield degraded("workers", f"They cannot be asked over this broker: {said}")
    elif said is not None:
        yield from _lacking(sweeping.queue, said)


def _cure(sweeping: Sweeping, said: WorkerReplies | str | None) -> str:
    beat = f"Run `{sweeping.line.celery('beat')}`, or the listener of a bridge, with the app that makes this outbox"
    if not sweeping.is_scheduled:
        return (
            "This app has no beat entry for it: make the outbox with sweep_every, or have something call its sweep()."
        )
    if not isinstance(said, WorkerReplies):
        return f"{beat}, and a worker of it."
    if not said.tasks and not said.queues:
        return f"No worker has answered: run one of this app. {beat}, too."
    knowing = {worker for worker, tasks in said.tasks.items() if SWEEP_TASK in tasks}
    if not knowing:
        return (
            f"No worker knows the task {SWEEP_TASK}: let its app import the module that makes this outbox, for "
            "example with include=[...]."
        )
    consuming = {worker for worker, queues in said.queues.items() if sweeping.queue in queues}
    if not knowing & consuming:
        return f"No worker that knows it consumes the queue {sweeping.queue}; add it to a worker's -Q."
    return (
        f"A worker would. {beat}; and where the worker sweeps other outboxes, let it import the module that makes "
        "this one."
    )


def _lacking(queue: str, said: WorkerReplies) -> Iterator[Finding]:
    """Workers that take the sweep from its queue, and drop it."""
    known = said.tasks
    for worker, queues in sorted(said.queues.items()):
        if queue in queues and worker in known and SWEEP_TASK not in known[worker]:
            yield failing(
                "sweep_task",
                f"Worker {worker} consumes the queue {queue} and lacks {SWEEP_TASK}: it drops the sweeps that it gets. "
                "Let it import the module that makes the outbox, or route that task to a queue of its own.",
            )
