"""What the workers that run now say of themselves, by remote control."""

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
class WorkersSaid:
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


def ask_workers(app: Celery, seconds: float) -> WorkersSaid:
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
    return WorkersSaid(queues, tasks, {worker: said.get("pool") or {} for worker, said in stats.items()})


def ask_for_queues(app: Celery, seconds: float) -> dict[str, set[str]]:
    """Ask the workers that run now for the queues that they consume; as `ask_workers`."""
    return consumed_queues(WorkersSaid(_ask(app, "active_queues", seconds), {}))


def _ask(app: Celery, question: str, seconds: float) -> Mapping[str, Any]:
    with bounded_connection(app, BROKER_SECONDS) as connection:
        inspect = app.control.inspect(timeout=seconds, connection=connection)
        return getattr(inspect, question)() or {}


def consumed_queues(said: WorkersSaid) -> dict[str, set[str]]:
    """The names of the queues that each worker consumes."""
    return {worker: {str(queue["name"]) for queue in queues} for worker, queues in said.queues.items()}


def slots_of(said: WorkersSaid, workers: Iterable[str]) -> int | None:
    """Return how many tasks these workers can run at a time; None where one of them does not say so."""
    sizes: list[Any] = [said.pools.get(worker, {}).get("max-concurrency") for worker in workers]
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None


def known_tasks(said: WorkersSaid) -> dict[str, set[str]]:
    """The names of the tasks that each worker knows."""
    return {worker: {text.partition(" [")[0] for text in texts} for worker, texts in said.tasks.items()}
