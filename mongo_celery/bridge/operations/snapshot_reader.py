"""Reading the snapshot of a bridge: its facts, shaped by pure functions, and judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from bson import Timestamp

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.identity import Identity
from mongo_celery.bridge.operations.bridge_facts import Facts, read_facts
from mongo_celery.bridge.operations.bridge_snapshot import (
    BLOCKED,
    PARTITION_STATES,
    BacklogStatus,
    BridgeSnapshot,
    ClaimStatus,
    FeedbackStatus,
    HandlerStatus,
    HistoryLoss,
    LeaderStatus,
    OplogGap,
    PartitionStatus,
    RepartitioningStatus,
    Standby,
    State,
    StorageFailure,
    StoredChanges,
    Undeliverable,
    UnservedQueues,
)
from mongo_celery.bridge.operations.broker_check import ask_servers
from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.snapshot_progress import describe_snapshot, describe_unrequested
from mongo_celery.bridge.operations.times import to_time
from mongo_celery.bridge.state.claims import describe_owner
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.subscriptions import parse_lost_history, parse_name, parse_position
from mongo_celery.command_line import CommandLine
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

GLANCE_SECONDS = 0.3
"""Seconds for counting stored changes in a view that reads repeatedly: a page, `--watch`, probes, metrics."""

LOOK_SECONDS = 2.0
"""Seconds for counting stored changes in a command."""

_LATELY_SECONDS = 3600
_ENDED_WITH_ERROR: Mapping[str, State] = {"failed": "failed", "history_lost": "history_lost"}


def read_snapshot(
    wiring: Wiring,
    line: CommandLine | None = None,
    *,
    ask: bool = False,
    counting: float = GLANCE_SECONDS,
) -> BridgeSnapshot:
    """
    Read a bridge, and judge it. Errors as in `read_facts`.

    Args:
        line: the beginning of commands in findings.
        ask: True to also query broker and workers, for some seconds.
        counting: as in `read_facts`.
    """
    line = line or wiring.line
    found = shape(read_facts(wiring, counting))
    if not ask:
        return judge(found, line)
    workers, findings = ask_servers(wiring, line)
    return judge(replace(found, workers=workers), line, findings)


# -- shaping ---------------------------------------------------------------------------------------


def shape(facts: Facts) -> BridgeSnapshot:
    """Shape a snapshot from facts, without findings."""
    lease, report, led = facts.lease or {}, facts.report, facts.is_led
    handlers = _shape_handlers(facts)
    known = [each for each in handlers if each.is_registered]
    rates = [each.per_second for each in known if each.per_second is not None]
    partitions = [each for handler in known for each in handler.partitions]
    unread, untaken = report.get("unreadSeconds"), report.get("untaken")
    age = timedelta(milliseconds=max(lease.get("reportAge") or 0, 0))
    seen = BridgeSnapshot(
        bridge=facts.options.name,
        at=to_time(facts.now),
        state=_find_state(lease, led=led),
        error=None if led else lease.get("error"),
        leader=_shape_leader(lease, facts.identity) if led else None,
        standbys=tuple(Standby(host=str(each["host"]), pid=int(each["pid"])) for each in lease.get("standbys", ())),
        # By the server's clock: without a listener there may be no write, and the operation time does not advance.
        unled_seconds=None if led or lease.get("renewedAge") is None else max(int(lease["renewedAge"]) // 1000, 0),
        term=int(lease.get("term", 0)),
        difference=facts.identity.difference(lease.get("identity")) if facts.identity is not None else None,
        lag_seconds=_largest(each.lag_seconds for each in known),
        per_second=round(sum(rates), 1) if rates else None,
        oplog_seconds=facts.oplog.window_seconds if facts.oplog is not None else None,
        in_flight=report.get("inFlight", sum(each.live or each.handled is not None for each in facts.images)),
        buffered=report.get("buffered", None if led else 0),
        # A partition was just read, but the report is some seconds old.
        caught_up=_is_idle(report)
        and not any(each.is_blocked or each.stored or each.is_running for each in partitions),
        reported_at=facts.now.as_datetime() - age if report else None,
        unread_seconds=unread + age.seconds if unread else unread,
        reading_waits=report.get("readingWaits"),
        broker_down=report.get("brokerDown", False),
        untaken=UnservedQueues(**{**untaken, "queues": tuple(untaken["queues"])}) if untaken else None,
        sent_again=tuple(report.get("sentAgain", ())),
        undeliverable=tuple(Undeliverable(**_parse_reported(each)) for each in report.get("rejected", ())),
        undeliverable_count=report.get("rejectedCount", 0),
        not_stored=tuple(StorageFailure(**_parse_reported(each)) for each in report.get("notStored", ())),
        not_stored_count=report.get("notStoredCount", 0),
        locked=tuple(report.get("locked", ())),
        dropped={reason: int(count) for reason, count in (lease.get("dropped") or {}).items()},
        dropped_lately=tuple(
            reason
            for reason, at in sorted((lease.get("droppedAt") or {}).items())
            if (_age(to_time(at), facts.now) or 0) < _LATELY_SECONDS
        ),
        foreign_sender=lease.get("foreignSender"),
        partitions=facts.options.partitions,
        backlog=_shape_backlog(facts),
        dead_letters=sum(facts.dead_letters.values()),
        dead_letter_groups=facts.dead_letter_groups,
        oversized=facts.oversized,
        handlers=handlers,
    )
    tried = {each["id"]: f"tried {each['attempts']} times: {each['error']}" for each in report.get("snapshots", ())}
    waiting = [describe_unrequested(each) for each in report.get("unrequestedSnapshots", ())]
    others = [describe_snapshot(each, seen, tried.get(each.id)) for each in facts.snapshots]
    return replace(seen, snapshots=(*waiting, *others))


def _is_idle(report: Mapping[str, Any]) -> bool:
    """Return True if the listener has read everything, and nothing waits or runs."""
    return bool(report.get("caughtUp")) and not report.get("buffered") and not report.get("inFlight")


def _find_state(lease: Mapping[str, Any], *, led: bool) -> State:
    if led:
        return "leading"
    ended = _ENDED_WITH_ERROR.get(str(lease.get("state")))
    if not lease.get("term") or (ended is None and not lease.get("renewedAt")):  # the first listener will soon lead
        return "never_started"
    return ended or "no_listener"


def _shape_leader(lease: Mapping[str, Any], mine: Identity | None) -> LeaderStatus:
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


def _shape_backlog(facts: Facts) -> BacklogStatus:
    taken = facts.report.get("storedBytes")
    limit = facts.report.get("storedLimit", facts.options.spill_bytes)
    return BacklogStatus(
        count=_sum_stored(facts, facts.images),
        bytes=taken,
        limit=limit,
        share=None if taken is None else round(taken / limit, 3),
        waits=facts.report.get("storingWaits"),
    )


def _sum_stored(facts: Facts, images: Sequence[Image]) -> int | None:
    """Sum the stored changes of partitions. None if some could not be counted."""
    counts = [facts.stored.get((each.subscription, each.index)) for each in images if each.stored]
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None


def _shape_handlers(facts: Facts) -> tuple[HandlerStatus, ...]:
    documents = {parse_name(document): document for document in facts.subscriptions}
    images: dict[str, list[Image]] = {}
    for each in sorted(facts.images, key=lambda image: image.index):
        images.setdefault(each.subscription, []).append(each)
    return tuple(
        _shape_handler(facts, name, documents.get(name, {}), images.get(name, []))
        for name in sorted({*documents, *facts.registered})
    )


def _shape_handler(facts: Facts, name: str, document: Mapping[str, Any], images: Sequence[Image]) -> HandlerStatus:
    report, mine = facts.report, facts.registered.get(name)
    partitions = tuple(_shape_partition(facts, image) for image in images)
    position, lost = parse_position(document), parse_lost_history(document)
    refused, stopped = facts.find_reported("refusedMatches", name), facts.find_reported("stopped", name)
    moving, fed_back = facts.find_reported("repartitioning", name), facts.find_reported("fedBack", name)
    delayed = facts.find_reported("delayed", name)
    # A report describes only the handlers of its own term.
    is_led = mine is not None and document.get("term") == (facts.lease or {}).get("term") and not (refused or stopped)
    behind = 0 if _is_idle(report) and is_led and not lost else _age(position, facts.now)
    states = {each.state for each in partitions} or {"flowing" if facts.is_handler_led(name) else "not_led"}
    state = min(states, key=PARTITION_STATES.index)
    for is_so, wins in (
        (lost, "history_lost"),
        (not document, "new"),
        (mine is None, "unregistered"),
        (refused, "match_refused"),
        (stopped, "stopped"),
    ):
        state = wins if is_so else state
    return HandlerStatus(
        name=name,
        state=state,
        error=stopped["reason"] if stopped else refused["error"] if refused else None,
        committed=sum(each.committed for each in partitions),
        per_second=(report.get("rates") or {}).get(name),
        lag_seconds=_largest([behind, *(each.oldest_seconds for each in partitions)]),
        watermark=token_data(document["resumeToken"]) if document.get("resumeToken") else None,
        watermark_at=to_time(document.get("clusterTime")),
        oplog_left_seconds=None
        if facts.oplog is None or behind is None
        else max(facts.oplog.window_seconds - behind, 0),
        oplog_share=None
        if position is None or facts.oplog is None or not facts.oplog_rolls
        else round(facts.oplog.lag_share(position), 3),
        stored=_sum_stored(facts, images),
        dead_letters=facts.dead_letters.get(name, 0),
        parked_keys=sum(each.parked_keys for each in partitions),
        commit=mine.commit if mine is not None else None,
        time_limit=mine.time_limit if mine is not None else None,
        max_running=mine.max_running if mine is not None else None,
        rate=mine.rate if mine is not None else None,
        limited=(report.get("limited") or {}).get(name, 0),
        lost=HistoryLoss(
            **{each: to_time(lost.get(each)) for each in ("since", "at", "oldest")}, error=lost.get("error")
        )
        if lost
        else None,
        gaps=tuple(
            OplogGap(start=to_time(gap.get("from")), until=to_time(gap.get("until")), policy=gap.get("policy"))
            for gap in document.get("gaps", ())
        ),
        repartitioning=RepartitioningStatus(**_parse_reported(moving)) if moving else None,
        feedback=FeedbackStatus(**_parse_reported(fed_back)) if fed_back else None,
        delay_seconds=mine.longest_delay if mine is not None else 0.0,
        delayed=delayed["partitions"] if delayed else 0,
        delayed_until=to_time(delayed["until"]) if delayed else None,
        partitions=partitions,
    )


def _shape_partition(facts: Facts, image: Image) -> PartitionStatus:
    place = image.subscription, image.index
    state, head, waiting, stored = visible_state(image), image.head, image.waiting or {}, image.stored
    first_token, key = facts.first.get(place, (None, None))
    token = first_token if state in ("retrying", "waiting") else None
    if head is not None:
        first_token = token = token_data(head["resumeToken"])
        key = head["key"]
    began = time_of_token({"_data": first_token}, None) if first_token else None
    mine = facts.registered.get(image.subscription)
    return PartitionStatus(
        partition=image.index,
        queue=facts.options.queue_name(image.index, mine.group if mine is not None else None),
        state="not_led" if state == "flowing" and not facts.is_handler_led(image.subscription) else state,
        committed=int(image.committed),
        token=image.data or None,
        fencing_token=int(image.fencing_token),
        claim=_shape_claim(image, facts.now),
        handled=int(image.handled["last"]) if image.handled else None,
        key=key if token else None,
        key_token=token,
        since=to_time(waiting.get("since") if head is None else head.get("at")),
        error=waiting.get("cause") or image.error or None,
        retries=int(image.retries),
        crashes=int(image.crashes),
        waits=int(waiting.get("count", 0)),
        due_seconds=max(image.due_in, 0.0) if state in BLOCKED else 0.0,
        oldest_seconds=_age(began or to_time((stored or {}).get("since")), facts.now),
        stored=StoredChanges(
            count=facts.stored.get(place),
            since=to_time(stored["since"]),
            reason=stored["reason"],
            to=stored["to"],
            missing=place in facts.missing or f"{place[0]}/{place[1]}" in facts.report.get("storedMissing", ()),
        )
        if stored
        else None,
        parked_keys=image.parked_keys,
    )


def _shape_claim(image: Image, now: Timestamp) -> ClaimStatus | None:
    claim = image.claim
    if claim is None:
        return None
    read_at = to_time(image.read_at) or now.as_datetime()  # `now` of an idle cluster may be some seconds old
    return ClaimStatus(
        owner=claim["owner"],
        process=describe_owner(str(claim["owner"])),
        seconds=_age(to_time(claim.get("at")), Timestamp(read_at, 1)),
        first=int(claim["first"]),
        last=int(claim["last"]),
        until=to_time(claim["until"]),
        live=image.live,
    )


def _age(moment: Timestamp | datetime | None, now: Timestamp) -> int | None:
    if moment is None:
        return None
    return max(0, now.time - (moment.time if isinstance(moment, Timestamp) else int(moment.timestamp())))


def _parse_reported(reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one part of the listener's report, without its handler."""
    plain = {name: value for name, value in reported.items() if name != "subscription"}
    return {**plain, "since": to_time(reported["since"])}


def _largest(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)
