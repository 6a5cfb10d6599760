"""Preflight of the broker and the workers: their answers, and Celery's related settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery

from mongo_celery.bridge.operations.bridge_snapshot import Workers
from mongo_celery.bridge.worker.limits import time_limit
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS, check_server
from mongo_celery.broker.workers import WorkerReplies, ask_workers, count_slots
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, list_some, ok
from mongo_celery.mongo.opening import collect_findings
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.watching import TASK_PREFIX
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

INSPECT_SECONDS = 1.5
"""Seconds that workers have for an answer."""

_RABBITMQ = "amqp"
_QUORUM = "quorum"
_CONFIRMED = ("confirm_publish", "read_timeout", "write_timeout")
_QUEUES_SHOWN = 4
_UNSAFE_CONTENT = {"pickle", "application/x-python-serialize"}
_JSON = {"json", "application/json"}
_PREFETCH_DEFAULT = 4


def check_broker(app: Celery, names: Collection[str]) -> Iterator[Finding]:
    """Check the broker, then Celery's related settings, for the names of the bridge's queues."""
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
    Return the quorum queues in the app's settings: the bridge's first, then all others of the app.

    Args:
        app: the Celery app. This adds no queue to it, which a worker would consume.
        names: the bridge's queues. Queues without a setting have the type of queues that Celery creates automatically,
            not that of the app's default queue.
    """
    known = app.amqp.queues
    own = [known[name] if name in known else known.new_missing(name) for name in names]
    others = [queue for name, queue in known.items() if name not in names]
    return [each.name for each in (*own, *others) if (each.queue_arguments or {}).get("x-queue-type") == _QUORUM]


def judge_confirms(quorum: Sequence[str], names: Collection[str], transport_options: Mapping[str, Any]) -> Finding:
    """
    Judge whether a publisher notices in time that a quorum queue without a leader has refused a message.

    Args:
        quorum: the quorum queues, at least one.
        names: the bridge's queues.
        transport_options: the app's options for all publishing.
    """
    missing = [name for name in _CONFIRMED if not transport_options.get(name)]
    if not missing:
        return ok("broker_confirms", "RabbitMQ confirms every message, and senders do not wait forever for it.")
    own = [name for name in quorum if name in names]
    whose = f"Queues of the bridge are quorum queues ({list_some(own)})"
    if not own:
        whose = f"Other queues of this app are quorum queues ({list_some(quorum)})"
    effect = "While a queue elects its leader, a process that sends a message may wait forever."
    if "confirm_publish" in missing:
        effect = "RabbitMQ does not confirm messages. While a queue elects its leader, messages are lost unnoticed."
    fix = f"Set {', '.join(missing)} in broker_transport_options."
    return degraded("broker_confirms", f"{whose}. {effect} {fix}")


def judge_prefetch(multiplier: int) -> Finding:
    """Judge how many messages may wait behind slow ones. This affects time, never order."""
    text = f"worker_prefetch_multiplier is {multiplier}"
    if 1 <= multiplier <= _PREFETCH_DEFAULT:
        return ok("prefetch", f"{text}, so few changes wait for slow handlers of other partitions.")
    amount = "without limit" if not multiplier else "too early"
    return degraded(
        "prefetch",
        f"{text}, so a worker fetches messages {amount}. Changes wait for its slow handlers while other workers are "
        "idle. Set worker_prefetch_multiplier to 1.",
    )


def judge_content(accepted: Any) -> Iterator[Finding]:
    """Judge the accepted content. Messages are JSON, so that a writer to the broker cannot run code in a worker."""
    names = {str(name) for name in accepted or ()}
    unsafe = sorted(names & _UNSAFE_CONTENT)
    if not names & _JSON:
        text = "accept_content lacks 'json', so workers refuse the bridge's messages. Add it."
        yield failing("accept_content", text)
    if unsafe:
        text = f"accept_content has {', '.join(unsafe)}, so every program that can write to the broker can run code in "
        yield failing("accept_content", f"{text}the workers. Remove it.")
    elif names & _JSON:
        yield ok("accept_content", "accept_content has only formats that cannot run code.")


# -- workers ---------------------------------------------------------------------------------------


