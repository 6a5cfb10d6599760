"""
The field with a document's pending entries, and appending to it.

::

    pendingEvents: {count, events: [entry ...], claim: {owner, until}}

`count` always equals the length of `events`. The partial index has the documents with a `count`, by `claim.until`. The
first entry creates the field, and the last one removes it. Every write of an entry also creates `claim`. So relays
change only values of fixed size, and every document that could be written can also be delivered, up to the limit of 16
MB.

Writers claim nothing. A relay claims a document until `until`, or holds it back until then after a failure, by the
server's clock. The age of an entry comes from its writer's clock. A time ahead of the server's counts as long ago: a
writer with a wrong clock may cause a duplicate, but never delays an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from pymongo.errors import OperationFailure

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.verdicts import Code, is_too_large
from mongo_celery.mongo.writes import Addition, Body, Modifications, Operators, Pipeline, Replacement
from mongo_celery.outbox.entries import Entry

Document = dict[str, Any]

FIELD = "pendingEvents"
"""The top-level field of the document. The name comes from the technique's source."""

COUNT = f"{FIELD}.count"
EVENTS = f"{FIELD}.events"
CLAIM = f"{FIELD}.claim"
UNTIL = f"{CLAIM}.until"
"""Path of the time until which a document is claimed or held back."""

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
NOBODY = ObjectId("0" * 24)
UNCLAIMED: Document = {"owner": NOBODY, "until": LONG_AGO}
"""
The smallest claim, so `$max` adds it if there is none, and changes no existing one. The server compares documents key
by key, so its keys are in stored order.
"""

_PATH_STAGES = {"$set", "$addFields", "$unset"}


def new_field(entries: Sequence[Entry]) -> Document:
    """Return the field's value for an inserted document."""
    events = [entry.to_document() for entry in entries]
    return {"count": len(entries), "events": events, "claim": dict(UNCLAIMED)}


def append_entries(update: Modifications, entries: Sequence[Entry]) -> Any:
    """
    Return the user's update with the entries appended, as one write.

    Args:
        update: update operators or a pipeline.
        entries: at least one.

    Raises:
        OutboxRefusedError: the update touches the field, or a pipeline replaces the whole document.
    """
    refuse_in_update(update)
    if isinstance(update, Mapping) and not all(str(operator).startswith("$") for operator in update):
        raise ValueError("update only works with $ operators")  # PyMongo's own message
    for operator, fields in update.items() if isinstance(update, Mapping) else ():
        if not isinstance(fields, Mapping):
            raise OutboxRefusedError(f"{operator} takes a document of fields, not {type(fields).__name__}.")
    body = Operators(update) if isinstance(update, Mapping) else Pipeline(update)
    return body.build_update(make_addition(entries))


def replace_whole(document: Mapping[str, Any], entries: Sequence[Entry]) -> list[Mapping[str, Any]]:
    """
    Return a pipeline that replaces a document and keeps its `_id` and pending entries.

    Args:
        document: the new one. An `_id` in it must equal the stored one, otherwise the server refuses it.
        entries: to append. May be empty.
    """
    own = make_addition(entries) if entries else Addition(FIELD, {}, f"${FIELD}")
    identity = [] if "_id" in document else [Addition("_id", {}, "$_id")]
    return Replacement(document).build_update(*identity, own)


def make_addition(entries: Sequence[Entry]) -> Addition:
    """Return the outbox's update of an existing document: the appended entries, and room for a claim."""
    events = [entry.to_document() for entry in entries]
    pushed: dict[str, Document] = {
        "$push": {EVENTS: {"$each": events}},
        "$inc": {COUNT: len(events)},
        "$max": {CLAIM: dict(UNCLAIMED)},
    }
    return Addition(FIELD, pushed, _build_appended(literal(events)))


def _build_appended(new: Document) -> Document:
    there = {"$ifNull": [f"${EVENTS}", []]}
    return {
        "count": {"$add": [{"$size": there}, {"$size": new}]},
        "events": {"$concatArrays": [there, new]},
        "claim": {"$max": [f"${CLAIM}", literal(UNCLAIMED)]},
    }


def refuse_in_document(document: Mapping[str, Any]) -> None:
    """Refuse a document with the field."""
    _refuse(Replacement(document))


def refuse_in_filter(filter: Mapping[str, Any]) -> None:  # noqa: A002 - PyMongo's word
    """Refuse an upsert's filter with the field, because the server would copy it into the new document."""
    for name, condition in filter.items():
        if name in {"$and", "$or"}:
            for each in condition:
                refuse_in_filter(each)
        else:
            _refuse(Replacement({name: condition}))


def refuse_in_update(update: Modifications) -> None:
    """Refuse an update or pipeline with the field, or with a stage that could drop it."""
    if isinstance(update, Mapping):
        _refuse(Operators(update))
        return
    for name in (name for stage in update for name in stage):
        if name not in _PATH_STAGES:
            raise OutboxRefusedError(
                f"The pipeline stage {name} could remove {FIELD}. Use $set and $unset, or a replacement.",
            )
    _refuse(Pipeline(update))


def _refuse(body: Body) -> None:
    if body.find_name(FIELD) is not None:
        raise OutboxRefusedError(f"{FIELD} belongs to the outbox. Leave it out of the update or document.")


@contextmanager
def explain_refusals(namespace: str, otherwise: str = "nothing was written") -> Iterator[None]:
    """Explain why the server refuses a document: larger than 16 MB, or with another value in the field."""
    try:
        yield
    except Exception as error:
        if is_too_large(error):
            raise OutboxRefusedError(
                f"The document with its entries would be larger than 16 MB, so {otherwise} to {namespace}. Pass "
                "ids instead of values to the tasks, or store less in the document.",
            ) from error
        if isinstance(error, OperationFailure) and error.code == Code.PathNotViable and FIELD in str(error):
            raise OutboxRefusedError(
                f"{FIELD} of a document of {namespace} is not a document, perhaps because an ODM wrote null, so "
                f'{otherwise}. Remove the value: update_many({{"{FIELD}": {{"$type": "null"}}}}, '
                f'{{"$unset": {{"{FIELD}": 1}}}}).',
            ) from error
        raise
