"""
Bookkeeping: the package's own fields in users' documents, and its own collections.

Handlers get bookkeeping only on request. It contains no data of other writers, and a program without an outbox, a lock
or a transaction would not make these changes. In users' documents, it consists of updates that touch nothing else:

| feature | updates | recognised by |
|---|---|---|
| an outbox | claims, removals, entries without another change | collection and field, of the app's outboxes |
| `select_for_update` | the lock | its field `_lock`, with a lock's value |
| two-phase commit by markers | a new version, a settled transaction | `transactionFence`, with a version |
| fenced writes | a stamp without another change | `_fence`, with stamps |

If a handler gets a change for other reasons, it does not see these fields either (`hide_fields`). In a copy of the
document, entries would be sent twice, and stamps, locks and versions would apply to the wrong document.

The outbox itself names its field, because users may use the same name in other collections. The other fields may be in
any collection. They are recognised by name and form (`_FORMS`), so a user's own field of that name hides no change.

A handler of a whole database or cluster gets no collection of this package: not those of an `OutboxCollection`, the
idempotency records of `once`, or the transactions of two-phase commit.

The oplog fixes all this, so the server may filter it and every token can still be resumed. The server filters if that
is cheap and excludes much: in collections with an outbox, unless a handler requests bookkeeping. The listener filters
the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bson import ObjectId

from mongo_celery.bridge.fenced.fence import FIELD as FENCE
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION

LOCK = "_lock"
"""Default field of `select_for_update`."""

DESCRIPTION = "updateDescription"
DOCUMENTS = frozenset({"fullDocument", "fullDocumentBeforeChange", DESCRIPTION})
"""Fields of an event that contain a document's fields."""

Changes = Mapping[str, Any]
"""The values of an update, by path."""


@dataclass(frozen=True, slots=True)
class _Form:
    """
    The form of one of the package's fields.

    Attributes:
        paths: pattern of all paths below the field, two levels deep.
        whole: the paths of its value when it is written or read as a whole.
        proof: the path to which each write of the package gives another ObjectId. None if the paths are enough.
    """

    paths: re.Pattern[str]
    whole: frozenset[str] = frozenset()
    proof: str | None = None


_FORMS = {
    LOCK: _Form(re.compile("at|id"), frozenset({"at", "id"}), "id"),
    PARTICIPANT_VERSION: _Form(re.compile("of|at"), frozenset({"of", "at"}), "at"),
    FENCE: _Form(re.compile(r"[\w-]{1,64}/[\w-]{1,64}\.[gpl](\..*)?")),  # stamps by bridge and handler
}

KNOWN_BY_FORM = frozenset({*_FORMS, MARKERS})
"""Fields that belong to the package in any collection if they have its form. `MARKERS` also needs a version."""

_GONE = object()
"""Placeholder of a value that was removed or cut from an array."""

_DESCRIPTION = b"\x03updateDescription\0"
_WHOLE = {"updatedFields", "removedFields"}


@dataclass(frozen=True)
class Bookkeeping:
    """
    The bookkeeping of an app.

    Args:
        outboxes: the fields of outboxes, by the full names of their collections.
        collections: full names of collections that contain only bookkeeping.
    """

    outboxes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    collections: frozenset[str] = frozenset()

    @cached_property
    def _names(self) -> Sequence[bytes]:
        """Return names. Every bookkeeping update contains at least one of them."""
        return [name.encode() for name in set(_FORMS).union(*self.outboxes.values())]

    def covers_event(self, event: Mapping[str, Any]) -> bool:
        """Return True if an event only updates bookkeeping fields. It never raises."""
        if isinstance(event, RawEvent):  # most updates need no further check
            # If a value looks like a description, the check may fail. Then the handler gets the update.
            begin = event.raw.rfind(_DESCRIPTION)
            if begin < 0 or not any(event.raw.find(name, begin) > 0 for name in self._names):
                return False
        try:
            if event.get("operationType") != "update":
                return False
            description = event[DESCRIPTION]
            touched = _group_by_field(list_touched(description)) if description.keys() >= _WHOLE else {}
            namespace = f"{event['ns']['db']}.{event['ns']['coll']}"
            return bool(touched) and _find_ours(touched, self.outboxes.get(namespace, ())) == touched.keys()
        except Exception:  # noqa: BLE001 - whatever bytes do to a decoder
            return False


# -- fields of ours --------------------------------------------------------------------------------


def _find_ours(touched: Mapping[str, Changes], outboxes: Collection[str]) -> set[str]:
    """Return the fields that only this package has written."""
    return {name for name in touched if name in outboxes or _has_our_form(name, touched)}


