"""What the workers that run now say of themselves, by remote control."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS


@dataclass(frozen=True, slots=True)
class WorkersSaid:
    """
    Answers of workers; one that answered only one of the questions is in one of them.

    Attributes:
        queues: those that each consumes, as Celery's `inspect` gives them.
        tasks: names of those that each knows, perhaps followed by their options in brackets.
    """

    queues: Mapping[str, Iterable[Mapping[str, Any]]]
    tasks: Mapping[str, Iterable[str]]


def ask_workers(app: Celery, seconds: float) -> WorkersSaid:
    """
    Ask the workers that run now; a solo pool that is busy does not answer.

    Args:
        app: the Celery app, for its broker.
        seconds: how long each of the two questions waits, since nobody knows how many will answer.

    Raises:
        Exception: what the transport raises; some have no remote control.
    """
    with bounded_connection(app, BROKER_SECONDS) as connection:
        inspect = app.control.inspect(timeout=seconds, connection=connection)
        return WorkersSaid(inspect.active_queues() or {}, inspect.registered() or {})


def consumed_queues(said: WorkersSaid) -> dict[str, set[str]]:
    """The names of the queues that each worker consumes."""
    return {worker: {str(queue["name"]) for queue in queues} for worker, queues in said.queues.items()}


def known_tasks(said: WorkersSaid) -> dict[str, set[str]]:
    """The names of the tasks that each worker knows."""
    return {worker: {text.partition(" [")[0] for text in texts} for worker, texts in said.tasks.items()}
