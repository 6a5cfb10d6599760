"""
Plain values that carry their tasks and events, for whatever driver writes them.

====================  =====================================================  =======================================
what the user has     what carries the entries                               which `_id` is known
====================  =====================================================  =======================================
a document            a copy with the field, and with an `_id`               its own
operators             the same, and `$push`, `$inc` and `$max` of the field  what `id=` says
a pipeline            the same, and a last stage                             what `id=` says
a replacement         a pipeline for an update                               its own, or what `id=` says
a bulk write's        a request of the same kind; for a `ReplaceOne` an      of an insert; what its filter demands by
request               `UpdateOne`                                            equality, without a collation
====================  =====================================================  =======================================

Nothing is asked and nothing is written here. So no value can look at what is stored: it claims nothing, and keeps no
bound on how many entries wait.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from bson import ObjectId
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.common import validate_is_document_type

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, parse_filter_id, same_bson
from mongo_celery.mongo.writes import BulkRequest
from mongo_celery.outbox.document_write import refuse_replacement
from mongo_celery.outbox.entries import Entry, EntryMaker, Home
from mongo_celery.outbox.pending import PendingField

_WRITES = (InsertOne, UpdateOne, UpdateMany, ReplaceOne)
_DELETES = (DeleteOne, DeleteMany)


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

    def of(self, what: Any, tasks: Sequence[Any], events: Sequence[Any], *, id: Any, many: bool) -> Any:  # noqa: A002
        """
        A value of the kind of `what` that carries tasks and events; see `Outbox.with_tasks`.

        Raises:
            OutboxRefusedError: the message says why.
        """
        if many and id is not NO_ID:
            raise OutboxRefusedError("many=True and id= contradict each other: one _id is that of one document.")
        if isinstance(what, (*_WRITES, *_DELETES)):
            if id is not NO_ID or (many and not isinstance(what, UpdateMany)):
                raise OutboxRefusedError(
                    f"id= and many= are for operators and pipelines; {type(what).__name__} says itself what it writes."
                )
            return self.of_request(what, tasks, events)
        if isinstance(what, list):
            return self._of_update(what, tasks, events, Home(id, many or _unsure(id)))
        if not isinstance(what, Mapping):
            raise OutboxRefusedError(
                f"{type(what).__name__} can carry no tasks; pass a document, update operators, a pipeline or a request "
                "of a bulk write (of a model: its to_mongo() or model_dump())."
            )
        operators = [str(name).startswith("$") for name in what]
        if not operators or not any(operators):
            if many:
                raise OutboxRefusedError("many=True is for updates; each inserted document needs entries of its own.")
            return self._of_document(what, tasks, events, id)
        if not all(operators):
            raise OutboxRefusedError(
                "operators and fields stand side by side: neither a document to insert nor an update; pass one of them."
            )
        return self._of_update(what, tasks, events, Home(id, many or _unsure(id)))

    def replacement(
        self,
        document: Any,
        tasks: Sequence[Any],
        events: Sequence[Any],
        *,
        id: Any,  # noqa: A002
    ) -> list[Mapping[str, Any]]:
        """
        A pipeline that replaces a document, keeps what is pending in it and appends entries.

        Raises:
            OutboxRefusedError: the message says why.
            ValueError: PyMongo's own, for an update instead of a document.
        """
        refuse_replacement(self.field, document)
        known = document.get("_id", id)
        return self.field.replacement(document, self._maker.entries(tasks, events, Home(known, _unsure(known))))

    def of_request(self, request: Any, tasks: Sequence[Any], events: Sequence[Any]) -> Any:
        """A bulk write's request that carries tasks and events, errors as of `of`."""
        entries, document_id = self.entries_of_request(request, tasks, events)
        return self.with_entries(request, entries, document_id)

    def entries_of_request(
        self, request: Any, tasks: Sequence[Any], events: Sequence[Any]
    ) -> tuple[Sequence[Entry], Any]:
        """The entries of a bulk write's request, and the `_id` of its document or `NO_ID`; errors as of `of`."""
        if isinstance(request, _DELETES):
            if tasks or events:
                raise OutboxRefusedError(
                    f"{type(request).__name__} carries no tasks: with the document its entries would be gone; use an "
                    "OutboxCollection for what is to follow a delete."
                )
            return [], NO_ID
        if not isinstance(request, _WRITES):
            raise OutboxRefusedError(f"{type(request).__name__} is no request of a bulk write that the outbox knows.")
        facts = BulkRequest.of(request)
        if isinstance(request, InsertOne):
            validate_is_document_type("document", facts.document)
        document_id = _id_of(request, facts)
        return self._maker.entries(tasks, events, Home(document_id, isinstance(request, UpdateMany))), document_id

    def with_entries(self, request: Any, entries: Sequence[Entry], document_id: Any) -> Any:
        """A bulk write's request with its entries, if it has any; what would drop or spoil the field is refused."""
        facts = BulkRequest.of(request)
        if isinstance(request, _DELETES):
            return request
        if facts.upsert:
            self.field.refuse_in_filter(facts.filter)
        place: dict[str, Any] = {} if facts.namespace is None else {"namespace": facts.namespace}
        if isinstance(request, InsertOne):
            return InsertOne(self.inserted(facts.document, entries, document_id), **place) if entries else request
        sort = {} if facts.sort is None else {"sort": facts.sort}
        options = {"upsert": facts.upsert, **facts.options, **place, **sort}
        if isinstance(request, ReplaceOne):
            refuse_replacement(self.field, facts.document)
            return UpdateOne(facts.filter, self.field.replacement(facts.document, entries), **options)
        if not entries:
            self.field.refuse_in_update(facts.document)
            return request
        kind: Any = UpdateMany if isinstance(request, UpdateMany) else UpdateOne
        return kind(facts.filter, self.field.with_entries(facts.document, entries), **options)

    def inserted(self, document: Mapping[str, Any], entries: Sequence[Entry], document_id: Any) -> dict[str, Any]:
        """Return a copy of a document to insert, with its `_id` and its entries."""
        self.field.refuse_in_document(document)
        field = {self.field.name: self.field.new_field(entries)} if entries else {}
        return {"_id": document_id, **document, **field}

    def _of_document(self, document: Mapping[str, Any], tasks: Any, events: Any, id: Any) -> dict[str, Any]:  # noqa: A002
        known = document.get("_id", id)
        if id is not NO_ID and not same_bson(known, id):
            raise OutboxRefusedError(f"id={id!r} is not the _id of the document, {known!r}; leave one of them out.")
        document_id = ObjectId() if known is NO_ID else known
        self.field.refuse_in_document(document)
        return self.inserted(document, self._maker.entries(tasks, events, Home(document_id)), document_id)

    def _of_update(self, update: Any, tasks: Sequence[Any], events: Sequence[Any], home: Home) -> Any:
        entries = self._maker.entries(tasks, events, home)
        self.field.refuse_in_update(update)
        return self.field.with_entries(update, entries) if entries else update


def _unsure(id: Any) -> bool | None:  # noqa: A002
    """What is known of how many documents an update goes to, if only its `_id` may be known."""
    return None if id is NO_ID else False


def _id_of(request: Any, facts: BulkRequest) -> Any:
    if isinstance(request, InsertOne):
        # As PyMongo does when it inserts: the user finds the `_id` in his document afterwards.
        if "_id" not in facts.document and isinstance(facts.document, MutableMapping):
            facts.document["_id"] = ObjectId()
        return facts.document["_id"] if "_id" in facts.document else ObjectId()
    return NO_ID if facts.options.get("collation") else parse_filter_id(facts.filter)
