"""
The sweep delivers entries after a crash, a lost connection or a broker outage.

A sweep processes an outbox's due documents once, in index order, so earlier failures come last. A document that cannot
be delivered delays no other. Outboxes take turns, with a few documents each. A document with more entries than a turn
delivers continues after all others have had their turn.

If the broker accepts nothing, the sweep ends, and everything waits for the next one. The soft time limit of its task
also ends it, after every claim is released.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery.findings import list_some
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.commands import log_undeliverable
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.relay import Relay
from mongo_celery.outbox.runtime import OutboxRuntime

logger = logging.getLogger("mongo_celery.outbox")

SWEEP_TASK = "mongo_celery.outbox.sweep"

_TURN = 50
"""Number of documents of one outbox before the next one's turn."""

_ROUNDS = 20
"""A manual sweep has no time limit, so it leaves the rest of a document with continuous writes."""

_SWEEP_SECONDS = 60.0
"""Seconds after which a sweep leaves the rest to the next one, which beat has started meanwhile."""

_NOTE_SECONDS = 5.0
"""Seconds between two notes of a running sweep."""

_UNKNOWN_SECONDS = 60.0
"""An entry that has waited this long for another process is logged, at most this often."""


class OutboxSweep:
    """
    One outbox in one sweep.

    Args:
        outbox: the outbox to sweep.
        older_than: least age of a document's oldest entry in seconds. By default the option `sweep_after`.
        rounds: number of turns for a document with more entries than a turn delivers. The rest counts as left.

    Attributes:
        total: the total of the results.
        has_run: True after its first turn without such an error.
        failure: the error that ended it: MongoDB's, or one from opening the collection.
    """

    def __init__(self, outbox: OutboxRuntime, older_than: float | None = None, rounds: float = _ROUNDS) -> None:
        self.outbox = outbox
        self.id: ObjectId | None = None
        self.total = Delivery()
        self.failure: Exception | None = None
        self.has_run = False
        self.older_than = outbox.options.sweep_after if older_than is None else older_than
        self._due: Iterator[Any] | None = None
        self._more: list[Any] = []
        self._rounds = rounds

    def take_turn(self, deadline: float = math.inf) -> bool:
        """
        Deliver some documents. Return True if there may be more.

        Args:
            deadline: monotonic time after which no further single document is tried.

        Raises:
            PyMongoError: MongoDB did not answer, or refused the query.
            Exception: the collection cannot be opened.
        """
        if self.has_run or self.id is not None:
            self.outbox.sweeps.note(_NOTE_SECONDS, self.id, has_run=self.has_run)
        has_more = self._deliver_some(deadline)
        if not self.has_run:
            self.has_run = True
            if self.id is None:  # otherwise the next turn or the end notes it
                self.outbox.sweeps.note(0.0)
        return has_more

    def _deliver_some(self, deadline: float) -> bool:
        relay = self.outbox.relay
        if self._due is None:
            self._due = self.outbox.pending.find_due(self.older_than)
        found = list(islice(self._due, _TURN))
        if not found and self._rounds > 1:  # all others have had their turn
            self._rounds -= 1
            self._due, self._more = iter(self._more), []
            found = list(islice(self._due, _TURN))
        if not found:
            self.total, self._more = self.total.and_(Delivery(left=len(self._more))), []
            return False
        delivery = _deliver(self.outbox, relay, found, deadline)
        self.total = self.total.and_(delivery)
        self._more += delivery.more
        return not delivery.broker_down


def take_turns(sweeps: Iterable[OutboxSweep], seconds: float = math.inf) -> None:
    """
    Deliver due documents of some outboxes, until none is due or deliverable.

    If an outbox cannot be opened or MongoDB does not answer for it, or refuses it, the others continue.

    Args:
        sweeps: the sweeps of the outboxes.
        seconds: time after which the rest is left to the next sweep.
    """
    deadline = time.monotonic() + seconds
    waiting = list(sweeps)
    while waiting and time.monotonic() < deadline:
        for sweep in list(waiting):
            if time.monotonic() >= deadline:
                return
            try:
                has_more = sweep.take_turn(deadline)
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:  # noqa: BLE001 - whatever opening the collection or reading an `_id` raises
                has_more = False
                if isinstance(error, PyMongoError):
                    _renew(sweep.outbox, error)
                sweep.failure, sweep.total = error, sweep.total.and_(Delivery(error=short(error)))
            if sweep.total.broker_down:
                return
            if not has_more:
                waiting.remove(sweep)


