"""
The fenced writes of one execution to one collection, as steps (`mongo.steps`). Threads and asyncio share them.

A write by a filter without `_id` first chooses a document. `documents` and `bulk` do the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pymongo import DeleteOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.cursor import Cursor
from pymongo.results import BulkWriteResult, DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.bulk import BATCH, BulkDelete, BulkStep, BulkUpdate, BulkWrite
from mongo_celery.bridge.fenced.documents import Documents, FencedFindAndUpdate, FencedUpdate, make_result
from mongo_celery.bridge.fenced.fence import Fence, Origin, refuse_stamps
from mongo_celery.bridge.fenced.pending import PendingTasks
from mongo_celery.errors import ConfigurationError, ForkedClientError
from mongo_celery.mongo.steps import AnyCollection, Session, Steps, read_batch
from mongo_celery.mongo.transaction.scopes import current, is_beside_transaction, prepare_current
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
Options = Mapping[str, Any]
"""Arguments of PyMongo's method with the same name. None counts as missing."""

_OF_STATEMENT = {"collation", "hint", "array_filters"}
"""Arguments of one statement in a command. The others apply to the whole command."""

_BESIDE = (
    "A transaction is open, but this write runs in another asyncio task, as with gather, create_task and, in Python "
    "3.11, wait_for. A transaction takes one command at a time, so nothing was written. Await the write in the task of "
    "the transaction, or pass session=."
)


