"""
The snapshot of a bridge: one typed value with everything that is displayed.

`changes status`, the page, `/status`, metrics, probes, Django's admin and Python code display it, without computing.
`BridgeSnapshot.plain` is `--json` and `/status`. docs/reference/status.md lists every field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from mongo_celery.findings import EXIT_CODES, Finding, Verdict, verdict_of

State = Literal["leading", "no_listener", "never_started", "failed", "history_lost", "unknown"]

BLOCKED = ("halted", "paused", "waiting", "retrying")
"""States of a partition whose next change cannot run now, the worst first."""

PARTITION_STATES = (*BLOCKED, "not_led", "flowing")
"""States of a partition, the worst first."""

NOT_STARTED = "not started"
"""State of a handler's initial snapshots while their collections cannot be listed."""

LEVELS: Mapping[str, Literal["ok", "warn", "bad"]] = {
    **dict.fromkeys(("healthy", "flowing", "running", "done"), "ok"),
    **dict.fromkeys(("degraded", "paused", "waiting", "retrying", "not_led", NOT_STARTED), "warn"),
    **dict.fromkeys(("failing", "halted", "history_lost", "match_refused", "stopped", "failed", "source gone"), "bad"),
}
"""Level of a verdict, or of a state of a handler, a partition or a snapshot: its color in every view."""

