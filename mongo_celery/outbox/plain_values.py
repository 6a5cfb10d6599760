"""
Plain values that carry their tasks and events, for whatever driver writes them.

====================  =====================================================  =======================================
what the user has     what carries the entries                               which `_id` is known
====================  =====================================================  =======================================
a document            a copy with the field, and with an `_id`               its own
operators             the same, and `$push`, `$inc` and `$max` of the field  what `id=` says
a pipeline            the same, and a last stage                             what `id=` says
a bulk write's        a request of the same kind; for a `ReplaceOne` an      of an insert; what its filter demands by
request               `UpdateOne`                                            equality, without a collation
====================  =====================================================  =======================================

Nothing is asked and nothing is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from bson import ObjectId
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.common import validate_is_document_type, validate_ok_for_replace

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, parse_filter_id, same_bson
from mongo_celery.mongo.writes import BulkRequest, Modifications
from mongo_celery.outbox.entries import EntryMaker, Home
from mongo_celery.outbox.pending import PendingField


class PlainValues:
    """
    Makes plain values that carry entries.

    Args:
        field: in which entries wait.
        maker: of entries.
    """

    def __init__(self, field: PendingField, maker: EntryMaker) -> None:
        self.field = field
        self._maker = maker

    def of(self, what: Any, tasks: Sequence[Any], events: Sequence[Any], *, id: Any) -> Any:  # noqa: A002
        """
        A value of the kind of `what` that carries tasks and events; see `Outbox.with_tasks`.

        Raises:
            OutboxRefusedError: the message says why.
        """
        if isinstance(what, (InsertOne, UpdateOne, UpdateMany, ReplaceOne, DeleteOne, DeleteMany)):
            if id is not NO_ID:
                raise OutboxRefusedError(
                    f"id= is for operators and pipelines; {type(what).__name__} says itself what it writes."
                )
            return self.of_request(what, tasks, events)
        home = Home(id, None if id is NO_ID else False)
        if isinstance(what, list):
            return self.of_update(what, tasks, events, home)
        if not isinstance(what, Mapping):
            raise OutboxRefusedError(
                f"{type(what).__name__} can carry no tasks; pass a document, update operators, a pipeline or a request "
                "of a bulk write (of a model: its to_mongo() or model_dump())."
            )
        operators = [str(name).startswith("$") for name in what]
        if not any(operators):
            known = what.get("_id", id)
            if id is not NO_ID and not same_bson(known, id):
                raise OutboxRefusedError(f"id={id!r} is not the _id of the document, {known!r}; leave one of them out.")
            return self.of_document({**what, "_id": ObjectId() if known is NO_ID else known}, tasks, events)
        if not all(operators):
            raise OutboxRefusedError(
                "operators and fields stand side by side: neither a document to insert nor an update; pass one of them."
            )
        return self.of_update(what, tasks, events, home)

    def of_document(self, document: Any, tasks: Sequence[Any], events: Sequence[Any]) -> dict[str, Any]:
        """Return a document to insert with its entries; the given one gets an `_id`, as PyMongo would give it one."""
        validate_is_document_type("document", document)
        self.field.refuse_in_document(document)
        if "_id" not in document and isinstance(document, MutableMapping):
            document["_id"] = ObjectId()
        document_id = document["_id"] if "_id" in document else ObjectId()
        entries = self._maker.entries(tasks, events, Home(document_id))
        field = {self.field.name: self.field.new_field(entries)} if entries else {}
        return {"_id": document_id, **document, **field}

    def of_update(
        self,
        update: Modifications,
        tasks: Sequence[Any],
        events: Sequence[Any],
        home: Home,
        upserts: Mapping[str, Any] | None = None,
    ) -> Any:
        """
        Return operators or a pipeline with entries.

        Args:
            update: the user's.
            tasks: to follow.
            events: to follow.
            home: which document it goes to.
            upserts: the filter, where the write may create its document.
        """
        self.field.refuse_in_filter(upserts or {})
        entries = self._maker.entries(tasks, events, home)
        self.field.refuse_in_update(update)
        return self.field.with_entries(update, entries) if entries else update

    def of_request(self, request: Any, tasks: Sequence[Any], events: Sequence[Any]) -> Any:
        """A bulk write's request that carries tasks and events, errors as of `of`."""
        if isinstance(request, (DeleteOne, DeleteMany)):
            if tasks or events:
                raise OutboxRefusedError(
                    f"{type(request).__name__} carries no tasks: with the document its entries would be gone; use an "
                    "OutboxCollection for what is to follow a delete."
                )
            return request
        facts = BulkRequest.of(request)
        place: dict[str, Any] = {} if facts.namespace is None else {"namespace": facts.namespace}
        if isinstance(request, InsertOne):
            return InsertOne(self.of_document(facts.document, tasks, events), **place)
        known = NO_ID if facts.options.get("collation") else parse_filter_id(facts.filter)
        home, upserts = Home(known, isinstance(request, UpdateMany)), facts.filter if facts.upsert else {}
        if isinstance(request, ReplaceOne):
            validate_ok_for_replace(facts.document)
            self.field.refuse_in_document(facts.document)
            self.field.refuse_in_filter(upserts)
            update: Any = self.field.replacement(facts.document, self._maker.entries(tasks, events, home))
        else:
            update = self.of_update(facts.document, tasks, events, home, upserts)
        sort = {} if facts.sort is None else {"sort": facts.sort}
        kind: Any = UpdateMany if isinstance(request, UpdateMany) else UpdateOne
        return kind(facts.filter, update, upsert=facts.upsert, **facts.options, **place, **sort)
