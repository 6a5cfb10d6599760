"""
Conditions on changes: aggregation expressions over the event, of `match=` and of `snapshot --match`.

A query such as `{"status": "paid"}` is an object for the server, and an object is true. So it would match every change,
and is refused before anything is listened to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_EVENT_FIELDS = frozenset({
    "_id", "clusterTime", "collectionUUID", "disambiguatedPaths", "documentKey", "fullDocument",
    "fullDocumentBeforeChange", "lsid", "ns", "nsType", "operationDescription", "operationType", "reshardingUUID",
    "splitEvent", "stateBeforeChange", "to", "txnNumber", "updateDescription", "wallTime",
})  # fmt: skip
_OF_CONDITIONS = ("$and", "$or", "$not")
_EXAMPLE = """'{"$eq": ["$fullDocument.status", "open"]}'"""


def find_objection(condition: Any) -> str | None:
    """
    Find what keeps a value from being a condition, for as much as can be told without a server.

    Returns:
        The words that follow the condition in the sentence of a refusal, with what to do. None for a condition.
    """
    if not _is_expression(condition):
        return f"is no condition: give an aggregation expression over the event, such as {_EXAMPLE}."
    for each in _operands(condition):
        if isinstance(each, Mapping) and each and not _is_expression(each):
            return f"has {dict(each)!r} in it, which is true for every change: write an expression, such as {_EXAMPLE}."
    for path in find_paths(condition):
        if not path.startswith("$") and path.partition(".")[0] not in _EVENT_FIELDS:
            return f"reads '${path}', which no change has: for a field of the document write '$fullDocument.{path}'."
    return None


def find_paths(expression: Any) -> Iterator[str]:
    """Yield the field paths that an expression reads, without their `$`. Those of variables keep one."""
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
    """Yield what stands below `$and`, `$or` and `$not`, at any depth of these."""
    for name in _OF_CONDITIONS if isinstance(expression, Mapping) else ():
        below = expression.get(name, ())
        for each in below if isinstance(below, (list, tuple)) else [below]:
            yield each
            yield from _operands(each)
