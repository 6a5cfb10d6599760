"""
The filter of a handler: operation types, fields, and a condition on changes.

Servers send more operation types with every version. A handler gets the types that it names, or all with `"*"`. A name
that resembles a known one counts as misspelt.

A condition (`match=`, and `snapshot --match`) is an aggregation expression over the event. A query such as `{"status":
"paid"}` is an object for the server, which counts as true. It would match every change, so it is refused before the
stream opens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import bson

from mongo_celery.arguments import check_flags, nearest
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import short

ALL = "*"
"""Every operation type, including those of later servers."""

DOCUMENT_OPERATIONS = frozenset({"insert", "update", "replace", "delete"})
"""Changes of one document, which have a document key."""

OPERATIONS = DOCUMENT_OPERATIONS | {"drop", "rename", "dropDatabase", "invalidate"}
"""Types that every server sends."""

EXPANDED_OPERATIONS = frozenset({
    "create", "createIndexes", "dropIndexes", "modify", "refineCollectionShardKey", "reshardCollection",
    "shardCollection",
})  # fmt: skip
"""Types that a server sends only with `showExpandedEvents` (MongoDB 6.0 and later)."""

MOVES = frozenset({"drop", "rename", "dropDatabase", "invalidate"})
"""Types that replace or remove a collection."""

TAKES_DOCUMENTS = frozenset({"insert", "update", "replace"})
"""A handler of one of these handles documents, so a snapshot can give it the existing ones."""

_SNAPSHOT = (
    "operation 'snapshot' cannot be requested. Leave it out. To get existing documents, use start_from='snapshot', or "
    "run `celery -A APP changes snapshot start HANDLER`."
)
_ALL_ALONE = "'*' already means all operations, so it must be the only one: operations='*' or operations={'*'}."


def check_operations(asked: Collection[str]) -> frozenset[str]:
    """
    Return the operation types that a handler requests.

    Raises:
        ConfigurationError: a name resembles a known one, or `"*"` is not alone.
    """
    names = frozenset(asked)
    if ALL in names and len(names) > 1:
        raise ConfigurationError(_ALL_ALONE)
    if SNAPSHOT in names:
        raise ConfigurationError(_SNAPSHOT)
    known = OPERATIONS | EXPANDED_OPERATIONS
    for name in sorted(names - known - {ALL}):
        meant = nearest(name, sorted(known)) or nearest(name.lower(), sorted(known))
        if meant or not name.isidentifier():
            raise ConfigurationError(
                f"operation {name!r} is unknown{meant}. To get operations of newer servers, use operations='*'.",
            )
    return names


def check_are_sent(asked: Collection[str], *, expanded: bool) -> None:
    """
    Refuse operation types that never arrive.

    Args:
        asked: one handler's types.
        expanded: the bridge's option `show_expanded_events`.

    Raises:
        ConfigurationError: the stream does not show events of a requested type.
    """
    never = sorted(set(asked) - OPERATIONS - {ALL})
    if never and not expanded:
        raise ConfigurationError(
            f"operations {', '.join(map(repr, never))} would never arrive. Correct the name, or set the bridge's "
            "option show_expanded_events=True (MongoDB 6.0 or later). Without this option a server sends only "
            f"{', '.join(sorted(OPERATIONS))}.",
        )


_EVENT_FIELDS = frozenset({
    "_id", "clusterTime", "collectionUUID", "disambiguatedPaths", "documentKey", "fullDocument",
    "fullDocumentBeforeChange", "lsid", "ns", "nsType", "operationDescription", "operationType", "reshardingUUID",
    "splitEvent", "stateBeforeChange", "to", "txnNumber", "updateDescription", "wallTime",
})  # fmt: skip
_OF_CONDITIONS = ("$and", "$or", "$not")
_EXAMPLE = """'{"$eq": ["$fullDocument.status", "open"]}'"""


def find_objection(condition: Any) -> str | None:
    """
    Find the reason why a value is not a valid condition, as far as possible without a server.

    Returns:
        The end of the error sentence, with the fix. None for a valid condition.
    """
    if not _is_expression(condition):
        return f"is not a condition. Pass an aggregation expression over the event, such as {_EXAMPLE}."
    for each in _operands(condition):
        if isinstance(each, Mapping) and each and not _is_expression(each):
            return f"contains {dict(each)!r}, which is true for every change. Use an expression, such as {_EXAMPLE}."
    for path in find_paths(condition):
        if not path.startswith("$") and path.partition(".")[0] not in _EVENT_FIELDS:
            return f"reads '${path}', which no change has. For a field of the document use '$fullDocument.{path}'."
    try:
        bson.encode({"": condition})  # encode like the stream's client, whatever the URL sets
    except Exception as error:  # noqa: BLE001 - PyMongo raises what it likes
        return f"cannot be sent to MongoDB: {short(error)}."
    return None


def find_paths(expression: Any) -> Iterator[str]:
    """Yield the field paths that an expression reads, without `$`. Variables keep one `$`."""
    if isinstance(expression, Mapping):
        for name, value in expression.items():
            if name != "$literal":
                yield from find_paths(value)
    elif isinstance(expression, (list, tuple)):
        for each in expression:
            yield from find_paths(each)
    elif isinstance(expression, str) and expression.startswith("$") and len(expression) > 1:
        yield expression[1:]


def _is_expression(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and str(next(iter(value))).startswith("$")


def _operands(expression: Any) -> Iterator[Any]:
    """Yield the conditions inside `$and`, `$or` and `$not`, at any depth."""
    for name in _OF_CONDITIONS if isinstance(expression, Mapping) else ():
        below = expression.get(name, ())
        for each in below if isinstance(below, (list, tuple)) else [below]:
            yield each
            yield from _operands(each)


@dataclass(frozen=True, slots=True)
class Filter:
    """
    A handler's conditions for its changes.

    Attributes:
        operations: operation types. `{"*"}` for all.
        fields: an update counts only if it touches one of these. None for all.
        match: an aggregation expression over the event, which the server evaluates. None for all.
        bookkeeping: True if the handler sees this package's fields in documents, and its collections in a database that
            is watched as a whole. If there are `fields`, only these decide which updates count.
    """

    operations: frozenset[str] = DOCUMENT_OPERATIONS
    fields: frozenset[str] | None = None
    match: Any = None
    bookkeeping: bool = False

    @property
    def takes_documents(self) -> bool:
        """Return True if the handler gets documents, so that a snapshot can give it the existing ones."""
        return bool(self.operations & (TAKES_DOCUMENTS | {ALL}))

    @property
    def takes_every_change(self) -> bool:
        """Return True if the handler gets every change of a document."""
        is_open = self.operations >= DOCUMENT_OPERATIONS or ALL in self.operations
        return is_open and self.fields is None and self.match is None

    def asks_for_field(self, field: str) -> bool:
        """Return True if the handler requests updates that touch only one of the package's fields."""
        if self.fields is None:
            return self.bookkeeping
        return any(path.partition(".")[0] == field for path in self.fields)

    def wants_operation(self, operation: str) -> bool:
        """Return True if an operation type is requested."""
        return operation in self.operations or ALL in self.operations


