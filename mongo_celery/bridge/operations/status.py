"""
What `status` shows of a bridge: read in a few majority reads, then shaped by pure functions.

The stored positions are facts. What only the listener knows (how much it has buffered, whether it has
caught up) comes from the report that it leaves in the lease within a second of any change, and it counts
only while that listener's lease is live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.handlers import token_seconds
from mongo_celery.bridge.identity import Identity
from mongo_celery.bridge.listener.activity import read_times
from mongo_celery.bridge.operations.amounts import GLANCE_SECONDS
from mongo_celery.bridge.operations.run_gain import run_gain
from mongo_celery.bridge.operations.snapshot_progress import snapshots_shown
from mongo_celery.bridge.operations.snapshot_reader import Facts, read_facts
from mongo_celery.bridge.operations.snapshot_waits import surroundings
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.claims import describe_owner
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.subscriptions import (
    parse_lost_history,
    parse_name,
    parse_position,
)
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

_READ_SECONDS = 10.0
_HEADS_MAX = 10
"""Partitions whose change is looked up for each status: an event may be large."""

_FAILURES = {"failed", "history_lost"}
_OLDEST_MAX = 32
"""Partitions whose oldest stored change is looked up for each status, by the index alone."""
_WORST_FIRST = ("halted", "paused", "waiting", "retrying", "flowing")


def read_status(wiring: Wiring, counting: float = GLANCE_SECONDS) -> dict[str, Any]:
    """
    The state of a bridge as plain values that JSON can carry.

    Tokens are their `_data` strings, times ISO strings in UTC, durations seconds. Not promised: one
    snapshot; the reads follow each other within milliseconds.

    - `state`: `never_started`; `leading`; `idle` (nobody holds the lease); `failed` or `history_lost` (the
      last listener ended with `error`).
    - `at`: when it was read, by the cluster's latest operation.
    - `unled_seconds`: for how long nobody has renewed the lease, to some seconds; None while one leads, and before the
      first start.
    - `lag_seconds`: age of the oldest change that is not handled, the largest of the registered subscriptions: of what
      is stored or blocked by its own time, else from the watermark to the cluster's latest operation; 0 when the
      listener has read everything and nothing is left to do.
    - `difference`: why the bridge is that of another app or environment than this process; None where it is not.
    - `listener`: who leads, its `app` and `handlers`, and which of these have another definition in this process
      (`changed`).
    - `outstanding`, `buffered`: changes under way and waiting, from the listener's report. Without one,
      `outstanding` counts the partitions that are claimed, and `buffered` is 0 where nobody leads and None
      where a new listener has not reported yet.
    - `dropped_by_workers`: how many messages workers have dropped since the bridge exists, by reason.
    - `rejected_by_broker`: some of the messages that the broker rejects while it takes others, of
      `rejected_by_broker_count` in all: their partition, the change, its bytes, the broker's reason and since when.
    - `not_stored`: some of the partitions whose changes MongoDB does not store, of `not_stored_count` in all: its
      reason, and since when.
    - `untaken`: the `queues` of which nobody has taken anything for longer than `dispatch_grace`, as the listener has
      found by asking the workers, whether any `answered`, and whether they leave runs `unclaimed`; None where there
      are none.
    - `locked`: some of the partitions that this term could not win yet, because an open transaction has locked them.
    - `caught_up`: the listener has read to the end of the stream within the last seconds, and nothing stands.
      `standing` counts the partitions whose next change waits for a person or for its retry time.
    - `unread_seconds`: for how long no read of the stream has succeeded; 0 while one does every few seconds, None
      without a report. `reading_waits` is why: a full buffer, or the stream's last error; `reopenings` counts those of
      this term.
    - `spill`: how much is stored: the `count` of this bridge's changes (None where counting took too long), the `bytes`
      of it as the listener has measured them beside the bound (`limit`), the `share` that these are of it,
      and `waits`, why something is not stored that should be. `bytes` and `share` are None where no listener says so.
    - a partition's `oldest_seconds`: age of the change at which it is blocked, or of the first one that is stored; None
      where it is neither. Its claim's `seconds`: for how long it has been held.
    - a partition's `head`: the change at which it has halted, or is parked or waits; None where that is not known, as
      before it is stored.
    - a partition's `spilled`: the `count` of its stored changes (None where counting took too long), `since` when,
      `age_seconds`, for what `reason`, `to`, the token of the last one, and whether it is `missing`, as the listener
      finds; None where nothing is stored. A subscription's has how many `partitions` are so, and their sum.
    - `parked_keys`: how many keys are parked, in a partition and in all of a subscription: changes of theirs are set
      aside until a person releases them.
    - a subscription's `state` is that of its worst partition (`halted`, `paused`, `waiting`, `parked`,
      `flowing`, which is `not_led` where no listener is running), or `new` (registered, but no listener has led with it
      yet), or `unregistered`; `history_lost` where the oplog no longer holds its place: then `lost` says since when
      and where; `stopped` where the listener does not lead it: then `stopped` says why.
    - a subscription's `match_refused`: what the server said of its `match`, which it refuses, so that no change comes
      (`state` says so, too); else None.
    - a subscription's `fed_back`: the `key` of which `count` changes in a row (rounded down), `since` when, were
      written while the one before was handled, as if the handler wrote them itself; else None.
    - a subscription's `commit`: who writes its positions, `chain` (the commit task) or `inline` (the execution itself);
      None where it is `unregistered`.
    - a subscription's `time_limit`: seconds after which Celery ends its handler; None where nothing does in this app.
    - a subscription's `oplog_left_seconds`: what of the oplog's window lies before its watermark; None where it cannot
      be read.
    - a subscription's `partitioning_term` and `partitions` are those of its layout in force; None where it is `new`.
    - a subscription's `new_layout`: while one is being prepared, how many `partitions` it will have, since when, and
      what it `waits` for.
    - `oversized`: the error of one dead letter whose change was too large to be read; None where there is none.
    - `snapshots`: those that run, that have failed, and that have ended within the last hour: `id`, `handler`,
      `source`, `state` (`running`, `done`, `source gone`, `stopped`, `failed`), documents `done` of those `estimated`
      at the start (None where nobody could say), `rate` in documents a second, `remaining_seconds` (None where that is
      not known, or over, or something keeps it), `since` when, `by` whom, and `sentence`: why it has failed, or what
      keeps it: its handler is paused, stands in most partitions, has lost its history, waits for a new layout or is not
      in the app, nobody leads, or its last attempts have failed; else None.
    - a subscription's `run_gain`: what `run_size` would bring it, by the last change of each partition: seconds of its
      handler (`handler_seconds`) and from claim to commit (`change_seconds`), the `run_size` to set, how many times as
      many changes a partition would handle at least (`factor`), and the `sentence` that says so; None where it is
      little, or runs are in use.
    - a subscription's `oplog_share`: which share of the oplog's window lies behind it; None while the oplog removes
      nothing, or cannot be read. From 1 on, what was not read is lost.

    Args:
        counting: seconds that counting stored changes may take.

    Raises:
        ServerUnavailableError: MongoDB did not answer.
        DeploymentError: it cannot serve a bridge, or a right is missing.
    """
    client = wiring.reach()
    try:
        with pymongo.timeout(_READ_SECONDS):  # also where the primary goes away between two reads
            return shape(read_facts(client, wiring, wiring.line, counting))
    except PyMongoError as error:
        raise to_user_error(error, wiring.state_concern) from error


def shape(facts: Facts) -> dict[str, Any]:
    """The status from facts."""
    lease = facts.lease or {}
    live = _is_led(lease)
    report = _report(lease)
    around = surroundings(facts.lease, facts.registered, facts.subscriptions, facts.images, facts.line)
    subscriptions = _subscriptions(facts, report)
    lags = [each["lag_seconds"] for each in subscriptions if each["state"] != "unregistered"]
    under_way = sum(image.live or image.handled is not None for image in facts.images)
    return {
        "bridge": facts.options.name,
        "at": iso(facts.now),
        "state": _state(lease, live=live),
        "error": lease.get("error") if not live else None,
        "difference": facts.identity and facts.identity.difference(lease.get("identity")),
        "listener": _listener(lease, facts.identity) if live else None,
        "unled_seconds": None if live else _lag(_place_of(lease.get("renewedAt")), facts.now),
        "term": int(lease.get("term", 0)),
        "lag_seconds": max((lag for lag in lags if lag is not None), default=None),
        "oplog_window_seconds": facts.oplog.window_seconds if facts.oplog is not None else None,
        "started_from": iso(lease.get("startAtOperationTime")),
        "outstanding": report.get("outstanding", under_way),
        "buffered": report.get("buffered", None if live else 0),
        "buffered_bytes": report.get("bufferedBytes", None if live else 0),
        "standing": report.get("standing"),
        "caught_up": report.get("caughtUp", False),
        "broker_down": report.get("brokerDown", False),
        "untaken": report.get("untaken"),
        "rejected_by_broker": [{**each, "since": iso(each["since"])} for each in report.get("rejected", ())],
        "rejected_by_broker_count": report.get("rejectedCount", 0),
        "not_stored": [{**each, "since": iso(each["since"])} for each in report.get("notStored", ())],
        "not_stored_count": report.get("notStoredCount", 0),
        "dropped_by_workers": {reason: int(count) for reason, count in (lease.get("dropped") or {}).items()},
        "locked": list(report.get("locked", ())),
        "unread_seconds": _unread(lease, report),
        "reading_waits": report.get("readingWaits"),
        "reopenings": report.get("reopenings"),
        "spill": _spill(facts, report),
        "dead_letters": sum(facts.dead_letters.values()),
        "oversized": facts.oversized,
        "snapshots": snapshots_shown(facts.snapshots, facts.now, around),
        "subscriptions": subscriptions,
        "partitions": [
            _partition(image, facts)
            for image in sorted(facts.images, key=lambda image: (image.subscription, image.index))
        ],
    }


def _is_led(lease: Mapping[str, Any]) -> bool:
    return bool(lease.get("live")) and lease.get("listenerId") is not None


def _report(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the term that leads: an acquisition clears its predecessor's."""
    return (_is_led(lease) and lease.get("report")) or {}


