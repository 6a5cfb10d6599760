"""
Reading the snapshot of a bridge: a few majority reads, then pure functions that shape them.

The stored positions are facts. What only the listener knows (its buffer, and whether it has read everything) comes from
the report that it leaves in the lease. That counts only while its lease is live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.handlers import token_seconds
from mongo_celery.bridge.identity import Identity, build_identity
from mongo_celery.bridge.listener.activity import read_times
from mongo_celery.bridge.operations.bridge_snapshot import (
    BLOCKED,
    PARTITION_STATES,
    BacklogStatus,
    BridgeSnapshot,
    ClaimStatus,
    DeadLetterGroup,
    FeedbackStatus,
    HandlerStatus,
    HistoryLoss,
    LeaderStatus,
    OplogGap,
    PartitionStatus,
    RepartitioningStatus,
    SnapshotStatus,
    Standby,
    State,
    StorageFailure,
    StoredChanges,
    Undeliverable,
    UnservedQueues,
)
from mongo_celery.bridge.operations.broker_check import ask_servers
from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.run_gain import run_gain
from mongo_celery.bridge.operations.snapshot_progress import snapshots_shown, surroundings
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.backlog import Backlog
from mongo_celery.bridge.state.claims import describe_owner
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import (
    Layout,
    layouts_in_force,
    parse_lost_history,
    parse_name,
    parse_position,
)
from mongo_celery.bridge.worker.limits import time_limit
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import open_session, to_user_error
from mongo_celery.mongo.oplog import Oplog, operation_time, oplog_fill, oplog_or_none, time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

GLANCE_SECONDS = 0.3
"""Time for counting stored changes, of a view that reads again and again: a page, `--watch`, probes, metrics."""

LOOK_SECONDS = 2.0
"""Time for counting stored changes, of a command."""

_READ_SECONDS = 10.0
_KEYS_MAX = 10
"""Partitions whose change is looked up for each snapshot: an event may be large."""
_OLDEST_MAX = 32
"""Partitions whose oldest stored change is looked up for each snapshot, by the index alone."""
_GROUPED = 1000
_ERROR_CHARS = 200
_LATELY_SECONDS = 3600
_ENDED_WITH_ERROR: Mapping[str, State] = {"failed": "failed", "history_lost": "history_lost"}

Place = tuple[str, int]
"""A handler, and the index of one of its partitions."""


@dataclass(frozen=True, slots=True)
class Facts:
    """
    One reading of a bridge's state.

    Attributes:
        registered: names of the handlers of this process's app.
        lease: the lease with the server's verdict `live`, or None before the first start.
        subscriptions: all stored handlers, registered or not.
        images: the partitions of the partitionings in force.
        dead_letters: their number by handler.
        now: the cluster's latest operation time.
        oplog: the times of its oldest and latest entry; None where they cannot be read.
        oplog_rolls: whether its oldest entries are being removed.
        stored: how many changes are stored of partitions, as far as they were counted.
        groups: the group of each registered handler.
        heads: the changes at which retrying and waiting partitions are blocked, as far as they were looked up.
        oldest: token of the first stored change, of the partitions that have waited longest.
        missing: partitions whose stored changes are gone.
        time_limits: of the registered handlers, seconds after which Celery ends them.
        without_runs: the registered handlers that `run_size` is not for.
        commits: `chain` or `inline`, of the registered handlers.
        identity: of the bridge in this process. None where a source cannot work.
        line: beginning of the commands that are printed.
    """

    options: BridgeOptions
    registered: tuple[str, ...]
    lease: Mapping[str, Any] | None
    subscriptions: Sequence[Mapping[str, Any]]
    images: Sequence[Image]
    dead_letters: Mapping[str, int]
    now: Timestamp
    oplog: Oplog | None
    oplog_rolls: bool = False
    stored: Mapping[Place, int] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    groups: Mapping[str, str | None] = field(default_factory=dict)
    heads: Mapping[Place, tuple[str, str]] = field(default_factory=dict)
    oldest: Mapping[Place, str] = field(default_factory=dict)
    missing: frozenset[Place] = frozenset()
    time_limits: Mapping[str, float | None] = field(default_factory=dict)
    snapshots: Sequence[Snapshot] = ()
    without_runs: frozenset[str] = frozenset()
    commits: Mapping[str, str] = field(default_factory=dict)
    dead_letter_groups: tuple[DeadLetterGroup, ...] = ()
    oversized: str | None = None
    identity: Identity | None = None
    line: CommandLine = ANY_APP

    @property
    def is_led(self) -> bool:
        """Return True if a listener holds the lease."""
        lease = self.lease or {}
        return bool(lease.get("live")) and lease.get("listenerId") is not None

    @property
    def report(self) -> Mapping[str, Any]:
        """The report of the term that leads: an acquisition clears its predecessor's."""
        return (self.is_led and (self.lease or {}).get("report")) or {}