def make_filter(
    operations: Iterable[str] | None = None,
    fields: Iterable[str] | None = None,
    match: Any = None,
    *,
    bookkeeping: bool = False,
) -> Filter:
    """Return the filter for a decorator's arguments, or raise a ConfigurationError."""
    if operations == ALL:
        operations = {ALL}
    for name, value in (("operations", operations), ("fields", fields)):
        if value is not None and not _are_names(value):
            example = "insert" if name == "operations" else "status"
            raise ConfigurationError(f"{name}={value!r} must be a set of names, such as {name}={{{example!r}}}.")
    asked = check_operations(list(operations)) if operations is not None else DOCUMENT_OPERATIONS
    objection = find_objection(match) if match is not None else None
    if objection is not None:
        raise ConfigurationError(f"match={match!r} {objection}")
    check_flags(bookkeeping=bookkeeping)
    if fields is not None and not asked & {"update", ALL}:
        raise ConfigurationError(
            "fields= selects updates, but operations= does not include 'update'. Add 'update' to operations, or leave "
            "fields out.",
        )
    reads_document = any(path.partition(".")[0] == "fullDocument" for path in find_paths(match))
    if reads_document and not asked & (TAKES_DOCUMENTS | {ALL}):
        raise ConfigurationError(
            f"match= reads $fullDocument, but a change with operation {', '.join(sorted(asked))} has none. Use "
            "$documentKey, or $fullDocumentBeforeChange with the bridge's option full_document_before_change.",
        )
    return Filter(asked, frozenset(fields) if fields is not None else None, match, bookkeeping)


def _are_names(value: object) -> bool:
    """Return True if a value is a non-empty collection of names. A single string is not."""
    return (
        isinstance(value, Collection)
        and not isinstance(value, (str, bytes))
        and bool(value)
        and all(isinstance(name, str) for name in value)
    )
