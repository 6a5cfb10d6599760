"""
Updates and conditions on a document's `pendingEvents`: appending, claiming, removing.

::

    pendingEvents: {count, events: [entry ...], claim: {owner, since, ttl}, notBefore}

`count` always equals the length of `events`; the partial index `pending-events` is on it. Every write of an
entry also gives `claim` and `notBefore` a value: relays then change only values of fixed size, so a document
that could be written can also be delivered, right up to the limit of 16 MB.

A claim runs from `since`, by the server's clock (`$currentDate`, `$$NOW`). Only an insert has no server time to
offer; its claim, and the age of its entries, come from the writer's clock. So a time that lies ahead of the
server's counts as long ago: a writer with a wrong clock can cost a duplicate, and never makes an entry wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from bson.int64 import Int64

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.mongo.writes import Addition, Body, Modifications, Operators, Pipeline, Replacement
from mongo_celery.outbox.entries import FIELD, Entry

Document = dict[str, Any]

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
NOBODY = ObjectId("0" * 24)

_SKEW_SECONDS = 1.0
"""How far ahead of the server's clock a writer's may be before its times count as long ago."""

_PATH_STAGES = {"$set", "$addFields", "$unset"}


def new_field(entries: Sequence[Entry], owner: ObjectId, ttl: float, now: datetime) -> Document:
    """The field of a document that is inserted, claimed by its writer unless the owner is `NOBODY`."""
    since = LONG_AGO if owner == NOBODY else now
    return {
        "count": len(entries),
        "events": [entry.to_document() for entry in entries],
        "claim": {"owner": owner, "since": since, "ttl": millis(ttl)},
        "notBefore": LONG_AGO,
    }


def with_entries(update: Modifications, entries: Sequence[Entry], claim: tuple[ObjectId, float] | None = None) -> Any:
    """
    The user's update with the entries appended, to be written as one.

    Args:
        update: update operators or a pipeline.
        entries: at least one.
        claim: owner and seconds, to claim the document in the same write.

    Raises:
        OutboxRefusedError: the update touches `pendingEvents`, or replaces the whole document in a pipeline.
    """
    refuse_own_field(update)
    if isinstance(update, Mapping) and not all(str(operator).startswith("$") for operator in update):
        raise ValueError("update only works with $ operators")  # PyMongo's own words
    body = Operators(update) if isinstance(update, Mapping) else Pipeline(update)
    return body.amended(addition(entries, claim))


def replacement_with_entries(
    replacement: Mapping[str, Any], entries: Sequence[Entry], claim: tuple[ObjectId, float] | None, new_id: object
) -> list[Mapping[str, Any]]:
    """
    A pipeline that replaces a document and keeps its `_id` and what is pending.

    Args:
        replacement: the new document; an `_id` in it must be the document's own, or the server refuses it.
        entries: to append; may be empty.
        claim: owner and seconds, to claim the document in the same write.
        new_id: `_id` of a document that an upsert creates, where neither filter nor replacement says one.
    """
    identity = literal(replacement["_id"]) if "_id" in replacement else {"$ifNull": ["$_id", literal(new_id)]}
    return Replacement(replacement).amended(Addition("_id", {}, identity), addition(entries, claim))


def refuse_in_document(document: Mapping[str, Any]) -> None:
    """Refuse a document that names `pendingEvents`."""
    _refuse_own(Replacement(document))


def refuse_in_filter(filter: Mapping[str, Any]) -> None:  # noqa: A002 - PyMongo's word
    """Refuse the filter of an upsert that names `pendingEvents`: the server would copy it into the new document."""
    for name, condition in filter.items():
        if name in {"$and", "$or"}:
            for each in condition:
                refuse_in_filter(each)
        else:
            _refuse_own(Replacement({name: condition}))


def refuse_own_field(update: Modifications) -> None:
    """Refuse an update or pipeline that names `pendingEvents`, or a stage that could drop it."""
    if isinstance(update, Mapping):
        _refuse_own(Operators(update))
        return
    for name in (name for stage in update for name in stage):
        if name not in _PATH_STAGES:
            raise OutboxRefusedError(
                f"the pipeline stage {name} could drop {FIELD}; use $set and $unset, or replace_one.",
            )
    _refuse_own(Pipeline(update))


def _refuse_own(body: Body) -> None:
    if body.name_in(FIELD) is not None:
        raise OutboxRefusedError(f"{FIELD} belongs to the outbox; leave it out of the update or document.")


def addition(entries: Sequence[Entry], claim: tuple[ObjectId, float] | None) -> Addition:
    """What the outbox writes to a document that is there: the entries appended, and the claim."""
    return Addition(FIELD, _pushed(entries, claim), _appended(entries, claim))


def _pushed(entries: Sequence[Entry], claim: tuple[ObjectId, float] | None) -> dict[str, Document]:
    events = [entry.to_document() for entry in entries]
    pushed: dict[str, Document] = {
        "$push": {f"{FIELD}.events": {"$each": events}},
        "$inc": {f"{FIELD}.count": len(events)},
    }
    fixed: Document = {f"{FIELD}.notBefore": LONG_AGO}
    if claim is None:
        # The smallest values: they fill in what is missing and change nothing that is there.
        fixed |= {
            f"{FIELD}.claim.owner": NOBODY,
            f"{FIELD}.claim.since": LONG_AGO,
            f"{FIELD}.claim.ttl": Int64(0),
        }
    else:
        owner, ttl = claim
        pushed["$set"] = {f"{FIELD}.claim.owner": owner, f"{FIELD}.claim.ttl": millis(ttl)}
        pushed["$currentDate"] = {f"{FIELD}.claim.since": True}
    return {**pushed, "$max": fixed}


def _appended(entries: Sequence[Entry], claim: tuple[ObjectId, float] | None) -> Document:
    there = {"$ifNull": [f"${FIELD}.events", []]}
    return {
        "events": {"$concatArrays": [there, literal([entry.to_document() for entry in entries])]},
        "count": {"$add": [{"$size": there}, len(entries)]},
        "claim": claimed_by(*claim)
        if claim
        else {"$ifNull": [f"${FIELD}.claim", {"owner": NOBODY, "since": LONG_AGO, "ttl": Int64(0)}]},
        "notBefore": {"$ifNull": [f"${FIELD}.notBefore", LONG_AGO]},
    }


def claimed_by(owner: ObjectId, ttl: float) -> Document:
    """A claim from now on, for a pipeline."""
    return {"owner": literal(owner), "since": "$$NOW", "ttl": millis(ttl)}


def _readable(value: object, kind: str, otherwise: object) -> Document:
    """A value, or another where somebody else has written something that is none: no query fails for it."""
    return {"$convert": {"input": value, "to": kind, "onError": otherwise, "onNull": otherwise}}


_SINCE = _readable(f"${FIELD}.claim.since", "date", LONG_AGO)
_TTL = _readable(f"${FIELD}.claim.ttl", "long", Int64(0))

OLDEST: Document = _readable(
    {"$cond": [{"$isArray": f"${FIELD}.events.at"}, {"$arrayElemAt": [f"${FIELD}.events.at", 0]}, None]}, "date", None
)
"""When the oldest entry was written; null where that cannot be read."""

FREE: Document = {
    "$or": [
        {"$lte": [{"$add": [_SINCE, _TTL]}, "$$NOW"]},
        {"$gt": [_SINCE, after(_SKEW_SECONDS)]},
    ],
}
"""No claim, a lapsed one, or one whose time cannot be right."""

WITH_ENTRIES: Document = {f"{FIELD}.count": {"$gt": 0}}
"""Something is pending; what the partial index holds, so that a query needs this condition to use it."""

DUE: Document = {"$lte": [f"${FIELD}.notBefore", "$$NOW"]}
"""Not held back after a failure."""


def older_than(seconds: float) -> Document:
    """The oldest entry has waited so long, or its time cannot be right."""
    return {
        "$or": [
            {"$lte": [OLDEST, {"$subtract": ["$$NOW", millis(seconds)]}]},
            {"$gt": [OLDEST, after(_SKEW_SECONDS)]},
        ],
    }


def room_for(entries: Sequence[Entry], max_pending: int) -> Document:
    """There is still room for these entries; true of a document without the field."""
    return {f"{FIELD}.count": {"$not": {"$gt": max_pending - len(entries)}}}


def claim_update(owner: ObjectId, ttl: float) -> list[Document]:
    """Claim a document."""
    return [{"$set": {f"{FIELD}.claim": claimed_by(owner, ttl)}}]


def removal(ids: Sequence[str], owner: ObjectId, ttl: float) -> list[Document]:
    """Remove entries by name, then go on holding the claim if it is mine and there is more, else let it go."""
    events, mine = f"${FIELD}.events", {"$eq": [f"${FIELD}.claim.owner", literal(owner)]}
    readable = {"$cond": [{"$isArray": events}, events, []]}
    return [
        {"$set": {f"{FIELD}.events": _without(readable, ids)}},
        {
            "$set": {
                f"{FIELD}.count": {"$size": events},
                f"{FIELD}.claim": {
                    "$cond": [
                        mine,
                        {"$cond": [{"$gt": [{"$size": events}, 0]}, claimed_by(owner, ttl), _unclaimed()]},
                        f"${FIELD}.claim",
                    ],
                },
            },
        },
    ]


def release(owner: ObjectId, pause: float, failed: str | None = None) -> list[Document]:
    """
    Let a claim go if it is mine, and hold the document back for a while.

    Args:
        owner: of the claim.
        pause: seconds before the next relay may take it.
        failed: id of an entry whose attempts grow by one.
    """
    mine = {"$eq": [f"${FIELD}.claim.owner", literal(owner)]}
    counted = {"$mergeObjects": ["$$entry", {"attempts": {"$add": [{"$ifNull": ["$$entry.attempts", 0]}, 1]}}]}
    events: Document = {
        "$map": {
            "input": f"${FIELD}.events",
            "as": "entry",
            "in": {"$cond": [{"$eq": ["$$entry.id", literal(failed)]}, counted, "$$entry"]},
        },
    }
    change: Document = {
        f"{FIELD}.claim": {"$cond": [mine, _unclaimed(), f"${FIELD}.claim"]},
        f"{FIELD}.notBefore": after(pause) if pause else f"${FIELD}.notBefore",
    }
    return [{"$set": change if failed is None else {**change, f"{FIELD}.events": events}}]


def _unclaimed() -> Document:
    return {"owner": NOBODY, "since": LONG_AGO, "ttl": Int64(0)}


def _without(events: object, ids: Sequence[str]) -> Document:
    return {
        "$filter": {
            "input": events,
            "as": "entry",
            "cond": {"$not": [{"$in": [{"$ifNull": ["$$entry.id", None]}, literal(list(ids))]}]},
        },
    }