def read_snapshot(
    wiring: Wiring,
    line: CommandLine | None = None,
    *,
    ask: bool = False,
    counting: float = GLANCE_SECONDS,
    groups: bool = True,
) -> BridgeSnapshot:
    """
    Read a bridge, and judge it.

    Not promised: one moment. The reads follow each other within milliseconds.

    Args:
        line: beginning of the commands that findings print.
        ask: ask broker and workers, too, for some seconds.
        counting: seconds that counting stored changes may take.
        groups: read dead letters, too, and group them.

    Raises:
        ServerUnavailableError: MongoDB did not answer.
        DeploymentError: it cannot serve a bridge, or a right is missing.
    """
    line = line or wiring.line
    found = read_unjudged(wiring, line, counting, groups=groups)
    if not ask:
        return judge(found, line)
    workers, findings = ask_servers(wiring)
    return judge(replace(found, workers=workers), line, findings)


def read_unjudged(wiring: Wiring, line: CommandLine, counting: float, *, groups: bool = True) -> BridgeSnapshot:
    """Read a bridge, without findings. Arguments and errors as of `read_snapshot`."""
    client = wiring.reach()
    try:
        with pymongo.timeout(_READ_SECONDS):  # also where the primary goes away between two reads
            return shape(_read_facts(client, wiring, line, counting, groups=groups))
    except PyMongoError as error:
        raise to_user_error(error, wiring.state_concern) from error


def _read_facts(
    client: MongoClient[dict[str, Any]], wiring: Wiring, line: CommandLine, counting: float, *, groups: bool
) -> Facts:
    options, store, handlers = wiring.options, wiring.store, wiring.handlers
    lease = store.leases.read()
    subscriptions = store.subscriptions.read_all()
    layouts = layouts_in_force(subscriptions)
    images = store.partitions.of({name: layout.term for name, layout in layouts.items()})
    oplog = oplog_or_none(client)
    dead_letters = store.dead_letters.count()
    marked = {
        (each.subscription, each.index): (
            store.partitions.partition_id(each.subscription, layouts[each.subscription].term, each.index),
            each,
        )
        for each in images
        if each.spilled
    }
    oldest, missing = _read_oldest(wiring, marked)
    return Facts(
        options=options,
        registered=tuple(each.name for each in handlers),
        groups={each.name: each.group for each in handlers},
        identity=_identity(wiring),
        line=line,
        lease=lease,
        subscriptions=subscriptions,
        images=images,
        layouts=layouts,
        dead_letters=dead_letters,
        dead_letter_groups=_group_dead_letters(store, counting) if dead_letters and groups else (),
        oversized=store.dead_letters.read_oversized_error() if dead_letters else None,
        snapshots=store.snapshots.read(),
        without_runs=frozenset(each.name for each in handlers if not _takes_runs(wiring, each)),
        commits={each.name: "inline" if each.commits_inline(options) else "chain" for each in handlers},
        now=operation_time(client),
        oplog=oplog,
        oplog_rolls=oplog is not None and oplog.removes(oplog_fill(client)),
        stored=_count_stored(store.backlog, marked, counting),
        heads=_read_keys(store.backlog, marked),
        oldest=oldest,
        missing=missing,
        time_limits={each.name: time_limit(wiring.app.tasks.get(each.task_name)) for each in handlers},
    )


_Marked = Mapping[Place, tuple[str, Image]]
"""The partitions of which something is stored, with their `_id`s."""


