"""Preflight of the broker and the workers: whether they answer, and the settings of Celery that belong to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery

from mongo_celery.bridge.operations.bridge_snapshot import Workers
from mongo_celery.bridge.operations.judgement import listed
from mongo_celery.bridge.worker.limits import time_limit
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS, check_server
from mongo_celery.broker.workers import WorkerReplies, ask_workers, count_slots
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import collect_findings
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

INSPECT_SECONDS = 1.5
"""How long workers have to answer."""

_RABBITMQ = "amqp"
_QUORUM = "quorum"
_CONFIRMED = ("confirm_publish", "read_timeout", "write_timeout")
_QUEUES_SHOWN = 4
_UNSAFE_CONTENT = {"pickle", "application/x-python-serialize"}
_JSON = {"json", "application/json"}
_PREFETCH_DEFAULT = 4


def check_broker(app: Celery, names: Collection[str]) -> Iterator[Finding]:
    """The broker itself, then the settings of Celery that belong to it; with the names of the bridge's queues."""
    with bounded_connection(app, BROKER_SECONDS) as connection:
        yield from check_server(connection)
        if connection.transport.driver_type == _RABBITMQ:
            quorum = quorum_queues(app, names)
            if quorum:
                yield judge_confirms(quorum, names, app.conf.broker_transport_options or {})
    yield judge_prefetch(app.conf.worker_prefetch_multiplier)
    yield from judge_content(app.conf.accept_content)


def quorum_queues(app: Celery, names: Collection[str]) -> list[str]:
    """
    The quorum queues by the app's settings: of the bridge's, then of all others that the app knows.

    Args:
        app: the Celery app. Looking makes no queue known to it, which a worker would consume.
        names: the bridge's queues. Those that no setting names have the type of all that Celery makes by itself, and
            not that of the app's default queue.
    """
    known = app.amqp.queues
    own = [known[name] if name in known else known.new_missing(name) for name in names]
    others = [queue for name, queue in known.items() if name not in names]
    return [each.name for each in (*own, *others) if (each.queue_arguments or {}).get("x-queue-type") == _QUORUM]


def judge_confirms(quorum: Sequence[str], names: Collection[str], transport_options: Mapping[str, Any]) -> Finding:
    """
    A quorum queue without a leader refuses messages or does not answer, and only who asks in time hears of it.

    Args:
        quorum: the quorum queues, at least one.
        names: the bridge's queues.
        transport_options: of the app, for all that publishes.
    """
    missing = [name for name in _CONFIRMED if not transport_options.get(name)]
    if not missing:
        return ok("broker_confirms", "RabbitMQ confirms what is published, and the wait for that is bounded.")
    of_bridge = [name for name in quorum if name in names]
    if of_bridge:
        what = f"Queues of the bridge are quorum queues ({listed(of_bridge)})"
        lost, hangs = "vanishes, and partitions may stand", "a worker may hang with the change that it has done"
    else:
        what = f"Queues beside the bridge's are quorum queues ({listed(quorum)})"
        lost, hangs = "vanishes, also a task of yours", "whoever sends a task there may hang"
    if "confirm_publish" in missing:
        why = f"RabbitMQ confirms nothing: what it refuses while a queue elects its leader {lost}"
    else:
        why = f"nothing bounds the wait for RabbitMQ's confirmation: while a queue has no leader, {hangs}"
    return degraded("broker_confirms", f"{what}, and {why}. Set {', '.join(missing)} in broker_transport_options.")


def judge_prefetch(multiplier: int) -> Finding:
    """Prefetched messages wait behind slow ones; that costs time, never order."""
    text = f"worker_prefetch_multiplier is {multiplier}"
    if multiplier == 1:
        return ok("prefetch", f"{text}: a slow handler holds back no more than its own partition.")
    if 1 < multiplier <= _PREFETCH_DEFAULT:
        return ok("prefetch", f"{text}: changes may wait behind slow handlers of others; with 1 they do not.")
    amount = "without limit" if not multiplier else "far ahead"
    return degraded(
        "prefetch",
        f"{text}: a worker fetches {amount}, and changes wait behind slow handlers while other workers are idle. "
        "Set it to 1.",
    )


def judge_content(accepted: Any) -> Iterator[Finding]:
    """Messages are JSON; whoever may write to the broker must not be able to run code in a worker."""
    names = {str(name) for name in accepted or ()}
    if not names & _JSON:
        yield failing("accept_content", "json is not accepted, but the bridge's messages are JSON; add it.")
    unsafe = sorted(names & _UNSAFE_CONTENT)
    if unsafe:
        yield failing(
            "accept_content",
            f"{', '.join(unsafe)} is accepted: whoever can write to the broker can run code in the workers. Remove it.",
        )
    if names & _JSON and not unsafe:
        yield ok("accept_content", "Only content that cannot run code is accepted.")


# -- workers ---------------------------------------------------------------------------------------


def ask_servers(wiring: Wiring) -> tuple[Workers | None, list[Finding]]:
    """Ask broker and workers, for some seconds. The workers are None where they could not be asked."""
    concern = wiring.state_concern
    found = collect_findings("broker", lambda: check_broker(wiring.app, wiring.queue_names), concern)
    if any(each.code == "broker" and each.severity == "failing" for each in found):
        return None, found
    try:
        replies = ask_workers(wiring.app, INSPECT_SECONDS)
    except Exception as failure:  # noqa: BLE001 - every transport raises its own; some have no remote control
        return None, [*found, degraded("workers", f"Workers cannot be asked over this broker: {short(failure)}")]
    workers, about = judge_workers(_needed(wiring), replies, wiring.line)
    return workers, [*found, *about]


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


def judge_workers(
    needed: Mapping[str, Collection[str]], said: WorkerReplies, line: CommandLine
) -> tuple[Workers, list[Finding]]:
    """
    Return the workers, and findings about them.

    Args:
        needed: by queue of the bridge, names of the tasks that it sends there.
        said: their answers. A solo pool that is busy does not answer.
        line: beginning of the commands that are printed.
    """
    if not said.queues and not said.tasks:
        text = f"No worker answered within {INSPECT_SECONDS:.1f} s. Changes wait until one runs. Start one."
        return Workers(answered=0, serving=0, slots=0), [degraded("no_worker", text, line.celery("worker"))]
    consumed = said.queues
    concerned = {worker: names & needed.keys() for worker, names in sorted(consumed.items()) if names & needed.keys()}
    slots = count_slots(said, concerned) if concerned else None
    late = sorted({*said.tasks, *said.slots} - said.queues.keys())
    return Workers(answered=len(said.queues), serving=len(concerned), slots=slots), [
        ok("workers", f"{len(concerned)} of {len(said.queues)} workers that answered consume this bridge's queues."),
        _missing_consumers(needed, consumed, late, line),
        *_missing_tasks(concerned, needed, said.tasks),
    ]


def _missing_consumers(
    queue_names: Iterable[str], consumed: Mapping[str, set[str]], late: Sequence[str], line: CommandLine
) -> Finding:
    everything = set().union(*consumed.values())
    alone = [name for name in queue_names if name not in everything]
    if not alone:
        return ok("consumers", "Every queue of the bridge has a consumer.")
    shown = listed(alone, _QUEUES_SHOWN)
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
