"""
Conditions and updates with which relays claim, empty and release documents with pending entries.

A document belongs to the owner of its claim until `until`, by the server's clock alone. After a failure it has no owner
until then. Only relays write the claim. The index key contains `until`, so a relay reads only documents that it may
claim. Every claim has a unique owner. A claim keeps relays from publishing the same entries concurrently. Order does
not depend on it: a relay removes its published entries by id.

A relay claims with a majority update and a new owner, then reads this owner's documents with a majority read. So it
never publishes data that a fail-over could take back. All commands need only a document's `_id`, whatever the
collection's shard key.

Updates are operators if possible, because MongoDB 4.4 logs a pipeline's result as a whole new document. So `until`
comes from this process's recent reading of the server's clock, and conditions use the server's time. No stored value
can make a condition fail, even if other programs have written it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from bson.codec_options import CodecOptions
from pymongo.collection import Collection

from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.outbox.pending import CLAIM, COUNT, EVENTS, FIELD, NOBODY, UNTIL

Document = dict[str, Any]

SKEW_SECONDS = 1.0
"""Largest lead of a writer's clock before the server's. Later times count as long ago."""

_CLOCK_SECONDS = 5.0
"""Seconds for which a process uses one reading of the server's clock."""

_AWARE: CodecOptions[dict[str, Any]] = CodecOptions(tz_aware=True, tzinfo=UTC)

_LONGEST_SECONDS = 7200.0
"""Claims and pauses are shorter than this. A later `until` is not from a relay, and counts as past."""


WITH_ENTRIES: Document = {COUNT: {"$gt": 0}}
"""Something is pending. The partial index has these documents, so a query needs this condition to use it."""

_FREES = {"$lte": [f"${UNTIL}", "$$NOW"]}, {"$gt": [f"${UNTIL}", after(_LONGEST_SECONDS)]}
FREE: Document = {"$or": list(_FREES)}
"""No relay holds the document, and no failure holds it back."""

_IS_OBJECT: Document = {"$eq": [{"$type": f"${FIELD}"}, "object"]}
_EVENTS: Document = {"$cond": [{"$isArray": f"${EVENTS}"}, f"${EVENTS}", []]}
HEAD: Document = {"$arrayElemAt": [_EVENTS, 0]}
"""Not `$events.name`: a path through an array skips entries without the field."""

_SIZE: Document = {"$cond": [{"$isArray": f"${EVENTS}"}, {"$size": f"${EVENTS}"}, -1]}

_FIRST_AT: Document = {"$cond": [{"$isArray": f"${EVENTS}.at"}, {"$arrayElemAt": [f"${EVENTS}.at", 0]}, None]}
OLDEST: Document = {"$convert": {"input": _FIRST_AT, "to": "date", "onError": None, "onNull": None}}
"""Writing time of the oldest entry. Null if unreadable."""

ATTEMPTS: Document = {"$let": {"vars": {"head": HEAD}, "in": {"$ifNull": ["$$head.attempts", 0]}}}
"""Number of the next entry's own failures."""


# -- conditions ------------------------------------------------------------------------------------


def match_age(seconds: float) -> Document:
    """Return the condition that the oldest entry has waited this long, or its time cannot be right."""
    return {
        "$or": [
            {"$lte": [OLDEST, {"$subtract": ["$$NOW", millis(seconds)]}]},
            {"$gt": [OLDEST, after(SKEW_SECONDS)]},
        ],
    }


def claimable(older_than: float | None = None, held: ObjectId | None = None) -> Document:
    """
    Return a filter for documents that a relay may claim.

    Args:
        older_than: seconds that the oldest entry must have waited.
        held: owner of this relay's own claims.
    """
    frees: list[Document] = [{"$expr": each} for each in _FREES]  # each is a range of the index
    if held is not None:
        frees.append({f"{CLAIM}.owner": held})
    conditions = [_IS_OBJECT]
    if older_than is not None:
        conditions.append(match_age(older_than))
    return {"$or": [{**WITH_ENTRIES, "$and": [each, {"$expr": {"$and": conditions}}]} for each in frees]}


def match_held() -> Document:
    """Return a filter for documents with pending entries that a relay holds."""
    return {**WITH_ENTRIES, f"{CLAIM}.owner": {"$ne": NOBODY}, "$expr": {"$not": [FREE]}}


# -- updates ---------------------------------------------------------------------------------------


