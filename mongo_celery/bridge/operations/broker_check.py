"""Preflight of the broker: its server, and the settings of Celery that belong to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from celery import Celery

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS, check_server
from mongo_celery.findings import Finding, degraded, failing, ok

_RABBITMQ = "amqp"
_QUORUM = "quorum"
_CONFIRMED = ("confirm_publish", "read_timeout", "write_timeout")
_QUEUES_SHOWN = 3
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
    yield _judge_visibility(app)
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
        what = f"Queues of the bridge are quorum queues ({_shown(of_bridge)})"
        lost, hangs = "vanishes, and partitions may stand", "a worker may hang with the change that it has done"
    else:
        what = f"Queues beside the bridge's are quorum queues ({_shown(quorum)})"
        lost, hangs = "vanishes, also a task of yours", "whoever sends a task there may hang"
    if "confirm_publish" in missing:
        why = f"RabbitMQ confirms nothing: what it refuses while a queue elects its leader {lost}"
    else:
        why = f"nothing bounds the wait for RabbitMQ's confirmation: while a queue has no leader, {hangs}"
    return degraded("broker_confirms", f"{what}, and {why}. Set {', '.join(missing)} in broker_transport_options.")


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _QUEUES_SHOWN} more" if len(names) > _QUEUES_SHOWN else ""
    return ", ".join(names[:_QUEUES_SHOWN]) + more


def _judge_visibility(app: Celery) -> Finding:
    options = app.conf.broker_transport_options or {}
    seconds = options.get("visibility_timeout")
    text = "visibility_timeout is the broker's default" if seconds is None else f"visibility_timeout is {seconds} s"
    return ok(
        "visibility_timeout",
        f"{text}. It does not matter to the bridge: a change that the broker delivers again is refused by its claim in "
        "MongoDB, however long its handler runs.",
    )


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
