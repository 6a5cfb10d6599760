"""
What relays ask of documents with something pending, and what they write to them: claim, remove, let go.

A document belongs to the owner of its claim, or to nobody after a failure, until `until`, by the server's clock alone:
only relays write it. The index has `until` as its key, so a relay reads documents that it may claim, and no others.
Every claim has an owner of its own. A claim keeps relays from publishing the same entries side by side; order does not
rest on it. Whoever has published an entry removes it, by its id.

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

from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.outbox.pending import NOBODY, UNCLAIMED, PendingField

Document = dict[str, Any]

_SKEW_SECONDS = 1.0
"""How far ahead of the server's clock a writer's may be before its times count as long ago."""

_LONGEST_SECONDS = 7200.0
"""No claim and no pause lasts so long: an `until` beyond it is not a relay's, and counts as past."""


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

    def claimed(self, owner: ObjectId, ttl: float) -> list[Document]:
        """Claim a document."""
        return [{"$set": {self.field.claim: _whole({"owner": literal(owner), "until": after(ttl)})}}]

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
        renewed = {"$mergeObjects": [f"${field.claim}", {"until": after(ttl)}]}
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
        free = {**UNCLAIMED, "until": after(pause)} if pause else UNCLAIMED
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


def _whole(document: Document) -> Document:
    """Return what replaces a value; `$set` alone would merge a document into one, or into each of an array."""
    return {"$mergeObjects": [document]}


def _readable(value: object, kind: str, otherwise: object) -> Document:
    """A value, or another where somebody else has written something that is none: no query fails for it."""
    return {"$convert": {"input": value, "to": kind, "onError": otherwise, "onNull": otherwise}}


def _one_more(path: str) -> Document:
    """A count and one more; what is no number, or too large for one more, begins anew."""
    number = {"$min": [_readable(path, "int", 0), 1_000_000]}
    return {"$add": [number, 1]}