def _renew(outbox: OutboxRuntime, error: PyMongoError) -> None:
    """Replace unusable connections, unless the collection cannot be opened at all."""
    with suppress(Exception):
        renew_connections(outbox.collection.database.client, error)


def _deliver(outbox: OutboxRuntime, relay: Relay, document_ids: list[Any], deadline: float) -> Delivery:
    """Deliver some documents. An unreadable one does not stop others."""
    try:
        return relay.deliver_all(document_ids)
    except (ConnectionFailure, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it
        if len(document_ids) > 1:
            total = Delivery()
            for place, document_id in enumerate(document_ids):
                if time.monotonic() >= deadline:
                    return total.and_(Delivery(left=len(document_ids) - place))
                total = total.and_(_deliver(outbox, relay, [document_id], deadline))
            return total
        log_undeliverable(outbox.name, document_ids[0], error)
        return Delivery(left=1, error=short(error))


def _report_unknown_tasks(outbox: OutboxRuntime) -> None:
    """Log entries that wait for a process that knows their task, because nothing else reports them."""
    if time.monotonic() < outbox.unknown_logged_at + _UNKNOWN_SECONDS:
        return
    outbox.unknown_logged_at = time.monotonic()
    unknown = [each for each in outbox.find_unknown_tasks() if each.seconds > _UNKNOWN_SECONDS]
    if unknown:
        logger.warning(
            "outbox %s: entries wait for a process that knows %s. Import the module of the task in workers.",
            outbox.name, list_some([each.name for each in unknown]),
            extra={"event": "task_unknown"},
        )  # fmt: skip


def _begin(sweep: OutboxSweep) -> bool:
    """Begin a sweep. Return False if another one is delivering the outbox."""
    sweep.id = ObjectId()
    try:
        if not sweep.outbox.sweeps.note(0.0, sweep.id, has_run=False):
            return False
        _report_unknown_tasks(sweep.outbox)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - its turn meets the same error, and reports it
        logger.debug("A sweep could not be prepared: %s", short(error))
    return True


def _end(sweep: OutboxSweep, *, is_broker_down: bool) -> None:
    """Let the next sweep begin, and log a failure. Without a turn, the outbox is swept only if the broker is down."""
    if sweep.failure is not None:
        logger.warning(
            "outbox %s was not swept. The next sweep tries again: %s",
            sweep.outbox.label,
            short(sweep.failure),
            extra={"event": "sweep_failed"},
        )
    try:
        if sweep.id is not None:
            sweep.outbox.sweeps.end(sweep.id, has_run=sweep.has_run or (is_broker_down and sweep.failure is None))
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - the collection cannot be opened, so there is no note either
        logger.debug("The end of a sweep could not be recorded: %s", short(error))


def sweep_all(outboxes: Iterable[OutboxRuntime]) -> dict[str, Any]:
    """
    Deliver due documents of some outboxes in turns. Skip an outbox that another sweep is delivering.

    Returns:
        For each outbox `{"dispatched", "dead", "error"}`, as plain values for a task's result.
    """
    sweeps, begun = [OutboxSweep(each, rounds=math.inf) for each in outboxes], list[OutboxSweep]()
    try:
        for sweep in sweeps:  # includes those without a turn, because the broker is down
            if _begin(sweep):
                begun.append(sweep)
        take_turns(begun, _SWEEP_SECONDS)
    finally:
        is_broker_down = any(sweep.total.broker_down for sweep in begun)
        for sweep in begun:
            _end(sweep, is_broker_down=is_broker_down)
    return {
        sweep.outbox.label: {
            "dispatched": sweep.total.dispatched,
            "dead": sweep.total.dead,
            "error": sweep.total.error,
        }
        for sweep in sweeps
    }
