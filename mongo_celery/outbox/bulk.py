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
from mongo_celery.outbox import pending
from mongo_celery.outbox.change import refuse_replacement
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.writes import Writer

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
        document_id = _id_of(write.request)
        entries = make_entries(write.tasks, write.events, None if document_id is NO_ID else document_id)
        requests.append(_with_entries(writer, write.request, entries, document_id))
        if not entries:
            continue
        if document_id is not NO_ID:
            known[id_key(document_id, writer.collection.codec_options)] = document_id
        if not isinstance(write.request, InsertOne):
            unknown = write.request._filter if document_id is NO_ID else None  # noqa: SLF001
            added.append((document_id, unknown, len(entries)))
    writer.refuse_full_documents(added, session)
    return writer.collection.bulk_write(requests, ordered=ordered, session=session), list(known.values())


def _id_of(request: Any) -> Any:
    if isinstance(request, InsertOne):
        return request._doc.setdefault("_id", ObjectId())  # noqa: SLF001 - PyMongo's requests show nothing in public
    if isinstance(request, (UpdateOne, ReplaceOne)):
        return NO_ID if request._collation else demanded_id(request._filter)  # noqa: SLF001
    return NO_ID


def _with_entries(writer: Writer, request: Any, entries: Sequence[Entry], document_id: Any) -> Any:
    if isinstance(request, (DeleteOne, DeleteMany)):
        raise OutboxRefusedError("a bulk write cannot deliver before it deletes; use the outbox's delete_one.")
    document = request._doc  # noqa: SLF001
    if isinstance(request, UpdateMany):
        if request._upsert:  # noqa: SLF001
            pending.refuse_in_filter(request._filter)  # noqa: SLF001
        if entries:
            raise OutboxRefusedError("UpdateMany cannot carry tasks or events: each document needs its own entries.")
        pending.refuse_own_field(document)
        return request
    if isinstance(request, InsertOne):
        pending.refuse_in_document(document)
        return InsertOne(writer.insertion(document, entries, claim=False)[0]) if entries else request
    if not isinstance(request, (UpdateOne, ReplaceOne)):
        raise OutboxRefusedError(f"{type(request).__name__} is no request of a bulk write that the outbox knows.")
    if request._upsert:  # noqa: SLF001
        pending.refuse_in_filter(request._filter)  # noqa: SLF001
    if isinstance(request, ReplaceOne):
        refuse_replacement(document)
        new_id = ObjectId() if document_id is NO_ID else document_id
        update: Any = pending.replacement_with_entries(document, entries, None, new_id)
    elif entries:
        update = pending.with_entries(document, entries)
    else:
        pending.refuse_own_field(document)
        return request
    options = {name: getattr(request, f"_{name}", None) for name in ("collation", "array_filters", "hint", "sort")}
    given = {name: value for name, value in options.items() if value is not None}
    return UpdateOne(request._filter, update, upsert=bool(request._upsert), **given)  # noqa: SLF001