def _identity(wiring: Wiring) -> Identity | None:
    try:
        return build_identity(wiring)
    except ConfigurationError:  # `check` names the source that cannot work
        return None


def _takes_runs(wiring: Wiring, handler: Handler) -> bool:
    return handler.takes_runs(is_rate_limited=token_seconds(wiring.app, handler.task_name) > 0)


def _group_dead_letters(store: Store, seconds: float) -> tuple[DeadLetterGroup, ...]:
    """Group the newest dead letters by handler and error. Empty where the time did not suffice."""
    groups: dict[tuple[str, str], DeadLetterGroup] = {}
    try:
        with pymongo.timeout(seconds):
            for each in store.dead_letters.list_errors(_GROUPED):
                error = " ".join(str(each.get("error") or "no error is recorded").split())[:_ERROR_CHARS]
                where = str(each.get("handler")), error
                found = groups.get(where)
                if found is None:  # the newest come first
                    name = token_data(each["resumeToken"]) if each.get("resumeToken") else str(each["_id"])
                    found = DeadLetterGroup(
                        handler=where[0], error=error, count=0, newest_at=to_time(each.get("at")), newest_id=name
                    )
                groups[where] = replace(found, count=found.count + 1)
    except PyMongoError as error:
        if not error.timeout:
            raise
        return ()
    return tuple(sorted(groups.values(), key=lambda each: -each.count))


def _count_stored(backlog: Backlog, marked: _Marked, seconds: float) -> dict[Place, int]:
    """Count stored changes; without the partitions for which the time did not suffice."""
    counts: dict[Place, int] = {}
    try:
        with pymongo.timeout(seconds):
            for place, (partition_id, image) in marked.items():
                counts[place] = backlog.count(partition_id, image.data, (image.spilled or {})["to"])
    except PyMongoError as error:
        if not error.timeout:
            raise
    return counts


def _read_keys(backlog: Backlog, marked: _Marked) -> dict[Place, tuple[str, str]]:
    """Read the changes of some partitions that do not know them themselves: token and key."""
    found = {}
    unknown = [place for place, (_, image) in marked.items() if visible_state(image) in ("retrying", "waiting")]
    for place in unknown[:_KEYS_MAX]:
        partition_id, image = marked[place]
        for change in backlog.read(partition_id, image.data, (image.spilled or {})["to"], 1):
            found[place] = change.data, describe(change.raw)
    return found


def _read_oldest(wiring: Wiring, marked: _Marked) -> tuple[dict[Place, str], frozenset[Place]]:
    """Read the first stored change of the partitions that have waited longest, and find those that have none."""
    backlog, found, missing = wiring.store.backlog, {}, set()
    longest = sorted(marked, key=lambda place: ((marked[place][1].spilled or {})["since"], place))
    for place in longest[:_OLDEST_MAX]:
        partition_id, image = marked[place]
        first = backlog.first(partition_id, image.data, (image.spilled or {})["to"])
        if first is not None:
            found[place] = first
        elif _is_bare(wiring, partition_id):
            missing.add(place)
    return found, frozenset(missing)


def _is_bare(wiring: Wiring, partition_id: str) -> bool:
    """
    Return True if nothing is stored of a partition that says so, by a session that has seen it say so.

    So no old primary can claim it. The partition is read twice, since what was stored is removed once it is committed.
    """
    store = wiring.store
    with open_session(wiring.client, causal_consistency=True) as session:
        seen = set()
        for _ in range(2):
            images = store.partitions.look([partition_id], session)
            after, to = (images[0].data, (images[0].spilled or {}).get("to", "")) if images else ("", "")
            if to <= after or store.backlog.outline(partition_id, after, to, 1, session):
                return False
            seen.add((after, to))
    return len(seen) == 1


# -- shaping ---------------------------------------------------------------------------------------


