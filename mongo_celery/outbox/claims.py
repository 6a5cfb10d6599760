"""
What relays ask of documents with something pending, and what they write to them: claim, remove, let go.

A document belongs to the owner of its claim, or to nobody after a failure, until `until`, by the server's clock alone:
only relays write it. The index has `until` as its key, so a relay reads documents that it may claim, and no others.
Every claim has an owner of its own. A claim keeps relays from publishing the same entries side by side; order does not
rest on it. Whoever has published an entry removes it, by its id.

Claims are taken by an update with a fresh owner and a majority, and a majority read of what has that owner then: so a
relay publishes only what no fail-over takes back, and no command needs more than the `_id` of a document, whatever
the key by which its collection is sharded.

Updates are operators where they can be: MongoDB 4.4 logs a pipeline's result as a whole new document. So `until` is
made of the server's clock as this process has read it a moment ago, and conditions ask the server for its time.

The condition on the server's clock is written so that no stored value makes it fail: whatever a field can contain,
somebody has written.
"""

from __future__ import annotations

import time
from collections.abc import Collection as AnyOf
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from bson.codec_options import CodecOptions
from pymongo.collection import Collection

from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.outbox.pending import NOBODY, PendingField

Document = dict[str, Any]

_SKEW_SECONDS = 1.0
"""How far ahead of the server's clock a writer's may be before its times count as long ago."""

_CLOCK_SECONDS = 5.0
"""For so long a process goes by what it has read of the server's clock."""

_AWARE: CodecOptions[dict[str, Any]] = CodecOptions(tz_aware=True, tzinfo=UTC)

_LONGEST_SECONDS = 7200.0
"""No claim and no pause lasts so long: an `until` beyond it is not a relay's, and counts as past."""


