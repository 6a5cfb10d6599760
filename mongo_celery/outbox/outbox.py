"""The outbox of one collection: writes that carry their tasks and events, and their delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from bson import ObjectId
from celery import Celery
from celery.result import AsyncResult
from pymongo import InsertOne, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, parse_filter_id
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.transaction.scopes import after_commit, current, innermost_session
from mongo_celery.mongo.writes import Modifications
from mongo_celery.outbox.bulk import BulkWrites, Write
from mongo_celery.outbox.deletes import Deletes
from mongo_celery.outbox.document_write import DocumentWrite, Written, names_id, refuse_replacement
from mongo_celery.outbox.entries import FIELD, Entry, Home, asks_for_id, listed
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.options import SharedOptions, options_of
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.plain_values import PlainValues
from mongo_celery.outbox.registry import OUTBOXES, AnyOutbox
from mongo_celery.outbox.writes import explained_refusals

__all__ = ["OUTBOXES", "Outbox"]


class Outbox(AnyOutbox):
    """
    Saves documents together with the tasks and events that are to follow: both, or neither.

    Each write stores its entries in the document itself (`pendingEvents`), by the same atomic write. Afterwards
    they are dispatched: at once by the writer, by a bridge that watches the collection, and by a sweep for what
    was left behind. In order per document, at least once; consumers deduplicate by the id (see `once`).

    Not promised: that an entry is dispatched only once; an order between documents; anything for documents that
    are deleted or replaced behind the outbox's back while something is pending.

    Args:
        app: the Celery app.
        collection: a PyMongo collection, or a callable that returns one; it is asked once in each process, since
            prefork workers make their clients after the fork.
        max_pending: how many entries a document may hold.
        field: name of the field in which a document's entries wait.
        options: see `SharedOptions`.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app has an outbox of this name.
    """

    def __init__(
        self,
        app: Celery,
        collection: Source,
        *,
        max_pending: int = 1000,
        field: str = FIELD,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(app, collection, options_of(options, max_pending=max_pending, field=field))
        self.field = self.backing.field = replace(self.backing.field, beside=self._fields_beside)
        self._values = PlainValues(self.field, self._maker)

    # -- plain values ------------------------------------------------------------------------------

    def with_tasks(
        self,
        what: Any,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        *,
        id: Any = NO_ID,  # noqa: A002 - MongoDB's word
        many: bool = False,
    ) -> Any:
        """
        A plain value that carries tasks and events, for whatever driver writes it: PyMongo's collections, sync and
        async, bulk writes and transactions, MongoEngine's `__raw__`, Beanie, a fenced view.

        Write it once. It is saved with its tasks or not at all; they are dispatched soon after, or at once if
        `dispatch` says where. Nothing bounds how many entries such writes leave in a document, `max_pending` neither.

        A document that carries tasks is for an insert. As a replacement it would drop what others have pending: that
        is what `replacement` is for, and the same holds for a `save()` of MongoEngine or Beanie of a document that is
        there already.

        Args:
            what: a document to insert, update operators, a pipeline, or a request of a bulk write. It is not changed,
                but for the `_id` that an `InsertOne` gives its document.
            tasks: signatures, chains, groups, chords. `STORED_ID` among their arguments becomes the document's `_id`;
                where that is known already, a callable of it that makes the signature will do as well.
            events: events, or callables of the `_id`.
            id: the `_id` of the document that is updated, where only the filter will say it.
            many: operators or a pipeline for `update_many`: then ids that the user has chosen are another in each
                document, too, as those that he has not always are.

        Returns:
            A value of the same kind; for a `ReplaceOne` an `UpdateOne` that does the same.

        Raises:
            OutboxRefusedError: nothing was made; the message says why.
        """
        carried = self._values.of(what, tasks, events, id=id, many=many)
        self._expect(tasks, events)
        return carried

    def replacement(
        self,
        document: Mapping[str, Any],
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        *,
        id: Any = NO_ID,  # noqa: A002
    ) -> list[Mapping[str, Any]]:
        """
        A pipeline that replaces a document and carries tasks and events, for `update_one` and `find_one_and_update`.

        What is pending in the document stays, and so does its `_id`. With `upsert` it creates the document.

        Args:
            document: the new one.
            tasks: as of `with_tasks`.
            events: as of `with_tasks`.
            id: the document's `_id`, where only the filter will say it.

        Raises:
            OutboxRefusedError: nothing was made; the message says why.
        """
        carried = self._values.replacement(document, tasks, events, id=id)
        self._expect(tasks, events)
        return carried

    # -- writes ------------------------------------------------------------------------------------

    def insert_one(
        self,
        document: Any,
        *,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> InsertOneResult:
        """
        Insert a document with its tasks and events, as PyMongo's `insert_one`; then dispatch them.

        Args:
            document: gets an `_id` if it has none, as with PyMongo; is not changed otherwise.
            tasks: signatures, chains, groups, chords, or callables of the `_id` that make one.
            events: events, or callables of the `_id` that make one.
            session: inside a transaction nothing is dispatched before the commit.
            options: further options of PyMongo's `insert_one`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        self.field.refuse_in_document(document)
        if "_id" not in document:
            document["_id"] = ObjectId()
        entries = self._maker.entries(tasks, events, Home(document["_id"]))
        if not entries:
            return self.collection.insert_one(document, session=session, **options)
        written = self.backing.writer.insert(document, entries, session=session, **options)
        self.backing.dispatch_at_once(written, session)
        return InsertOneResult(document["_id"], acknowledged=True)

    def insert_many(
        self,
        documents: Sequence[Any],
        *,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        ordered: bool = True,
        session: ClientSession | None = None,
        **options: Any,
    ) -> InsertManyResult:
        """
        Insert documents, each with these tasks and events of its own, as PyMongo's `insert_many`.

        Args:
            documents: as of `insert_one`.
            tasks: for each document: `STORED_ID` among the arguments is its `_id`, and a callable gets it.
            events: for each document.
            ordered: as PyMongo's.
            session: inside a transaction nothing is dispatched before the commit.
            options: further options of PyMongo's `insert_many`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
            BulkWriteError: as PyMongo's; what was inserted is dispatched.
        """
        documents = list(documents)
        requests = [InsertOne(document) for document in documents]
        if not requests:
            raise TypeError("documents must be a non-empty list")  # PyMongo's own words
        self.bulk_write(requests, tasks=tasks, events=events, ordered=ordered, session=session, **options)
        return InsertManyResult([document["_id"] for document in documents], acknowledged=True)

    def update_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
        update: Modifications,
        *,
        upsert: bool = False,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> UpdateResult:
        """
        Update one document and add its tasks and events, as PyMongo's `update_one`; then dispatch them.

        If no document matches and `upsert` is false, nothing is written and nothing is dispatched. Callables of the
        `_id` need a filter that names it, or an upsert in which nothing does.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        if upsert:
            self.field.refuse_in_filter(filter)
        if not (tasks or events):
            self.field.refuse_in_update(update)
            return self.collection.update_one(filter, update, upsert=upsert, session=session, **options)
        sort = options.pop("sort", None)
        write = DocumentWrite(filter=filter, update=update, upsert=upsert, sort=sort, options=options)
        return self._write(write, tasks, events, session).result()

    def update_many(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        update: Modifications,
        *,
        upsert: bool = False,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> UpdateResult:
        """
        Update documents and add these tasks and events to each, as PyMongo's `update_many`.

        In each document they have ids of their own, and `STORED_ID` among their arguments is its `_id`. How full the
        documents are is looked at before the write; writers at the same time can pass the limit a little.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        if upsert:
            self.field.refuse_in_filter(filter)
        pinned = NO_ID if "collation" in options else parse_filter_id(filter)
        entries = self._maker.entries(tasks, events, Home(pinned, many=True))
        self.field.refuse_in_update(update)
        whole = self.field.with_entries(update, entries) if entries else update
        if entries:
            self.backing.writer.refuse_more_than_ever(entries)
            alike = {name: options[name] for name in ("collation", "hint", "let") if name in options}
            self.backing.writer.refuse_full_among(filter, len(entries), session, **alike)
        namespace, before = self.collection.full_name, "documents before it may have been written"
        with explained_refusals(namespace, self.field.name, before):
            result = self.collection.update_many(filter, whole, upsert=upsert, session=session, **options)
        if entries and (result.matched_count or result.upserted_id is not None):
            known = pinned if result.upserted_id is None else result.upserted_id
            self.backing.dispatch_at_once(Written(known, matched=True), session)
        return result

    def replace_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
        replacement: Mapping[str, Any],
        *,
        upsert: bool = False,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> UpdateResult:
        """
        Replace one document, as PyMongo's `replace_one`; what is pending in it stays, and the new is added.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        write = self._replacing(filter, replacement, upsert=upsert, sort=options.pop("sort", None), options=options)
        if not (tasks or events):
            kept = self.field.replacement(replacement, [])
            given = {} if write.sort is None else {"sort": write.sort}
            return self.collection.update_one(filter, kept, upsert=upsert, session=session, **given, **options)
        return self._write(write, tasks, events, session).result()

    def find_one_and_update(
        self,
        filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
        update: Modifications,
        *,
        projection: Any = None,
        sort: Any = None,
        upsert: bool = False,
        return_document: bool = ReturnDocument.BEFORE,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """
        Update one document, add its tasks and events and return it, as PyMongo's `find_one_and_update`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        given = {"projection": projection, "sort": sort, "upsert": upsert, "return_document": return_document}
        if upsert:
            self.field.refuse_in_filter(filter)
        if not (tasks or events):
            self.field.refuse_in_update(update)
            return self.collection.find_one_and_update(filter, update, session=session, **given, **options)
        write = DocumentWrite(filter=filter, update=update, options=options, **given)
        return self._write(write, tasks, events, session).document

    def find_one_and_replace(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        replacement: Mapping[str, Any],
        *,
        projection: Any = None,
        sort: Any = None,
        upsert: bool = False,
        return_document: bool = ReturnDocument.BEFORE,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """
        Replace one document as `replace_one` does and return it, as PyMongo's `find_one_and_replace`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        given = {"projection": projection, "return_document": return_document}
        write = self._replacing(filter, replacement, upsert=upsert, sort=sort, options=options, **given)
        if not (tasks or events):
            kept, given = self.field.replacement(replacement, []), {**given, "sort": sort, "upsert": upsert}
            return self.collection.find_one_and_update(filter, kept, session=session, **given, **options)
        return self._write(write, tasks, events, session).document

    def bulk_write(
        self,
        requests: Sequence[Any],
        *,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        ordered: bool = True,
        session: ClientSession | None = None,
        **options: Any,
    ) -> BulkWriteResult:
        """
        PyMongo's `bulk_write`, each request with its tasks and events.

        A `DeleteOne` or `DeleteMany` carries none; it delivers first what is pending in its documents: before the first
        request if its filter says which they are, a `DeleteOne` by another filter than the `_id` at its turn. It stands
        by itself between the others, so it costs round trips of its own.

        Args:
            requests: PyMongo's requests, bare or in a `Write(request, tasks=[...])` or `(request, [task, ...])`.
            tasks: in addition, for every request but deletes.
            events: in addition, for every request but deletes.
            ordered: as PyMongo's.
            session: inside a transaction nothing is dispatched before the commit.
            options: further options of PyMongo's `bulk_write`.

        Raises:
            OutboxRefusedError: what was refused is said, and that nothing was written, unless it says otherwise.
            PyMongoError: as PyMongo's `bulk_write`, also for a document that would be larger than 16 MB; then
                other requests may have been carried out, and the error says which. Those are dispatched.
        """
        tasks, events = listed(tasks), listed(events)
        writes = [Write.of(request, tasks, events) for request in requests]
        bulk = BulkWrites(self.backing.writer, self._values, self._deletes)
        try:
            return bulk.run(writes, ordered=ordered, session=session, **options)
        finally:
            self.backing.dispatch_all_at_once(bulk.written, session)

    def delete_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        *,
        session: ClientSession | None = None,
        **options: Any,
    ) -> DeleteResult:
        """
        Deliver what is pending in a document, then delete it.

        A delete that does not go through the outbox takes the pending entries with it.

        Args:
            filter: which document.
            session: in a transaction nothing is delivered (a relay would wait for it), so what waits is refused.
            options: further options of PyMongo's `delete_one`.

        Raises:
            OutboxRefusedError: something could not be delivered; the document is still there.
        """
        return self._deletes.one(filter, session, **options)

    def delete_many(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        *,
        session: ClientSession | None = None,
        **options: Any,
    ) -> DeleteResult:
        """
        Deliver what is pending in documents, then delete them; arguments as of `delete_one`.

        Raises:
            OutboxRefusedError: something could not be delivered; the message says how many were deleted.
        """
        return self._deletes.many(filter, session, **options)

    def find_one_and_delete(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        *,
        projection: Any = None,
        sort: Any = None,
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """
        Deliver what is pending in a document, then delete and return it, as PyMongo's `find_one_and_delete`.

        Raises:
            OutboxRefusedError: something could not be delivered; the document is still there.
        """
        return self._deletes.found(filter, sort, session, projection=projection, **options)

    def delay(self, document_id: object, task: Any, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """
        `task.delay(...)` for code that has a document at hand: the task is stored in the document, then dispatched.

        Inside a transaction of `transactional` this is part of it.

        Args:
            document_id: `_id` of the document, or the document itself.
            task: a Celery task.
            args: of the task.
            kwargs: of the task.

        Returns:
            The result that `delay` would return.

        Raises:
            OutboxRefusedError: there is no such document, or the entry is refused.
            ConfigurationError: a transaction of another client of the same cluster is open here.
        """
        if isinstance(document_id, Mapping) and "_id" in document_id:
            document_id = document_id["_id"]
        (entry,) = self._maker.entries([task.s(*args, **kwargs)], (), Home(document_id))
        write = DocumentWrite(filter={"_id": document_id}, update={}, options={})
        session = current(self.collection.database.client)  # without it the write would wait for the end of that one
        written = self.backing.writer.write(write, [entry], session=session)
        if not written.matched:
            raise OutboxRefusedError(f"there is no document {document_id!r} in {self.collection.full_name}.")
        self.backing.dispatch_at_once(written, session)
        return self.app.AsyncResult(entry.id)

    def save(self, instance: Any, *, tasks: Sequence[object] = (), events: Sequence[Event] = (), **options: Any) -> Any:
        """
        Save an instance of a Django model (django-mongodb-backend) with its tasks and events.

        This calls the instance's own `save()`, with Django's signals. The tasks are stored by the write inside of that.

        Args:
            instance: of a model.
            tasks: as of `insert_one`.
            events: as of `insert_one`.
            options: of `save()`, such as `update_fields`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
            ConfigurationError: the instance is no Django model, or its collection is another.
            DatabaseError: Django's own, as of `save()`.
        """
        from mongo_celery.outbox.django import save

        insert = partial(self.insert_one, tasks=tasks, events=events)
        update = partial(self.update_one, tasks=tasks, events=events)
        return save(instance, self.collection.name, insert=insert, update=update, options=options)

    # -- delivery ----------------------------------------------------------------------------------

    def dispatch(self, *document_ids: object) -> None:
        """
        Have the dispatcher look at documents that may have something pending. It never blocks and never fails.

        For writes that carry tasks and that you have carried out. Inside a transaction of `transactional` it waits for
        the commit. In a transaction of the driver's own, or of Django's, call it after the commit.

        Args:
            document_ids: their `_id`s; without any, the index is looked at.
        """
        after_commit(lambda: self.backing.dispatcher.hint(*document_ids, expected=True))

    # -- inside ------------------------------------------------------------------------------------

    def _expect(self, tasks: Sequence[Any], events: Sequence[Any]) -> None:
        """Have the index looked at soon, and after a commit: there is what somebody else writes."""
        if not tasks and not events:
            return
        self.backing.watch.needed()
        if self.backing.at_once:
            self.backing.dispatcher.expect()
            if innermost_session() is not None:
                after_commit(self.backing.dispatcher.expect)

    def _write(
        self, write: DocumentWrite, tasks: Sequence[Any], events: Sequence[Any], session: ClientSession | None
    ) -> Written:
        tasks, events = listed(tasks), listed(events)
        writer = self.backing.writer
        chosen = write.upsert and write.pinned is NO_ID and not names_id(write)
        if chosen and any(map(asks_for_id, (*tasks, *events))):

            def make(document_id: Any) -> Sequence[Entry]:
                return self._maker.entries(tasks, events, Home(document_id))

            written = writer.upsert_of_new_id(write, make, session=session)
        else:
            entries = self._maker.entries(tasks, events, Home(write.pinned))
            written = writer.write(write, entries, session=session)
        self.backing.dispatch_at_once(written, session)
        return written

    def _replacing(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        replacement: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        upsert: bool,
        sort: Any,
        **given: Any,
    ) -> DocumentWrite:
        refuse_replacement(self.field, replacement)
        if upsert:
            self.field.refuse_in_filter(filter)
        return DocumentWrite(filter=filter, replacement=replacement, upsert=upsert, sort=sort, options=options, **given)

    @property
    def _deletes(self) -> Deletes:
        return Deletes(self.collection, {each.field: each.backing.deliver_now for each in (self, *self._beside())})

    def _beside(self) -> list[Outbox]:
        """Return the app's other outboxes that keep entries in the documents of this collection."""
        others = [each for each in OUTBOXES.of(self.app) if isinstance(each, Outbox)]
        names = (self.field.name, self.collection.full_name)
        return [each for each in others if each.field.name != names[0] and each.collection.full_name == names[1]]

    def _fields_beside(self) -> list[PendingField]:
        return [each.field for each in self._beside()]
