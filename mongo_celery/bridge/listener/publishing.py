"""
Publish due runs: one message per run, followed by the commit task as a link, unless the handler commits inline.

A message is a hint. If publishing fails, the outcome is unknown, and the run is dispatched again later. The claim in
MongoDB drops duplicates.

If the broker is down, all runs wait. Otherwise it may still reject one message that is too large or cannot be
serialised. A change that exceeds `max_message_bytes` is stored, and travels by reference. For a broker with a lower
limit, a change that is larger than `run_bytes` always travels alone. If a batch fails on two connections, its runs are
tried one by one, the smallest first, on working connections. If a run fails on two of them while the broker accepts a
third, it is rejected (Redis closes the connection of a message that is too large). If a connection cannot be made, all
attempts end, so an outage costs no more than before.

A rejected run blocks only its own partition. It is tried again automatically, with growing pauses up to
`LONGEST_REJECTION_PAUSE`, so that it goes out soon after the broker's limit is lifted. Other partitions flow. If a
partition is rejected for `spill_after`, it is stored, so its messages contain no changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kombu import Connection
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils.json import dumps

from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.listener.partition import Rejection
from mongo_celery.bridge.state.signing import Sealing
from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.broker.connection import bounded_connection, declare_queues, demand_answer
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import storable
from mongo_celery.tracing import is_heard, sending, trace_headers

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.activity import Activity
    from mongo_celery.bridge.listener.fairness import Fairness
    from mongo_celery.bridge.listener.renewal import Renewal
    from mongo_celery.bridge.listener.subscription import Dispatch, Subscription
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

LONGEST_REJECTION_PAUSE = 15.0
_REJECTION_PAUSES = Pauses(first=1.0, longest=LONGEST_REJECTION_PAUSE)
_BROKER_PAUSES = Pauses(first=0.5, longest=10.0)
_BROKER_SECONDS = 5
_ATTEMPTS = 2  # the first connection may have been cut while idle, or the broker restarted
_ALONE_A_TURN = 8
_REJECTIONS_AT_FIRST = 3
"""
If this many messages are rejected before any is accepted, the broker accepts nothing, for example because its memory is
full.
"""
_REPEATS_A_RECORD = 20
_REPORTED_MAX = 10
_REASON_CHARS = 300
_SERIALIZER = "mongo_celery"
_SECRET_BYTES = 8
"""Random bytes of a task id: remote control revokes by id, so it must not be guessable."""


class RunPublisher:
    """
    The publishing of one term. One thread uses it.

    Args:
        wiring: the wiring of the bridge.
        renewal: the term, whose key signs messages.
        activity: counts sent runs.
        fairness: selects between the handlers of a group.

    Attributes:
        due_at: monotonic time of the next run that waits only for a time.
    """

    def __init__(self, wiring: Wiring, renewal: Renewal, activity: Activity, fairness: Fairness) -> None:
        self.due_at = 0.0
        self._app = app = wiring.app
        self._options = options = wiring.options
        self._queues = wiring.queue_names
        self._renewal = renewal
        self._activity = activity
        self._fairness = fairness
        self._store = wiring.store.subscriptions
        self._broker = RetryGate(_BROKER_PAUSES)
        self._sealing = Sealing(b"", "")
        self._is_traced = True
        self._connection: Connection | None = None
        self._producer: Any = None
        self._is_amqp = False
        self._careful: Connection | None = None
        self._announces = bool(app.conf.task_send_sent_event)  # Celery's settings are slow to read
        self._origin = f"listener.{options.name}.{os.getpid()}@{socket.gethostname()}"
        declare_queues(app, self._queues)

    @property
    def is_down(self) -> bool:
        """Return True if the broker accepts nothing."""
        return self._broker.failures > 0

    def retry_now(self) -> None:
        """Publish in the next turn, because the broker answers again."""
        self._broker.opens_at = 0.0

    def close(self) -> None:
        """Drop the connection. The next publish makes a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()

    def dispatch(self, subscriptions: Mapping[str, Subscription]) -> bool:
        """Publish due runs if the lease is trusted. Return True if any of them is now in flight."""
        now, is_sent = time.monotonic(), False
        if now >= self._broker.opens_at:
            due = self._fairness.due(subscriptions, now)
            if due and self._renewal.is_trusted():
                is_sent = self.publish(self._reserve_starts(due, subscriptions))
        self.due_at = max(self._fairness.next_due(subscriptions), self._broker.opens_at)
        return is_sent

    def publish(self, due: Sequence[Dispatch]) -> bool:
        """
        Publish, mostly in one batch if the transport can. It ends in bounded time, even with a frozen broker.

        Returns:
            True if any of these runs is now in flight.
        """
        if not due:  # the broker is not contacted: its known state stays
            return False
        rejected = [each for each in due if each.partition.rejection is not None]
        fresh = [each for each in due if each.partition.rejection is None]
        try:
            before, self._sealing, self._is_traced = self._sealing.key, self._renewal.sealing, is_heard()
            if before and before != self._sealing.key:
                logger.info("the listener signs messages with the new key", extra={"event": "key_exchanged"})
            self._publish_together([each for each in fresh if each.size <= self._options.run_bytes])
            for dispatch in fresh:
                if dispatch.size > self._options.run_bytes:
                    self._publish_alone(dispatch)
            for dispatch in rejected[:_ALONE_A_TURN]:
                self._publish_alone(dispatch, attempts=1)
        except Exception as error:  # noqa: BLE001 - whatever the broker's client raises: the outcome is unknown
            self.close()
            self._note_failure(error)
        else:
            if self._broker.failures:
                self._broker.note_success()
        if self._careful is not None:
            self._release_careful()
        return any(each.partition.in_flight is not None for each in due)

    def _reserve_starts(self, due: Sequence[Dispatch], led: Mapping[str, Subscription]) -> list[Dispatch]:
        """Reserve a token for each due run of a handler with a rate. Return the runs to send, each with its slot."""
        counts = Counter(each.run.subscription for each in due)
        for name, count in counts.items():
            if led[name].limit.per_second:
                counts[name] = led[name].limit.reserve(self._store, name, led[name].plan.version, count)
        chosen = []
        for each in due:
            if counts[each.run.subscription] > 0:
                counts[each.run.subscription] -= 1
                chosen.append(each)
                if each.run.fencing_token is not None:
                    each.partition.note_sending()
        return chosen

    # -- outcomes ------------------------------------------------------------------------------------

    def _publish_together(self, dispatches: Sequence[Dispatch]) -> None:
        if not dispatches:
            return
        for _ in range(_ATTEMPTS):
            producer = self._producer or self._make_producer()
            # One round trip for many messages if kombu (5.7 and later) and the transport can.
            batch = producer.batch() if hasattr(producer, "batch") else contextlib.nullcontext()
            try:
                with batch:
                    for dispatch in dispatches:
                        self._publish(producer, dispatch)
                if self._is_amqp:
                    self._demand_verdict()
            except Exception:  # noqa: BLE001 - of the broker's client; the next check finds its meaning
                self.close()
                continue
            now = time.monotonic()
            for dispatch in dispatches:
                self._note_sent(dispatch, now)
            return
        rejections: list[Exception | None] = []
        for dispatch in sorted(dispatches, key=lambda each: each.size):
            rejections.append(self._publish_alone(dispatch))
            if len(rejections) == _REJECTIONS_AT_FIRST and (last := rejections[-1]) and all(rejections):
                raise last

    def _publish_alone(self, dispatch: Dispatch, attempts: int = _ATTEMPTS) -> Exception | None:
        """
        Publish one message on a working connection. Return the broker's reason if it rejects the message.

        Raises:
            Exception: there is no working connection.
        """
        rejection: Exception | None = None
        for _ in range(attempts):
            producer = self._careful_producer()
            try:
                self._publish(producer, dispatch)
            except Exception as error:  # noqa: BLE001 - of the broker's client, or of what makes the message
                rejection = error
                self._release_careful()
                continue
            self._note_sent(dispatch, time.monotonic())
            return None
        assert rejection is not None, "it was tried"
        self._careful_producer()  # raises if the broker is away: then nothing was rejected
        self._note_rejection(dispatch, rejection)
        return rejection

    def _note_sent(self, dispatch: Dispatch, now: float) -> None:
        partition, run = dispatch.partition, dispatch.run
        if partition.rejection is not None:
            logger.info(
                "the broker has accepted the message of %s in partition %s after earlier rejections",
                dispatch.label,
                partition.place,
                extra={"event": "message_taken"},
            )
        self._activity.of(run.subscription).note_sent(run, now, partition)
        partition.note_sent(now, 0 if run.dead_letter is not None else run.last - run.first + 1)

    def _note_rejection(self, dispatch: Dispatch, error: Exception) -> None:
        partition, before = dispatch.partition, dispatch.partition.rejection
        count = before.count if before else 0
        rejection = Rejection(
            dispatch.label,
            dispatch.size,
            _reason(error),
            before.since if before else datetime.now(UTC),
            count + 1,
            time.monotonic() + _REJECTION_PAUSES.nth(count),
        )
        partition.note_rejected(rejection)
        if rejection.count % _REPEATS_A_RECORD == 1:
            logger.error(
                "the broker rejects the message of %s in partition %s (%d bytes of changes): %s. This partition waits, "
                "and the listener tries again at least every %.0f s. Raise the broker's limit (in Redis "
                "proto-max-bulk-len or maxmemory, in RabbitMQ max_message_size), or lower max_message_bytes",
                dispatch.label,
                partition.place,
                dispatch.size,
                rejection.error,
                LONGEST_REJECTION_PAUSE,
                extra={"event": "message_rejected", "partition": partition.partition_id, "bytes": dispatch.size},
            )

    def _note_failure(self, error: Exception) -> None:
        self._broker.note_failure()
        logger.error(
            "the listener could not send messages, and tries again in %.1f s: %s",
            self._broker.opens_at - time.monotonic(),
            _reason(error),
            extra={"event": "publish_failed"},
        )

    # -- connections and messages --------------------------------------------------------------------

    def _make_producer(self) -> Any:
        """
        Return a producer. A new connection declares the queues: RabbitMQ silently drops a message to an
        unknown queue.
        """
        self._connection = bounded_connection(self._app, _BROKER_SECONDS, as_text=True)
        demand_answer(self._connection, _BROKER_SECONDS)
        self._is_amqp = self._connection.transport.driver_type == "amqp"
        channel = self._connection.default_channel
        for name in self._queues:
            self._app.amqp.queues[name].bind(channel).declare()
        self._producer = self._app.amqp.Producer(channel, auto_declare=False)
        return self._producer

    def _demand_verdict(self) -> None:
        """Wait for RabbitMQ's answer: a rejected message shows only at the channel's next call."""
        assert self._connection is not None, "publishing opens the connection"
        channel: Any = self._connection.default_channel
        channel.queue_declare(self._queues[0], passive=True)

    def _careful_producer(self) -> Any:
        """
        Return a producer. Each call of `publish` opens a new connection, also after each failure.

        RabbitMQ would reject a message later, by closing its channel. So here it must confirm each message.
        """
        if self._careful is None:
            if self._producer is None:
                self._make_producer()  # this declares the queues
            self._careful = bounded_connection(self._app, _BROKER_SECONDS, confirm=True, as_text=True)
            demand_answer(self._careful, _BROKER_SECONDS)
        return self._app.amqp.Producer(self._careful.default_channel, auto_declare=False)

    def _release_careful(self) -> None:
        connection, self._careful = self._careful, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()

    def _publish(self, producer: Any, dispatch: Dispatch) -> None:
        run = dispatch.run
        task_id = f"{run.bridge}.{run.subscription}.{run.index}.{run.first}"
        if dispatch.partition.attempt:
            task_id += f".d{dispatch.partition.attempt}"
        task_id += f".{secrets.token_hex(_SECRET_BYTES)}"
        if not self._is_traced:
            self._send(producer, dispatch, task_id, {})
            return
        with sending(f"{run.bridge}/{run.subscription}", lambda: _span_attributes(dispatch, task_id)):
            self._send(producer, dispatch, task_id, trace_headers())

    def _send(self, producer: Any, dispatch: Dispatch, task_id: str, headers: Mapping[str, str]) -> None:
        """Send the handler's message with its link, if any, and the same trace for both."""
        run, sealing, amqp = dispatch.run, self._sealing, self._app.amqp
        links = [self._commit_link(run, task_id, dispatch.queue, headers)] if dispatch.commits else []
        message = amqp.as_task_v2(
            task_id,
            dispatch.task_name,
            (sign_run("run", run, sealing.key, sealing.installation, Carrier.of(task_id, links)),),
            {},
            chain=links or None,
            root_id=task_id,
            ignore_result=True,
            argsrepr=dispatch.label,
            kwargsrepr="{}",
            origin=self._origin,
            create_sent_event=self._announces,
        )
        amqp.send_task_message(
            producer,
            dispatch.task_name,
            message,
            queue=amqp.queues[dispatch.queue],
            serializer=_SERIALIZER,
            declare=[],
            retry=False,
            headers=headers,
        )

    def _commit_link(self, run: Run, task_id: str, queue: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the commit task after a run."""
        commit_id, sealing = f"{task_id}.commit", self._sealing
        commit = Run(run.bridge, run.subscription, run.partitioning, run.index, run.term, run.first, run.last)
        options = {"queue": queue, "task_id": commit_id, "argsrepr": f"('{run.partition_id}',)"}
        return {
            "task": COMMIT_TASK,
            "args": [sign_run("commit", commit, sealing.key, sealing.installation, Carrier(commit_id))],
            "kwargs": {},
            "options": {**options, "headers": dict(headers)} if headers else options,
            "subtask_type": None,
            "immutable": True,
        }


def _encode_body(body: Any) -> str:
    """Return a message's body as JSON. Its argument is base64, without any character to escape."""
    (argument,), options, embedded = body
    return f'[["{argument}"], {dumps(options)}, {dumps(embedded)}]'


registry.register(_SERIALIZER, _encode_body, None, "application/json", "utf-8")
registry.type_to_name["application/json"] = "json"  # for all other messages of the process


def report_rejections(subscriptions: Iterable[Subscription]) -> dict[str, Any]:
    """Return the number of rejected runs, and some of them, for the listener's report."""
    rejected = [
        (each.partition_id, each.rejection)
        for subscription in subscriptions
        for each in subscription.partitions.values()
        if each.rejection is not None
    ]
    return {
        "rejectedCount": len(rejected),
        "rejected": [_describe_rejection(*pair) for pair in rejected[:_REPORTED_MAX]],
    }


def _describe_rejection(partition_id: str, rejection: Rejection) -> dict[str, Any]:
    return {
        "partition": partition_id,
        "key": storable(rejection.label),
        "bytes": rejection.size,
        "error": rejection.error,
        "since": rejection.since,
    }


def _reason(error: BaseException) -> str:
    """Return the broker client's error without its wrappers, truncated."""
    while error.__cause__ is not None:
        error = error.__cause__
    return storable(f"{type(error).__name__}: {short(error)}"[:_REASON_CHARS])


def _span_attributes(dispatch: Dispatch, task_id: str) -> dict[str, Any]:
    run = dispatch.run
    return {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": dispatch.queue,
        "messaging.destination.partition.id": str(run.index),
        "messaging.message.id": task_id,
        "mongo_celery.first": run.first,
        "mongo_celery.last": run.last,
        "mongo_celery.attempt": dispatch.partition.attempt,
    }
