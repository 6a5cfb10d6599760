"""
The handlers' sources and filters, and the one change stream for all handlers of a bridge.

Server-side filters use only data that the oplog fixes: namespace and operation. For any other condition (`match`), the
server computes a flag, and the listener applies it. If a filter used a looked-up field, a token could no longer be
resumed after a change of the document. Server or listener exclude bookkeeping (`bookkeeping`).

The server's filter determines how fast the stream passes other writes. A stream that is slower than these writes falls
off the oplog. So the filter is cheap rather than exact: one lookup of the namespace in a list of any length, with no
clause for each collection, handler or field. It passes every requested event, and `Selector` excludes the rest.

The bridge's own state database is always excluded. Otherwise every commit would be a change that causes a commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bson import json_util

from mongo_celery.bridge.change import FLAGS
from mongo_celery.bridge.fenced import TOMBSTONES
from mongo_celery.bridge.stream.bookkeeping import (
    DESCRIPTION,
    Bookkeeping,
    exclusion_stages,
    list_touched,
)
from mongo_celery.bridge.stream.filter import (
    ALL,
    DOCUMENT_OPERATIONS,
    MOVES,
    Filter,
)
from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from pymongo import MongoClient

_IMAGES = ("fullDocument", "fullDocumentBeforeChange")
_DEFAULTS = ("default", "off")
_RESERVED = frozenset({"admin", "config", "local"})
_DATABASE_BYTES = 63
_OF_NO_DATABASE, _OF_NO_COLLECTION = frozenset('/\\. "$\0*'), frozenset("$\0*")
"""Characters that MongoDB or PyMongo refuses in a name. A `*` is a mistaken pattern."""


@dataclass(frozen=True, slots=True)
class Source:
    """A collection, a database (`collection` is None), or the cluster (both are None)."""

    database: str | None
    collection: str | None

    def covers(self, database: str | None, collection: str | None) -> bool:
        """Return True if an event of this namespace belongs to the source. Some events have no collection."""
        if self.collection is None and collection is not None and collection.endswith(TOMBSTONES):
            return False  # tombstones of fenced deletes are not user data
        if database is None or self.database is None:
            return True
        return self.database == database and (self.collection is None or collection in (None, self.collection))

    def __str__(self) -> str:
        return f"{self.database or '*'}.{self.collection or '*'}" if self.database else "*"


def parse_source(target: object, default_database: str | None) -> Source:
    """
    Return the source for a user's argument.

    Args:
        target: `"db.collection"`, `"db.*"`, `"*"`, `"collection"` if the URL names a database, a PyMongo
            collection or database, a Django model or a MongoEngine document class.
        default_database: the database in the bridge's URL.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(target, str):
        return _from_text(target, default_database)
    full_name = getattr(target, "full_name", None)
    if isinstance(full_name, str):
        return _from_text(full_name, default_database)
    if isinstance(target, type):
        return _from_class(target)
    name = getattr(target, "name", None)
    if isinstance(name, str) and hasattr(target, "list_collection_names"):
        return _check_source(Source(name, None), target)
    raise ConfigurationError(
        f"{target!r} is not a source. Give 'db.collection', 'db.*', a PyMongo collection or a model class.",
    )


def _from_text(text: str, default_database: str | None) -> Source:
    if text == "*":
        return Source(None, None)
    database, dot, collection = text.partition(".")
    if not dot:
        if not default_database:
            raise ConfigurationError(
                f"source {text!r} has no database, and the bridge's URL has none. Use 'db.{text}' or '{text}.*'.",
            )
        database, collection = default_database, text
    return _check_source(Source(database, None if collection == "*" else collection), text)


def _check_source(source: Source, target: object) -> Source:
    if source.database in _RESERVED:
        raise ConfigurationError(
            f"source {target!r} cannot be watched, because {source.database!r} is a database of MongoDB itself. Use "
            "one of your databases."
        )
    if not (_is_database_name(source.database or "") and _is_collection_name(source.collection)):
        raise ConfigurationError(
            f"source {target!r} must be of the form 'db.collection' or 'db.*', with names that MongoDB and PyMongo "
            "accept."
        )
    return source