def shape(facts: Facts) -> BridgeSnapshot:
    """Shape a snapshot from facts, without findings."""
    lease, report, led = facts.lease or {}, facts.report, facts.is_led
    handlers = _handlers(facts)
    known = [each for each in handlers if each.is_registered]
    rates = [each.per_second for each in known if each.per_second is not None]
    partitions = [each for handler in known for each in handler.partitions]
    unread = report.get("unreadSeconds")
    untaken = report.get("untaken")
    return BridgeSnapshot(
        bridge=facts.options.name,
        at=to_time(facts.now),
        state=_state(lease, led=led),
        error=None if led else lease.get("error"),
        leader=_leader(lease, facts.identity) if led else None,
        standbys=tuple(Standby(host=str(each["host"]), pid=int(each["pid"])) for each in lease.get("standbys", ())),
        unled_seconds=None if led else _age(_place(lease.get("renewedAt")), facts.now),
        term=int(lease.get("term", 0)),
        difference=facts.identity.difference(lease.get("identity")) if facts.identity is not None else None,
        lag_seconds=_largest(each.lag_seconds for each in known),
        per_second=round(sum(rates), 1) if rates else None,
        oplog_seconds=facts.oplog.window_seconds if facts.oplog is not None else None,
        in_flight=report.get("outstanding", sum(each.live or each.handled is not None for each in facts.images)),
        buffered=report.get("buffered", None if led else 0),
        buffered_bytes=report.get("bufferedBytes", None if led else 0),
        # A partition is read at once, and the report is some seconds old.
        caught_up=_is_idle(report)
        and not any(each.is_blocked or each.stored or each.is_running for each in partitions),
        reported_at=_reported_at(facts) if report else None,
        unread_seconds=unread + (lease.get("reportAge") or 0) // 1000 if unread else unread,
        reading_waits=report.get("readingWaits"),
        reopenings=report.get("reopenings"),
        broker_down=report.get("brokerDown", False),
        untaken=UnservedQueues(**{**untaken, "queues": tuple(untaken["queues"])}) if untaken else None,
        undeliverable=tuple(Undeliverable(**_fields(each)) for each in report.get("rejected", ())),
        undeliverable_count=report.get("rejectedCount", 0),
        not_stored=tuple(StorageFailure(**_fields(each)) for each in report.get("notStored", ())),
        not_stored_count=report.get("notStoredCount", 0),
        locked=tuple(report.get("locked", ())),
        dropped={reason: int(count) for reason, count in (lease.get("dropped") or {}).items()},
        dropped_lately=tuple(
            reason
            for reason, at in sorted((lease.get("droppedAt") or {}).items())
            if (_age(_place(at), facts.now) or 0) < _LATELY_SECONDS
        ),
        foreign_sender=lease.get("foreignSender"),
        partitions=facts.options.partitions,
        backlog=_backlog(facts),
        dead_letters=sum(facts.dead_letters.values()),
        dead_letter_groups=facts.dead_letter_groups,
        oversized=facts.oversized,
        handlers=handlers,
        snapshots=_snapshots(facts),
    )


def _is_idle(report: Mapping[str, Any]) -> bool:
    """Return True if the listener has read everything, and nothing of it waits or runs."""
    return bool(report.get("caughtUp")) and not report.get("buffered") and not report.get("outstanding")


def _reported_at(facts: Facts) -> datetime:
    age = timedelta(milliseconds=max((facts.lease or {}).get("reportAge") or 0, 0))
    return facts.now.as_datetime() - age


def _state(lease: Mapping[str, Any], *, led: bool) -> State:
    if not lease.get("term"):
        return "never_started"
    return "leading" if led else _ENDED_WITH_ERROR.get(str(lease.get("state")), "no_listener")


def _leader(lease: Mapping[str, Any], mine: Identity | None) -> LeaderStatus:
    identity = lease.get("identity") or {"app": None, "handlers": {}}
    return LeaderStatus(
        host=lease.get("host"),
        pid=lease.get("pid"),
        since=to_time(lease.get("acquiredAt")),
        app=identity["app"],
        handlers=tuple(sorted(identity["handlers"])),
        changed=tuple(mine.find_changed_handlers(identity)) if mine is not None else (),
        partitions=(lease.get("report") or {}).get("partitions"),
    )


def _backlog(facts: Facts) -> BacklogStatus:
    taken = facts.report.get("spilledBytes")
    limit = facts.report.get("spillLimit", facts.options.spill_bytes)
    return BacklogStatus(
        count=_count(facts, facts.images),
        bytes=taken,
        limit=limit,
        share=None if taken is None else round(taken / limit, 3),
        waits=facts.report.get("spillWaits"),
    )


