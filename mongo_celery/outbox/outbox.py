"""The outbox of one collection: writes that carry their tasks and events, and their delivery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from bson import ObjectId
from celery import Celery
from celery.result import AsyncResult
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.results import DeleteResult, InsertOneResult, UpdateResult

from mongo_celery.app import Registry, add_task, schedule
from mongo_celery.arguments import Duration, seconds
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import demanded_id
from mongo_celery.mongo.opening import DEFAULT_DATABASE, Source
from mongo_celery.mongo.writes import Modifications
from mongo_celery.outbox import pending
from mongo_celery.outbox.backing import Backing, OutboxStatus
from mongo_celery.outbox.bulk import Write, write_in_bulk
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.document_write import DocumentWrite, Written, refuse_replacement
from mongo_celery.outbox.entries import FIELD, Entry, Home, event_entry, task_entry
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.options import AtOnce, OutboxOptions, bounded
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.relay import Delivery
from mongo_celery.outbox.sweep import SWEEP_TASK, Backlog, sweep_all, sweep_one

_FIELD = pending.PendingField()
_DELETE_ROUNDS = 3
_HELD = "another relay holds them, or they wait to be tried again after a failure"

OUTBOXES: Registry[Outbox] = Registry(
    "outbox",
    create="mongo_celery.Outbox(app, client.shop.orders) where the app or its tasks are made",
    rename="use it, or give this one name='...'",
)
"""Of all apps."""


class Outbox:
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
        name: what commands and logs call it; by default the collection's full name.
        sweep_after: seconds after which the sweep takes an entry.
        sweep_every: seconds between two sweeps by `celery beat`; None for no beat entry.
        at_once: whether this process dispatches what it has written, by a thread of its own; `"wait"` to have a write
            wait for that, some seconds at most.
        claim_ttl: seconds for which a document belongs to one relay.
        max_pending: how many entries a document may hold.
        max_attempts: how often an entry may fail through its own fault before it is stuck, or may be set aside.
        database: where dead letters are kept.
        exchange: topic exchange of the events.
        source: CloudEvents' source; by default `/<database>/<collection>`.
        foreign_tasks: publish tasks that this app does not know, for another app to run.
        field: name of the field in which a document's entries wait.
        failure_policy: `"halt"` tries an entry with a fault of its own for ever, in front of what stands behind it;
            `"dead_letter"` sets it aside after `max_attempts` and ten minutes.
        delivers: names of other apps that write to this collection, whose entries this app publishes too.

    Raises:
        ConfigurationError: an option cannot work, or the app has an outbox of this name.
    """

    def __init__(
        self,
        app: Celery,
        collection: Source,
        *,
        name: str | None = None,
        sweep_after: Duration = 5.0,
        sweep_every: Duration | None = 5.0,
        at_once: AtOnce = True,
        claim_ttl: Duration = 10.0,
        max_pending: int = 1000,
        max_attempts: int = 5,
        database: str = DEFAULT_DATABASE,
        exchange: str = "mongo_celery.events",
        source: str | None = None,
        foreign_tasks: bool = False,
        field: str = FIELD,
        failure_policy: str = "halt",
        delivers: Sequence[str] = (),
    ) -> None:
        options = OutboxOptions(
            name=name,
            sweep_after=bounded(sweep_after, "sweep_after"),
            sweep_every=None if sweep_every is None else bounded(sweep_every, "sweep_every"),
            at_once=at_once,
            claim_ttl=bounded(claim_ttl, "claim_ttl"),
            max_pending=max_pending,
            max_attempts=max_attempts,
            database=database,
            exchange=exchange,
            source=source,
            foreign_tasks=foreign_tasks,
            field=field,
            failure_policy=failure_policy,
            delivers=delivers,
        )
        self.app = app
        self.sweep_after = options.sweep_after
        self.publisher = Publisher(
            app, options.exchange, foreign_tasks=options.foreign_tasks, delivers=options.delivers
        )
        self.backing = Backing(app, collection, self.publisher, options)
        self._name = options.name or (collection.full_name if isinstance(collection, Collection) else None)
        self._source = options.source
        OUTBOXES.add(app, self, self._name)
        add_task(app, SWEEP_TASK, _sweep_of(app), acks_late=False)
        if options.sweep_every is not None:
            schedule(app, SWEEP_TASK, options.sweep_every)

    def __repr__(self) -> str:
        return f"<Outbox {self._name or '(not opened yet)'}>"

    @property
    def name(self) -> str:
        """What commands and logs call it."""
        return self._name or self.collection.full_name

    @property
    def collection(self) -> Collection[Any]:
        """The user's collection, with majority writes and reads from the primary."""
        return self.backing.collection

    @property
    def dead_letters(self) -> OutboxDeadLetters:
        """Entries that could not be published."""
        return self.backing.dead_letters

    @property
    def backlog(self) -> Backlog:
        """What a sweep needs of this outbox."""
        return Backlog(lambda: self.name, self.backing, self.sweep_after)

    # -- writes ------------------------------------------------------------------------------------

    def insert_one(
        self,
        document: Any,
        *,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> InsertOneResult:
        """
        Insert a document with its tasks and events, as PyMongo's `insert_one`; then dispatch them.

        Args:
            document: gets an `_id` if it has none, as with PyMongo; is not changed otherwise.
            tasks: signatures, chains, groups, chords.
            events: events.
            session: inside a transaction nothing is dispatched before the commit.
            options: further options of PyMongo's `insert_one`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        _FIELD.refuse_in_document(document)
        if "_id" not in document:
            document["_id"] = ObjectId()
        entries = self._entries(tasks, events, document["_id"])
        if not entries:
            return self.collection.insert_one(document, session=session, **options)
        claim = self.backing.may_claim(session)
        written = self.backing.writer.insert(document, entries, session=session, claim=claim, **options)
        self.backing.dispatch_at_once(written, session)
        return InsertOneResult(document["_id"], acknowledged=True)

    def update_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
        update: Modifications,
        *,
        upsert: bool = False,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> UpdateResult:
        """
        Update one document and add its tasks and events, as PyMongo's `update_one`; then dispatch them.

        If no document matches and `upsert` is false, nothing is written and nothing is dispatched.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        entries = self._entries(tasks, events, demanded_id(filter))
        if upsert:
            _FIELD.refuse_in_filter(filter)
        if not entries:
            _FIELD.refuse_in_update(update)
            return self.collection.update_one(filter, update, upsert=upsert, session=session, **options)
        sort = options.pop("sort", None)
        write = DocumentWrite(filter=filter, update=update, upsert=upsert, sort=sort, options=options)
        return self._write(write, entries, session).result()

    def replace_one(
        self,
        filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
        replacement: Mapping[str, Any],
        *,
        upsert: bool = False,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> UpdateResult:
        """
        Replace one document, as PyMongo's `replace_one`; what is pending in it stays, and the new is added.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        refuse_replacement(replacement)
        if upsert:
            _FIELD.refuse_in_filter(filter)
        entries = self._entries(tasks, events, demanded_id(filter))
        sort = options.pop("sort", None)
        write = DocumentWrite(filter=filter, replacement=replacement, upsert=upsert, sort=sort, options=options)
        return self._write(write, entries, session).result()

    def find_one_and_update(
        self,
        filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
        update: Modifications,
        *,
        projection: Any = None,
        sort: Any = None,
        upsert: bool = False,
        return_document: bool = ReturnDocument.BEFORE,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """
        Update one document, add its tasks and events and return it, as PyMongo's `find_one_and_update`.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        entries = self._entries(tasks, events, demanded_id(filter))
        given = {"projection": projection, "sort": sort, "upsert": upsert, "return_document": return_document}
        if upsert:
            _FIELD.refuse_in_filter(filter)
        if not entries:
            _FIELD.refuse_in_update(update)
            return self.collection.find_one_and_update(filter, update, session=session, **given, **options)
        write = DocumentWrite(filter=filter, update=update, options=options, **given)
        return self._write(write, entries, session).document

    def bulk_write(
        self,
        requests: Sequence[Any],
        *,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        ordered: bool = True,
        session: ClientSession | None = None,
    ) -> Any:
        """
        PyMongo's `bulk_write`, each request with its tasks and events.

        Args:
            requests: PyMongo's `InsertOne`, `UpdateOne` and `ReplaceOne`, bare or in a `Write(request, tasks=[...])`
                or `(request, [task, ...])`.
            tasks: in addition, for every request.
            events: in addition, for every request.
            ordered: as PyMongo's.
            session: inside a transaction nothing is dispatched before the commit.

        Raises:
            OutboxRefusedError: a request that changes many documents or deletes cannot carry entries, and a
                document that is full; nothing was written.
            PyMongoError: as PyMongo's `bulk_write`, also for a document that would be larger than 16 MB; then
                other requests may have been carried out, and the error says which.
        """
        writes = [Write.of(request, tasks, events) for request in requests]
        result, ids = write_in_bulk(self.backing.writer, writes, self._entries, ordered=ordered, session=session)
        for each in ids:
            self.backing.dispatch_at_once(Written(each, matched=True), session)
        return result

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
        in_transaction = session is not None and session.in_transaction
        alike = {name: options[name] for name in ("collation", "hint", "let") if name in options}
        empty = {f"{FIELD}.count": {"$not": {"$gt": 0}}}
        reason, document_id = "", None
        for _ in range(_DELETE_ROUNDS):
            guard = {**filter, "$and": [*filter.get("$and", ()), empty]}
            result = self.collection.delete_one(guard, session=session, **options)
            if result.deleted_count:
                return result
            found = self.backing.latest.find_one(filter, {"_id": 1}, session=session, **alike)
            if found is None:
                return result
            document_id = found["_id"]
            if in_transaction:
                reason = "nothing is delivered inside a transaction"
                break
            reason = self.backing.deliver_now(document_id).error or _HELD
        raise OutboxRefusedError(
            f"document {document_id!r} has pending entries that could not be delivered ({reason}); it was not deleted. "
            "Try again when they are.",
            document=document_id,
        )

    def delay(self, document_id: object, task: Any, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """
        `task.delay(...)` for code that has a document at hand: the task is stored in the document, then dispatched.

        Args:
            document_id: `_id` of the document, or the document itself.
            task: a Celery task.
            args: of the task.
            kwargs: of the task.

        Returns:
            The result that `delay` would return.

        Raises:
            OutboxRefusedError: there is no such document, or the entry is refused.
        """
        if isinstance(document_id, Mapping) and "_id" in document_id:
            document_id = document_id["_id"]
        entry = task_entry(self.app, task.s(*args, **kwargs), datetime.now(UTC))
        write = DocumentWrite(filter={"_id": document_id}, update={}, options={})
        written = self._write(write, [entry], None)
        if not written.matched:
            raise OutboxRefusedError(f"there is no document {document_id!r} in {self.collection.full_name}.")
        return self.app.AsyncResult(entry.id)

    def save(self, instance: Any, *, tasks: Sequence[object] = (), events: Sequence[Event] = ()) -> Any:
        """
        Save an instance of a Django model (django-mongodb-backend) with its tasks and events.

        Afterwards the instance is as after its own `save()`: it has its primary key, and Django's signals were sent.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
            ConfigurationError: the instance is no Django model, or its collection is another.
        """
        from mongo_celery.outbox.django import save

        insert = partial(self.insert_one, tasks=tasks, events=events)
        update = partial(self.update_one, tasks=tasks, events=events)
        return save(instance, self.collection.name, insert=insert, update=update)

    # -- delivery ----------------------------------------------------------------------------------

    def dispatch(self, *document_ids: object) -> None:
        """
        Have documents looked at that may have something pending: a hint, which never blocks and never fails.

        For writes that carry tasks and that somebody else has carried out. Without it such a write is found by the
        sweep.

        Args:
            document_ids: their `_id`s; without any, the index is looked at.
        """
        self.backing.dispatcher.hint(*document_ids)

    def sweep(self, *, older_than: Duration | None = None, limit: int = 1000) -> Delivery:
        """
        Deliver what was left behind in this collection.

        Args:
            older_than: seconds that the oldest entry of a document has waited; by default `sweep_after`.
            limit: how many documents at most.

        Returns:
            The sum of what was done.
        """
        age = self.sweep_after if older_than is None else seconds(older_than, "older_than")
        return sweep_one(self.backlog, age, limit)

    def status(self) -> OutboxStatus:
        """Counts and ages of what is pending; reads only documents in the index."""
        return self.backing.status()

    # -- inside ------------------------------------------------------------------------------------

    def _entries(self, tasks: Sequence[object], events: Sequence[Event], document_id: object) -> list[Entry]:
        now = datetime.now(UTC)
        if isinstance(tasks, (str, bytes, Mapping)) or isinstance(events, (str, bytes, Event)):
            raise OutboxRefusedError("tasks and events are lists: tasks=[send_receipt.s(order_id)].")
        home = Home(document_id)
        source = self._source or "/" + self.collection.full_name.replace(".", "/", 1)
        found = [task_entry(self.app, task, now, home) for task in tasks]
        return [*found, *(event_entry(self.app, event, now, source=source, home=home) for event in events)]

    def _write(self, write: DocumentWrite, entries: Sequence[Entry], session: ClientSession | None) -> Written:
        claim = bool(entries) and write.return_document is None and self.backing.may_claim(session)
        written = self.backing.writer.write(write, entries, session=session, claim=claim)
        if entries:
            self.backing.dispatch_at_once(written, session)
        return written


def _sweep_of(app: Celery) -> Callable[[], Any]:
    def sweep_outboxes() -> Any:
        """Deliver what was left behind in all outboxes of this app."""
        return sweep_all(outbox.backlog for outbox in OUTBOXES.of(app))

    return sweep_outboxes
