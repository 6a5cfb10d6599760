"""Answers of the workers that run now, by remote control."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS

_QUESTIONS = ("active_queues", "registered", "stats")


@dataclass(frozen=True, slots=True)
class WorkerReplies:
    """
    Answers of workers; one that answered only one of the questions is in one of them.

    Attributes:
        queues: those that each consumes, as Celery's `inspect` gives them.
        tasks: names of those that each knows, perhaps followed by their options in brackets.
        pools: the pool of each, with `max-concurrency`, as far as it says so.
    """

    queues: Mapping[str, Iterable[Mapping[str, Any]]]
    tasks: Mapping[str, Iterable[str]]
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def ask_workers(app: Celery, seconds: float) -> WorkerReplies:
    """
    Ask the workers that run now; a solo pool that is busy does not answer.

    Args:
        app: the Celery app, for its broker.
        seconds: how long the questions wait, all at the same time, since nobody knows how many will answer.

    Raises:
        Exception: what the transport raises; some have no remote control.
    """
    with ThreadPoolExecutor(len(_QUESTIONS)) as threads:
        queues, tasks, stats = threads.map(lambda question: _ask(app, question, seconds), _QUESTIONS)
    return WorkerReplies(queues, tasks, {worker: replies.get("pool") or {} for worker, replies in stats.items()})


def ask_for_queues(app: Celery, seconds: float) -> dict[str, set[str]]:
    """Ask the workers that run now for the queues that they consume; as `ask_workers`."""
    return list_queues(WorkerReplies(_ask(app, "active_queues", seconds), {}))


def _ask(app: Celery, question: str, seconds: float) -> Mapping[str, Any]:
    with bounded_connection(app, BROKER_SECONDS) as connection:
        inspect = app.control.inspect(timeout=seconds, connection=connection)
        return getattr(inspect, question)() or {}


def list_queues(replies: WorkerReplies) -> dict[str, set[str]]:
    """Return the names of the queues that each worker consumes."""
    return {worker: {str(queue["name"]) for queue in queues} for worker, queues in replies.queues.items()}


def count_slots(replies: WorkerReplies, workers: Iterable[str]) -> int | None:
    """Return how many tasks these workers can run at a time; None where one of them does not say so."""
    sizes: list[Any] = [replies.pools.get(worker, {}).get("max-concurrency") for worker in workers]
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None


def list_tasks(replies: WorkerReplies) -> dict[str, set[str]]:
    """Return the names of the tasks that each worker knows."""
    return {worker: {text.partition(" [")[0] for text in texts} for worker, texts in replies.tasks.items()}