def _count(facts: Facts, images: Sequence[Image]) -> int | None:
    """Sum the stored changes of partitions. None where they could not all be counted."""
    counts = [facts.stored.get((each.subscription, each.index)) for each in images if each.spilled]
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None


def _snapshots(facts: Facts) -> tuple[SnapshotStatus, ...]:
    around = surroundings(facts.lease, facts.registered, facts.subscriptions, facts.images, facts.line)
    return snapshots_shown(facts.snapshots, facts.now, around)


def _handlers(facts: Facts) -> tuple[HandlerStatus, ...]:
    report = facts.report
    documents = {parse_name(document): document for document in facts.subscriptions}
    images: dict[str, list[Image]] = {}
    for each in sorted(facts.images, key=lambda image: image.index):
        images.setdefault(each.subscription, []).append(each)
    refused = {each["subscription"]: each["error"] for each in report.get("refusedMatches", ())}
    stopped = {each["subscription"]: each["reason"] for each in report.get("stopped", ())}
    apart = {
        **{name: ("match_refused", error) for name, error in refused.items()},
        **{name: ("stopped", error) for name, error in stopped.items()},
    }
    return tuple(
        _handler(facts, name, documents.get(name, {}), images.get(name, []), apart.get(name))
        for name in sorted({*documents, *facts.registered})
    )


def _handler(
    facts: Facts, name: str, document: Mapping[str, Any], images: Sequence[Image], apart: tuple[str, str] | None
) -> HandlerStatus:
    report, layout = facts.report, facts.layouts.get(name)
    partitions = tuple(_partition(facts, image) for image in images)
    lost = parse_lost_history(document)
    # A report speaks for the handlers of its own term.
    is_led = name in facts.registered and document.get("term") == (facts.lease or {}).get("term") and apart is None
    behind = 0 if _is_idle(report) and is_led and not lost else _age(parse_position(document), facts.now)
    moving = next((each for each in report.get("moving", ()) if each["subscription"] == name), None)
    fed_back = next((each for each in report.get("fedBack", ()) if each["subscription"] == name), None)
    is_registered = name in facts.registered
    return HandlerStatus(
        name=name,
        state=apart[0] if apart else _handler_state(facts, document, partitions, is_registered=is_registered),
        error=apart[1] if apart else None,
        committed=sum(each.committed for each in partitions),
        per_second=(report.get("rates") or {}).get(name),
        lag_seconds=_largest([behind, *(each.oldest_seconds for each in partitions)]),
        watermark=token_data(document["resumeToken"]) if document.get("resumeToken") else None,
        watermark_at=to_time(document.get("clusterTime")),
        oplog_left_seconds=None
        if facts.oplog is None or behind is None
        else max(facts.oplog.window_seconds - behind, 0),
        oplog_share=_oplog_share(facts, parse_position(document)),
        stored=_count(facts, images),
        dead_letters=facts.dead_letters.get(name, 0),
        parked_keys=sum(each.parked_keys for each in partitions),
        commit=facts.commits.get(name),
        time_limit=facts.time_limits.get(name),
        run_gain=_run_gain(facts, name, images) if is_registered else None,
        partitioning_term=int(layout.term) if layout else None,
        lost=_loss(lost) if lost else None,
        gaps=tuple(
            OplogGap(start=to_time(gap.get("from")), until=to_time(gap.get("until")), policy=gap.get("policy"))
            for gap in document.get("gaps", ())
        ),
        repartitioning=RepartitioningStatus(**_fields(moving)) if moving else None,
        feedback=FeedbackStatus(**_fields(fed_back)) if fed_back else None,
        partitions=partitions,
    )


def _loss(lost: Mapping[str, Any]) -> HistoryLoss:
    since, at, oldest = (to_time(lost.get(name)) for name in ("since", "at", "oldest"))
    return HistoryLoss(since=since, at=at, oldest=oldest, error=lost.get("error"))