class PendingClaims:
    """
    Conditions and updates on one field, for the relays of one process.

    Args:
        field: in which entries wait.
        apps: whose entries this process publishes; None for those that name no app.
    """

    def __init__(self, field: PendingField, apps: AnyOf[str | None]) -> None:
        self.field = field
        name = field.name
        self.with_entries: Document = {field.count: {"$gt": 0}}
        """Something is pending; what the partial index holds, so that a query needs this condition to use it."""
        self.oldest: Document = _readable(
            {"$cond": [{"$isArray": f"${field.events}.at"}, {"$arrayElemAt": [f"${field.events}.at", 0]}, None]},
            "date",
            None,
        )
        """When the oldest entry was written; null where that cannot be read."""
        self._frees = {"$lte": [f"${field.until}", "$$NOW"]}, {"$gt": [f"${field.until}", after(_LONGEST_SECONDS)]}
        self.free: Document = {"$or": list(self._frees)}
        """No relay holds the document, and it is not held back after a failure."""
        self._object: Document = {"$eq": [{"$type": f"${name}"}, "object"]}
        head_app = {"$let": {"vars": {"head": self._head}, "in": {"$ifNull": ["$$head.app", None]}}}
        self.ours: Document = {"$in": [head_app, literal(list(apps))]}
        """What stands at the head belongs to an app that this process delivers for."""

    @property
    def _events(self) -> Document:
        return {"$cond": [{"$isArray": f"${self.field.events}"}, f"${self.field.events}", []]}

    @property
    def _head(self) -> Document:
        # Not "$events.app": a path through an array skips entries that have no such field.
        return {"$arrayElemAt": [self._events, 0]}

    @property
    def _size(self) -> Document:
        events = f"${self.field.events}"
        return {"$cond": [{"$isArray": events}, {"$size": events}, -1]}

    @property
    def attempts(self) -> Document:
        """How often what stands at the head has failed through its own fault."""
        return {"$let": {"vars": {"head": self._head}, "in": {"$ifNull": ["$$head.attempts", 0]}}}

    # -- conditions --------------------------------------------------------------------------------

    def older_than(self, seconds: float) -> Document:
        """The oldest entry has waited so long, or its time cannot be right."""
        return {
            "$or": [
                {"$lte": [self.oldest, {"$subtract": ["$$NOW", millis(seconds)]}]},
                {"$gt": [self.oldest, after(_SKEW_SECONDS)]},
            ],
        }

    def claimable(self, older_than: float | None = None, held: Sequence[ObjectId] = ()) -> Document:
        """
        A filter for documents that a relay may claim.

        Args:
            older_than: seconds that the oldest entry must have waited.
            held: owners whose claims are this relay's own.
        """
        frees: list[Document] = [{"$expr": each} for each in self._frees]  # each is a range of the index
        if held:
            frees.append({f"{self.field.claim}.owner": {"$in": list(held)}})
        conditions = [self._object, self.ours]
        if older_than is not None:
            conditions.append(self.older_than(older_than))
        return {"$or": [{**self.with_entries, "$and": [each, {"$expr": {"$and": conditions}}]} for each in frees]}

    def others(self, older_than: float) -> Document:
        """A filter for documents whose next entry belongs to an app that this process does not deliver for."""
        conditions = [self._object, {"$not": [self.ours]}, self.older_than(older_than)]
        return {**self.with_entries, "$expr": {"$and": conditions}}

    def held(self) -> Document:
        """Return a filter for documents with something pending that some relay holds."""
        return {**self.with_entries, f"{self.field.claim}.owner": {"$ne": NOBODY}, "$expr": {"$not": [self.free]}}

    # -- updates -----------------------------------------------------------------------------------

    def build_claim(self, owner: ObjectId, until: datetime) -> Document:
        """Claim a document."""
        return {"$set": {self.field.claim: {"owner": owner, "until": until}}}

    def match_whole(self, published: Sequence[tuple[object, Sequence[object]]]) -> Document:
        """
        A filter for documents that hold exactly what was published, in this order.

        One for all of them: as many updates by `_id`, each with conditions of its own, cost the server four times as
        much.

        Args:
            published: the `_id` of each document, and the ids of its entries.
        """
        events = f"${self.field.events}"
        there = ["$_id", f"${self.field.count}", self._size, f"{events}.id"]  # ids alone pass over what has none
        whole = [[document_id, len(ids), len(ids), list(ids)] for document_id, ids in published]
        these = {"_id": {"$in": [document_id for document_id, _ in published]}}
        return {**these, "$expr": {"$in": [there, literal(whole)]}}

    def build_removal(self, document_id: object, ids: Sequence[object]) -> tuple[Document, Document]:
        """
        Filter and update that remove entries by id, where each of them is there once and more is left.

        An id that is no text is left to `build_any_removal`: to `$pull`, a stored regular expression is a pattern.
        """
        is_one = {"$in": [{"$ifNull": ["$$entry.id", None]}, literal(list(ids))]}
        found = {"$size": {"$filter": {"input": self._events, "as": "entry", "cond": is_one}}}
        conditions = [
            {"$eq": [found, len(ids)]},
            {"$gt": [self._size, len(ids)]},
            {"$eq": [f"${self.field.count}", self._size]},
            literal(all(isinstance(each, str) for each in ids)),
        ]
        update = {"$pull": {self.field.events: {"id": {"$in": list(ids)}}}, "$inc": {self.field.count: -len(ids)}}
        return {"_id": {"$eq": document_id}, "$expr": {"$and": conditions}}, update

    def build_any_removal(self, document_id: object, ids: Sequence[object]) -> tuple[Document, list[Document]]:
        """
        As `build_removal`, whatever else is there. An id of None removes those that have none.

        Where nothing is left, the field goes.
        MongoDB 4.4 logs such an update as a whole new document.
        """
        field = self.field
        is_other = {"$not": [{"$in": [{"$ifNull": ["$$entry.id", None]}, literal(list(ids))]}]}
        rest = {"$filter": {"input": f"${field.events}", "as": "entry", "cond": is_other}}
        left = {"$mergeObjects": [f"${field.name}", {"count": {"$size": "$$rest"}, "events": "$$rest"}]}
        value = {"$let": {"vars": {"rest": rest}, "in": {"$cond": [{"$eq": ["$$rest", []]}, "$$REMOVE", left]}}}
        readable = {"$and": [self._object, {"$isArray": f"${field.events}"}]}  # else it is no longer the outbox's
        return {"_id": {"$eq": document_id}, "$expr": readable}, [{"$set": {field.name: value}}]

    def build_discard(self, document_id: object, owner: ObjectId) -> tuple[Document, Document]:
        """Filter and update that remove a field in which no entries are, whatever its count says."""
        here = {"_id": {"$eq": document_id}, f"{self.field.claim}.owner": owner}
        no_entries = {"$or": [{self.field.events: {"$size": 0}}, {self.field.events: {"$not": {"$type": "array"}}}]}
        return {**here, **no_entries}, {"$unset": {self.field.name: 1}}

    def build_release(
        self, document_ids: Sequence[object], owners: Sequence[ObjectId], until: datetime
    ) -> tuple[Document, Document]:
        """Filter and update that let these owners' claims go, and hold the documents back until then."""
        mine = {"_id": {"$in": list(document_ids)}, f"{self.field.claim}.owner": {"$in": list(owners)}}
        return mine, {"$set": {self.field.claim: {"owner": NOBODY, "until": until}}}

    def build_count(self, failed: object) -> tuple[Document, list[Document]]:
        """Update and array filters that count an attempt of an entry; a count that is no number stays."""
        one_more = {"$inc": {f"{self.field.events}.$[failed].attempts": 1}}
        return one_more, [{"failed.id": {"$eq": failed}, "failed.attempts": {"$type": "number"}}]


class ServerClock:
    """
    The server's clock, as this process knows it: read every few seconds, and the monotonic clock in between.

    Args:
        collection: of the server.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        self._collection = collection
        self._read: tuple[float, datetime] | None = None

    def after(self, seconds: float) -> datetime:
        """
        Return the server's time, so many seconds from now.

        Raises:
            PyMongoError: the server did not answer.
        """
        now, read = time.monotonic(), self._read
        if read is None or now - read[0] > _CLOCK_SECONDS:
            answer = self._collection.database.command("hello", codec_options=_AWARE)
            read = self._read = now, answer["localTime"]
        return read[1] + timedelta(seconds=time.monotonic() - read[0] + seconds)

    def forget(self) -> None:
        """Read it again: another server may be the primary now."""
        self._read = None


def age_of(field: Mapping[str, Any], ttl: float, at: Any) -> float | None:
    """
    Return the seconds between a writer's time and a claim, which has the server's; None where one is missing.

    Args:
        field: as it was read with the claim.
        ttl: seconds of the claim.
        at: the writer's time.
    """
    claim = field.get("claim")
    until = claim.get("until") if isinstance(claim, Mapping) else None
    try:
        return float((until - at).total_seconds()) - ttl
    except (TypeError, AttributeError):
        return None


def _readable(value: object, kind: str, otherwise: object) -> Document:
    """A value, or another where somebody else has written something that is none: no query fails for it."""
    return {"$convert": {"input": value, "to": kind, "onError": otherwise, "onNull": otherwise}}
