"""
The position of each subscription in the oplog. A warning precedes each oplog gap.

The housekeeping thread reads the oldest and the latest entry every few seconds. So a slow MongoDB delays a warning, but
never the listener. The leading thread compares the last reading with each subscription's position. Only an oplog that
removes entries is a risk: one that is complete, or has room, only grows.

Usually one blocked partition is the reason: the one with the oldest unfinished change. It holds the place from which
its subscription must be read again. The log record names it, and the command that frees it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pymongo
from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.state.partitions import visible_state
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import DeploymentError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.oplog import Oplog, oplog_fill, read_oplog

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

THRESHOLDS = (0.5, 0.75, 0.9, 1.0)
"""Shares of the oplog's window at which a subscription is reported, once for each."""

SERIOUS = 0.9
"""The share from which a report is an error."""

_SLACK = 0.05
_LONGEST_PAUSE = 10.0
_SHORTEST_PAUSE = 0.5
_READINGS_A_WINDOW = 40


@dataclass(frozen=True, slots=True)
class Risk:
    """
    A subscription that may lose its history.

    Attributes:
        share: share of the oplog's window after its position. From 1 a restart loses changes.
        partition: the partition that holds the position. None if no partition does, because the reader itself is
            behind.
        state: the state of that partition. A blocked one has its state in `status` (`halted`, `paused`, `retrying`, or
            `waiting` for MongoDB or the broker). Otherwise `running`, `delayed` or `limited` by its handler's options,
            or `unclaimed` while no worker has taken its run.
        cause: the server that it waits for, if `waiting`.
    """

    subscription: str
    share: float
    partition: int | None
    state: str | None
    cause: str | None = None


class Horizon:
    """Watches the oplog for one term."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._read: Oplog | None = None
        self._judged: Oplog | None = None
        self._named: dict[str, float] = {}

    def share(self, subscription: Subscription) -> float:
        """
        Return the share of the oplog's window after a subscription, from the last reading. 0 if nothing
        is removed, or the oplog cannot be read.
        """
        oplog = self._read
        return max(oplog.lag_share(_place(subscription)), 0.0) if oplog is not None else 0.0

    def judge(self, subscriptions: Iterable[Subscription]) -> None:
        """Compare with a new reading, and report handlers that have passed a threshold."""
        oplog = self._read
        if oplog is self._judged:
            return
        self._judged = oplog
        if oplog is None:  # it has room again
            return
        for subscription in subscriptions:
            if not subscription.lost:
                self._name(judge_risk(subscription, oplog))

    def _name(self, risk: Risk) -> None:
        passed = max((threshold for threshold in THRESHOLDS if risk.share >= threshold), default=0.0)
        named = self._named.get(risk.subscription, 0.0)
        if passed > named:
            self._named[risk.subscription] = passed
            sentence = _sentence(risk, self._wiring.line)
            extra = {"subscription": risk.subscription, "partition": risk.partition, "share": risk.share}
            if risk.share >= SERIOUS:
                logger.error("%s", sentence, extra={"event": "history_at_risk", **extra})
            else:
                logger.warning("%s", sentence, extra={"event": "history_at_risk", **extra})
        elif risk.share < named - _SLACK:  # report a share that varies around a threshold once
            self._named[risk.subscription] = passed

    def read_oplog(self) -> float:
        """Read the reach of the oplog. Return the seconds until the next reading."""
        oplog: Oplog | None = None
        try:
            with pymongo.timeout(ANSWER_SECONDS):
                oplog = read_oplog(self._wiring.client)
                self._read = oplog if oplog.removes(oplog_fill(self._wiring.client)) else None
        except PyMongoError:  # repeated soon: others report that MongoDB does not answer
            pass
        except DeploymentError as error:  # no right to read it, or a mongos without an oplog
            logger.info(
                "this listener cannot read the age of the oplog, so before an oplog gap it neither warns nor stores "
                "slow changes: %s",
                error,
                extra={"event": "horizon_unseen"},
            )
            return math.inf
        return _pause(oplog)


def judge_risk(subscription: Subscription, oplog: Oplog) -> Risk:
    """Return a subscription's position in the oplog, and the partition that holds it."""
    head = subscription.window.oldest
    share = max(oplog.lag_share(_place(subscription)), 0.0)
    if head is None:
        return Risk(subscription.name, share, None, None)
    partition = subscription.partitions[head.index]
    state = visible_state(partition.image)
    if state == "flowing":
        is_limited = partition.in_flight is None and subscription.waiting_for_limit
        waits = "delayed" if partition.delayed_until else "limited" if is_limited else "unclaimed"
        state = "running" if partition.in_flight is not None and partition.image.live else waits
    cause = (partition.image.waiting or {}).get("cause") if state == "waiting" else None
    return Risk(subscription.name, share, head.index, state, cause)


def remedy(line: CommandLine, subscription: str, partition: int | None, state: str | None) -> str:
    """Return the command that frees a partition, or the thing to check."""
    where = (subscription, [] if partition is None else [partition])
    remedies = {
        "halted": f"`{line.on('retry', *where)}` or `{line.on('skip', *where)}`",
        "paused": f"`{line.on('resume', *where)}`",
        "waiting": f"restore the server that `{line.changes('status')}` names",
        "retrying": f"run its change immediately with `{line.on('retry', *where)}`",
        "running": "check that its handler does not hang, and that its worker lives",
        "delayed": "nothing needs to be done, because its changes are stored. If they are not, raise spill_bytes",
        "limited": "raise max_running or rate of the handler, or make it faster",
        "unclaimed": "start workers for its queue, or more of them",
    }
    reading = f"find the cause with `{line.changes('status')}`, or enlarge the oplog with replSetResizeOplog"
    return remedies.get(state or "", reading)


def _sentence(risk: Risk, line: CommandLine) -> str:
    free = remedy(line, risk.subscription, risk.partition, risk.state)
    held = "the listener has not read the stream so far"
    if risk.partition is not None:
        cause = f" ({risk.cause})" if risk.cause else ""
        held = f"because partition {risk.partition} is {risk.state}{cause}"
    if risk.share < 1:
        return (
            f"handler {risk.subscription} is behind by {risk.share:.0%} of the oplog ({held}). At 100% it loses "
            f"changes. To free it: {free}"
        )
    return (
        f"the oplog no longer reaches the position of handler {risk.subscription} ({held}). Only this listener's "
        f"memory still has its changes, so do not stop the listener. To free it: {free}"
    )


def _place(subscription: Subscription) -> Timestamp:
    """Return the time from which a new listener would read: the watermark, but not before the handler's start."""
    mark = subscription.window.watermark
    start = subscription.plan.start
    return max(mark.cluster_time, start) if mark is not None and mark.cluster_time is not None else start


def _pause(oplog: Oplog | None) -> float:
    """Return the seconds until the next reading. Each oplog window has several readings."""
    window = oplog.window_seconds if oplog is not None else _LONGEST_PAUSE * _READINGS_A_WINDOW
    return min(max(window / _READINGS_A_WINDOW, _SHORTEST_PAUSE), _LONGEST_PAUSE)