def _is_database_name(name: str) -> bool:
    return 0 < len(name.encode(errors="replace")) <= _DATABASE_BYTES and not _OF_NO_DATABASE.intersection(name)


def _is_collection_name(name: str | None) -> bool:
    """Return True for a valid name, and for None, which is all collections."""
    if name is None:
        return True
    is_split = ".." in name or name.startswith(".") or name.endswith(".")
    return bool(name) and not is_split and not _OF_NO_COLLECTION.intersection(name)


def _from_class(model: Any) -> Source:
    """Return a model's collection. Django and MongoEngine are imported only if they are in use."""
    concrete = getattr(getattr(model, "_meta", None), "concrete_model", None)
    if concrete is not None:
        from django.db import connections, router

        alias = router.db_for_write(model)
        connection = connections[alias]
        if connection.vendor != "mongodb":
            raise ConfigurationError(
                f"{model.__name__} is stored in {alias!r}, a database of {connection.display_name}, but only MongoDB "
                "can be watched. Use a model of django-mongodb-backend, or route this model to its database."
            )
        database = connection.settings_dict["NAME"]
        return _check_source(Source(str(database), str(concrete._meta.db_table)), model)  # noqa: SLF001 - Django's public name
    named = getattr(model, "_get_collection_name", None)
    if callable(named) and named():
        database = model._get_db().name  # noqa: SLF001 - MongoEngine has no other way
        return _check_source(Source(str(database), str(named())), model)
    raise ConfigurationError(f"class {model.__name__} is neither a Django model nor a MongoEngine document.")


@dataclass(frozen=True, slots=True)
class Selector:
    """
    The sources and the filter of one handler, which select its events.

    Attributes:
        bookkeeping: the bookkeeping of the app. None for a handler that requests it.
    """

    name: str
    sources: tuple[Source, ...]
    filter: Filter
    bookkeeping: Bookkeeping | None = None

    def selects(self, event: Mapping[str, Any]) -> bool:
        """Return True if an event belongs to this subscription."""
        return self.wants(event) and not self.is_bookkeeping(event)

    def wants(self, event: Mapping[str, Any]) -> bool:
        """Return True if an event belongs to this subscription, apart from bookkeeping."""
        return self._may_want(event) and (self.filter.match is None or bool(event[FLAGS].get(self.name, False)))

    def is_bookkeeping(self, event: Mapping[str, Any]) -> bool:
        """Return True if an event is only bookkeeping that was not requested. It never raises."""
        if self.bookkeeping is None or self.filter.fields is not None:  # `fields` decide which updates count
            return False
        return self.bookkeeping.covers_event(event)

    def may_be_bookkeeping(self, event: Mapping[str, Any]) -> bool:
        """Return True if a document change with this operation could be only bookkeeping."""
        return self.bookkeeping is not None and event.get("operationType") == "update"

    @property
    def is_simple(self) -> bool:
        """Return True if operation, namespace and bookkeeping suffice to decide about a document change."""
        return self.filter.match is None and self.filter.fields is None

    def may_select(self, event: Mapping[str, Any]) -> bool:
        """Return True if the event, which may be incomplete, could belong to this subscription."""
        return self._may_want(event) and not self.is_bookkeeping(event)

    def _may_want(self, event: Mapping[str, Any]) -> bool:
        operation = event["operationType"]
        if not (self.filter.wants_operation(operation) and self._covers(event)):
            return False
        fields = self.filter.fields
        return fields is None or operation != "update" or DESCRIPTION not in event or _touches(event, fields)

    def _covers(self, event: Mapping[str, Any]) -> bool:
        """
        Return True if an event belongs to one of the sources. A wide source excludes bookkeeping collections.

        A rename concerns both the old and the new collection.
        """
        ours = self.bookkeeping.collections if self.bookkeeping is not None else ()
        places = [at for at in (event.get("ns"), event.get("to")) if isinstance(at, Mapping)] or [{}]
        return any(
            source.covers(at.get("db"), at.get("coll"))
            and (source.collection is not None or f"{at.get('db')}.{at.get('coll')}" not in ours)
            for at in places
            for source in self.sources
        )


