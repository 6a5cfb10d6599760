"""
The fenced view of a PyMongo collection. `change.fenced(...)` returns it.

Round trips if nothing is stale (n = number of batches of 500):

=====================================  ================================================================
operation                              round trips
=====================================  ================================================================
`update_one`, `replace_one` by `_id`   1, also for an upsert that finds its document
`find_one_and_update` by `_id`         1. Operators on a document without a stamp of this term: 2
any of them by another filter          1 more
an upsert that inserts                 5: the miss, then a transaction (slot, insert, slot, commit)
`delete_one` by `_id`                  4: a transaction (slot, delete, tombstone, commit)
a write that matches nothing           at most 4, to find the reason
`update_many`                          1 + n
`bulk_write` of updates by `_id`       n. A batch with new documents: 7 more, all of them together
`bulk_write` of deletes by `_id`       6 for up to 500 consecutive deletes. A single one as above
`bulk_write` of anything else          as the single operation
delete from a collection with outbox   without a document: 1 more. With pending entries: their delivery
=====================================  ================================================================

A client's first insert or delete in a collection also creates the TTL index of the tombstones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pymongo import DeleteOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.cursor import Cursor
from pymongo.results import BulkWriteResult, DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.bulk import BulkDelete, BulkStep, BulkUpdate, BulkWrite
from mongo_celery.bridge.fenced.documents import Documents, FencedFindAndUpdate, FencedUpdate, make_result
from mongo_celery.bridge.fenced.fence import Fence, Origin, refuse_stamps
from mongo_celery.bridge.fenced.pending import PendingTasks
from mongo_celery.errors import ConfigurationError, ForkedClientError
from mongo_celery.mongo.opening import resolve_collection
from mongo_celery.mongo.transaction import current
from mongo_celery.mongo.writes import (
    Body,
    BulkRequest,
    Modifications,
    Target,
    build_target,
    changing,
    parse_target,
    replacing,
)

if TYPE_CHECKING:
    from mongo_celery.outbox import Outbox

CHOICES = 3
"""How often a write with another filter chooses a document, if each chosen one no longer matches when it is written."""

Query = Mapping[str, Any]


class DeleteOptions(TypedDict, total=False):
    """Arguments of PyMongo's method with the same name, here and below."""

    session: ClientSession | None
    collation: Any
    hint: Any
    let: Mapping[str, Any] | None
    comment: Any


class ReplaceOptions(DeleteOptions, total=False):
    """Arguments of `replace_one`."""

    bypass_document_validation: bool | None


class UpdateOptions(ReplaceOptions, total=False):
    """Arguments of `update_one` and `update_many`."""

    array_filters: Sequence[Mapping[str, Any]] | None


_OF_STATEMENT = {"collation", "hint", "array_filters"}
"""Arguments of one statement in a command. The others apply to the whole command."""