def ask_servers(wiring: Wiring, line: CommandLine) -> tuple[Workers | None, list[Finding]]:
    """Query broker and workers for some seconds. The workers are None if they could not be queried."""
    concern = wiring.state_concern
    found = collect_findings("broker", lambda: check_broker(wiring.app, wiring.queue_names), concern)
    if any(each.code == "broker" and each.severity == "failing" for each in found):
        return None, found
    try:
        replies = ask_workers(wiring.app, INSPECT_SECONDS)
    except Exception as failure:  # noqa: BLE001 - every transport raises its own; some have no remote control
        text = f"Workers cannot be asked over this broker, so they are not checked: {short(failure)}"
        return None, [*found, degraded("workers", text)]
    workers, about = judge_workers(_list_tasks_by_queue(wiring), replies, line)
    return workers, [*found, *about]


def check_time_limits(wiring: Wiring) -> Finding:
    """Name the user's handlers without a time limit. A worker's own limit from its start is unknown here."""
    tasks = wiring.app.tasks
    handlers = [each for each in wiring.handlers if not each.task_name.startswith(f"{TASK_PREFIX}.")]
    names = [each.name for each in handlers if time_limit(tasks.get(each.task_name)) is None]
    if not names:
        return ok("time_limits", "Every handler has a time limit.")
    return degraded(
        "time_limits",
        f"{list_some(names)} {'has' if len(names) == 1 else 'have'} no time limit. A call that never returns blocks "
        "its partition and a slot of a worker. Set time_limit or soft_time_limit of the handler, or task_time_limit.",
    )


def _list_tasks_by_queue(wiring: Wiring) -> dict[str, list[str]]:
    """Return the tasks sent to each queue of the bridge."""
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
        needed: names of the bridge's tasks, by queue.
        said: the workers' answers. A busy solo pool does not answer.
        line: the beginning of commands in findings.
    """
    if not said.queues and not said.tasks:
        text = f"No worker answered within {INSPECT_SECONDS:.1f} s. If none is running, changes wait. Start a worker."
        return Workers(answered=0, serving=0, slots=0), [degraded("no_worker", text, line.celery("worker"))]
    serving = {worker: names & needed.keys() for worker, names in sorted(said.queues.items()) if names & needed.keys()}
    text = f"{number(len(said.queues), 'worker', 'workers')} answered, {len(serving)} with this bridge's queues."
    slots = count_slots(said, serving) if serving else None
    return Workers(answered=len(said.queues), serving=len(serving), slots=slots), [
        ok("workers", text),
        _judge_consumers(needed, said, line),
        *_judge_tasks(serving, needed, said.tasks, line),
    ]


def _judge_consumers(needed: Iterable[str], said: WorkerReplies, line: CommandLine) -> Finding:
    consumed = set().union(*said.queues.values())
    alone = list_some([name for name in needed if name not in consumed], _QUEUES_SHOWN)
    late = sorted({*said.tasks, *said.slots} - said.queues.keys())
    if not alone:
        return ok("consumers", "Every queue of the bridge has a consumer.")
    if late:
        text = f"Worker {late[0]} did not list its queues within {INSPECT_SECONDS:.1f} s, and no other worker consumes "
        return degraded("consumers", f"{text}{alone}. Repeat the command.")
    text = f"No worker consumes the queues {alone}. Changes there wait. Start a worker for them."
    worker = line.celery("worker")
    return failing("consumers", text, worker, f'{worker} -Q "$({line.changes("queues")})"')


def _judge_tasks(
    serving: Mapping[str, Collection[str]],
    needed: Mapping[str, Collection[str]],
    registered: Mapping[str, set[str]],
    line: CommandLine,
) -> Iterator[Finding]:
    lacking = {
        worker: sorted({name for queue in queues for name in needed[queue]} - registered[worker])
        for worker, queues in serving.items()
        if worker in registered  # otherwise it answered only the other question
    }
    for worker, names in lacking.items():
        if names:
            yield failing(
                "worker_tasks",
                f"Worker {worker} does not have the tasks {', '.join(names)}, and drops their messages. Deploy the "
                "same code to it. If it is for other tasks only, start it without the bridge's queues: "
                f'{line.celery("worker")} -X "$({line.changes("queues")})"',
            )
    if serving and not any(lacking.values()):
        yield ok("worker_tasks", "Every worker that consumes the bridge's queues has its tasks.")
