"""
The snapshot of a bridge: one typed value of everything that is shown of it.

`changes status`, the page, `/status`, metrics, probes, Django's admin and Python code render it, and none of them
computes. `BridgeSnapshot.plain` is `--json` and `/status`. docs/reference/status.md lists every field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from typing import Any, Literal

from mongo_celery.findings import Finding, Severity, worst_severity

State = Literal["leading", "no_listener", "never_started", "failed", "history_lost", "unknown"]
Verdict = Literal["healthy", "degraded", "failing"]

BLOCKED = ("halted", "paused", "waiting", "retrying")
"""States of a partition whose next change cannot run now, the worst first."""

PARTITION_STATES = (*BLOCKED, "not_led", "flowing")
"""States of a partition, the worst first."""

_VERDICTS: Mapping[Severity, Verdict] = {"ok": "healthy", "degraded": "degraded", "failing": "failing"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderStatus:
    """
    The listener that leads.

    Attributes:
        host: its machine.
        pid: its process there.
        since: when its term began.
        app: name of its Celery app.
        handlers: names of the handlers that it serves.
        changed: those of them that have another definition in this process.
        partitions: over how many it spreads new handlers. None before its first report.
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
    """A listener that waits for the lease: its host and process, as it last reported itself."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimStatus:
    """
    The claim of an execution on a partition.

    Attributes:
        owner: made for this execution.
        process: the worker's process, for people.
        seconds: how long the claim has been held.
        first: number of its first change in the partition.
        last: number of its last change.
        until: when it lapses, unless the worker renews it.
        live: whether it has not lapsed.
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
    The changes of a partition that are stored.

    Attributes:
        count: None where counting took too long.
        since: when the first of them was stored.
        reason: why storing began.
        to: resume token of the last one.
        missing: whether the listener cannot find them.
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
        index: its number.
        queue: the Celery queue to which its runs are sent.
        state: `flowing`; `halted`, `paused`, `waiting` (for MongoDB or the broker) or `retrying` where it is blocked;
            `not_led` where it would flow if a listener were running.
        committed: number of the last change that is committed.
        token: resume token of that change.
        term: of the listener that led it last.
        fencing_token: of its last execution.
        claim: of the execution that runs, or has ended without a result.
        handled: number of the last change that succeeded, and is not committed yet.
        key: the change at which it is blocked: namespace, operation and document key. None where it is not known.
        key_token: resume token of that change.
        since: since when it is halted, or waits.
        error: of the last attempt, or what it waits for.
        retries: attempts after which the handler asked for another one.
        crashes: attempts that ended without a result.
        waits: attempts that met an outage of MongoDB or the broker.
        due_seconds: until its change runs again. 0 where it is not retrying or waiting.
        oldest_seconds: age of the change at which it is blocked, or of the first one that is stored. Else None.
        stored: its stored changes. None where there are none.
        parked_keys: how many keys are parked.
    """

    index: int
    queue: str
    state: str
    committed: int
    token: str | None
    term: int
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
        """Return True if its next change cannot run now."""
        return self.state in BLOCKED

    @property
    def is_running(self) -> bool:
        """Return True if a worker handles its changes at this moment."""
        return self.handled is not None or (self.claim is not None and self.claim.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLoss:
    """
    A position that the oplog no longer reaches.

    Attributes:
        since: when the listener noticed it.
        at: the position.
        oldest: the oplog's oldest entry at that time.
        error: the server's sentence.
    """

    since: datetime | None
    at: datetime | None
    oldest: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OplogGap:
    """Changes from `start` until `until` that a handler was never given; `policy` is the decision that passed over."""

    start: datetime | None
    until: datetime | None
    policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepartitioningStatus:
    """New partitions that a handler is to get: how many, since when, and the thing that it `waits` for."""

    partitions: int
    since: datetime | None
    waits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackStatus:
    """Changes of one `key` in a row, each written while the one before was handled; `count` is rounded down."""

    key: str
    count: int
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerStatus:
    """
    One handler.

    Attributes:
        name: of the handler.
        state: that of its worst partition. Or `new` (no listener has led it yet), `unregistered` (it is stored, and
            this app has no such handler), `history_lost`, `stopped` or `match_refused` (`error` says why).
        error: why it is stopped, or why the server refuses its `match`.
        committed: sum of its partitions.
        per_second: changes that are committed a second, over the last seconds. None without a listener.
        lag_seconds: age of its oldest change that is not handled, also of what is blocked or stored. 0 where nothing
            is left to do.
        watermark: resume token up to which all is done.
        watermark_at: time of that.
        oplog_left_seconds: until the oplog no longer reaches the watermark. None where the oplog cannot be read.
        oplog_share: share of the oplog's window behind the watermark. From 1 on, what was not read is lost. None while
            the oplog removes nothing.
        stored: how many of its changes are stored. None where counting took too long.
        dead_letters: how many it has.
        parked_keys: sum of its partitions.
        commit: `chain` (a task commits) or `inline` (the execution commits). None where it is `unregistered`.
        time_limit: seconds after which Celery ends a call. None where nothing does.
        run_gain: what `run_size` would bring, as a sentence. None where that is little.
        partitioning_term: term of the partitioning in force. None where it is `new`.
        lost: where its history is lost.
        gaps: what it was never given.
        repartitioning: while new partitions are prepared.
        feedback: where it seems to feed itself.
        partitions: those of the partitioning in force.
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
    run_gain: str | None = None
    partitioning_term: int | None = None
    lost: HistoryLoss | None = None
    gaps: tuple[OplogGap, ...] = ()
    repartitioning: RepartitioningStatus | None = None
    feedback: FeedbackStatus | None = None
    partitions: tuple[PartitionStatus, ...] = ()

    @property
    def is_registered(self) -> bool:
        """Return True if this process has the handler."""
        return self.state != "unregistered"

    @property
    def is_given_changes(self) -> bool:
        """Return True if the listener reads changes for it."""
        return self.state not in ("stopped", "match_refused", "history_lost")

    def list_in(self, *states: str) -> list[PartitionStatus]:
        """Return its partitions in these states."""
        return [each for each in self.partitions if each.state in states]


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogStatus:
    """
    All stored changes of a bridge.

    Attributes:
        count: None where counting took too long.
        bytes: as the listener has measured. None without one.
        limit: `spill_bytes`.
        share: `bytes` of `limit`.
        waits: why something is not stored that should be.
    """

    count: int | None
    bytes: int | None
    limit: int
    share: float | None
    waits: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeliverable:
    """A message that the broker rejects while it takes others: its partition, change, bytes, error and since when."""

    partition: str
    key: str
    bytes: int
    error: str
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFailure:
    """A partition whose changes MongoDB does not store: the error and since when."""

    partition: str
    error: str
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnservedQueues:
    """
    Queues from which no worker has taken anything for longer than `dispatch_grace`.

    Attributes:
        queues: their names.
        answered: whether workers answered the listener. None where it could not ask.
        unclaimed: whether workers take messages, and claim nothing.
    """

    queues: tuple[str, ...]
    answered: bool | None
    unclaimed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """Dead letters of one handler with the same error: how many of the newest ones, and the newest of them."""

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
        id: for `changes snapshot`.
        source: the collection.
        state: `running`, `done`, `source gone`, `stopped` or `failed`.
        done: documents that were read.
        estimated: documents that there were at the start. None where nobody could tell.
        per_second: documents a second, over all of it.
        remaining_seconds: None where that is not known, or it does not move.
        since: when it was requested.
        by: who requested it.
        reason: why it has failed, or what it waits for.
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
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """
    The workers that answered.

    Attributes:
        answered: how many.
        serving: how many of them consume queues of this bridge.
        slots: how many tasks these can run at a time. None where one does not say so.
    """

    answered: int
    serving: int
    slots: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSnapshot:
    """
    A bridge at one moment.

    Attributes:
        bridge: its name.
        at: when it was read, by the cluster's clock. None where nothing could be read.
        state: `leading`; `no_listener`; `never_started`; `failed` or `history_lost` (the last listener ended with
            `error`); `unknown` where MongoDB cannot be read.
        error: why the last listener ended.
        leader: the listener that leads.
        standbys: listeners that wait for the lease.
        unled_seconds: for how long no listener has been running.
        term: number of the last term.
        difference: why this bridge is that of another app or environment than this process.
        lag_seconds: the largest of the registered handlers: age of the oldest change that is not handled.
        per_second: sum of the handlers.
        oplog_seconds: from the oplog's oldest entry to its latest. None where it cannot be read.
        in_flight: runs that were sent, and are not finished.
        buffered: changes in the listener's memory. None where a new listener has not reported yet.
        buffered_bytes: bytes of these.
        caught_up: whether everything is read, nothing waits, is blocked or runs, and nothing is left to do.
        reported_at: when the listener that leads has said so. None where it has not reported yet.
        unread_seconds: for how long no read of the stream has succeeded. 0 while one does every few seconds.
        reading_waits: why: a full buffer, or the stream's last error.
        reopenings: how often the stream was opened again in this term.
        broker_down: whether the listener cannot publish.
        untaken: queues that no worker takes from.
        undeliverable: some messages that the broker rejects.
        undeliverable_count: how many there are.
        not_stored: some partitions whose changes MongoDB does not store.
        not_stored_count: how many there are.
        locked: some partitions that an open transaction has locked, so that this term could not win them yet.
        dropped: how many messages workers have dropped since the bridge exists, by reason.
        dropped_lately: the reasons for which one was dropped within the last hour.
        foreign_sender: `pid@host` of the last dropped message of another installation, as it says itself.
        partitions: over how many this process would spread new handlers.
        backlog: all stored changes.
        dead_letters: how many there are.
        dead_letter_groups: the newest 1000 by handler and error, the largest group first.
        oversized: the error of one dead letter whose change was too large to be read.
        handlers: by name.
        snapshots: those that run, have failed, or have ended within the last hour.
        workers: None where they were not asked.
        note: what was not asked, and the command that does.
        findings: problems, the worst first. Empty where the bridge is healthy.
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
    buffered_bytes: int | None = None
    caught_up: bool = False
    reported_at: datetime | None = None
    unread_seconds: int | None = None
    reading_waits: str | None = None
    reopenings: int | None = None
    broker_down: bool = False
    untaken: UnservedQueues | None = None
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
        return _VERDICTS[worst_severity(self.findings)]

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 degraded, 2 failing."""
        return EXIT_CODES[self.verdict]

    @property
    def is_readable(self) -> bool:
        """Return True if MongoDB could be read."""
        return self.state != "unknown"

    def plain(self) -> dict[str, Any]:
        """Return it as JSON: all fields, times in ISO 8601, and `verdict`."""
        found: dict[str, Any] = {"verdict": self.verdict, **to_plain(self)}
        return found


EXIT_CODES: Mapping[Verdict, int] = {"healthy": 0, "degraded": 1, "failing": 2}
"""Exit status of the commands that show a verdict."""


def unreadable(bridge: str, sentence: str) -> BridgeSnapshot:
    """Return the snapshot of a bridge whose state cannot be read: no answer, a refused login, or a missing right."""
    return BridgeSnapshot(bridge=bridge, findings=(Finding("state_unreadable", "failing", sentence),))


def to_plain(value: Any) -> Any:
    """Return a dataclass of this module, or what it holds, as JSON: times in ISO 8601."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(each) for each in value]
    return value