class FencedCollection:
    """
    A view of a collection whose writes carry the fencing token of one execution.

    Methods take PyMongo's arguments and return PyMongo's results. The write concern is majority. A method raises
    `StaleFencingTokenError` if a newer execution of the same handler and partition has already written to the
    document or deleted it (P3). Each write stores the fencing token in the document's field ``_fence``, and a stored
    token never decreases (P4). Documents that you read contain ``_fence``. A replacement keeps the entries that an
    outbox of the app has in the document, and a delete delivers them first.

    With `partition_by`, changes of one document may be in several partitions. A write that sets, replaces or deletes
    then raises `OutdatedChangeError` if another partition has written for a later change of the document.

    The view does not protect documents that the newer execution has not touched. It does not see writes that bypass
    it. Inside an open transaction of the collection's client, as in a handler with `transactional=True`, each method
    joins the transaction without `session=` (see `current`), and the transaction's write concern applies. Upserts do
    not support a collation under which different `_id`s are equal. Use a view in one thread at a time, like a session.

    Args:
        collection: any PyMongo collection.
        fence: the execution's right to write.
        outboxes: returns the app's outboxes of this collection, like `Change.fenced`.
        origin_of: given a target's `_id`, returns the change that the write is for. Needed for executions of several
            changes.

    Raises:
        ConfigurationError: the collection belongs to an `AsyncMongoClient`. Each method also raises it if a transaction
            of another client of the same cluster is open here.
        ForkedClientError: raised by each method if the client was opened before this process was forked.
    """

    def __init__(
        self,
        collection: Collection[Any],
        fence: Fence,
        *,
        outboxes: Callable[[], Sequence[Outbox]] = tuple,
        origin_of: Callable[[Any], Origin | None] | None = None,
    ) -> None:
        collection = resolve_collection(collection)
        self._pending = PendingTasks(collection, outboxes)
        self._documents = Documents(collection, fence, self._pending, origin_of)

    def __repr__(self) -> str:
        return f"FencedCollection({self._documents.collection.full_name!r}, {self._documents.fence!r})"

    def update_one(
        self,
        filter: Query,  # noqa: A002 - PyMongo's name, here and below
        update: Modifications,
        upsert: bool = False,
        *,
        sort: Mapping[str, Any] | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateResult:
        """
        Update one document, like `Collection.update_one`.

        Raises:
            StaleFencingTokenError: a newer execution has written to the document.
            OutdatedChangeError: another partition has written to it for a later change of the same document.
            ConfigurationError: an upsert without equality on `_id`, or an update of ``_fence``.
        """
        session, *given = _split(options)
        write = self._updating(_changing(update), *given)
        return self._write(write, filter, upsert, sort, session) or make_result(0, 0)

    def replace_one(
        self,
        filter: Query,  # noqa: A002
        replacement: Mapping[str, Any],
        upsert: bool = False,
        *,
        sort: Mapping[str, Any] | None = None,
        **options: Unpack[ReplaceOptions],
    ) -> UpdateResult:
        """
        Replace one document, like `Collection.replace_one`. Stamps and pending entries stay. Errors as in `update_one`.

        Raises:
            OutboxRefusedError: the replacement has tasks. Add them by `bulk_write` of a `ReplaceOne` with its tasks.
        """
        session, *given = _split(options)
        write = self._updating(self._replacing(replacement), *given)
        return self._write(write, filter, upsert, sort, session) or make_result(0, 0)

    def find_one_and_update(
        self,
        filter: Query,  # noqa: A002
        update: Modifications,
        projection: Mapping[str, Any] | Iterable[str] | None = None,
        *,
        sort: Any = None,
        upsert: bool = False,
        return_document: bool = False,
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """Update and return one document, like `Collection.find_one_and_update`. Errors as in `update_one`."""
        given = _drop_missing(projection=projection, return_document=return_document, **options)
        body = _changing(update)
        write = FencedFindAndUpdate(body, given, kept=self._pending.list_kept_fields(body))
        return self._write(write, filter, upsert, sort, session)

    def delete_one(self, filter: Query, **options: Unpack[DeleteOptions]) -> DeleteResult:  # noqa: A002
        """
        Delete one document, like `Collection.delete_one`, and store a tombstone (see `tombstones`).

        A delete by `_id` stores a tombstone even if the document does not exist, so that an older execution cannot
        create it again. Pending entries of an outbox in the document are delivered first.

        Raises:
            StaleFencingTokenError: a newer execution has written to the document or deleted it.
            OutdatedChangeError: as in `update_one`.
            OutboxRefusedError: pending entries cannot be delivered now. Inside a transaction they never can.
        """
        session, statement, command = _split(options)
        session, given, deleted = self._session(session), {**statement, **command}, 0
        known = _find_target(filter, given)
        for target in self._choose(filter, None, given, session) if known is None else (known,):
            deleted = self._documents.delete(target, session, **given)
            if deleted:
                break
        return DeleteResult({"n": deleted, "ok": 1.0}, True)

    def update_many(
        self,
        filter: Query,  # noqa: A002
        update: Modifications,
        upsert: bool = False,
        **options: Unpack[UpdateOptions],
    ) -> UpdateResult:
        """
        Update many documents, like `Collection.update_many`. The fencing token of each is checked.

        If a newer execution has written to one of them, its batch is written without it, then the error is raised.
        Errors as in `update_one`.
        """
        session, *given = _split(options)
        write = self._updating(_changing(update), *given)
        if upsert or _find_target(filter, write.options) is not None:
            return self._write(write, filter, upsert, None, session) or make_result(0, 0)
        session = self._session(session)
        # By `_id`, which no update changes: a document that the update moves in another index would be changed twice.
        found = self._find(filter, {"_id": 1}, {**write.options, **write.command}, session)

        def make_step(target: Target) -> BulkStep:
            act = partial(self._documents.write, write, target, upsert=False, session=session)
            return BulkUpdate(0, act, target, write, upsert=False)

        steps = (make_step(build_target(filter, document["_id"])) for document in found.allow_disk_use(True))
        details = BulkWrite(self._documents, write.command, session).run(steps)
        return make_result(details["nMatched"], details["nModified"])

    def bulk_write(
        self,
        requests: Sequence[UpdateOne | ReplaceOne[Any] | DeleteOne | UpdateMany],
        ordered: bool = True,
        *,
        bypass_document_validation: bool | None = None,
        session: ClientSession | None = None,
        comment: Any = None,
        let: Mapping[str, Any] | None = None,
    ) -> BulkWriteResult:
        """
        Make many writes, like `Collection.bulk_write`. The fencing token of each document is checked.

        `InsertOne` and `DeleteMany` are refused. Use ``ReplaceOne(..., upsert=True)`` and `DeleteOne`.

        Raises:
            StaleFencingTokenError: a newer execution has written to a document or deleted it. Later requests are
                not tried.
            OutdatedChangeError, OutboxRefusedError: as in the single operations. Later requests are not tried.
            BulkWriteError: writes failed. Indexes refer to `requests`.
            ConfigurationError: as in `update_one`. Nothing was written.
        """
        session = self._session(session)
        command = _drop_missing(bypass_document_validation=bypass_document_validation, comment=comment, let=let)
        steps = [self._make_step(place, request, command, session) for place, request in enumerate(requests)]
        return BulkWriteResult(BulkWrite(self._documents, command, session, ordered=ordered).run(steps), True)

    def _make_step(
        self, place: int, request: Any, command: Mapping[str, Any], session: ClientSession | None
    ) -> BulkStep:
        """Return the step for a request: one that can join a batch, or one that runs alone."""
        facts = BulkRequest.of(request)
        if isinstance(request, UpdateMany):
            many = {**facts.options, **command, "session": session, "upsert": facts.upsert}
            _changing(facts.document)
            return BulkStep(place, lambda: self.update_many(facts.filter, facts.document, **many))
        if isinstance(request, DeleteOne):
            one = {**facts.options, **_drop_missing(let=command.get("let"), comment=command.get("comment"))}
            target = _find_target(facts.filter, one)
            delete = partial(self.delete_one, facts.filter, **one, session=session)
            if one or target is None or target.rest:
                return BulkStep(place, delete)
            return BulkDelete(place, delete, target)
        if not isinstance(request, UpdateOne | ReplaceOne):
            raise ConfigurationError(
                f"A fenced bulk write cannot contain {type(request).__name__}. Use UpdateOne, ReplaceOne or DeleteOne."
            )
        body = _changing(facts.document) if isinstance(request, UpdateOne) else self._replacing(facts.document)
        write, target = self._updating(body, facts.options, command), _find_target(facts.filter, facts.options)
        self._demand_upsertable(write, target, facts.upsert)
        act = partial(self._write, write, facts.filter, facts.upsert, facts.sort, session)
        if target is None or (facts.upsert and target.rest):
            return BulkStep(place, act)
        return BulkUpdate(place, act, target, write, facts.upsert)

    def _updating(self, body: Body, options: Mapping[str, Any], command: Mapping[str, Any]) -> FencedUpdate:
        return FencedUpdate(body, options, command, self._pending.list_kept_fields(body))

    def _replacing(self, replacement: Mapping[str, Any]) -> Body:
        body = refuse_stamps(replacing(replacement))
        self._pending.refuse_entries(body)
        return body

    def _write(self, write: FencedUpdate, wanted: Query, upsert: bool, sort: Any, session: ClientSession | None) -> Any:
        """Do a write. Return its result, or None if nothing matched."""
        session, known = self._session(session), _find_target(wanted, write.options)
        self._demand_upsertable(write, known, upsert)
        options = {**write.options, **write.command}
        for target in self._choose(wanted, sort, options, session) if known is None else (known,):
            result = self._documents.write(write, target, upsert=upsert, session=session)
            if result is not None:
                return result
        return None

    def _demand_upsertable(self, write: FencedUpdate, target: Target | None, upsert: bool) -> None:
        if upsert and "collation" in write.options:
            raise ConfigurationError(
                "A fenced upsert cannot have a collation, because every execution must find the same _id. Leave it out."
            )
        if upsert and target is None:
            raise ConfigurationError(
                "A fenced upsert needs a filter with one _id, such as {'_id': 1}. By another field, a stale execution "
                "could insert a second document. Use the field's value as _id, or find the _id first."
            )

    def _choose(
        self, wanted: Query, sort: Any, options: Mapping[str, Any], session: ClientSession | None
    ) -> Iterator[Target]:
        """
        Yield the documents that a write by `wanted` and `sort` would choose, stale or not.

        If the filter contained the guard, a stale call would skip the guarded document and write to the next one. If
        the document no longer matches when it is written, the next one is chosen, as in MongoDB.
        """
        for _ in range(CHOICES):
            document = next(self._find(wanted, sort, options, session).limit(1), None)
            if document is None:
                return
            yield build_target(wanted, document["_id"])

    def _find(self, wanted: Query, sort: Any, options: Mapping[str, Any], session: ClientSession | None) -> Cursor[Any]:
        chosen = {name: options[name] for name in ("collation", "hint", "let", "comment") if name in options}
        order = list(sort.items()) if isinstance(sort, Mapping) else sort
        return self._documents.collection.find(wanted, {"_id": 1}, sort=order, session=session, **chosen)

    def _session(self, given: ClientSession | None) -> ClientSession | None:
        """Return the session for writes: the given one, or that of the open transaction."""
        client = self._documents.collection.database.client
        # PyMongo only warns: a child that uses the parent's sockets reads the answers to others.
        topology = getattr(client, "_topology", None)
        if getattr(topology, "_pid", None) not in (None, os.getpid()):
            raise ForkedClientError(namespace=self._documents.collection.full_name)
        return current(client) if given is None else given


def _find_target(wanted: Mapping[str, Any], options: Mapping[str, Any]) -> Target | None:
    """Return the document that a filter names by `_id`. None under a collation, which may match another document."""
    return None if "collation" in options else parse_target(wanted)


def _changing(update: Modifications) -> Body:
    return refuse_stamps(changing(update))


def _drop_missing(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _split(options: Mapping[str, Any]) -> tuple[ClientSession | None, dict[str, Any], dict[str, Any]]:
    """Return the session, the arguments of the statement, and those of the whole command."""
    given = _drop_missing(**options)
    session = given.pop("session", None)
    return session, {name: given.pop(name) for name in _OF_STATEMENT & given.keys()}, given
