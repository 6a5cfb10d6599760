"""
Prometheus metrics of bridges. They need the extra `metrics`.

The help of each metric names its kind. *State* is the same for all listeners of a bridge. *Leader* is the leading
listener's report from some seconds ago. *Process* counts since the start of this process, while it leads. Labels are
names of bridges and handlers, states and codes, never keys or texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import ProcessCollector, generate_latest

from mongo_celery.bridge.http.recent import call_all
from mongo_celery.bridge.listener.activity import BUCKETS, Activity
from mongo_celery.bridge.operations.bridge_snapshot import PARTITION_STATES, BridgeSnapshot
from mongo_celery.bridge.operations.judgement import CODES
from mongo_celery.findings import SEVERITIES
from mongo_celery.metrics import make_families
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.outbox.prometheus import OutboxCollector
from mongo_celery.twophase.prometheus import TransactionCollector

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client import Metric

PREFIX = "mongo_celery_bridge_"

GAUGES = {
    "up": ("1 if MongoDB answered this scrape. Otherwise the metrics of the state are missing.", ""),
    "verdict": ("State: 0 healthy, 1 degraded, 2 failing.", ""),
    "finding": ("State: 1 if the finding with this code is degraded, 2 if it is failing, otherwise 0.", "code"),
    "led": ("State: 1 if a listener leads.", ""),
    "standbys": ("State: listeners that stand by.", ""),
    "oplog_window_seconds": ("State: seconds from the oplog's oldest entry to its latest.", ""),
    "stored_changes": ("State: stored changes of blocked partitions.", ""),
    "stored_bytes": ("Leader: bytes of stored changes.", ""),
    "stored_bytes_limit": ("Leader: limit of the bytes of stored changes (spill_bytes).", ""),
    "in_flight": ("Leader: runs that were sent and are not finished.", ""),
    "buffered": ("Leader: changes in its memory.", ""),
    "unread_seconds": ("Leader: seconds since the last successful read of the stream. 0 below 5 s.", ""),
    "lag_seconds": ("State: age of the oldest unhandled change, including blocked changes.", "handler"),
    "oplog_left_seconds": ("State: seconds until the oplog no longer reaches the handler's position.", "handler"),
    "dead_letters": ("State: dead letters.", "handler"),
    "parked_keys": ("State: parked keys, which wait for a person.", "handler"),
    "limited": ("Leader: partitions whose next change waits for max_running or rate.", "handler"),
    "partitions": ("State: partitions by state.", "handler state"),
    "listener_alive": ("Process: 1 if the listener's loop works, like /healthz.", ""),
    "leading": ("Process: 1 if it leads.", ""),
}
"""Help, and labels in addition to `bridge`."""

COUNTERS = {
    "takeovers": ("Process: how often it began to lead.", ""),
    "sweeps": ("Process: how often it compared all partitions with the runs in flight.", ""),
    "reopenings": ("Process: how often it opened the stream again after an error.", ""),
    "dispatched": ("Process: changes that it sent to workers, including repetitions.", "handler"),
    "dispatched_again": ("Process: changes that it sent again, because it saw no result of them.", "handler"),
    "committed": ("Process: changes that are finished: handled, skipped, or dead letters.", "handler"),
    "retries": ("Process: attempts that ended with a request for a retry.", "handler"),
    "crashes": ("Process: attempts that ended without a result.", "handler"),
    "waits": ("Process: attempts that met an outage of MongoDB or the broker.", "handler"),
    "stored": ("Process: changes that it stored, because their partition was blocked.", "handler"),
    "undeliverable": ("Process: changes that it could not give to the handler.", "handler"),
    "dropped_messages": ("State: messages that workers have ever dropped.", "cause"),
}

LATENCIES = {
    "claim_seconds": ("Process: seconds from sending a run to its claim by a worker.", "handler"),
    "handler_seconds": ("Process: seconds from the claim of a run to its success, by the worker's clock.", "handler"),
    "commit_seconds": ("Process: seconds from the success of a run to its commit.", "handler"),
}


def read_others(app: Celery) -> list[Metric]:
    """Read the metrics of an app's outboxes and transactions. An outer `pymongo.timeout` does not apply."""
    found = call_all([
        lambda: [*OutboxCollector(app, answer_seconds=ANSWER_SECONDS).collect()],
        lambda: [*TransactionCollector(app, answer_seconds=ANSWER_SECONDS).collect()],
    ])  # fmt: skip
    return [*chain(*found)]


def expose(
    activities: Sequence[Activity],
    read: Callable[[], Sequence[BridgeSnapshot]],
    others: Callable[[], Sequence[Metric]],
) -> bytes:
    """
    Return the metrics of this process, and of its app's bridges, outboxes and transactions, in Prometheus format.

    Args:
        activities: the activities of the listeners of this process.
        read: returns the snapshots of their bridges, in the same order, within a limited time.
        others: returns the metrics of outboxes and transactions.
    """
    found = call_all([
        ProcessCollector(registry=None).collect,
        lambda: _collect(activities, read()),
        lambda: [*others()],
    ])  # fmt: skip
    return generate_latest(cast("Any", SimpleNamespace(collect=lambda: chain(*found))))


def _collect(activities: Sequence[Activity], snapshots: Sequence[BridgeSnapshot]) -> list[Metric]:
    families = make_families(PREFIX, "bridge", GAUGES, COUNTERS, LATENCIES)

    for activity, shown in zip(activities, snapshots, strict=True):

        def add(name: str, value: Any, *labels: str, bridge: str = activity.bridge, **more: float) -> None:
            if value is not None:  # 0 would be a known value
                families[name].add_metric([bridge, *labels], value, **more)

        _add_process(add, activity)
        _add_state(add, shown)
    return list(families.values())


def _add_process(add: Callable[..., None], activity: Activity) -> None:
    add("listener_alive", activity.is_alive)
    add("leading", activity.role == "leading")
    handlers = sorted(activity.handlers.copy().items())
    for name, (_, labels) in COUNTERS.items():
        if not labels:
            add(name, getattr(activity, name))
        for handler, seen in handlers if labels == "handler" else ():
            add(name, getattr(seen, name), handler)
    for handler, seen in handlers:
        for name in LATENCIES:
            latencies = getattr(seen, name.removesuffix("_seconds"))
            ends = [*map(str, BUCKETS), "+Inf"]
            buckets = list(zip(ends, accumulate(latencies.counts), strict=True))
            add(name, buckets, handler, sum_value=latencies.sum)


def _add_state(add: Callable[..., None], shown: BridgeSnapshot) -> None:
    worst = {each.code: SEVERITIES.index(each.severity) for each in reversed(shown.findings)}
    for code in CODES:
        add("finding", worst.get(code, 0), code)
    add("up", shown.is_readable)
    add("verdict", shown.exit_code)
    if not shown.is_readable or shown.backlog is None:
        return
    add("led", shown.state == "leading")
    add("standbys", len(shown.standbys))
    add("oplog_window_seconds", shown.oplog_seconds)
    add("stored_changes", shown.backlog.count)
    add("stored_bytes", shown.backlog.bytes)
    add("stored_bytes_limit", shown.backlog.limit)
    for name in ("in_flight", "buffered", "unread_seconds"):
        add(name, getattr(shown, name))
    for cause, count in shown.dropped.items():
        add("dropped_messages", count, cause)
    for handler in shown.handlers:
        for name, (_, labels) in GAUGES.items():
            if labels == "handler":
                add(name, getattr(handler, name), handler.name)
        states = Counter(each.state for each in handler.partitions)
        for state in PARTITION_STATES:
            add("partitions", states[state], handler.name, state)