def _touches(event: Mapping[str, Any], fields: frozenset[str]) -> bool:
    return any(
        path == field or path.startswith(f"{field}.") or field.startswith(f"{path}.")
        for path, _ in list_touched(event.get(DESCRIPTION) or {})
        for field in fields
    )


@dataclass(frozen=True, slots=True)
class Scope:
    """
    A bridge's change stream: target, stages and options.

    Attributes:
        database: None for the whole cluster.
        collection: None for a whole database.
        selection: the bridge's filters. They use only fields that the oplog fixes.
        options: options of the stage `$changeStream` that differ from the server's default.
        flags: the `match` expressions, by handler.
        last: the bridge's final stages, which reduce an event.
    """

    database: str | None
    collection: str | None
    selection: tuple[Mapping[str, Any], ...]
    options: Mapping[str, str | bool]
    flags: Mapping[str, Any] = field(default_factory=dict)
    last: tuple[Mapping[str, Any], ...] = ()

    @property
    def pipeline(self) -> tuple[Mapping[str, Any], ...]:
        """Return all stages."""
        flags: tuple[Mapping[str, Any], ...] = ({"$addFields": {FLAGS: self.flags}},) if self.flags else ()
        return (*self.selection, *flags, *self.last)

    @property
    def without_images(self) -> Scope:
        """Return the same stream without lookup and images."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in _IMAGES})

    def with_flags(self, names: Iterable[str]) -> Scope:
        """Return the same stream with only some handlers' flags."""
        return replace(self, flags={name: self.flags[name] for name in names})

    def add_stage(self, stage: Mapping[str, Any]) -> Scope:
        """Return the same stream with one more stage."""
        return replace(self, last=(*self.last, stage))

    def find_target(self, client: MongoClient[Any]) -> Any:
        """Return the client, database or collection for `watch`."""
        if self.database is None:
            return client
        database = client.get_database(self.database)
        return database if self.collection is None else database[self.collection]

    @property
    def fingerprint(self) -> str:
        """Digest of this stream. A token may be used only for a stream with the same fingerprint."""
        document = {
            "database": self.database,
            "collection": self.collection,
            "pipeline": list(self.pipeline),
            "options": dict(self.options),
        }
        text = json_util.dumps(document, sort_keys=True, json_options=json_util.CANONICAL_JSON_OPTIONS)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def make_scope(
    selectors: Sequence[Selector],
    *,
    state_database: str,
    full_document: str | None = None,
    before_change: str | None = None,
    expanded: bool = False,
    bookkeeping: Bookkeeping | None = None,
) -> Scope:
    """
    Return the narrowest stream for all subscriptions, regardless of their order.

    Args:
        selectors: the selectors of all subscriptions.
        state_database: the state database of the bridge.
        full_document: the option of this name.
        before_change: the option `full_document_before_change`.
        expanded: the option `show_expanded_events`.
        bookkeeping: the known bookkeeping. None to include all of it.

    Raises:
        ConfigurationError: a source is in the bridge's own state database.
    """
    sources = sorted({source for selector in selectors for source in selector.sources}, key=str)
    for source in sources:
        if source.database == state_database:
            raise ConfigurationError(
                f"source {source} is in the bridge's state database {state_database!r}, so the bridge would read its "
                "own writes. Use another state database: Bridge(..., database='...').",
            )
    databases = {source.database for source in sources}
    database = databases.pop() if len(databases) == 1 else None
    collection = sources[0].collection if len(sources) == 1 else None
    opened = Source(database, collection)
    selection = (
        _match_events(selectors, opened, state_database),
        *exclusion_stages(_find_unasked(selectors, bookkeeping or Bookkeeping())),
    )
    asked = {"fullDocument": full_document, "fullDocumentBeforeChange": before_change, "showExpandedEvents": expanded}
    options = {name: value for name, value in asked.items() if value and value not in _DEFAULTS}
    return Scope(database, collection, selection, options, _make_flags(selectors, opened))


def resolve_selectors(selectors: Iterable[Selector], bookkeeping: Bookkeeping) -> list[Selector]:
    """Return a bridge's selectors with the bookkeeping that its handlers did not request."""
    return [each if each.filter.bookkeeping else replace(each, bookkeeping=bookkeeping) for each in selectors]


