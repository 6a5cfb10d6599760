"""Answers of running workers by remote control."""

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
    Answers by worker. A worker that answered only one question is in only one of them.

    Attributes:
        queues: names of the queues that it consumes.
        tasks: names of the tasks that it knows.
        slots: number of concurrent tasks. None if it does not report it.
    """

    queues: Mapping[str, set[str]]
    tasks: Mapping[str, set[str]]
    slots: Mapping[str, int | None] = field(default_factory=dict)


def ask_workers(app: Celery, seconds: float) -> WorkerReplies:
    """
    Query the running workers. A busy solo pool does not answer.

    Args:
        app: the Celery app, for its broker.
        seconds: the time for answers. All questions wait concurrently, because the number of workers is unknown.

    Raises:
        Exception: the transport's error. Some transports have no remote control.
    """
    with ThreadPoolExecutor(3) as threads:
        queues = threads.submit(ask_for_queues, app, seconds)
        tasks, stats = threads.map(lambda question: _ask(app, question, seconds), ("registered", "stats"))
        known = {worker: {text.partition(" [")[0] for text in texts} for worker, texts in tasks.items()}  # with options
        slots = {worker: (reply.get("pool") or {}).get("max-concurrency") for worker, reply in stats.items()}
        return WorkerReplies(queues.result(), known, slots)


def ask_for_queues(app: Celery, seconds: float) -> dict[str, set[str]]:
    """Query the running workers for their queues, like `ask_workers`."""
    found = _ask(app, "active_queues", seconds)
    return {worker: {str(queue["name"]) for queue in queues} for worker, queues in found.items()}


def count_slots(replies: WorkerReplies, workers: Iterable[str]) -> int | None:
    """Return the total of concurrent tasks of these workers. None if one does not report it."""
    sizes = [replies.slots.get(worker) for worker in workers]
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) if len(known) == len(sizes) else None


def _ask(app: Celery, question: str, seconds: float) -> Mapping[str, Any]:
    with bounded_connection(app, BROKER_SECONDS) as connection:
        inspect = app.control.inspect(timeout=seconds, connection=connection)
        return getattr(inspect, question)() or {}
