"""
What relays ask of documents with something pending, and what they write to them: claim, remove, let go.

A claim stands until `since + ttl`, and a document is held back until `since + wait`, both by the server's clock. Every
claim has an owner of its own, so that nobody takes another's for his. A claim keeps relays from publishing the same
entries side by side; order does not rest on it. What was published is removed by name, by who has published it.

Claims are taken by an update with a fresh owner and a majority, and a majority read of what has that owner then: so a
relay publishes only what no fail-over takes back, and no command needs more than the `_id` of a document, whatever
the key by which its collection is sharded.

The condition on the server's clock is written so that no stored value makes it fail: whatever a field can contain,
somebody has written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bson import ObjectId
from bson.int64 import Int64

from mongo_celery.mongo.expressions import LONGEST_SECONDS, after, literal, millis
from mongo_celery.outbox.pending import LONG_AGO, UNCLAIMED, PendingField, claimed_by

Document = dict[str, Any]

_SKEW_SECONDS = 1.0
"""How far ahead of the server's clock a writer's may be before its times count as long ago."""


class PendingClaims:
    """
    Conditions and updates on one field, for the relays of one process.

    Args:
        field: in which entries wait.
        apps: whose entries this process publishes; None for those that name no app.
    """

    def __init__(self, field: PendingField, apps: Collection[str | None]) -> None:
        self.field = field
        name = field.name
        since = _readable(f"${field.claim}.since", "date", LONG_AGO)
        self.with_entries: Document = {field.count: {"$gt": 0}}
        """Something is pending; what the partial index holds, so that a query needs this condition to use it."""
        self.oldest: Document = _readable(
            {"$cond": [{"$isArray": f"${field.events}.at"}, {"$arrayElemAt": [f"${field.events}.at", 0]}, None]},
            "date",
            None,
        )
        """When the oldest entry was written; null where that cannot be read."""
        ahead = {"$gt": [since, after(_SKEW_SECONDS)]}
        self.free: Document = {"$or": [ahead, {"$lte": [since, _ago(f"${field.claim}.ttl")]}]}
        """No claim, a lapsed one, or one whose time cannot be right."""
        self.due: Document = {"$or": [ahead, {"$lte": [since, _ago(f"${field.claim}.wait")]}]}
        """Not held back after a failure."""
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
    def attempts(self) -> Document:
        """How often what stands at the head has failed through its own fault."""
        return {"$let": {"vars": {"head": self._head}, "in": {"$ifNull": ["$$head.attempts", 0]}}}

    @property
    def has_failed(self) -> Document:
        """It was held back after its last turn: what stands at the head could not be published."""
        return {"$gt": [_readable(f"${self.field.claim}.wait", "long", Int64(0)), 0]}

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
        free: Document = {"$and": [self.free, self.due]}
        if held:
            free = {"$or": [free, {"$in": [f"${self.field.claim}.owner", literal(list(held))]}]}
        conditions = [self._object, free, self.ours]
        if older_than is not None:
            conditions.append(self.older_than(older_than))
        return {**self.with_entries, "$expr": {"$and": conditions}}

    def others(self, older_than: float) -> Document:
        """A filter for documents whose next entry belongs to an app that this process does not deliver for."""
        conditions = [self._object, {"$not": [self.ours]}, self.older_than(older_than)]
        return {**self.with_entries, "$expr": {"$and": conditions}}

    def held(self) -> Document:
        """A filter for documents with something pending that some relay holds."""
        return {**self.with_entries, "$expr": {"$not": [self.free]}}

    # -- updates -----------------------------------------------------------------------------------

    def claimed(self, owner: ObjectId, ttl: float) -> list[Document]:
        """Claim a document."""
        return [{"$set": {self.field.claim: _whole(claimed_by(owner, ttl))}}]

    def emptied(self, published: Sequence[tuple[object, Sequence[object]]]) -> tuple[Document, Document]:
        """
        Filter and update that remove the field of documents that hold exactly what was published, in this order.

        One update for all of them: as many updates by `_id`, each with conditions of its own, cost the server four
        times as much.

        Args:
            published: the `_id` of each document, and the names of its entries.
        """
        events = f"${self.field.events}"
        size = {"$cond": [{"$isArray": events}, {"$size": events}, -1]}  # names alone pass over what has none
        there = ["$_id", f"${self.field.count}", size, f"{events}.id"]
        whole = [[document_id, len(names), len(names), list(names)] for document_id, names in published]
        these = {"_id": {"$in": [document_id for document_id, _ in published]}}
        return {**these, "$expr": {"$in": [there, literal(whole)]}}, {"$unset": {self.field.name: 1}}

    def removed(
        self, document_id: object, names: Sequence[object], owner: ObjectId, ttl: float
    ) -> tuple[Document, list[Document]]:
        """
        Filter and update that remove entries by name; with its last one a document's field goes.

        Where more is left and the owner still holds the claim, it begins anew, by the server's clock.

        Args:
            document_id: where they are.
            names: of the entries; None for those that have none.
            owner: of this relay's claim.
            ttl: of this claim.
        """
        field = self.field
        mine = {"$eq": [f"${field.claim}.owner", literal(owner)]}
        renewed = {"$mergeObjects": [f"${field.claim}", {"since": "$$NOW", "ttl": millis(ttl), "wait": Int64(0)}]}
        rest = {
            "$filter": {
                "input": f"${field.events}",
                "as": "entry",
                "cond": {"$not": [{"$in": [{"$ifNull": ["$$entry.id", None]}, literal(list(names))]}]},
            },
        }
        left = {
            "$mergeObjects": [
                f"${field.name}",
                {
                    "count": {"$size": "$$rest"},
                    "events": "$$rest",
                    "claim": {"$cond": [mine, renewed, f"${field.claim}"]},
                },
            ],
        }
        value = {"$let": {"vars": {"rest": rest}, "in": {"$cond": [{"$eq": ["$$rest", []]}, "$$REMOVE", left]}}}
        readable = {"$and": [self._object, {"$isArray": f"${field.events}"}]}  # else it is no longer the outbox's
        return {"_id": document_id, "$expr": readable}, [{"$set": {field.name: value}}]

    def discarded(self, document_id: object, owner: ObjectId) -> tuple[Document, Document]:
        """Filter and update that remove a field in which no entries are, whatever its count says."""
        here = {"_id": document_id, f"{self.field.claim}.owner": owner}
        no_entries = {"$or": [{self.field.events: {"$size": 0}}, {self.field.events: {"$not": {"$type": "array"}}}]}
        return {**here, **no_entries}, {"$unset": {self.field.name: 1}}

    def released(
        self, document_ids: Sequence[object], owners: Sequence[ObjectId], pause: float = 0.0, failed: object = None
    ) -> tuple[Document, list[Document]]:
        """
        Filter and update that let claims go, and hold documents back for a while.

        Args:
            document_ids: which.
            owners: of the claims; another's stays, and is held back no longer than it says itself.
            pause: seconds before the next relay may take them.
            failed: id of an entry whose attempts grow by one.
        """
        field = self.field
        mine = {"_id": {"$in": list(document_ids)}, f"{field.claim}.owner": {"$in": list(owners)}}
        free = {**UNCLAIMED, "since": "$$NOW", "wait": millis(pause)} if pause else UNCLAIMED
        change: Document = {field.claim: _whole(free)}
        if failed is not None:
            counted = {"$mergeObjects": ["$$entry", {"attempts": _one_more("$$entry.attempts")}]}
            change[field.events] = {
                "$map": {
                    "input": self._events,
                    "as": "entry",
                    "in": {"$cond": [{"$eq": ["$$entry.id", literal(failed)]}, counted, "$$entry"]},
                },
            }
        return mine, [{"$set": change}]


def age_of(field: Mapping[str, Any], at: Any) -> float | None:
    """Seconds between a time that a writer has noted and a claim, which is the server's; None where one is missing."""
    claim = field.get("claim")
    since = claim.get("since") if isinstance(claim, Mapping) else None
    try:
        return float((since - at).total_seconds())
    except (TypeError, AttributeError):
        return None


def _whole(document: Document) -> Document:
    """Return what replaces a value; `$set` alone would merge a document into one, or into each of an array."""
    return {"$mergeObjects": [document]}


def _readable(value: object, kind: str, otherwise: object) -> Document:
    """A value, or another where somebody else has written something that is none: no query fails for it."""
    return {"$convert": {"input": value, "to": kind, "onError": otherwise, "onNull": otherwise}}


def _ago(path: str) -> Document:
    """The server's time, so many stored milliseconds ago; bounded, since a difference beyond 64 bits is refused."""
    stored = _readable(path, "long", Int64(0))
    return {"$subtract": ["$$NOW", {"$min": [{"$max": [stored, Int64(0)]}, millis(LONGEST_SECONDS)]}]}


def _one_more(path: str) -> Document:
    """A count and one more; what is no number, or too large for one more, begins anew."""
    number = {"$min": [_readable(path, "int", 0), 1_000_000]}
    return {"$add": [number, 1]}
