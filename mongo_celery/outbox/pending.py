"""
What an outbox keeps in a document, in a field of its own, and how a write appends to it.

::

    pendingEvents: {count, events: [entry ...], claim: {owner, until}}

`count` always equals the length of `events`. The partial index has the documents with a `count`, by `claim.until`. The
field comes with the first entry and goes with the last. Every write of an entry also gives `claim` its place: relays
then change only values of fixed size, so a document that could be written can also be delivered, right up to the limit
of 16 MB.

Writers claim nothing. A relay claims a document until `until`, and holds it back until then after a failure, by the
server's clock. The age of an entry comes from its writer's clock. A time that lies ahead of the server's counts as
long ago: a writer with a wrong clock can cost a duplicate, and never makes an entry wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from pymongo.errors import OperationFailure

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.verdicts import Code, is_too_large
from mongo_celery.mongo.writes import Addition, Body, Modifications, Operators, Pipeline, Replacement
from mongo_celery.outbox.entries import FIELD, Entry

Document = dict[str, Any]
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
NOBODY = ObjectId("0" * 24)
UNCLAIMED: Document = {"owner": NOBODY, "until": LONG_AGO}
"""
The smallest claim, so that `$max` fills it in where there is none and changes nothing that is there: the server
compares documents key by key, which is why these stand in the order in which they are stored.
"""

_PATH_STAGES = {"$set", "$addFields", "$unset"}


@dataclass(frozen=True, slots=True)
class PendingField:
    """
    The field of a collection's documents in which their entries wait.

    Args:
        name: of the field, at the top of the document.
    """

    name: str = FIELD

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
    def until(self) -> str:
        """Path of the time until which a document is claimed, or held back."""
        return f"{self.claim}.until"

    # -- append ------------------------------------------------------------------------------------

    def new_field(self, entries: Sequence[Entry]) -> Document:
        """Return the field's value in a document that is inserted."""
        events = [entry.to_document() for entry in entries]
        return {"count": len(entries), "events": events, "claim": dict(UNCLAIMED)}

    def with_entries(self, update: Modifications, entries: Sequence[Entry]) -> Any:
        """
        The user's update with the entries appended, to be written as one.

        Args:
            update: update operators or a pipeline.
            entries: at least one.

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
        return body.build_update(self.addition(entries))

    def replacement(self, document: Mapping[str, Any], entries: Sequence[Entry]) -> list[Mapping[str, Any]]:
        """
        A pipeline that replaces a document and keeps its `_id` and what is pending.

        Args:
            document: the new one; an `_id` in it must be the stored document's own, or the server refuses it.
            entries: to append; may be empty.
        """
        own = self.addition(entries) if entries else Addition(self.name, {}, f"${self.name}")
        identity = [] if "_id" in document else [Addition("_id", {}, "$_id")]
        return Replacement(document).build_update(*identity, own)

    def addition(self, entries: Sequence[Entry]) -> Addition:
        """Return what the outbox writes to a document that is there: the entries appended, and a place for a claim."""
        events = [entry.to_document() for entry in entries]
        pushed: dict[str, Document] = {
            "$push": {self.events: {"$each": events}},
            "$inc": {self.count: len(events)},
            "$max": {self.claim: dict(UNCLAIMED)},
        }
        return Addition(self.name, pushed, self._build_appended(literal(events)))

    def _build_appended(self, new: Document) -> Document:
        there = {"$ifNull": [f"${self.events}", []]}
        return {
            "count": {"$add": [{"$size": there}, {"$size": new}]},
            "events": {"$concatArrays": [there, new]},
            "claim": {"$max": [f"${self.claim}", literal(UNCLAIMED)]},
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
        if body.find_name(self.name) is not None:
            raise OutboxRefusedError(f"{self.name} belongs to the outbox; leave it out of the update or document.")


@contextmanager
def explain_refusals(namespace: str, field: str, otherwise: str = "nothing was written") -> Iterator[None]:
    """Say in our words why the server refuses a document: larger than 16 MB, or with a value where entries belong."""
    try:
        yield
    except Exception as error:
        if is_too_large(error):
            raise OutboxRefusedError(
                f"the document with its entries would be larger than 16 MB; {otherwise} to {namespace}. Pass ids "
                "instead of values to the tasks, or keep less in the document.",
            ) from error
        if isinstance(error, OperationFailure) and error.code == Code.PathNotViable and field in str(error):
            raise OutboxRefusedError(
                f"{field} of a document of {namespace} is no document, as where an ODM has written null; {otherwise}. "
                f'Remove it there: update_many({{"{field}": {{"$type": "null"}}}}, {{"$unset": {{"{field}": 1}}}}).',
            ) from error
        raise
