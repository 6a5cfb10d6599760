"""The health of outboxes: their pending entries, their needs, and findings about both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo.errors import OperationFailure

from mongo_celery.broker.server_check import check_broker
from mongo_celery.broker.workers import WorkerReplies, ask_workers
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, list_some, ok
from mongo_celery.mongo.indexes import is_index
from mongo_celery.mongo.opening import collect_findings
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.outbox.pending_documents import PENDING_INDEX, UnknownTask
from mongo_celery.outbox.requirements import check_collection, check_rights, error_context, reach
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.outbox.sweep_records import patience
from mongo_celery.quantities import duration, number

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.outbox.registry import BaseOutbox
    from mongo_celery.outbox.runtime import OutboxStatus

INSPECT_SECONDS = 1.5
"""Time limit of workers for each of two questions."""

_LATE = 3
"""An entry that is older than this many times `sweep_after`, or has been due for two sweeps, is late."""


@dataclass(frozen=True, slots=True)
class OutboxHealth:
    """
    One outbox at one moment.

    Attributes:
        name: the name of the outbox.
        findings: findings about its state and its needs.
        status: counts and ages. None if MongoDB is unreadable, which is a finding.
    """

    name: str
    findings: Sequence[Finding]
    status: OutboxStatus | None = None


def read_health(app: Celery, outboxes: Sequence[BaseOutbox], *, thorough: bool = False) -> list[OutboxHealth]:
    """
    Return the health of one app's outboxes. The broker is queried once. Nothing is written.

    If a server does not answer, that is a finding, and the rest is still checked.

    Args:
        outboxes: the outboxes of the app.
        thorough: True to also check everything outside our code that writes and delivery need, for some more seconds:
            rights, the collection, workers, and settings of the app and the broker. The result may change later.
    """
    broker = check_broker(app)
    answers = not any(each.code == "broker" and each.severity == "failing" for each in broker)
    shared = broker if thorough else [each for each in broker if each.code == "broker"]
    if thorough and app.conf.task_always_eager:
        shared.append(
            failing(
                "task_always_eager",
                "task_always_eager is set, so the process that delivers an entry also runs its task. Unset it.",
            )
        )
    if thorough and answers:
        shared += _check_workers(app)
    return [_read_one(each, shared, broker_answers=answers, thorough=thorough) for each in outboxes]


def _read_one(outbox: BaseOutbox, shared: Sequence[Finding], *, broker_answers: bool, thorough: bool) -> OutboxHealth:
    status: OutboxStatus | None = None

    def check_mongodb() -> Iterator[Finding]:
        reach(outbox)
        yield ok("mongodb", f"The primary answers, and {outbox.collection.full_name} can be opened.")

    def check_state() -> Iterator[Finding]:
        nonlocal status
        status = outbox.status()
        yield from _check_state(outbox, status, broker_answers=broker_answers)

    def collect(part: Callable[[], Iterable[Finding]], context: ErrorContext) -> list[Finding]:
        return collect_findings("state_unreadable", part, context)

    found = collect(check_mongodb, ErrorContext("the data of this command", "readWrite there"))
    if found[-1].severity == "failing":
        return OutboxHealth(_name_safely(outbox), [*found, *shared])
    context = error_context(outbox)
    if not thorough:
        found = []
    else:
        found += collect(lambda: check_rights(outbox), context) + collect(lambda: check_collection(outbox), context)
    found += collect(check_state, context)
    return OutboxHealth(outbox.name, [*found, *shared], status)


def _name_safely(outbox: BaseOutbox) -> str:
    try:
        return outbox.name
    except Exception:  # noqa: BLE001 - whatever the user's function raises
        return repr(outbox)


# -- state -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sweeping:
    """
    Facts about the sweeps of an outbox.

    Attributes:
        seconds: time since the last noted sweep. None if there is no note.
        is_readable: True if the notes could be read.
        after: seconds after which a sweep takes an entry.
        every: seconds between two sweeps. None if unknown.
    """

    seconds: float | None
    is_readable: bool = True
    after: float = 5.0
    every: float | None = 15.0

    @property
    def has_swept(self) -> bool:
        """Return True if a sweep ran recently, as far as known."""
        return not self.is_readable if self.seconds is None else self.seconds <= patience(self.every)


def _check_state(outbox: BaseOutbox, status: OutboxStatus, *, broker_answers: bool) -> Iterator[Finding]:
    seconds, is_readable = None, True
    try:
        seconds = outbox.runtime.sweeps.read_age()
    except OperationFailure:  # a user who may not read the notes sees the rest
        is_readable = False
    sweeping = Sweeping(seconds, is_readable, outbox.runtime.options.sweep_after, outbox.runtime.options.sweep_every)
    line, unknown = CommandLine.of(outbox.app), outbox.runtime.find_unknown_tasks()
    yield from judge_state(status, sweeping, line, broker_answers=broker_answers, unknown=unknown)
    with suppress(OperationFailure):  # as for the notes
        yield from judge_indexes(outbox.collection.name, outbox.runtime.plain.list_indexes(), status.pending)


def judge_state(
    status: OutboxStatus,
    sweeping: Sweeping,
    line: CommandLine,
    *,
    broker_answers: bool,
    unknown: Sequence[UnknownTask] = (),
) -> Iterator[Finding]:
    """
    Judge pending entries, their age, failures, and whether sweeps run.

    Entries that are late for another reported reason are not a separate finding.

    Args:
        status: counts and ages.
        sweeping: facts about its sweeps.
        line: the command line of the app.
        broker_answers: True if the broker answers, as far as known.
        unknown: unknown tasks of this process that documents wait for.
    """
    late = max(_LATE * sweeping.after, sweeping.after + 2 * (sweeping.every or 0.0))
    is_late = status.oldest_seconds is not None and status.oldest_seconds > late
    explained = status.failing + status.other_brokers + sum(each.documents for each in unknown)
    if not is_late:
        yield ok("late", f"{number(status.pending, 'entry is', 'entries are')} pending, none for too long.")
    elif broker_answers and sweeping.has_swept and explained < status.documents:
        yield failing(
            "late",
            f"{number(status.pending, 'entry waits', 'entries wait')}, the oldest for "
            f"{duration(status.oldest_seconds or 0.0)}. A sweep should deliver them after {sweeping.after:g} s. "
            "Search the worker's log for `outbox`. To deliver them now, run:",
            line.celery("outbox", "sweep"),
        )
    if sweeping.has_swept:
        yield ok("sweep", "Sweeps of this outbox run.")
    elif broker_answers:
        since = "yet" if sweeping.seconds is None else f"for {duration(sweeping.seconds)}"
        beat = "" if sweeping.every is not None else "The app has no beat entry for the sweep: set sweep_every. "
        yield failing(
            "sweep",
            f"No sweep of this outbox has run {since}. Entries that a crash or an outage leaves behind are never "
            f"sent. {beat}Run beat or the listener of a bridge, and a worker on the queue of the sweep. Each "
            "must import the module that makes the outbox.",
            line.celery("beat"),
        )
    if unknown:
        report = failing if max(each.seconds for each in unknown) > late else degraded
        yield report(
            "unknown_tasks",
            f"{number(sum(each.documents for each in unknown), 'document waits', 'documents wait')} for a "
            f"process that knows {list_some([each.name for each in unknown])}. This app does not know it. During a "
            "deploy this ends automatically. Otherwise import the module of the task in workers, for example "
            "with include=[...]. To call another app, send an Event.",
        )
    if status.other_brokers:
        yield failing(
            "other_broker",
            f"{number(status.other_brokers, 'document waits', 'documents wait')} for another app, which "
            "publishes to another broker. Give apps that share a collection the same broker_url, or use "
            "separate collections. Until then run the sweep of each app. The worker's log names both brokers "
            "(`other_broker`).",
        )
    yield from _judge_failures(status, line)


def _judge_failures(status: OutboxStatus, line: CommandLine) -> Iterator[Finding]:
    letters = line.celery("outbox", "dead-letters", "list")
    if status.stuck:
        yield failing(
            "stuck",
            f"{number(status.stuck, 'document is', 'documents are')} stuck: the next entry fails again and "
            "again, and later entries wait. The worker's log has the reason. Fix the cause, or move such "
            "entries to the dead letters with failure_policy='dead_letter'.",
        )
    failed = status.failing - status.stuck
    if failed > 0:
        yield degraded(
            "failing",
            f"{number(failed, 'document holds', 'documents hold')} an entry that could not be published. The "
            "sweep tries again, with growing pauses. The worker's log has the reason.",
        )
    if status.unsigned:
        yield failing(
            "unsigned",
            f"{number(status.unsigned, 'dead letter was', 'dead letters were')} not signed by the outbox, and "
            "not sent. Another program writes to the outbox's field, the signing key was lost, or the writers "
            "set another `database`. Find the writer, then discard the dead letters or replay them with "
            "--sign:",
            letters,
        )
    if status.dead_letters:
        entries = number(status.dead_letters, "entry was", "entries were")
        text = f"{entries} moved to the dead letters. Look at them, then replay or discard them:"
        yield degraded("dead_letters", text, letters)


def judge_indexes(name: str, indexes: Iterable[Mapping[str, Any]], pending: int) -> Iterator[Finding]:
    """
    Judge whether the sweep has its index, and whether another index lets documents expire.

    Args:
        name: the name of the collection.
        indexes: the indexes of the collection.
        pending: number of pending entries. Without any, the index is not used.
    """
    indexes = list(indexes)
    fits = [each for each in indexes if is_index(each, PENDING_INDEX)]
    if fits:
        yield ok("index", f"The sweep finds pending entries by the index {fits[0]['name']}.")
    elif not pending:
        yield ok("index", "The first delivery creates the index.")
    else:
        options = {**PENDING_INDEX.document}
        keys = dict(options.pop("key"))
        yield degraded(
            "index",
            "The index is missing, so each sweep reads the whole collection. The first delivery creates it, if "
            "the user may create indexes and no transaction stays open. If there are many documents, create it "
            "now:",
            f"db.{name}.createIndex({json.dumps(keys)}, {json.dumps(options)})",
        )
    for each in indexes:
        if "expireAfterSeconds" in each:
            yield degraded(
                "expiry",
                f"The index {each['name']} removes old documents together with their pending entries. Increase "
                "expireAfterSeconds to more than the longest outage of the broker.",
            )


# -- workers ---------------------------------------------------------------------------------------


def is_scheduled(app: Celery) -> bool:
    """Return True if the app has a beat entry for the sweep."""
    return any(entry.get("task") == SWEEP_TASK for entry in app.conf.beat_schedule.values())


def _check_workers(app: Celery) -> Iterable[Finding]:
    try:
        return judge_workers(find_sweep_queue(app), ask_workers(app, INSPECT_SECONDS))
    except Exception as failure:  # noqa: BLE001 - every transport raises its own; some have no remote control
        return [degraded("workers", f"The workers cannot be queried over this broker: {short(failure)}")]


def find_sweep_queue(app: Celery) -> str:
    """Return the queue of the app's sweep."""
    queue = app.amqp.router.route({}, SWEEP_TASK).get("queue")
    return str(getattr(queue, "name", queue) or app.conf.task_default_queue)


def judge_workers(queue: str, said: WorkerReplies) -> Iterator[Finding]:
    """
    Judge workers that take the sweep from its queue and drop it.

    Args:
        queue: the queue of the sweep.
        said: the workers' answers.
    """
    for worker, queues in sorted(said.queues.items()):
        if queue in queues and worker in said.tasks and SWEEP_TASK not in said.tasks[worker]:
            yield failing(
                "sweep_task",
                f"Worker {worker} consumes the queue {queue} but does not know {SWEEP_TASK}, so it drops sweeps. "
                "Let it import the module that makes the outbox, or route that task to another queue.",
            )
