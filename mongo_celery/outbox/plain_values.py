"""
Plain values with their tasks and events, for any driver.

====================  =====================================================  =======================================
what the user has     what carries the entries                               which `_id` is known
====================  =====================================================  =======================================
a document            a copy with the field, and with an `_id`               its own
operators             the same, and `$push`, `$inc` and `$max` of the field  what `id=` says
a pipeline            the same, and a last stage                             what `id=` says
a bulk write's        a request of the same kind; for a `ReplaceOne` an      of an insert; what its filter demands by
request               `UpdateOne`                                            equality, without a collation
====================  =====================================================  =======================================

This module reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from bson import ObjectId
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.common import validate_is_document_type, validate_ok_for_replace

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, parse_filter_id, same_bson
from mongo_celery.mongo.writes import BulkRequest, Modifications
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import (
    FIELD,
    append_entries,
    new_field,
    refuse_in_document,
    refuse_in_filter,
    refuse_in_update,
    replace_whole,
)


class PlainValues:
    """
    Makes plain values with entries.

    Args:
        make: returns entries of tasks and events, for an `_id`.
    """

    def __init__(self, make: Callable[[Sequence[Any], Sequence[Any], Any], list[Entry]]) -> None:
        self._make = make

    def of(self, what: Any, tasks: Sequence[Any], events: Sequence[Any], *, id: Any) -> Any:  # noqa: A002
        """
        Return a value of the same kind as `what`, with tasks and events, as in `Outbox.with_tasks`.

        Raises:
            OutboxRefusedError: the message names the reason.
        """
        if isinstance(what, (InsertOne, UpdateOne, UpdateMany, ReplaceOne, DeleteOne, DeleteMany)):
            if id is not NO_ID:
                raise OutboxRefusedError(
                    f"id= is only for operators and pipelines. {type(what).__name__} already selects its "
                    "documents, so leave id= out."
                )
            return self.of_request(what, tasks, events)
        if isinstance(what, list):
            return self.of_update(what, tasks, events, id)
        if not isinstance(what, Mapping):
            raise OutboxRefusedError(
                f"{type(what).__name__} cannot carry tasks. Pass a document, update operators, a pipeline or a "
                "request of a bulk write. For a model, pass its to_mongo() or model_dump()."
            )
        operators = [str(name).startswith("$") for name in what]
        if not any(operators):
            known = what.get("_id", id)
            if id is not NO_ID and not same_bson(known, id):
                raise OutboxRefusedError(
                    f"id={id!r} differs from the _id of the document, {known!r}. Leave one of them out."
                )
            return self.of_document({**what, "_id": ObjectId() if known is NO_ID else known}, tasks, events)
        if not all(operators):
            raise OutboxRefusedError(
                "The value has both operators and fields, so it is neither a document nor an update. Pass one of them."
            )
        return self.of_update(what, tasks, events, id)

    def of_document(self, document: Any, tasks: Sequence[Any], events: Sequence[Any]) -> dict[str, Any]:
        """Return a document to insert, with its entries. The given one gets an `_id`, as with PyMongo."""
        validate_is_document_type("document", document)
        refuse_in_document(document)
        if "_id" not in document and isinstance(document, MutableMapping):
            document["_id"] = ObjectId()
        document_id = document["_id"] if "_id" in document else ObjectId()
        entries = self._make(tasks, events, document_id)
        field = {FIELD: new_field(entries)} if entries else {}
        return {"_id": document_id, **document, **field}

    def of_update(
        self,
        update: Modifications,
        tasks: Sequence[Any],
        events: Sequence[Any],
        document_id: Any,
        upserts: Mapping[str, Any] | None = None,
    ) -> Any:
        """
        Return operators or a pipeline with entries.

        Args:
            update: the user's update.
            tasks: the tasks to append.
            events: the events to append.
            document_id: the `_id` of its document. `NO_ID` if unknown.
            upserts: the filter, if the write may create its document.
        """
        refuse_in_filter(upserts or {})
        entries = self._make(tasks, events, document_id)
        refuse_in_update(update)
        return append_entries(update, entries) if entries else update

    def of_request(self, request: Any, tasks: Sequence[Any], events: Sequence[Any]) -> Any:
        """Return a bulk write's request with tasks and events. Errors as in `of`."""
        if isinstance(request, (DeleteOne, DeleteMany)):
            if tasks or events:
                raise OutboxRefusedError(
                    f"{type(request).__name__} cannot carry tasks, because its entries would be deleted with the "
                    "document. To send tasks after a delete, use an OutboxCollection."
                )
            return request
        facts = BulkRequest.of(request)
        place: dict[str, Any] = {} if facts.namespace is None else {"namespace": facts.namespace}
        if isinstance(request, InsertOne):
            return InsertOne(self.of_document(facts.document, tasks, events), **place)
        known = NO_ID if facts.options.get("collation") else parse_filter_id(facts.filter)
        upserts = facts.filter if facts.upsert else {}
        if isinstance(request, ReplaceOne):
            validate_ok_for_replace(facts.document)
            refuse_in_document(facts.document)
            refuse_in_filter(upserts)
            update: Any = replace_whole(facts.document, self._make(tasks, events, known))
        else:
            update = self.of_update(facts.document, tasks, events, known, upserts)
        sort = {} if facts.sort is None else {"sort": facts.sort}
        kind: Any = UpdateMany if isinstance(request, UpdateMany) else UpdateOne
        return kind(facts.filter, update, upsert=facts.upsert, **facts.options, **place, **sort)
