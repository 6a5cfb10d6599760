"""Preflight of the workers: which one lacks which task, and which queue nobody consumes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mongo_celery.bridge.operations.bridge_snapshot import Workers
from mongo_celery.bridge.operations.broker_check import check_broker
from mongo_celery.bridge.operations.judgement import listed
from mongo_celery.bridge.worker.limits import time_limit
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.workers import WorkerReplies, ask_workers, count_slots
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import collect_findings
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

INSPECT_SECONDS = 1.5
"""How long workers have to answer."""

_QUEUES_SHOWN = 4


def ask_servers(wiring: Wiring) -> tuple[Workers | None, list[Finding]]:
    """Ask broker and workers, for some seconds. The workers are None where they could not be asked."""
    concern = wiring.state_concern
    found = collect_findings("broker", lambda: check_broker(wiring.app, wiring.queue_names), concern)
    if any(each.code == "broker" and each.severity == "failing" for each in found):
        return None, found
    about = collect_findings("workers", lambda: check_workers(wiring), concern)
    slots = next((each for each in about if each.code == "workers" and each.severity == "ok"), None)
    none = Workers(answered=0, serving=0, slots=0) if any(each.code == "no_worker" for each in about) else None
    return none if slots is None else Workers(answered=1, serving=1, slots=slots.amount), [*found, *about]


def check_workers(wiring: Wiring) -> Iterator[Finding]:
    """Ask the workers that run now; a solo pool that is busy does not answer."""
    try:
        said = ask_workers(wiring.app, INSPECT_SECONDS)
    except Exception as failure:  # noqa: BLE001 - every transport raises its own; some have no remote control
        yield degraded("workers", f"They cannot be asked over this broker: {short(failure)}")
        return
    yield from judge_workers(_needed(wiring), said, wiring.line)


def check_time_limits(wiring: Wiring) -> Finding:
    """Name the handlers that no time limit ends; one that a worker was started with is not seen here."""
    tasks = wiring.app.tasks
    names = [each.name for each in wiring.handlers if time_limit(tasks.get(each.task_name)) is None]
    if not names:
        return ok("time_limits", "Every handler has one.")
    return degraded(
        "time_limits",
        f"{listed(names)} {'has' if len(names) == 1 else 'have'} none: a call that never returns keeps its partition "
        "and a slot of a worker for ever. Set time_limit or soft_time_limit of the handler, or task_time_limit.",
    )


def _needed(wiring: Wiring) -> dict[str, list[str]]:
    """The tasks that are sent to each queue of the bridge."""
    return {
        queue: [*(handler.task_name for handler in wiring.handlers if handler.group == group), COMMIT_TASK]
        for group in wiring.groups
        for queue in wiring.options.queue_names(group)
    }


def judge_workers(needed: Mapping[str, Collection[str]], said: WorkerReplies, line: CommandLine) -> Iterator[Finding]:
    """
    Findings from what workers answered.

    Args:
        needed: by queue of the bridge, names of the tasks that it sends there.
        said: what they said.
        line: how the person who is told types commands.
    """
    if not said.queues and not said.tasks:
        yield degraded(
            "no_worker",
            f"None answered within {INSPECT_SECONDS:.1f} s: changes wait until one runs. (A busy solo pool does not "
            "answer.)",
        )
        return
    consumed = said.queues
    concerned = {worker: names & needed.keys() for worker, names in sorted(consumed.items()) if names & needed.keys()}
    yield ok(
        "workers",
        f"{len(concerned)} of {len(said.queues)} that answered consume this bridge's queues.",
        count_slots(said, concerned) if concerned else None,
    )
    yield _missing_consumers(needed, consumed, sorted({*said.tasks, *said.slots} - said.queues.keys()), line)
    yield from _missing_tasks(concerned, needed, said.tasks)


def _missing_consumers(
    queue_names: Iterable[str], consumed: Mapping[str, set[str]], late: Sequence[str], line: CommandLine
) -> Finding:
    everything = set().union(*consumed.values())
    alone = [name for name in queue_names if name not in everything]
    if not alone:
        return ok("consumers", "Every queue of the bridge has a consumer.")
    more = f" and {len(alone) - _QUEUES_SHOWN} more" if len(alone) > _QUEUES_SHOWN else ""
    shown = ", ".join(alone[:_QUEUES_SHOWN]) + more
    if late:
        return degraded(
            "consumers",
            f"Worker {late[0]} did not list its queues within {INSPECT_SECONDS:.1f} s, and no other worker consumes "
            f"{shown}. Ask again.",
        )
    return failing(
        "consumers",
        f"No running worker consumes {shown}. Changes of these partitions wait. Start workers without -Q, or so: "
        f'{line.celery("worker")} -Q "$({line.changes("queues")})"',
        line.celery("worker"),
    )


def _missing_tasks(
    concerned: Mapping[str, Collection[str]],
    needed: Mapping[str, Collection[str]],
    registered: Mapping[str, set[str]],
) -> Iterator[Finding]:
    complete = True
    for worker, queues in concerned.items():
        if worker not in registered:
            continue  # it answered only the other question
        lacking = sorted({name for queue in queues for name in needed[queue]} - registered[worker])
        if lacking:
            complete = False
            yield failing(
                "worker_tasks",
                f"Worker {worker} lacks {', '.join(lacking)} and drops what it gets of them: deploy the same code "
                "there, or keep it away from the bridge's queues with -X.",
            )
    if complete and concerned:
        yield ok("worker_tasks", "Every worker that consumes the bridge's queues knows its tasks.")