_CURRENT = (NOT_STARTED, "running", "failed", "source gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderStatus:
    """
    The listener that leads.

    Attributes:
        since: start of its term.
        app: name of its Celery app.
        handlers: names of the handlers that it serves.
        changed: handlers that the printing process defines differently.
        partitions: number of partitions of new handlers.
    """

    host: str | None
    pid: int | None
    since: datetime | None
    app: str | None
    handlers: tuple[str, ...]
    changed: tuple[str, ...]
    partitions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """A listener that waits for the lease, with the host and process of its last report."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimStatus:
    """
    The claim of an execution on a partition.

    Attributes:
        owner: id of this execution.
        process: the worker's process, as readable text.
        seconds: age of the claim.
        first: number of its first change.
        last: number of its last change.
        until: time at which the claim lapses.
        live: true until the claim lapses.
    """

    owner: str
    process: str
    seconds: int | None
    first: int
    last: int
    until: datetime | None
    live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChanges:
    """
    The stored changes of a partition.

    Attributes:
        count: number of changes. None if counting took too long.
        since: time at which the first change was stored.
        reason: the state in which storing began.
        to: resume token of the last stored change.
        missing: true if the stored changes are gone.
    """

    count: int | None
    since: datetime | None
    reason: str
    to: str
    missing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """
    One partition of a handler.

    Attributes:
        queue: the Celery queue of its runs.
        state: `flowing`, `halted`, `paused`, `waiting`, `retrying`, or `not_led` (no listener has the handler).
        committed: number of the last change that is committed.
        token: resume token of that change.
        fencing_token: fencing token of the last execution.
        claim: claim of an execution that runs, or ended without a result.
        handled: number of the last successful, uncommitted change.
        key: the blocked change: namespace, operation, document key.
        key_token: resume token of that change.
        since: time of the halt, or start of the wait.
        error: error of the last attempt.
        retries: attempts that ended with a retry.
        crashes: attempts that ended without a result.
        waits: attempts that failed because MongoDB or the broker was unavailable.
        due_seconds: time until the blocked change runs again.
        oldest_seconds: age of the blocked or first stored change.
        stored: stored changes.
    """

    partition: int
    queue: str
    state: str
    committed: int
    token: str | None
    fencing_token: int
    claim: ClaimStatus | None = None
    handled: int | None = None
    key: str | None = None
    key_token: str | None = None
    since: datetime | None = None
    error: str | None = None
    retries: int = 0
    crashes: int = 0
    waits: int = 0
    due_seconds: float = 0.0
    oldest_seconds: int | None = None
    stored: StoredChanges | None = None
    parked_keys: int = 0

    @property
    def is_blocked(self) -> bool:
        """Return True if the next change of the partition cannot run now."""
        return self.state in BLOCKED

    @property
    def is_running(self) -> bool:
        """Return True if a worker is handling changes of the partition now."""
        return self.handled is not None or (self.claim is not None and self.claim.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLoss:
    """
    A position that the oplog no longer reaches.

    Attributes:
        since: time at which the listener noticed it.
        at: time of the position.
        oldest: time of the oplog's oldest entry then.
        error: the server's message.
    """

    since: datetime | None
    at: datetime | None
    oldest: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OplogGap:
    """Changes from `start` until `until` that a handler skipped. `policy` is the reason."""

    start: datetime | None
    until: datetime | None
    policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepartitioningStatus:
    """
    The new partitions that a handler will get.

    Attributes:
        since: start of the repartitioning.
        waits: reason why they are not in use yet.
    """

    partitions: int
    since: datetime | None
    waits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackStatus:
    """A series of changes of one `key`, each written while the previous one was handled. `count` is rounded down."""

    key: str
    count: int
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerStatus:
    """
    One handler.

    Attributes:
        state: the state of its worst partition, or `new`, `unregistered` (not in this app),
            `history_lost`, `stopped` or `match_refused` (see `error`).
        error: reason of the state `stopped`, `history_lost` or `match_refused`.
        committed: number of committed changes.
        per_second: committed changes a second. None without a listener.
        lag_seconds: age of its oldest unhandled change, blocked, delayed or not.
        watermark: resume token of the watermark.
        watermark_at: time of the watermark.
        oplog_left_seconds: time until an oplog gap.
        oplog_share: used share of the oplog's window. At 1, unread changes are lost.
        stored: number of stored changes. None if counting took too long.
        commit: `chain` or `inline`.
        time_limit: seconds after which Celery ends the handler.
        max_running: largest number of executions at a time.
        rate: largest number of executions a second.
        limited: number of partitions whose next change waits for `max_running` or `rate`.
        lost: the present oplog gap.
        gaps: changes that were skipped.
        repartitioning: present while new partitions are prepared.
        feedback: present if the handler seems to trigger itself.
        delay_seconds: longest time for which `delay` may keep a change.
        delayed: number of partitions whose next change waits for `delay`.
        delayed_until: time at which the first of them is due.
    """

    name: str
    state: str
    error: str | None = None
    committed: int = 0
    per_second: float | None = None
    lag_seconds: int | None = None
    watermark: str | None = None
    watermark_at: datetime | None = None
    oplog_left_seconds: int | None = None
    oplog_share: float | None = None
    stored: int | None = 0
    dead_letters: int = 0
    parked_keys: int = 0
    commit: str | None = None
    time_limit: float | None = None
    max_running: int | None = None
    rate: float | None = None
    limited: int = 0
    lost: HistoryLoss | None = None
    gaps: tuple[OplogGap, ...] = ()
    repartitioning: RepartitioningStatus | None = None
    feedback: FeedbackStatus | None = None
    delay_seconds: float = 0.0
    delayed: int = 0
    delayed_until: datetime | None = None
    partitions: tuple[PartitionStatus, ...] = ()

    @property
    def is_registered(self) -> bool:
        """Return True if this process has the handler."""
        return self.state != "unregistered"

    @property
    def is_given_changes(self) -> bool:
        """Return True if the listener reads changes for it."""
        return self.state not in ("stopped", "match_refused", "history_lost")

    @property
    def is_mostly_blocked(self) -> bool:
        """Return True if more than half of its partitions are blocked."""
        return 2 * sum(each.is_blocked for each in self.partitions) > len(self.partitions)

    def list_partitions(self, *states: str) -> list[PartitionStatus]:
        """Return its partitions in these states."""
        return [each for each in self.partitions if each.state in states]


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogStatus:
    """
    All stored changes of a bridge.

    Attributes:
        count: number of changes. None if counting took too long.
        bytes: size of the changes. None without a listener.
        limit: `spill_bytes`.
        share: `bytes` divided by `limit`.
        waits: reason why changes are not stored.
    """

    count: int | None
    bytes: int | None
    limit: int
    share: float | None
    waits: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeliverable:
    """
    A message that the broker rejects while it accepts others.

    Attributes:
        key: the change of the message.
        bytes: size of the message.
        since: time of the first rejection.
    """

    partition: str
    key: str
    bytes: int
    error: str
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFailure:
    """
    A partition whose changes MongoDB does not store.

    Attributes:
        since: time of the first error.
    """

    partition: str
    error: str
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnservedQueues:
    """
    Queues from which no worker has taken a message for longer than `dispatch_grace`.

    Attributes:
        answered: true if workers answered the listener.
        unclaimed: true if workers take messages, but start no change.
    """

    queues: tuple[str, ...]
    answered: bool | None
    unclaimed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """
    Dead letters of one handler with the same error.

    Attributes:
        count: number of these among the newest 1000 dead letters of the bridge.
        newest_at: time of the newest dead letter.
        newest_id: id of the newest dead letter.
    """

    handler: str
    error: str
    count: int
    newest_at: datetime | None
    newest_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """
    One snapshot of a collection for a handler.

    Attributes:
        source: the collection, or the handler's sources.
        state: `not started`, `running`, `done`, `source gone`, `stopped` or `failed`.
        done: number of rows read.
        estimated: estimated number of rows.
        per_second: rows a second, on average.
        remaining_seconds: estimated time until the end.
        since: time of the request.
        moved_at: time of the last read rows, or of the end.
        by: user who requested it.
        reason: reason of a failure or a wait.
    """

    id: str
    handler: str
    source: str
    state: str
    done: int
    estimated: int | None
    per_second: float | None
    remaining_seconds: int | None
    since: datetime | None
    moved_at: datetime | None = None
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """
    The workers that answered.

    Attributes:
        answered: number of workers.
        serving: number of workers that consume queues of this bridge.
        slots: number of tasks that `serving` workers can run at a time.
    """

    answered: int
    serving: int
    slots: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSnapshot:
    """
    A bridge at one moment.

    Attributes:
        at: time of the snapshot, by the cluster's clock.
        state: `leading`, `no_listener`, `never_started`, `failed` or `history_lost` (see `error`), or `unknown`.
        error: error that ended the last listener.
        leader: the listener that leads.
        standbys: listeners that wait for the lease.
        unled_seconds: time without a running listener.
        term: number of the last leading listener.
        difference: reason why this bridge belongs to another app or environment.
        lag_seconds: age of the oldest unhandled change.
        per_second: committed changes a second, of all handlers.
        oplog_seconds: the oplog's window. None if it cannot be read.
        in_flight: runs that were sent and have not ended.
        buffered: changes in the listener's memory.
        caught_up: true if all changes are handled, and none is blocked.
        reported_at: time of the leader's last report.
        unread_seconds: time since the last read of the stream.
        reading_waits: reason why nothing is read: a full buffer, or the stream's last error.
        broker_down: true if the listener cannot publish.
        untaken: queues from which no worker takes messages.
        sent_again: handlers whose messages a worker has taken for a minute without starting them.
        undeliverable: examples of messages that the broker rejects.
        undeliverable_count: number of rejected messages.
        not_stored: examples of partitions whose changes MongoDB does not store.
        not_stored_count: number of these partitions.
        locked: examples of partitions that an open transaction locks.
        dropped: number of messages that workers have ever dropped, by reason.
        dropped_lately: reasons of drops within the last hour.
        foreign_sender: claimed `pid@host` of the last dropped foreign message.
        partitions: number of partitions of new handlers in the printing process.
        backlog: all stored changes.
        dead_letter_groups: the newest 1000 dead letters in groups, the largest first.
        oversized: error of the newest dead letter that was too large to read.
        handlers: all handlers, by name.
        snapshots: running, failed, stopped and recently ended snapshots.
        workers: the workers that answered. None if workers were not queried.
        note: checks that were omitted, and the command for them.
        findings: problems, the worst first.
    """

    bridge: str
    at: datetime | None = None
    state: State = "unknown"
    error: str | None = None
    leader: LeaderStatus | None = None
    standbys: tuple[Standby, ...] = ()
    unled_seconds: int | None = None
    term: int = 0
    difference: str | None = None
    lag_seconds: int | None = None
    per_second: float | None = None
    oplog_seconds: int | None = None
    in_flight: int | None = None
    buffered: int | None = None
    caught_up: bool = False
    reported_at: datetime | None = None
    unread_seconds: int | None = None
    reading_waits: str | None = None
    broker_down: bool = False
    untaken: UnservedQueues | None = None
    sent_again: tuple[str, ...] = ()
    undeliverable: tuple[Undeliverable, ...] = ()
    undeliverable_count: int = 0
    not_stored: tuple[StorageFailure, ...] = ()
    not_stored_count: int = 0
    locked: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    dropped_lately: tuple[str, ...] = ()
    foreign_sender: str | None = None
    partitions: int = 0
    backlog: BacklogStatus | None = None
    dead_letters: int = 0
    dead_letter_groups: tuple[DeadLetterGroup, ...] = ()
    oversized: str | None = None
    handlers: tuple[HandlerStatus, ...] = ()
    snapshots: tuple[SnapshotStatus, ...] = ()
    workers: Workers | None = None
    note: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst severity of the findings."""
        return verdict_of(self.findings)

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 degraded, 2 failing."""
        return EXIT_CODES[self.verdict]

    @property
    def last_snapshots(self) -> list[SnapshotStatus]:
        """The current snapshot of each handler and collection: the running one, otherwise the last one."""
        known = sorted(self.snapshots, key=lambda each: each.state == "running")
        return list({(each.handler, each.source): each for each in known}.values())

    @property
    def current_snapshots(self) -> list[SnapshotStatus]:
        """The snapshots that are running, have failed and were not replaced, or have ended within the last hour."""
        last = {each.id for each in self.last_snapshots if each.state in _CURRENT}
        return [each for each in self.snapshots if each.id in last or self._is_recent(each)]

    def _is_recent(self, snapshot: SnapshotStatus) -> bool:
        moved = snapshot.moved_at or snapshot.since
        return moved is not None and self.at is not None and self.at - moved < timedelta(hours=1)

    @property
    def is_readable(self) -> bool:
        """Return True if MongoDB could be read."""
        return self.state != "unknown"

    def plain(self) -> dict[str, Any]:
        """Return it as JSON: all fields, times in ISO 8601, and `verdict`."""
        found: dict[str, Any] = {"verdict": self.verdict, **to_plain(self)}
        return found


def unreadable(bridge: str, sentence: str) -> BridgeSnapshot:
    """Return the snapshot of a bridge whose state cannot be read: no answer, a refused login, or a missing right."""
    return BridgeSnapshot(bridge=bridge, findings=(Finding("state_unreadable", "failing", sentence),))


def to_plain(value: Any) -> Any:
    """Return a dataclass of this module, or one of its values, as JSON, with times in ISO 8601."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(each) for each in value]
    return value
