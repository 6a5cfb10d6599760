"""PyMongo's bulk write with entries: each request keeps its order and carries its own tasks and events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.client_session import ClientSession

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, demanded_id, id_key
from mongo_celery.mongo.writes import BulkRequest
from mongo_celery.outbox import pending
from mongo_celery.outbox.document_write import refuse_replacement
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.writes import Writer

_FIELD = pending.PendingField()

MakeEntries = Callable[[Sequence[object], Sequence[Event], object], list[Entry]]


@dataclass(frozen=True, slots=True)
class Write:
    """
    One request of a bulk write with its tasks and events.

    Args:
        request: PyMongo's `InsertOne`, `UpdateOne` or `ReplaceOne`.
        tasks: signatures, chains, groups, chords.
        events: events.
    """

    request: Any
    tasks: Sequence[object] = ()
    events: Sequence[Event] = ()

    @classmethod
    def of(cls, given: Any, tasks: Sequence[object], events: Sequence[Event]) -> Write:
        """A write from what the user passed, with what every request gets in addition."""
        write = given if isinstance(given, cls) else cls(*given) if isinstance(given, tuple) else cls(given)
        return cls(write.request, [*write.tasks, *tasks], [*write.events, *events])


def write_in_bulk(
    writer: Writer,
    writes: Sequence[Write],
    make_entries: MakeEntries,
    *,
    ordered: bool,
    session: ClientSession | None,
) -> tuple[Any, list[Any]]:
    """
    Run a bulk write.

    How full the documents are is looked at before the write; writers at the same time can pass the limit a little.

    Returns:
        PyMongo's result, and the `_id`s that are known to have something pending now.

    Raises:
        OutboxRefusedError: before anything was written.
    """
    requests, known, added = [], dict[Hashable, Any](), list[tuple[Any, Any, int]]()
    for write in writes:
        facts = BulkRequest.of(write.request)
        document_id = _id_of(write.request, facts)
        entries = make_entries(write.tasks, write.events, document_id)
        requests.append(_with_entries(writer, write.request, facts, entries))
        if not entries:
            continue
        if document_id is not NO_ID:
            known[id_key(document_id, writer.collection.codec_options)] = document_id
        if not isinstance(write.request, InsertOne):
            added.append((document_id, facts.filter if document_id is NO_ID else None, len(entries)))
    writer.refuse_full_documents(added, session)
    return writer.collection.bulk_write(requests, ordered=ordered, session=session), list(known.values())


def _id_of(request: Any, facts: BulkRequest) -> Any:
    if isinstance(request, InsertOne):
        return facts.document.setdefault("_id", ObjectId())
    if isinstance(request, (UpdateOne, ReplaceOne)) and not facts.options.get("collation"):
        return demanded_id(facts.filter)
    return NO_ID


def _with_entries(writer: Writer, request: Any, facts: BulkRequest, entries: Sequence[Entry]) -> Any:
    if isinstance(request, (DeleteOne, DeleteMany)):
        raise OutboxRefusedError("a bulk write cannot deliver before it deletes; use the outbox's delete_one.")
    if not isinstance(request, (InsertOne, UpdateOne, UpdateMany, ReplaceOne)):
        raise OutboxRefusedError(f"{type(request).__name__} is no request of a bulk write that the outbox knows.")
    if facts.upsert:
        _FIELD.refuse_in_filter(facts.filter)
    if isinstance(request, InsertOne):
        _FIELD.refuse_in_document(facts.document)
        return InsertOne(writer.insertion(facts.document, entries, claim=False)[0]) if entries else request
    if isinstance(request, UpdateMany) and entries:
        raise OutboxRefusedError("UpdateMany cannot carry tasks or events: each document needs its own entries.")
    if isinstance(request, ReplaceOne):
        refuse_replacement(facts.document)
        update: Any = _FIELD.replacement(facts.document, entries)
    elif entries:
        update = _FIELD.with_entries(facts.document, entries)
    else:
        _FIELD.refuse_in_update(facts.document)
        return request
    sort = {} if facts.sort is None else {"sort": facts.sort}
    return UpdateOne(facts.filter, update, upsert=facts.upsert, **facts.options, **sort)