def _unread(lease: Mapping[str, Any], report: Mapping[str, Any]) -> int | None:
    """What the listener said, and the time that has passed since it said so."""
    silent = report.get("unreadSeconds")
    return silent + (lease.get("reportAge") or 0) // 1000 if silent else silent


def _state(lease: Mapping[str, Any], *, live: bool) -> str:
    if not lease.get("term"):
        return "never_started"
    if live:
        return "leading"
    return str(lease["state"]) if lease.get("state") in _FAILURES else "idle"


def _listener(lease: Mapping[str, Any], mine: Identity | None) -> dict[str, Any]:
    identity = lease.get("identity") or {"app": None, "handlers": {}}
    return {
        "id": lease["listenerId"],
        "host": lease.get("host"),
        "pid": lease.get("pid"),
        "since": iso(lease.get("acquiredAt")),
        "expires": iso(lease.get("expiresAt")),
        "app": identity["app"],
        "handlers": sorted(identity["handlers"]),
        "changed": mine.find_changed_handlers(identity) if mine is not None else [],
    }


def _subscriptions(facts: Facts, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    documents = {parse_name(document): document for document in facts.subscriptions}
    idle = bool(report.get("caughtUp")) and not report.get("buffered") and not report.get("outstanding")
    version = (facts.lease or {}).get("term")
    moving = {each["subscription"]: each for each in report.get("moving", ())}
    refused = {each["subscription"]: each["error"] for each in report.get("refusedMatches", ())}
    stopped = {each["subscription"]: each["reason"] for each in report.get("stopped", ())}
    fed_back = {each["subscription"]: each for each in report.get("fedBack", ())}
    apart = {**dict.fromkeys(refused, "match_refused"), **dict.fromkeys(stopped, "stopped")}
    shaped = []
    for name in sorted({*documents, *facts.registered}):
        document = documents.get(name, {})
        images = [image for image in facts.images if image.subscription == name]
        layout = facts.layouts.get(name)
        # A report speaks for the subscriptions of its own term; an epoch shows which these are.
        lost = parse_lost_history(document)
        is_led = name in facts.registered and document.get("term") == version and name not in apart
        done = idle and is_led and not lost
        behind = 0 if done else _lag(parse_position(document), facts.now)
        ages = [behind, *(_age_of_oldest(image, facts) for image in images)]
        shaped.append(
            {
                "name": name,
                "state": apart.get(name) or _subscription_state(facts, name, document, images),
                "match_refused": refused.get(name),
                "fed_back": _fed_back(fed_back[name]) if name in fed_back else None,
                "commit": facts.commits.get(name),
                "time_limit": facts.time_limits.get(name),
                "partitioning_term": int(layout.generation) if layout else None,
                "partitions": layout.partitions if layout else None,
                "new_layout": _new_layout(moving[name]) if name in moving else None,
                "watermark": _data(document.get("resumeToken")),
                "watermark_at": iso(document.get("clusterTime")),
                "lag_seconds": max((age for age in ages if age is not None), default=None),
                "oplog_left_seconds": _oplog_left(facts, behind),
                "oplog_share": _share(facts, parse_position(document)),
                "run_gain": _run_gain(facts, name, images),
                "spilled": _sum_stored(facts, [image for image in images if image.spilled]),
                "dead_letters": facts.dead_letters.get(name, 0),
                "parked_keys": sum(image.parked_keys for image in images),
                "lost": _lost(lost) if lost else None,
                "stopped": stopped.get(name),
                "gaps": [_gap(gap) for gap in document.get("gaps", ())],
            },
        )
    return shaped


def _takes_runs(wiring: Wiring, handler: Handler) -> bool:
    return handler.takes_runs(is_rate_limited=token_seconds(wiring.app, handler.task_name) > 0)


def _run_gain(facts: Facts, name: str, images: Sequence[Image]) -> dict[str, Any] | None:
    """What the last changes of its partitions say of runs."""
    times = [found for image in images if (found := read_times(image)) is not None]
    if not times or name not in facts.registered:
        return None
    handler, whole = (median(each) for each in zip(*times, strict=True))
    gain = run_gain(handler, whole, facts.options, takes_runs=name not in facts.without_runs)
    return None if gain is None else gain.plain()


def _subscription_state(facts: Facts, name: str, document: Mapping[str, Any], images: Sequence[Image]) -> str:
    if name not in facts.registered:
        return "unregistered"
    if not document:
        return "new"
    if parse_lost_history(document):
        return "history_lost"
    states = {visible_state(image) for image in images}
    return _state_under(facts, next((state for state in _WORST_FIRST if state in states), "flowing"))


def _state_under(facts: Facts, state: str) -> str:
    """Return the state, which is `not_led` for what would flow if a listener were running."""
    return "not_led" if state == "flowing" and not _is_led(facts.lease or {}) else state


def _lag(place: Timestamp | None, now: Timestamp) -> int | None:
    return None if place is None else max(0, now.time - place.time)


def _age_of_oldest(image: Image, facts: Facts) -> int | None:
    """Return the age of the first change of a partition that is blocked or stored; None where it is neither."""
    data = token_data(image.head["resumeToken"]) if image.head else facts.oldest.get((image.subscription, image.index))
    place = time_of_token({"_data": data}, None) if data else None
    return _lag(place or _place_of((image.spilled or {}).get("since")), facts.now)


def _oplog_left(facts: Facts, behind: int | None) -> int | None:
    if facts.oplog is None or behind is None:
        return None
    return max(facts.oplog.window_seconds - behind, 0)


def _place_of(moment: datetime | None) -> Timestamp | None:
    return None if moment is None else Timestamp(moment if moment.tzinfo else moment.replace(tzinfo=UTC), 1)


def _share(facts: Facts, place: Timestamp | None) -> float | None:
    if place is None or facts.oplog is None or not facts.oplog_rolls:
        return None
    return round(facts.oplog.lag_share(place), 3)


def _new_layout(moving: Mapping[str, Any]) -> dict[str, Any]:
    return {"partitions": moving["partitions"], "since": iso(moving["since"]), "waits": moving["waits"]}


def _fed_back(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"key": found["key"], "count": found["count"], "since": iso(found["since"])}


def _lost(lost: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "since": iso(lost.get("since")),
        "at": iso(lost.get("at")),
        "oldest": iso(lost.get("oldest")),
        "error": lost.get("error"),
    }


def _partition(image: Image, facts: Facts) -> dict[str, Any]:
    return {
        "subscription": image.subscription,
        "index": image.index,
        "queue": facts.options.queue_name(image.index, facts.groups.get(image.subscription)),
        "state": _state_under(facts, visible_state(image)),
        "committed": int(image.committed),
        "token": image.data or None,
        "term": int(image.term),
        "fencing_token": int(image.fencing_token),
        "claim": _claim(image, facts.now),
        "handled": int(image.handled["last"]) if image.handled else None,
        "retry": _retry(image),
        "waiting": _waiting(image),
        "halted_at": iso((image.head or {}).get("at")),
        "head": _head(image) or _looked_up(facts, image),
        "oldest_seconds": _age_of_oldest(image, facts),
        "spilled": _spilled(image, facts),
        "parked_keys": image.parked_keys,
    }


def _claim(image: Image, now: Timestamp) -> dict[str, Any] | None:
    claim = image.claim
    if claim is None:
        return None
    now = _place_of(image.read_at) or now  # an idle cluster's latest operation may be some seconds old
    return {
        "owner": claim["owner"],
        "process": describe_owner(str(claim["owner"])),
        "seconds": _lag(_place_of(claim.get("at")), now),
        "first": int(claim["first"]),
        "last": int(claim["last"]),
        "until": iso(claim["until"]),
        "live": image.live,
    }


def _retry(image: Image) -> dict[str, Any] | None:
    if not (image.retries or image.crashes or image.error or image.parked):
        return None
    return {
        "count": int(image.retries),
        "crashes": int(image.crashes),
        "due_seconds": max(image.due_in, 0.0),
        "error": image.error,
    }


def _waiting(image: Image) -> dict[str, Any] | None:
    if image.waiting is None:
        return None
    return {
        "since": iso(image.waiting.get("since")),
        "cause": image.waiting.get("cause"),
        "count": int(image.waiting.get("count", 0)),
        "due_seconds": max(image.due_in, 0.0),
    }


def _looked_up(facts: Facts, image: Image) -> dict[str, Any] | None:
    found = facts.heads.get((image.subscription, image.index))
    return None if found is None else {"token": found[0], "key": found[1]}


def _head(image: Image) -> dict[str, Any] | None:
    if image.head is None:
        return None
    return {"token": token_data(image.head["resumeToken"]), "key": image.head["key"]}


def _spill(facts: Facts, report: Mapping[str, Any]) -> dict[str, Any]:
    """How much is stored, beside the bound."""
    marked = [image for image in facts.images if image.spilled]
    taken, limit = report.get("spilledBytes"), report.get("spillLimit", facts.options.spill_bytes)
    return {
        "count": _sum_stored(facts, marked)["count"],
        "bytes": taken,
        "limit": limit,
        "share": None if taken is None else round(taken / limit, 3),
        "waits": report.get("spillWaits"),
    }


def _sum_stored(facts: Facts, marked: Sequence[Image]) -> dict[str, Any]:
    """Of how many partitions something is stored, and how many changes; None where they could not all be counted."""
    counts = [facts.stored.get((image.subscription, image.index)) for image in marked]
    known = [count for count in counts if count is not None]
    return {"partitions": len(marked), "count": sum(known) if len(known) == len(counts) else None}


def _spilled(image: Image, facts: Facts) -> dict[str, Any] | None:
    if image.spilled is None:
        return None
    since = iso(image.spilled["since"])
    assert since is not None, "a mark has its time from the server"
    return {
        "count": facts.stored.get((image.subscription, image.index)),
        "missing": f"{image.subscription}/{image.index}" in _report(facts.lease or {}).get("spillMissing", ()),
        "since": since,
        "age_seconds": max(facts.now.time - int(datetime.fromisoformat(since).timestamp()), 0),
        "reason": image.spilled["reason"],
        "to": image.spilled["to"],
    }


def _gap(gap: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "from": iso(gap.get("from")),
        "until": iso(gap.get("until")),
        "policy": gap.get("policy"),
    }


def _data(token: Mapping[str, Any] | None) -> str | None:
    return token_data(token) if token else None