class FencedWrites:
    """
    The writes of a view. `FencedCollection` has their rules, arguments and errors.

    Args:
        collection: the target, of either kind of client.
        fence: the execution's right to write.
        outboxes: returns the app's outboxes of this collection.
        origin_of: given a target's `_id`, returns the change that the write is for.
    """

    def __init__(
        self,
        collection: AnyCollection,
        fence: Fence,
        outboxes: Callable[[], Sequence[Outbox]],
        origin_of: Callable[[Any], Origin | None] | None,
    ) -> None:
        self._is_async = isinstance(collection, AsyncCollection)
        self._pending = PendingTasks(collection, outboxes)
        self._documents = Documents(collection, fence, self._pending, origin_of)

    def describe(self, view: object) -> str:
        """Return a representation of a view of these writes."""
        return f"{type(view).__name__}({self._documents.collection.full_name!r}, {self._documents.fence!r})"

    def update_one(
        self,
        wanted: Query,
        update: Modifications,
        *,
        upsert: bool,
        sort: Any,
        session: Session | None,
        options: Options,
    ) -> Steps[UpdateResult]:
        """Update one document."""
        write = self._updating(_changing(update), *_split(options))
        return (yield from self._write(write, wanted, upsert, sort, session)) or make_result(0, 0)

    def replace_one(
        self, wanted: Query, replacement: Query, *, upsert: bool, sort: Any, session: Session | None, options: Options
    ) -> Steps[UpdateResult]:
        """Replace one document."""
        write = self._updating(self._replacing(replacement), *_split(options))
        return (yield from self._write(write, wanted, upsert, sort, session)) or make_result(0, 0)

    def find_one_and_update(
        self,
        wanted: Query,
        update: Modifications,
        *,
        upsert: bool,
        sort: Any,
        session: Session | None,
        options: Options,
    ) -> Steps[Any]:
        """Update and return one document."""
        body = _changing(update)
        write = FencedFindAndUpdate(body, _drop_missing(**options), kept=self._pending.list_kept_fields(body))
        return (yield from self._write(write, wanted, upsert, sort, session))

    def delete_one(self, wanted: Query, *, session: Session | None, options: Options) -> Steps[DeleteResult]:
        """Delete one document."""
        given = _drop_missing(**options)
        session = yield from self._find_session(session)

        def delete(target: Target) -> Steps[int | None]:
            return (yield from self._documents.delete(target, session, **given)) or None

        deleted = yield from self._act(delete, wanted, _find_target(wanted, given), None, given, session)
        return DeleteResult({"n": deleted or 0, "ok": 1.0}, True)

    def update_many(
        self, wanted: Query, update: Modifications, *, upsert: bool, session: Session | None, options: Options
    ) -> Steps[UpdateResult]:
        """Update many documents."""
        write = self._updating(_changing(update), *_split(options))
        if upsert or _find_target(wanted, write.options) is not None:
            return (yield from self._write(write, wanted, upsert, None, session)) or make_result(0, 0)
        session = yield from self._find_session(session)
        # By `_id`, which no update changes: a document that the update moves in another index would be changed twice.
        found = self._find(wanted, {"_id": 1}, {**write.options, **write.command}, session).allow_disk_use(True)
        many, details = BulkWrite(self._documents, write.command, session), {"nMatched": 0, "nModified": 0}

        def make_step(target: Target) -> BulkStep:
            act = partial(self._documents.write, write, target, upsert=False, session=session)
            return BulkUpdate(0, act, target, write, upsert=False)

        while documents := (yield from read_batch(found, BATCH)):
            steps = [make_step(build_target(wanted, document["_id"])) for document in documents]
            details = yield from many.run(steps)
        return make_result(details["nMatched"], details["nModified"])

    def bulk_write(
        self, requests: Sequence[Any], *, ordered: bool, session: Session | None, options: Options
    ) -> Steps[BulkWriteResult]:
        """Make many writes."""
        session, command = (yield from self._find_session(session)), _drop_missing(**options)
        steps = [self._make_step(place, request, command, session) for place, request in enumerate(requests)]
        details = yield from BulkWrite(self._documents, command, session, ordered=ordered).run(steps)
        return BulkWriteResult(details, True)

    def _make_step(self, place: int, request: Any, command: Options, session: Session | None) -> BulkStep:
        """Return the step for a request: one that can join a batch, or one that runs alone."""
        facts = BulkRequest.of(request)
        if isinstance(request, UpdateMany):
            _changing(facts.document)
            many: dict[str, Any] = {"upsert": facts.upsert, "session": session, "options": {**facts.options, **command}}
            return BulkStep(place, lambda: self.update_many(facts.filter, facts.document, **many))
        if isinstance(request, DeleteOne):
            one = {**facts.options, **_drop_missing(let=command.get("let"), comment=command.get("comment"))}
            target = _find_target(facts.filter, one)
            delete = partial(self.delete_one, facts.filter, session=session, options=one)
            if one or target is None or target.rest:
                return BulkStep(place, delete)
            return BulkDelete(place, delete, target)
        if not isinstance(request, UpdateOne | ReplaceOne):
            raise ConfigurationError(
                f"A fenced bulk write cannot contain {type(request).__name__}. Use UpdateOne, ReplaceOne or DeleteOne."
            )
        body = _changing(facts.document) if isinstance(request, UpdateOne) else self._replacing(facts.document)
        write, target = self._updating(body, facts.options, command), _find_target(facts.filter, facts.options)
        _demand_upsertable(write, target, facts.upsert)
        act = partial(self._write, write, facts.filter, facts.upsert, facts.sort, session)
        if target is None or (facts.upsert and target.rest):
            return BulkStep(place, act)
        return BulkUpdate(place, act, target, write, facts.upsert)

    def _updating(self, body: Body, options: Options, command: Options) -> FencedUpdate:
        return FencedUpdate(body, options, command, self._pending.list_kept_fields(body))

    def _replacing(self, replacement: Query) -> Body:
        body = refuse_stamps(replacing(replacement))
        self._pending.refuse_entries(body)
        return body

    def _write(
        self, write: FencedUpdate, wanted: Query, upsert: bool, sort: Any, session: Session | None
    ) -> Steps[Any]:
        """Do a write. Return its result, or None if nothing matched."""
        session, known = (yield from self._find_session(session)), _find_target(wanted, write.options)
        _demand_upsertable(write, known, upsert)
        act = partial(self._documents.write, write, upsert=upsert, session=session)
        return (yield from self._act(act, wanted, known, sort, {**write.options, **write.command}, session))

    def _act(
        self,
        act: Callable[[Target], Steps[Any]],
        wanted: Query,
        known: Target | None,
        sort: Any,
        options: Options,
        session: Session | None,
    ) -> Steps[Any]:
        """
        Write to the known document, or to the one that `wanted` and `sort` choose, stale or not.

        If the filter contained the guard, a stale call would skip the guarded document and write to the next one. If
        the document no longer matches when it is written, the next one is chosen, as in MongoDB.
        """
        if known is not None:
            return (yield from act(known))
        for _ in range(CHOICES):
            found = yield from read_batch(self._find(wanted, sort, options, session).limit(1), 1)
            if not found:
                break
            result = yield from act(build_target(wanted, found[0]["_id"]))
            if result is not None:
                return result
        return None

    def _find(
        self, wanted: Query, sort: Any, options: Options, session: Session | None
    ) -> Cursor[Any] | AsyncCursor[Any]:
        chosen = {name: options[name] for name in ("collation", "hint", "let", "comment") if name in options}
        order = list(sort.items()) if isinstance(sort, Mapping) else sort
        found: Cursor[Any] | AsyncCursor[Any] = self._documents.collection.find(
            wanted, {"_id": 1}, sort=order, session=session, **chosen
        )
        return found

    def _find_session(self, given: Session | None) -> Steps[Session | None]:
        """Return the session for writes: the given one, or that of the open transaction."""
        client = self._documents.collection.database.client
        # PyMongo only warns: a child that uses the parent's sockets reads the answers to others.
        topology = getattr(client, "_topology", None)
        if getattr(topology, "_pid", None) not in (None, os.getpid()):
            raise ForkedClientError(namespace=self._documents.collection.full_name)
        if given is not None:
            return given
        if self._is_async:
            yield prepare_current(client)
        session: Session | None = current(client)
        if session is None and self._is_async and is_beside_transaction(client):
            raise ConfigurationError(_BESIDE)
        return session


def _demand_upsertable(write: FencedUpdate, target: Target | None, upsert: bool) -> None:
    if upsert and "collation" in write.options:
        raise ConfigurationError(
            "A fenced upsert cannot have a collation, because every execution must find the same _id. Leave it out."
        )
    if upsert and target is None:
        raise ConfigurationError(
            "A fenced upsert needs a filter with one _id, such as {'_id': 1}. By another field, a stale execution "
            "could insert a second document. Use the field's value as _id, or find the _id first."
        )


def _find_target(wanted: Query, options: Options) -> Target | None:
    """Return the document that a filter names by `_id`. None under a collation, which may match another document."""
    return None if "collation" in options else parse_target(wanted)


def _changing(update: Modifications) -> Body:
    return refuse_stamps(changing(update))


def _drop_missing(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _split(options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the statement, and those of the whole command."""
    given = _drop_missing(**options)
    return {name: given.pop(name) for name in _OF_STATEMENT & given.keys()}, given
