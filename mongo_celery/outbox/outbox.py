"""The outbox of one collection: writes with tasks and events, and their delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from bson import encode
from bson.raw_bson import RawBSONDocument
from celery import Celery
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.results import DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, parse_filter_id
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.transaction.scopes import after_commit, innermost_session
from mongo_celery.mongo.writes import Modifications
from mongo_celery.outbox.entries import list_given
from mongo_celery.outbox.options import SharedOptions
from mongo_celery.outbox.pending import COUNT, explain_refusals
from mongo_celery.outbox.plain_values import PlainValues
from mongo_celery.outbox.registry import BaseOutbox


class Outbox(BaseOutbox):
    """
    Saves documents with their tasks and events: both, or neither.

    Each write stores its entries in the document (`pendingEvents`), in the same atomic write. Then they are dispatched:
    immediately by the writer, by a bridge that watches the collection, or later by a sweep. Delivery is in order for
    each document, and at least once. Consumers deduplicate by id (see `once`).

    An entry may be dispatched more than once. There is no order between documents. If other code deletes or replaces a
    document with pending entries, they are lost.

    Args:
        app: the Celery app.
        collection: a PyMongo collection, or a callable that returns one. The callable runs once in each process,
            because prefork workers make their clients after the fork.
        options: see `SharedOptions`.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app has an outbox of this name.
    """

    def __init__(self, app: Celery, collection: Source, **options: Unpack[SharedOptions]) -> None:
        super().__init__(app, collection, options)
        self._values = PlainValues(self._make_entries)

    # -- plain values ------------------------------------------------------------------------------

    def with_tasks(
        self,
        what: Any,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        *,
        id: Any = NO_ID,  # noqa: A002 - MongoDB's word
    ) -> Any:
        """
        Return a plain value with tasks and events, for the driver that writes it.

        Write it with PyMongo's collections, sync or async, also in bulk writes and transactions. MongoEngine's
        `__raw__`, Beanie and a fenced view also work. Write it once. It is saved with its tasks or not at all. They are
        dispatched soon after, or immediately after a call of `dispatch`.

        Use a document with tasks only for an insert. As a replacement, or in a `save()` of an existing document by
        MongoEngine or Beanie, it would remove pending entries. Pass a `ReplaceOne` instead.

        Args:
            what: a document to insert, update operators, a pipeline, or a request of a bulk write. It is not changed,
                except that an `InsertOne` gives its document an `_id`.
            tasks: signatures, chains, groups. `STORED_ID` among their arguments becomes the document's `_id`.
            events: events. `STORED_ID` in their bodies becomes the `_id`.
            id: the updated document's `_id`, if only the filter contains it.

        Returns:
            A value of the same kind. For a `ReplaceOne`, an equivalent `UpdateOne` that keeps pending entries.

        Raises:
            OutboxRefusedError: nothing was made. The message names the reason.
        """
        carried = self._values.of(what, tasks, events, id=id)
        if tasks or events:
            self._expect()
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
        Insert a document with its tasks and events, like PyMongo's `insert_one`. Then dispatch them.

        Args:
            document: gets an `_id` if it has none, as with PyMongo. Otherwise it does not change. One that cannot be
                changed, such as a `RawBSONDocument`, is stored with a new `_id`, and the result has it.
            tasks: as for `with_tasks`.
            events: as for `with_tasks`.
            session: inside a transaction nothing is dispatched before the commit.
            options: further options of PyMongo's `insert_one`.

        Raises:
            OutboxRefusedError: nothing was written. The message has the reason.
        """
        carried = self._values.of_document(document, tasks, events)
        with self._explain():
            self.collection.insert_one(carried, session=session, **options)
        if tasks or events:
            self.runtime.dispatch([carried["_id"]], session)
        return InsertOneResult(carried["_id"], acknowledged=True)

    def insert_many(
        self,
        documents: Sequence[Any],
        *,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> InsertManyResult:
        """
        Insert documents, each with these tasks and events, like PyMongo's `insert_many`. Then dispatch them.

        Args:
            documents: as for `insert_one`.
            tasks: the tasks for each document: `STORED_ID` among the arguments is its `_id`.
            events: the events for each document.
            session: as for `insert_one`.
            options: further options of PyMongo's `insert_many`.

        Raises:
            OutboxRefusedError: nothing was written. The message has the reason.
            BulkWriteError: as with PyMongo. The tasks of inserted documents are dispatched.
        """
        documents, tasks, events = list(documents), list_given(tasks), list_given(events)
        carried = [self._values.of_document(document, tasks, events) for document in documents]
        ids = [each["_id"] for each in carried]
        try:
            with self._explain("earlier documents of the list may have been inserted"):
                self.collection.insert_many(carried, session=session, **options)
        finally:
            if tasks or events:
                self.runtime.dispatch(ids, session)
        return InsertManyResult(ids, acknowledged=True)

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
        Update one document and add its tasks and events, like PyMongo's `update_one`. Then dispatch them.

        If no document matches and `upsert` is false, nothing is written and nothing is dispatched.

        Raises:
            OutboxRefusedError: nothing was written. The message has the reason.
        """
        known = _find_id(filter, options)
        carried = self._values.of_update(update, tasks, events, known, filter if upsert else {})
        with self._explain():
            result = self.collection.update_one(filter, carried, upsert=upsert, session=session, **options)
        self._dispatch_updated(result, known, tasks, events, session)
        return result

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
        Update documents and add these tasks and events to each, like PyMongo's `update_many`.

        In each document the entries have new ids, and `STORED_ID` in their arguments is the document's `_id`.

        Raises:
            OutboxRefusedError: nothing was written, or the message names the documents that may be written.
        """
        known = _find_id(filter, options)
        carried = self._values.of_update(update, tasks, events, known, filter if upsert else {})
        with self._explain("earlier documents may have been changed"):
            result = self.collection.update_many(filter, carried, upsert=upsert, session=session, **options)
        self._dispatch_updated(result, known, tasks, events, session)
        return result

    def find_one_and_update(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        update: Modifications,
        *,
        upsert: bool = False,
        return_document: bool = ReturnDocument.BEFORE,
        tasks: Sequence[Any] = (),
        events: Sequence[Any] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """
        Update one document, add its tasks and events and return it, like PyMongo's `find_one_and_update`.

        Raises:
            OutboxRefusedError: nothing was written. The message has the reason.
        """
        known = _find_id(filter, options)
        carried = self._values.of_update(update, tasks, events, known, filter if upsert else {})
        given = {"upsert": upsert, "return_document": return_document, "session": session, **options}
        with self._explain():
            document = self.collection.find_one_and_update(filter, carried, **given)
        if (tasks or events) and (upsert or document is not None):
            self.runtime.dispatch([(document or {}).get("_id", known)], session)
        return document

    def delete_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        *,
        session: ClientSession | None = None,
        **options: Any,
    ) -> DeleteResult:
        """
        Delete one document without pending entries, like PyMongo's `delete_one`.

        A delete that bypasses the outbox also deletes pending entries.

        Raises:
            OutboxRefusedError: entries are pending. The document still exists, and they are being dispatched. Try
                again.
        """
        guarded = {**filter, "$and": [*filter.get("$and", ()), {COUNT: {"$not": {"$gt": 0}}}]}
        result = self.collection.delete_one(guarded, session=session, **options)
        if not result.deleted_count:
            encoded = RawBSONDocument(encode(filter, codec_options=self.collection.codec_options))
            found = self.runtime.latest.find_one(encoded, {"_id": 1}, session=session, **_finding(options))
            if found is not None:
                self.runtime.dispatch([found["_id"]], session)
                raise OutboxRefusedError(
                    f"Document {found['_id']!r} of {self.collection.full_name} has pending entries, so it was "
                    "not deleted. Try again when they have been dispatched.",
                    document=found["_id"],
                    retryable=True,
                )
        return result

    # -- delivery ----------------------------------------------------------------------------------

    def dispatch(self, *document_ids: object) -> None:
        """
        Let the dispatcher read documents that may have pending entries. It never blocks and never fails.

        Call it after your writes with tasks. Inside a transaction of `transactional` it waits for the commit. In a
        transaction of the driver or of Django, call it after the commit.

        Args:
            document_ids: `_id`s of the documents. Without any, the dispatcher reads the index.
        """
        after_commit(lambda: self.runtime.dispatcher.hint(*document_ids, expected=True))

    # -- inside ------------------------------------------------------------------------------------

    def _expect(self) -> None:
        """Poll the index soon, and after a commit, for the writes of other code."""
        self.runtime.watch.needed()
        if self.runtime.at_once:
            self.runtime.dispatcher.expect()
            if innermost_session() is not None:
                after_commit(self.runtime.dispatcher.expect)

    def _dispatch_updated(
        self,
        result: UpdateResult,
        known: Any,
        tasks: Sequence[Any],
        events: Sequence[Any],
        session: ClientSession | None,
    ) -> None:
        upserted = (result.raw_result or {}).get("upserted", NO_ID)
        if (tasks or events) and (result.matched_count or upserted is not NO_ID):
            self.runtime.dispatch([known if upserted is NO_ID else upserted], session)

    def _explain(self, otherwise: str = "nothing was written") -> Any:
        return explain_refusals(self.collection.full_name, otherwise)


def _find_id(filter: Mapping[str, Any], options: Mapping[str, Any]) -> Any:  # noqa: A002
    """Return the `_id` in a filter, or `NO_ID`. A collation may select another one."""
    return NO_ID if options.get("collation") else parse_filter_id(filter)


def _finding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a write that affect the selection of its document."""
    return {name: options[name] for name in ("collation", "hint", "let") if name in options}
