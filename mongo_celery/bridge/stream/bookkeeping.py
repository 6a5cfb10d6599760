"""
Bookkeeping: what this package keeps for itself, in fields of users' documents and in collections of its own.

No handler runs for it unless it asks: nothing that anybody else has written is in it, and a program without an outbox,
a lock or a transaction would not have made these changes. In users' documents it is updates that touch nothing else:

| who keeps it | updates | known by |
|---|---|---|
| an outbox | claims, removals, entries without a change beside them | collection and field, of the app's outboxes |
| `select_for_update` | the lock | its field `_lock`, and the value of a lock in it |
| two-phase commit by markers | a version given, a transaction settled | `transactionFence`, and a version in it |
| fenced writes | a stamp without a change beside it | `_fence`, and stamps in it |

A handler that gets a change for other reasons does not see these fields either (`hide_fields`). Copied, entries
would be sent twice, and stamps, locks and versions would count for a document to which they do not belong.

An outbox's field is known from the outbox, since a field of that name may be a user's elsewhere. The others may be in
any collection. So they are known by name and form (`_FORMS`): a user's own field of that name makes no change vanish.

A handler of a whole database or cluster gets no collection of ours. Left out are those of `OutboxCollection`s,
idempotency records of `once`, transactions of two-phase commit, and its receipts, by the form of their `_id`.

All this is fixed by the oplog, so that the server may leave it out and every token remains one to resume from. The
server does so where that is cheap and leaves out much: in collections with an outbox, unless a handler wants to know.
The listener leaves out the rest.
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
from mongo_celery.twophase.receipts import COLLECTION

LOCK = "_lock"
"""Where `select_for_update` writes unless it is told another field."""

DESCRIPTION = "updateDescription"
DOCUMENTS = frozenset({"fullDocument", "fullDocumentBeforeChange", DESCRIPTION})
"""Fields of an event in which fields of a document stand."""

RECEIPTS = COLLECTION
"""Where two-phase commit keeps its receipts, in each database with participants."""

Changes = Mapping[str, Any]
"""The values that an update has given, by their paths."""


@dataclass(frozen=True, slots=True)
class _Form:
    """
    The form of a field of ours.

    Attributes:
        paths: pattern of all paths below the field, two levels deep.
        whole: the paths that its value has when it is written as a whole, or is read.
        proof: the path to which each of our writes gives another ObjectId. None if the paths are proof enough.
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
"""Fields that are ours in any collection if they have our form: `MARKERS` beside a version."""

_GONE = object()
"""In the place of a value: it was removed, or cut from an array."""

_RECEIPT_PARTS = {"t", "b"}
_OF_RECEIPTS = RECEIPTS.encode() + b"\0\0"
"""How the bytes of their namespace end."""

_DESCRIPTION = b"\x03updateDescription\0"
_WHOLE = {"updatedFields", "removedFields"}


@dataclass(frozen=True)
class Bookkeeping:
    """
    The bookkeeping of an app.

    Args:
        outboxes: the fields of outboxes, by the full names of their collections.
        collections: full names of those that hold nothing but bookkeeping.
    """

    outboxes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    collections: frozenset[str] = frozenset()

    @cached_property
    def _names(self) -> Sequence[bytes]:
        """One of these is in each description that is bookkeeping."""
        return [name.encode() for name in set(_FORMS).union(*self.outboxes.values())]

    def covers_event(self, event: Mapping[str, Any]) -> bool:
        """Return True if an event is an update that touches nothing else. Never raises."""
        if isinstance(event, RawEvent):  # most updates need no further look
            # Where a value looks like a description, the rest may be too little; then the update is given.
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


def may_be_receipt(event: Mapping[str, Any]) -> bool:
    """Return True unless operation and namespace of an event rule out that it is about a receipt."""
    return not isinstance(event, RawEvent) or (event.origin or b"").endswith(_OF_RECEIPTS)


def is_receipt(event: Mapping[str, Any]) -> bool:
    """Return True if an event is about a receipt of two-phase commit. False if that cannot be judged. Never raises."""
    if not may_be_receipt(event):
        return False
    try:
        key = event["documentKey"]["_id"]
        return event["ns"]["coll"] == RECEIPTS and set(key) == _RECEIPT_PARTS and isinstance(key["t"], ObjectId)
    except Exception:  # noqa: BLE001 - whatever bytes do to a decoder
        return False


# -- fields of ours --------------------------------------------------------------------------------


def _find_ours(touched: Mapping[str, Changes], outboxes: Collection[str]) -> set[str]:
    """Return the fields in which nothing was written but by this package."""
    return {name for name in touched if name in outboxes or _has_our_form(name, touched)}


def _has_our_form(name: str, touched: Mapping[str, Changes]) -> bool:
    """Return True if a field was given what this package writes there: as a whole, or a part of it."""
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
    """Yield the parts of a value with their paths. Itself if it has none, or lies deeper."""
    if levels and value and isinstance(value, Mapping):
        for key in value:
            yield from _split(f"{path}.{key}", value[key], levels - 1)
    else:
        yield path, value


def find_touched_fields(description: Mapping[str, Any]) -> set[str]:
    """Return the fields at the top of a document that an update has touched. None if that cannot be judged."""
    try:
        return {_find_field(path) for path, _ in list_touched(description)}
    except Exception:  # noqa: BLE001 - whatever bytes do to a decoder
        return set()


def list_touched(description: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the paths that an update has touched, each with the value that is there now."""
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
    Return one of an event's `DOCUMENTS` without the fields that this package keeps. Never raises.

    Args:
        event: plain, as the server sent it. It stays as it is.
        name: one of `DOCUMENTS`.
        outboxes: fields of the outboxes on its collection.
        asks_for: returns True for a field that stays.
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
    """Return a document like an update that has written each of its fields as a whole."""
    return {name: {name: value} for name, value in document.items()}


def _drop_paths(paths: Any, hidden: set[str]) -> Any:
    """Return a part of a description without what lies in some fields: values by path, paths, or cut arrays."""
    if isinstance(paths, Mapping):
        return {path: value for path, value in paths.items() if _find_field(path) not in hidden}
    return [
        each for each in paths or () if _find_field(each["field"] if isinstance(each, Mapping) else each) not in hidden
    ]


# -- what judges them ------------------------------------------------------------------------------


def exclusion_stages(outboxes: Collection[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """
    Return the stage that leaves out the updates which touch nothing but an outbox's field. None without an outbox.

    Args:
        outboxes: full name of the collection, and field of each.
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
    # In this order, so that nobody else's updates cost more than a look-up.
    is_all = [
        {"$eq": ["$operationType", "update"]},
        {"$in": [name, sorted({collection for collection, _ in outboxes})]},
        {"$in": [[name, fields], [[collection, [each]] for collection, each in sorted(outboxes)]]},
    ]
    return [{"$match": {"$expr": {"$not": [{"$and": is_all}]}}}]