def _handler_state(
    facts: Facts, document: Mapping[str, Any], partitions: Sequence[PartitionStatus], *, is_registered: bool
) -> str:
    if not is_registered:
        return "unregistered"
    if not document:
        return "new"
    if parse_lost_history(document):
        return "history_lost"
    states = {each.state for each in partitions} or {"flowing" if facts.is_led else "not_led"}
    return min(states, key=PARTITION_STATES.index)


def _oplog_share(facts: Facts, place: Timestamp | None) -> float | None:
    if place is None or facts.oplog is None or not facts.oplog_rolls:
        return None
    return round(facts.oplog.lag_share(place), 3)


def _run_gain(facts: Facts, name: str, images: Sequence[Image]) -> str | None:
    """Return what the last changes of its partitions say of runs."""
    times = [found for image in images if (found := read_times(image)) is not None]
    if not times:
        return None
    handler, whole = (median(each) for each in zip(*times, strict=True))
    gain = run_gain(handler, whole, facts.options, takes_runs=name not in facts.without_runs)
    return None if gain is None else gain.sentence


def _partition(facts: Facts, image: Image) -> PartitionStatus:
    place = image.subscription, image.index
    state = visible_state(image)
    head, waiting = image.head, image.waiting or {}
    token, key = facts.heads.get(place, (None, None))
    if head is not None:
        token, key = token_data(head["resumeToken"]), head["key"]
    since = (head or {}).get("at") if head is not None else waiting.get("since")
    return PartitionStatus(
        index=image.index,
        queue=facts.options.queue_name(image.index, facts.groups.get(image.subscription)),
        state="not_led" if state == "flowing" and not facts.is_led else state,
        committed=int(image.committed),
        token=image.data or None,
        term=int(image.term),
        fencing_token=int(image.fencing_token),
        claim=_claim(image, facts.now),
        handled=int(image.handled["last"]) if image.handled else None,
        key=key,
        key_token=token,
        since=to_time(since),
        error=waiting.get("cause") or image.error or None,
        retries=int(image.retries),
        crashes=int(image.crashes),
        waits=int(waiting.get("count", 0)),
        due_seconds=max(image.due_in, 0.0) if state in BLOCKED else 0.0,
        oldest_seconds=_age_of_oldest(facts, image),
        stored=StoredChanges(
            count=facts.stored.get(place),
            since=to_time(image.spilled["since"]),
            reason=image.spilled["reason"],
            to=image.spilled["to"],
            missing=place in facts.missing or f"{place[0]}/{place[1]}" in facts.report.get("spillMissing", ()),
        )
        if image.spilled
        else None,
        parked_keys=image.parked_keys,
    )


def _claim(image: Image, now: Timestamp) -> ClaimStatus | None:
    claim = image.claim
    if claim is None:
        return None
    read_at = _place(image.read_at) or now  # an idle cluster's latest operation may be some seconds old
    return ClaimStatus(
        owner=claim["owner"],
        process=describe_owner(str(claim["owner"])),
        seconds=_age(_place(claim.get("at")), read_at),
        first=int(claim["first"]),
        last=int(claim["last"]),
        until=to_time(claim["until"]),
        live=image.live,
    )


def _age_of_oldest(facts: Facts, image: Image) -> int | None:
    """Return the age of the first change of a partition that is blocked or stored; None where it is neither."""
    data = token_data(image.head["resumeToken"]) if image.head else facts.oldest.get((image.subscription, image.index))
    place = time_of_token({"_data": data}, None) if data else None
    return _age(place or _place((image.spilled or {}).get("since")), facts.now)


def _age(place: Timestamp | None, now: Timestamp) -> int | None:
    return None if place is None else max(0, now.time - place.time)


def _place(moment: datetime | None) -> Timestamp | None:
    return None if moment is None else Timestamp(moment if moment.tzinfo else moment.replace(tzinfo=UTC), 1)


def to_time(moment: object) -> datetime | None:
    """Return a stored moment in UTC; None for anything else that is stored."""
    if isinstance(moment, Timestamp):
        moment = moment.as_datetime()
    if not isinstance(moment, datetime):
        return None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def _fields(reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part of the listener's report, without its handler."""
    plain = {name: value for name, value in reported.items() if name != "subscription"}
    return {**plain, "since": to_time(reported["since"])}


def _largest(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)