def _has_our_form(name: str, touched: Mapping[str, Changes]) -> bool:
    """Return True if this package wrote the value of a field, in whole or in part."""
    if name == MARKERS:
        name = PARTICIPANT_VERSION
    form, changes = _FORMS.get(name), touched.get(name)
    if form is None or changes is None:
        return False
    written = (each for path, value in changes.items() for each in _split(path, value))
    parts = {path.removeprefix(f"{name}."): value for path, value in written}
    return (
        all(value is not _GONE and form.paths.fullmatch(path) for path, value in parts.items())
        and (form.proof is None or isinstance(parts.get(form.proof), ObjectId))
        and (name not in changes or form.whole <= parts.keys())
    )


def _split(path: str, value: Any, levels: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their paths, or the value itself if it has none or is deeper."""
    if levels and value and isinstance(value, Mapping):
        for key in value:
            yield from _split(f"{path}.{key}", value[key], levels - 1)
    else:
        yield path, value


def find_touched_fields(description: Mapping[str, Any]) -> set[str]:
    """Return the top-level fields that an update has touched. Empty if its description cannot be read."""
    try:
        return {_find_field(path) for path, _ in list_touched(description)}
    except Exception:  # noqa: BLE001 - whatever bytes do to a decoder
        return set()


def list_touched(description: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the paths that an update has touched, each with its current value."""
    yield from (description.get("updatedFields") or {}).items()
    for path in description.get("removedFields") or ():
        yield path, _GONE
    for array in description.get("truncatedArrays") or ():
        yield array["field"], _GONE


def _group_by_field(values: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    grouped: dict[str, dict[str, Any]] = {}
    for path, value in values:
        grouped.setdefault(_find_field(path), {})[path] = value
    return grouped


def _find_field(path: str) -> str:
    return path.partition(".")[0]


# -- documents without them ------------------------------------------------------------------------


def hide_fields(event: Mapping[str, Any], name: str, outboxes: Collection[str], asks_for: Callable[[str], bool]) -> Any:
    """
    Return one of an event's `DOCUMENTS` without the fields of this package. It never raises.

    Args:
        event: the event as plain values, as the server sent it. It does not change.
        name: one of `DOCUMENTS`.
        outboxes: fields of the outboxes in its collection.
        asks_for: returns True for a field to keep.
    """
    value = event[name]
    try:
        if name != DESCRIPTION:
            hidden = {each for each in _find_ours(_as_touched(value), outboxes) if not asks_for(each)}
            return {each: value[each] for each in value if each not in hidden} if hidden else value
        ours = _find_ours(_group_by_field(list_touched(value)), outboxes)
        if _has_our_form(MARKERS, _as_touched(event.get("fullDocument") or {})):
            ours.add(MARKERS)
        hidden = {each for each in ours if not asks_for(each)}
        return {each: _drop_paths(value[each], hidden) for each in value} if hidden else value
    except Exception:  # noqa: BLE001 - whatever bytes do to a decoder
        return value


def _as_touched(document: Mapping[str, Any]) -> dict[str, Changes]:
    """Return a document in the form of an update that writes each of its fields as a whole."""
    return {name: {name: value} for name, value in document.items()}


def _drop_paths(paths: Any, hidden: set[str]) -> Any:
    """Return a part of an update description without hidden fields: values by path, paths, or truncated arrays."""
    if isinstance(paths, Mapping):
        return {path: value for path, value in paths.items() if _find_field(path) not in hidden}
    return [
        each for each in paths or () if _find_field(each["field"] if isinstance(each, Mapping) else each) not in hidden
    ]


# -- filter in the server ------------------------------------------------------------------------


def exclusion_stages(outboxes: Collection[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """
    Return the stage that excludes updates of nothing but an outbox's field. Empty without an outbox.

    Args:
        outboxes: full name and field for each.
    """
    if not outboxes:
        return []
    updated = {"$objectToArray": {"$ifNull": [f"${DESCRIPTION}.updatedFields", {}]}}
    paths = {
        "$concatArrays": [
            {"$map": {"input": updated, "as": "each", "in": "$$each.k"}},
            {"$ifNull": [f"${DESCRIPTION}.removedFields", []]},
            {"$ifNull": [f"${DESCRIPTION}.truncatedArrays.field", []]},
        ]
    }
    fields = {"$setUnion": [{"$map": {"input": paths, "as": "path", "in": {"$first": {"$split": ["$$path", "."]}}}}]}
    name = {"$concat": ["$ns.db", ".", "$ns.coll"]}
    # In this order, so that other updates cost only one lookup.
    is_all = [
        {"$eq": ["$operationType", "update"]},
        {"$in": [name, sorted({collection for collection, _ in outboxes})]},
        {"$in": [[name, fields], [[collection, [each]] for collection, each in sorted(outboxes)]]},
    ]
    return [{"$match": {"$expr": {"$not": [{"$and": is_all}]}}}]
