"""
What an outbox keeps in a document, in a field of its own, and how a write appends to it.

::

    pendingEvents: {count, events: [entry ...], claim: {owner, since, ttl, wait}}

`count` always equals the length of `events`; the partial index is on it. The field comes with the first entry and goes
with the last. Every write of an entry also gives `claim` its place: relays then change only values of fixed size, so a
document that could be written can also be delivered, right up to the limit of 16 MB.

A claim runs from `since` for `ttl` milliseconds, by the server's clock (`$currentDate`, `$$NOW`), and a document is
held back for `wait` milliseconds from then. Only an insert has no server time to offer; its claim, and the age of its
entries, come from the writer's clock. So a time that lies ahead of the server's counts as long ago: a writer with a
wrong clock can cost a duplicate, and never makes an entry wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from datetime import UTC, datetime
from typing import Any

from bson import Decimal128, ObjectId
from bson.int64 import Int64

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.expressions import literal, millis
from mongo_celery.mongo.writes import Addition, Body, Modifications, Operators, Pipeline, Replacement
from mongo_celery.outbox.entries import FIELD, Entry

Document = dict[str, Any]
Claim = tuple[ObjectId, float]
"""Owner and seconds, of a claim that is written with the entries."""

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
NOBODY = ObjectId("0" * 24)
UNCLAIMED: Document = {"owner": NOBODY, "since": LONG_AGO, "ttl": Int64(0), "wait": Int64(0)}
"""
The smallest claim, so that `$max` fills it in where there is none and changes nothing that is there: the server
compares documents key by key, which is why these stand in the order in which they are stored.
"""

_COUNT_MAX = 2**63 - 1

_PATH_STAGES = {"$set", "$addFields", "$unset"}


@dataclass(frozen=True, slots=True)
class PendingField:
    """
    The field of a collection's documents in which their entries wait.

    Args:
        name: of the field, at the top of the document.
        beside: gives the fields of other outboxes on the collection, which a replacement keeps, too.
    """

    name: str = FIELD
    beside: Callable[[], Sequence[PendingField]] = dataclass_field(default=tuple, compare=False)

    @property
    def count(self) -> str:
        """Path of the number of entries."""
        return f"{self.name}.count"

    @property
    def events(self) -> str:
        """Path of the entries."""
        return f"{self.name}.events"

    @property
    def claim(self) -> str:
        """Path of the claim."""
        return f"{self.name}.claim"

    @property
    def absent(self) -> Document:
        """A condition: nothing is pending, and no relay holds the document."""
        return {self.name: {"$exists": False}}

    def room_for(self, count: int, max_pending: int) -> Document:
        """A condition: there is still room for so many entries; true of a document without the field."""
        return {self.count: {"$not": {"$gt": max_pending - count}}}

    def count_in(self, document: Mapping[str, Any]) -> int:
        """How many entries a document says that it holds; what is no number counts as none."""
        field = document.get(self.name)
        count = field.get("count", 0) if isinstance(field, Mapping) else 0
        try:
            return int(count.to_decimal() if isinstance(count, Decimal128) else count)
        except OverflowError:  # infinity, which is beyond any bound
            return _COUNT_MAX
        except (TypeError, ValueError):
            return 0

    # -- append ------------------------------------------------------------------------------------

    def new_field(self, entries: Sequence[Entry], claim: Claim | None, now: datetime) -> Document:
        """The field's value in a document that is inserted, claimed from `now` by the writer's clock if it is."""
        owner, ttl = claim or (NOBODY, 0)
        since, events = now if claim else LONG_AGO, [entry.to_document() for entry in entries]
        return {
            "count": len(entries),
            "events": events,
            "claim": {"owner": owner, "since": since, "ttl": millis(ttl), "wait": Int64(0)},
        }

    def with_entries(self, update: Modifications, entries: Sequence[Entry], claim: Claim | None = None) -> Any:
        """
        The user's update with the entries appended, to be written as one.

        Args:
            update: update operators or a pipeline.
            entries: at least one.
            claim: to claim, in the same write, a document without the field.

        Raises:
            OutboxRefusedError: the update touches the field, or replaces the whole document in a pipeline.
        """
        self.refuse_in_update(update)
        if isinstance(update, Mapping) and not all(str(operator).startswith("$") for operator in update):
            raise ValueError("update only works with $ operators")  # PyMongo's own words
        for operator, fields in update.items() if isinstance(update, Mapping) else ():
            if not isinstance(fields, Mapping):
                raise OutboxRefusedError(f"{operator} takes a document of fields, not {type(fields).__name__}.")
        body = Operators(update) if isinstance(update, Mapping) else Pipeline(update)
        return body.amended(self.addition(entries, claim))

    def replacement(
        self, document: Mapping[str, Any], entries: Sequence[Entry], claim: Claim | None = None
    ) -> list[Mapping[str, Any]]:
        """
        A pipeline that replaces a document and keeps its `_id` and what is pending, of other outboxes, too.

        Args:
            document: the new one; an `_id` in it must be the stored document's own, or the server refuses it. It may
                carry new entries of other outboxes.
            entries: to append; may be empty.
            claim: to claim, in the same write, a document without the field.
        """
        own = self.addition(entries, claim) if entries else self._kept()
        beside = {other.name: other.kept_with(document.get(other.name)) for other in self.beside()}
        identity = [] if "_id" in document else [Addition("_id", {}, "$_id")]
        rest = {name: value for name, value in document.items() if name not in beside} if beside else document
        return Replacement(rest).amended(*identity, own, *beside.values())

    def kept_with(self, brought: Any) -> Addition:
        """Return what keeps the pending entries, with those of a field's value in a new document, each once."""
        events = brought.get("events") if isinstance(brought, Mapping) else None
        if not isinstance(events, list) or not events:
            return self._kept()
        known = {"$in": ["$$entry.id", {"$ifNull": [f"${self.events}.id", []]}]}
        new = {"$filter": {"input": literal(events), "as": "entry", "cond": {"$not": [known]}}}
        return Addition(self.name, {}, self._appended(events, None, new))

    def addition(self, entries: Sequence[Entry], claim: Claim | None = None) -> Addition:
        """What the outbox writes to a document that is there: the entries appended, and the claim."""
        events = [entry.to_document() for entry in entries]
        return Addition(self.name, self._pushed(events, claim), self._appended(events, claim))

    def _kept(self) -> Addition:
        """What is pending stays; where nothing is, no field comes to be."""
        return Addition(self.name, {}, f"${self.name}")

    def _pushed(self, events: Sequence[Document], claim: Claim | None) -> dict[str, Document]:
        pushed: dict[str, Document] = {
            "$push": {self.events: {"$each": list(events)}},
            "$inc": {self.count: len(events)},
        }
        if claim is None:
            return {**pushed, "$max": {self.claim: dict(UNCLAIMED)}}
        owner, ttl = claim
        fixed = {f"{self.claim}.owner": owner, f"{self.claim}.ttl": millis(ttl), f"{self.claim}.wait": Int64(0)}
        return {**pushed, "$set": fixed, "$currentDate": {f"{self.claim}.since": True}}

    def _appended(self, events: Sequence[Document], claim: Claim | None, new: Document | None = None) -> Document:
        there, new = {"$ifNull": [f"${self.events}", []]}, new or literal(list(events))
        kept = {"$max": [f"${self.claim}", literal(UNCLAIMED)]}
        return {
            "count": {"$add": [{"$size": there}, {"$size": new}]},
            "events": {"$concatArrays": [there, new]},
            "claim": claimed_by(*claim) if claim else kept,
        }

    # -- refuse ------------------------------------------------------------------------------------

    def refuse_in_document(self, document: Mapping[str, Any]) -> None:
        """Refuse a document that names the field."""
        self._refuse(Replacement(document))

    def refuse_in_filter(self, filter: Mapping[str, Any]) -> None:  # noqa: A002 - PyMongo's word
        """Refuse the filter of an upsert that names the field: the server would copy it into the new document."""
        for name, condition in filter.items():
            if name in {"$and", "$or"}:
                for each in condition:
                    self.refuse_in_filter(each)
            else:
                self._refuse(Replacement({name: condition}))

    def refuse_in_update(self, update: Modifications) -> None:
        """Refuse an update or pipeline that names the field, or a stage that could drop it."""
        if isinstance(update, Mapping):
            self._refuse(Operators(update))
            return
        for name in (name for stage in update for name in stage):
            if name not in _PATH_STAGES:
                raise OutboxRefusedError(
                    f"the pipeline stage {name} could drop {self.name}; use $set and $unset, or a replacement.",
                )
        self._refuse(Pipeline(update))

    def _refuse(self, body: Body) -> None:
        if body.name_in(self.name) is not None:
            raise OutboxRefusedError(f"{self.name} belongs to the outbox; leave it out of the update or document.")


def claimed_by(owner: ObjectId, ttl: float) -> Document:
    """A claim from now on, for a pipeline."""
    return {"owner": literal(owner), "since": "$$NOW", "ttl": millis(ttl), "wait": Int64(0)}