def match_whole(published: Sequence[tuple[object, Sequence[object]]]) -> Document:
    """
    Return a filter for documents that contain exactly the published entries, in this order.

    It is one filter for all of them: separate updates by `_id` with conditions cost the server four times as much.

    Args:
        published: each document's `_id`, and its entries' ids.
    """
    there = ["$_id", f"${COUNT}", _SIZE, f"${EVENTS}.id"]  # ids alone would skip entries without one
    whole = [[document_id, len(ids), len(ids), list(ids)] for document_id, ids in published]
    these = {"_id": {"$in": [document_id for document_id, _ in published]}}
    return {**these, "$expr": {"$in": [there, literal(whole)]}}


def build_removal(document_id: object, ids: Sequence[object]) -> tuple[Document, Document]:
    """
    Return filter and update that remove entries by id, if each exists once and more entries are left.

    `build_any_removal` handles ids that are not text: for `$pull`, a stored regular expression is a pattern.
    """
    is_one = {"$in": [{"$ifNull": ["$$entry.id", None]}, literal(list(ids))]}
    found = {"$size": {"$filter": {"input": _EVENTS, "as": "entry", "cond": is_one}}}
    conditions = [
        {"$eq": [found, len(ids)]},
        {"$gt": [_SIZE, len(ids)]},
        {"$eq": [f"${COUNT}", _SIZE]},
        literal(all(isinstance(each, str) for each in ids)),
    ]
    update = {"$pull": {EVENTS: {"id": {"$in": list(ids)}}}, "$inc": {COUNT: -len(ids)}}
    return {"_id": {"$eq": document_id}, "$expr": {"$and": conditions}}, update


def build_any_removal(document_id: object, ids: Sequence[object]) -> tuple[Document, list[Document]]:
    """
    Return the same as `build_removal` for any content. An id of None removes entries without an id.

    If no entry is left, the field is removed. MongoDB 4.4 logs this update as a whole new document.
    """
    is_other = {"$not": [{"$in": [{"$ifNull": ["$$entry.id", None]}, literal(list(ids))]}]}
    rest = {"$filter": {"input": f"${EVENTS}", "as": "entry", "cond": is_other}}
    left = {"$mergeObjects": [f"${FIELD}", {"count": {"$size": "$$rest"}, "events": "$$rest"}]}
    value = {"$let": {"vars": {"rest": rest}, "in": {"$cond": [{"$eq": ["$$rest", []]}, "$$REMOVE", left]}}}
    readable = {"$and": [_IS_OBJECT, {"$isArray": f"${EVENTS}"}]}  # otherwise it is no longer the outbox's
    return {"_id": {"$eq": document_id}, "$expr": readable}, [{"$set": {FIELD: value}}]


def build_discard(document_id: object, owner: ObjectId) -> tuple[Document, Document]:
    """Return filter and update that remove a field without entries, whatever its count."""
    here = {"_id": {"$eq": document_id}, f"{CLAIM}.owner": owner}
    no_entries = {"$or": [{EVENTS: {"$size": 0}}, {EVENTS: {"$not": {"$type": "array"}}}]}
    return {**here, **no_entries}, {"$unset": {FIELD: 1}}


def build_release(
    document_ids: Sequence[object], owners: Sequence[ObjectId], until: datetime
) -> tuple[Document, Document]:
    """Return filter and update that release these owners' claims, and hold the documents back until then."""
    mine = {"_id": {"$in": list(document_ids)}, f"{CLAIM}.owner": {"$in": list(owners)}}
    return mine, {"$set": {CLAIM: {"owner": NOBODY, "until": until}}}


def build_count(failed: object) -> tuple[Document, list[Document]]:
    """Return update and array filters that count an entry's attempt. A count that is not a number is kept."""
    one_more = {"$inc": {f"{EVENTS}.$[failed].attempts": 1}}
    return one_more, [{"failed.id": {"$eq": failed}, "failed.attempts": {"$type": "number"}}]


class ServerClock:
    """
    An estimate of the server's clock: a reading every few seconds plus the monotonic time since then.

    Args:
        collection: a collection of the server.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        self._collection = collection
        self._read: tuple[float, datetime] | None = None

    def after(self, seconds: float) -> datetime:
        """
        Return the server's time plus these seconds.

        Raises:
            PyMongoError: the server did not answer.
        """
        now, read = time.monotonic(), self._read
        if read is None or now - read[0] > _CLOCK_SECONDS:
            answer = self._collection.database.command("hello", codec_options=_AWARE)
            read = self._read = now, answer["localTime"]
        return read[1] + timedelta(seconds=time.monotonic() - read[0] + seconds)

    def forget(self) -> None:
        """Read the clock again, because another server may be the primary now."""
        self._read = None
