"""
A bridge as Prometheus metrics; needs the extra `metrics`.

Three kinds of numbers, and the help of each metric says which it is: of the *state*, which whichever process is scraped
reads in MongoDB, and which are the same for all listeners of a bridge; of the *leader*, which tells them in its
report; and of this *process* since it started, which are counted while it leads: sum them over all listeners. Label
values are names of bridges and handlers, states and codes; never keys, never texts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.http.sights import Sight
from mongo_celery.bridge.listener.activity import BUCKETS, Activity, HandlerActivity, Latencies
from mongo_celery.bridge.operations.readings import WAIT_SECONDS, Reading
from mongo_celery.bridge.operations.reasons import CODES
from mongo_celery.bridge.operations.verdict import EXIT_CODES
from mongo_celery.bridge.state.snapshots import DONE, FAILED, GONE, RUNNING, STOPPED

if TYPE_CHECKING:
    from prometheus_client import Metric

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install 'mongo-celery[metrics]'") from error

PREFIX = "mongo_celery_bridge_"

_PARTITION_STATES = ("flowing", "halted", "paused", "waiting", "retrying", "not_led")
_SNAPSHOT_STATES = (RUNNING, DONE, GONE, STOPPED, FAILED)
_SEVERITIES = {"degraded": 1, "failing": 2}
_BRIDGE = ("bridge",)
_HANDLER = ("bridge", "handler")

_GAUGES: Mapping[str, tuple[str, Sequence[str]]] = {
    "up": ("Whether MongoDB answered this scrape; without an answer the gauges of the state are missing.", _BRIDGE),
    "loop_turning": ("Process: whether the listener's loop turns, as /healthz says.", _BRIDGE),
    "leading": ("Process: whether this process leads.", _BRIDGE),
    "led": ("State: whether any listener leads.", _BRIDGE),
    "verdict": ("State: 0 healthy, 1 degraded, 2 failing.", _BRIDGE),
    "reason": (
        "State: 1 where the verdict is degraded for this reason, 2 where it is failing, else 0.",
        ("bridge", "code"),
    ),
    "lease_term": ("State: number of the term; it grows with every take-over.", _BRIDGE),
    "lag_seconds": (
        "State: age of the oldest change that is not handled, also of what is blocked or stored.",
        _HANDLER,
    ),
    "oplog_window_seconds": ("State: from the oplog's oldest entry to its latest.", _BRIDGE),
    "oplog_left_seconds": (
        "State: what of that lies before the handler's watermark: at 0, once the oplog is full, history is lost.",
        _HANDLER,
    ),
    "partitions": (
        "State: partitions by state; waiting is for MongoDB or the broker, not_led for a listener.",
        (*_HANDLER, "state"),
    ),
    "dead_letters": ("State: changes that were set aside.", _HANDLER),
    "parked_keys": ("State: keys of which changes are set aside until a person releases them.", _HANDLER),
    "snapshots": ("State: snapshots by state; one that is done or over for an hour.", (*_HANDLER, "state")),
    "snapshot_documents": ("State: documents that the handler's running snapshots have scanned.", _HANDLER),
    "snapshot_documents_estimated": ("State: of how many, as estimated when they began.", _HANDLER),
    "stored_changes": ("Leader: changes that are stored, since their partitions stand.", _BRIDGE),
    "stored_bytes": ("Leader: the bytes that they take.", _BRIDGE),
    "stored_bytes_limit": ("Leader: the bound of these, spill_bytes.", _BRIDGE),
    "outstanding": ("Leader: runs that are out.", _BRIDGE),
    "buffered": ("Leader: changes that were read and wait in memory.", _BRIDGE),
    "unread_seconds": ("Leader: for how long no read of the stream has succeeded; 0 below 5 s.", _BRIDGE),
}

_COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "takeovers": ("Process: how often it has begun to lead.", _BRIDGE),
    "sweeps": ("Process: how often all partitions were compared with what is out.", _BRIDGE),
    "reopenings": ("Process: errors after which the stream was opened again.", _BRIDGE),
    "dispatched": ("Process: changes in the runs that were sent, those that were sent again included.", _HANDLER),
    "dispatched_again": ("Process: of these, those whose run was sent again, since nothing was seen of it.", _HANDLER),
    "committed": ("Process: changes that positions were seen to pass, whatever became of them.", _HANDLER),
    "retries": ("Process: attempts that were seen to end with the wish for another.", _HANDLER),
    "crashes": ("Process: attempts that were seen to end without an outcome.", _HANDLER),
    "waits": ("Process: attempts that were seen to end since MongoDB or the broker was away.", _HANDLER),
    "spilled": ("Process: changes that were stored, since their partition stood.", _HANDLER),
    "refused": ("Process: changes that could not be given to the handler.", _HANDLER),
    "dropped_messages": ("State: messages that workers have dropped since the bridge exists.", ("bridge", "cause")),
}

_LATENCIES: Mapping[str, tuple[str, Callable[[HandlerActivity], Latencies]]] = {
    "claim_seconds": ("Process: from the sending of a run to its claim by a worker.", lambda seen: seen.claim),
    "handler_seconds": (
        "Process: from the claim of a run to the record that its handler succeeded, by the worker's clock.",
        lambda seen: seen.handler,
    ),
    "commit_seconds": ("Process: from that record to the commit.", lambda seen: seen.commit),
}
_Families = dict[str, Any]


class BridgeCollector(Collector):
    """
    What this process's listeners do, and the state of their bridges.

    Args:
        activities: of the listeners.
        look: gives what MongoDB says of each bridge, by its name, within a bounded time.
    """

    def __init__(self, activities: Sequence[Activity], look: Callable[[], Mapping[str, Sight]]) -> None:
        self._activities = activities
        self._look = look

    def describe(self) -> list[Metric]:
        """The metrics without numbers: a registry that looks for duplicates must not connect."""
        return list(_families().values())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        families = _families()
        sights = self._look()
        for activity in self._activities:
            _of_process(families, activity)
            sight = sights[activity.bridge]
            families["up"].add_metric([activity.bridge], 0 if sight.status is None else 1)
            families["verdict"].add_metric([activity.bridge], EXIT_CODES[sight.verdict.state])
            _reasons(families, activity.bridge, sight)
            if sight.status is not None:
                _of_state(families, activity.bridge, sight.status)
        yield from families.values()


class BoundedCollector(Collector):
    """What another collector asks of MongoDB, as far as it comes within `WAIT_SECONDS` of `ask`."""

    def __init__(self, collector: Collector) -> None:
        self._reading = Reading("MongoDB", lambda: list(collector.collect()))
        self._until = 0.0

    def ask(self) -> None:
        """Begin to collect."""
        self._until = time.monotonic() + WAIT_SECONDS
        self._reading.ask()

    def collect(self) -> Iterator[Metric]:
        """What has come, or nothing."""
        yield from self._reading.get(self._until).value or ()


def _families() -> _Families:
    return {
        **{name: GaugeMetricFamily(PREFIX + name, text, labels=labels) for name, (text, labels) in _GAUGES.items()},
        **{name: CounterMetricFamily(PREFIX + name, text, labels=labels) for name, (text, labels) in _COUNTERS.items()},
        **{name: HistogramMetricFamily(PREFIX + name, text, labels=_HANDLER) for name, (text, _) in _LATENCIES.items()},
    }


def _of_process(families: _Families, activity: Activity) -> None:
    bridge = [activity.bridge]
    families["loop_turning"].add_metric(bridge, activity.is_alive)
    families["leading"].add_metric(bridge, activity.version is not None)
    for name in ("takeovers", "sweeps", "reopenings"):
        families[name].add_metric(bridge, getattr(activity, name))
    for handler, seen in sorted(activity.handlers.copy().items(), key=lambda each: each[0]):
        labels = [*bridge, handler]
        families["dispatched_again"].add_metric(labels, seen.again)
        for name in ("dispatched", "committed", "retries", "crashes", "waits", "spilled", "refused"):
            families[name].add_metric(labels, getattr(seen, name))
        for name, (_, of) in _LATENCIES.items():
            latencies = of(seen)
            ends = [str(end) for end in BUCKETS] + ["+Inf"]
            buckets = list(zip(ends, accumulate(latencies.counts), strict=True))
            families[name].add_metric(labels, buckets, sum_value=latencies.sum)


def _reasons(families: _Families, bridge: str, sight: Sight) -> None:
    worst: dict[str, int] = {}
    for reason in sight.verdict.reasons:
        worst[reason.code] = max(_SEVERITIES[reason.severity], worst.get(reason.code, 0))
    for code in CODES:
        families["reason"].add_metric([bridge, code], worst.get(code, 0))


def _of_state(families: _Families, bridge: str, status: Mapping[str, Any]) -> None:
    spill = status["spill"]
    figures = {
        "led": status["state"] == "leading",
        "lease_term": status["term"],
        "oplog_window_seconds": status["oplog_window_seconds"],
        "stored_changes": spill["count"],
        "stored_bytes": spill["bytes"],
        "stored_bytes_limit": spill["limit"],
        "outstanding": status["outstanding"],
        "buffered": status["buffered"],
        "unread_seconds": status["unread_seconds"],
    }
    for name, value in figures.items():
        if value is not None:  # nobody knows, and 0 would say that somebody does
            families[name].add_metric([bridge], value)
    for cause, count in status["dropped_by_workers"].items():
        families["dropped_messages"].add_metric([bridge, cause], count)
    for subscription in status["subscriptions"]:
        _of_handler(families, [bridge, subscription["name"]], subscription, status)


def _of_handler(
    families: _Families, labels: list[str], subscription: Mapping[str, Any], status: Mapping[str, Any]
) -> None:
    if subscription["lag_seconds"] is not None:
        families["lag_seconds"].add_metric(labels, subscription["lag_seconds"])
    if subscription["oplog_left_seconds"] is not None:
        families["oplog_left_seconds"].add_metric(labels, subscription["oplog_left_seconds"])
    for name in ("dead_letters", "parked_keys"):
        families[name].add_metric(labels, subscription[name])
    states = Counter(each["state"] for each in status["partitions"] if each["subscription"] == labels[1])
    for state in _PARTITION_STATES:
        families["partitions"].add_metric([*labels, state], states[state])
    _snapshots(families, labels, [each for each in status["snapshots"] if each["handler"] == labels[1]])


def _snapshots(families: _Families, labels: list[str], snapshots: Sequence[Mapping[str, Any]]) -> None:
    states = Counter(each["state"] for each in snapshots)
    for state in _SNAPSHOT_STATES:
        families["snapshots"].add_metric([*labels, state], states[state])
    running = [each for each in snapshots if each["state"] == RUNNING]
    families["snapshot_documents"].add_metric(labels, sum(each["done"] for each in running))
    if all(each["estimated"] is not None for each in running):  # else nobody knows, and a sum would say less
        families["snapshot_documents_estimated"].add_metric(labels, sum(each["estimated"] for each in running))