def _find_unasked(selectors: Sequence[Selector], bookkeeping: Bookkeeping) -> list[tuple[str, str]]:
    """Return collection and field of each watched outbox whose bookkeeping no handler requests."""
    found = []
    for name, fields in bookkeeping.outboxes.items():
        takers = [
            each.filter
            for each in selectors
            if each.filter.wants_operation("update")
            and any(source.covers(*name.split(".", 1)) for source in each.sources)
        ]
        found += [
            (name, field) for field in fields if takers and not any(each.asks_for_field(field) for each in takers)
        ]
    return found


def _match_events(selectors: Sequence[Selector], opened: Source, state_database: str) -> Mapping[str, Any]:
    """
    Return the bridge's first stage for a stream that is opened on a source.

    Events of a whole collection are rare and pass by operation alone. Their namespace may be a database's, or in `to`,
    so the selectors judge them. Events that move a collection always pass. The stream reopens after an invalidate's
    token, and the snapshot of a dropped or renamed collection must not end as if it were complete.
    """
    asked = frozenset().union(*(selector.filter.operations for selector in selectors))
    others = sorted((asked | MOVES) - DOCUMENT_OPERATIONS)
    kinds = {"operationType": {"$nin": sorted(DOCUMENT_OPERATIONS)} if ALL in asked else {"$in": others}}
    everything = {"$or": [kinds, *_match_documents(selectors, opened)]}
    is_open_wide = any(source.database is None for selector in selectors for source in selector.sources)
    return {"$match": {"ns.db": {"$ne": state_database}, **everything} if is_open_wide else everything}


def _match_documents(selectors: Sequence[Selector], opened: Source) -> list[dict[str, Any]]:
    """
    Return conditions on document changes, grouped by the operations requested for the same sources.

    There are at most four, and usually one. If one handler wants only a collection's inserts, its updates do not pass
    because another handler wants updates elsewhere: for each update that passes, the server looks up the document.
    """
    wanted: dict[frozenset[Source], list[str]] = {}
    for operation in sorted(DOCUMENT_OPERATIONS):
        takers = [selector for selector in selectors if selector.filter.wants_operation(operation)]
        sources = frozenset(source for selector in takers for source in selector.sources)
        if sources:
            wanted.setdefault(sources, []).append(operation)
    return [
        {"operationType": {"$in": operations}, **({} if opened in sources else _match_namespaces(sources))}
        for sources, operations in wanted.items()
    ]


def _match_namespaces(sources: Iterable[Source]) -> dict[str, Any]:
    """
    Return one list for all collections, and one for all databases that are watched as a whole.

    The server translates an expression to the oplog's own namespace, and looks it up in a set. It would translate a
    `$match` on `ns.db` and `ns.coll` to one regular expression per name, and try them one by one.
    """
    whole = sorted(str(source.database) for source in sources if source.collection is None)
    single = sorted(str(each) for each in sources if each.collection is not None and each.database not in whole)
    among: list[dict[str, Any]] = []
    if single:
        among.append({"$in": [{"$concat": ["$ns.db", ".", "$ns.coll"]}, single]})
    if whole:
        among.append({"$in": ["$ns.db", whole]})
    return {"$expr": among[0] if len(among) == 1 else {"$or": among}}


def _make_flags(selectors: Sequence[Selector], opened: Source) -> dict[str, Any]:
    return {
        selector.name: {"$cond": [{"$and": [*_guard_match(selector, opened), selector.filter.match]}, True, False]}
        for selector in selectors
        if selector.filter.match is not None
    }


def _guard_match(selector: Selector, opened: Source) -> list[dict[str, Any]]:
    """Return the conditions before a `match`, so that it cannot fail on other handlers' documents."""
    guards: list[dict[str, Any]] = []
    if ALL not in selector.filter.operations:
        guards.append({"$in": ["$operationType", sorted(selector.filter.operations)]})
    if opened not in selector.sources:
        of_a_document = {"$in": ["$operationType", sorted(DOCUMENT_OPERATIONS)]}
        guards.append({"$or": [{"$not": [of_a_document]}, _match_namespaces(selector.sources)["$expr"]]})
    return guards


def strip_flags(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event as the server would send it without the bridge's flags."""
    event.pop(FLAGS, None)
    return event
