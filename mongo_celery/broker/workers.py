"""Answers of the workers that run now, by remote control."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS


@dataclass(frozen=True, slots=True)
class WorkerReplies:
    """
    Answers of workers, by worker. One that answered only one of the questions is in one of them.

    Attributes:
        queues: names of those that it consumes.
        tasks: names of those that it knows.
        slots: how many tasks it can run at a time. None if it does not say so.
    """

    queues: Mapping[str, set[str]]
    tasks: Mapping[str, set[str]]
    slots: Mapping[str, int | None] = field(default_factory=dict)


def ask_workers(app: Celery, seconds: float) -> WorkerReplies:
    """
    Ask the workers that run now; a solo pool that is busy does not answer.

    Args:
        app: the Celery app, for its broker.
        seconds: how long the questions wait, all at the same time, since nobody knows how many will answer.

    Raises:
        Exception: what the transport raises; some have no remote control.
    """
    with ThreadPoolExecutor(3) as threads:
        queues = threads.submit(ask_for_queues, app, seconds)
        tasks, stats = threads.map(lambda question: _ask(app, question, seconds), ("registered", "stats"))
        known = {worker: {text.partition(" [")[0] for text in texts} for worker, texts in tasks.items()}  # with options
        slots = {worker: (reply.get("pool") or {}).get("max-concurrency") for worker, reply in stats.items()}
        return WorkerReplies(queues.result(), known, slots)


def ask_for_queues(app: Celery, seconds: float) -> dict[str, set[str]]:
    """Ask the workers that run now for the queues that they consume; as `ask_workers`."""
    found = _ask(app, "active_queues", seconds)
    return {worker: {str(queue["name"]) for queue in queues} for worker, queues in found.items()}


def count_slots(replies: WorkerReplies, workers: Iterable[str]) -> int | None:
    """Return how many tasks these workers can run at a time; None where one of them does not say so."""
    sizes = [replies.slots.get(worker) for worker in workers]
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) if len(known) == len(sizes) else None


def _ask(app: Celery, question: str, seconds: float) -> Mapping[str, Any]:
    with bounded_connection(app, BROKER_SECONDS) as connection:
        inspect = app.control.inspect(timeout=seconds, connection=connection)
        return getattr(inspect, question)() or {}
