"""The outbox of one collection: writes that carry their tasks and events, and their delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from celery import Celery
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.results import DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, parse_filter_id
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.transaction.scopes import after_commit, innermost_session
from mongo_celery.mongo.writes import Modifications
from mongo_celery.outbox.entries import Home, list_given
from mongo_celery.outbox.options import SharedOptions
from mongo_celery.outbox.pending import explain_refusals
from mongo_celery.outbox.plain_values import PlainValues
from mongo_celery.outbox.registry import OUTBOXES, AnyOutbox

__all__ = ["OUTBOXES", "Outbox"]


class Outbox(AnyOutbox):
    """
    Saves documents together with the tasks and events that are to follow: both, or neither.

    Each write stores its entries in the document itself (`pendingEvents`), by the same atomic write. Afterwards
    they are dispatched: immediately by the writer, by a bridge that watches the collection, and by a sweep for what
    was left behind. In order per document, at least once; consumers deduplicate by the id (see `once`).

    Not promised: that an entry is dispatched only once; an order between documents; anything for documents that
    are deleted or replaced behind the outbox's back while something is pending.

    Args:
        app: the Celery app.
        collection: a PyMongo collection, or a callable that returns one; it is asked once in each process, since
            prefork workers make their clients after the fork.
        options: see `SharedOptions`.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app has an outbox of this name.
    """

    def __init__(self, app: Celery, collection: Source, **options: Unpack[SharedOptions]) -> None:
        super().__init__(app, collection, options)
        self.field = self.backing.field
        self._values = PlainValues(self.field, self._maker)

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
        Return a plain value that carries tasks and events, for whatever driver writes it.

        PyMongo's collections write it, sync and async, in bulk writes and transactions; so do MongoEngine's `__raw__`,
        Beanie and a fenced view. Write it once. It is saved with its tasks or not at all. They are dispatched soon
        after, or immediately if `dispatch` says where.

        A document that carries tasks is for an insert. As a replacement it would drop what others have pending: pass a
        `ReplaceOne` instead. So would a `save()` of MongoEngine or Beanie of a document that is there already.

        Args:
            what: a document to insert, update operators, a pipeline, or a request of a bulk write. It is not changed,
                but for the `_id` that an `InsertOne` gives its document.
            tasks: signatures, chains, groups. `STORED_ID` among their arguments becomes the document's `_id`;
                where that is known already, a callable of it that makes the signature will do as well.
            events: events, or callables of the `_id`.
            id: the `_id` of the document that is updated, where only the filter will say it.

        Returns:
            A value of the same kind; for a `ReplaceOne` an `UpdateOne` that does the same and keeps what is pending.

        Raises:
            OutboxRefusedError: nothing was made; the message says why.
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
        Insert a document with its tasks and events, as PyMongo's `insert_one`; then dispatch them.

        Args:
            document: gets an `_id` if it has none, as with PyMongo; is not changed otherwise.
            tasks: as of `with_tasks`.
            events: as of `with_tasks`.
            session: inside a transaction nothing is dispatched before the commit.
            options: further options of PyMongo's `insert_one`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        carried = self._values.of_document(document, tasks, events)
        with self._explain():
            self.collection.insert_one(carried, session=session, **options)
        if tasks or events:
            self.backing.dispatch([document["_id"]], session)
        return InsertOneResult(document["_id"], acknowledged=True)

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
        Insert documents, each with these tasks and events of its own, as PyMongo's `insert_many`.

        Args:
            documents: as of `insert_one`.
            tasks: for each document: `STORED_ID` among the arguments is its `_id`, and a callable gets it.
            events: for each document.
            session: as of `insert_one`.
            options: further options of PyMongo's `insert_many`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
            BulkWriteError: as PyMongo's; what was inserted is dispatched.
        """
        documents, tasks, events = list(documents), list_given(tasks), list_given(events)
        carried = [self._values.of_document(document, tasks, events) for document in documents]
        ids = [document["_id"] for document in documents]
        try:
            with self._explain("documents before it may have been inserted"):
                self.collection.insert_many(carried, session=session, **options)
        finally:
            if tasks or events:
                self.backing.dispatch(ids, session)
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
        Update one document and add its tasks and events, as PyMongo's `update_one`; then dispatch them.

        If no document matches and `upsert` is false, nothing is written and nothing is dispatched. Callables of the
        `_id` need a filter that names it.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        home = self._find_home(filter, options)
        carried = self._values.of_update(update, tasks, events, home, filter if upsert else {})
        with self._explain():
            result = self.collection.update_one(filter, carried, upsert=upsert, session=session, **options)
        self._dispatch_updated(result, home, tasks, events, session)
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
        Update documents and add these tasks and events to each, as PyMongo's `update_many`.

        In each document they have ids of their own, and `STORED_ID` among their arguments is its `_id`.

        Raises:
            OutboxRefusedError: nothing was written, or the message says what may have been.
        """
        home = self._find_home(filter, options, many=True)
        carried = self._values.of_update(update, tasks, events, home, filter if upsert else {})
        with self._explain("documents before it may have been written"):
            result = self.collection.update_many(filter, carried, upsert=upsert, session=session, **options)
        self._dispatch_updated(result, home, tasks, events, session)
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
        Update one document, add its tasks and events and return it, as PyMongo's `find_one_and_update`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        home = self._find_home(filter, options)
        carried = self._values.of_update(update, tasks, events, home, filter if upsert else {})
        given = {"upsert": upsert, "return_document": return_document, "session": session, **options}
        with self._explain():
            document = self.collection.find_one_and_update(filter, carried, **given)
        if (tasks or events) and (upsert or document is not None):
            known = document["_id"] if document is not None and "_id" in document else home.id
            self.backing.dispatch([known], session)
        return document

    def delete_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        *,
        session: ClientSession | None = None,
        **options: Any,
    ) -> DeleteResult:
        """
        Delete one document in which nothing is pending, as PyMongo's `delete_one`.

        A delete that does not go through the outbox takes the pending entries with it.

        Raises:
            OutboxRefusedError: something is pending; the document is still there, and is dispatched now. Try again.
        """
        guarded = {**filter, "$and": [*filter.get("$and", ()), {self.field.count: {"$not": {"$gt": 0}}}]}
        result = self.collection.delete_one(guarded, session=session, **options)
        if not result.deleted_count:
            found = self.backing.latest.find_one(filter, {"_id": 1}, session=session, **_finding(options))
            if found is not None:
                self.backing.dispatch([found["_id"]], session)
                raise OutboxRefusedError(
                    f"document {found['_id']!r} of {self.collection.full_name} has pending entries; it was not "
                    "deleted. Try again when they are dispatched.",
                    document=found["_id"],
                    retryable=True,
                )
        return result

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

    def _expect(self) -> None:
        """Have the index looked at soon, and after a commit: there is what somebody else writes."""
        self.backing.watch.needed()
        if self.backing.at_once:
            self.backing.dispatcher.expect()
            if innermost_session() is not None:
                after_commit(self.backing.dispatcher.expect)

    def _find_home(self, filter: Mapping[str, Any], options: Mapping[str, Any], *, many: bool = False) -> Home:  # noqa: A002
        """Return what a filter says of the document; a collation may mean another `_id` than it names."""
        return Home(NO_ID if options.get("collation") else parse_filter_id(filter), many)

    def _dispatch_updated(
        self,
        result: UpdateResult,
        home: Home,
        tasks: Sequence[Any],
        events: Sequence[Any],
        session: ClientSession | None,
    ) -> None:
        upserted = (result.raw_result or {}).get("upserted", NO_ID)
        if (tasks or events) and (result.matched_count or upserted is not NO_ID):
            self.backing.dispatch([home.id if upserted is NO_ID else upserted], session)

    def _explain(self, otherwise: str = "nothing was written") -> Any:
        return explain_refusals(self.collection.full_name, self.field.name, otherwise)


def _finding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a write that also say which document it means."""
    return {name: options[name] for name in ("collation", "hint", "let") if name in options}
