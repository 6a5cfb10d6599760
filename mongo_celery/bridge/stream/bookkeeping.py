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

A handler that gets a change for other reasons does not see these fields either (`shown`). Copied, entries
would be sent twice, and stamps, locks and versions would count for a document to which they do not belong.

What an outbox keeps is known from the outbox, since a field named so may be a user's elsewhere. The others work on
whatever collection; so the value counts too, and who has a field of such a name for something else misses nothing.

A handler of a whole database or cluster gets no collection of ours. Left out are those of `OutboxCollection`s,
idempotency records of `once`, transactions of two-phase commit, and its receipts, by the form of their `_id`.

All this is fixed by the oplog, so that the server may leave it out and every token remains one to go on from. It is
asked to where that is cheap and leaves out much: in collections with an outbox, unless a handler wants to know. The
listener leaves out the rest. What it cannot judge, since a pipeline has removed or changed the description of the
update, is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId, json_util

from mongo_celery.bridge.fenced.fence import FIELD as FENCE
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION
from mongo_celery.twophase.receipts import COLLECTION

LOCK = "_lock"
"""Where `select_for_update` writes unless it is told another field."""

KNOWN_BY_VALUE = frozenset({LOCK, MARKERS, PARTICIPANT_VERSION, FENCE})
"""Fields that are ours in any collection, where they hold what we write."""

DESCRIPTION = "updateDescription"
DOCUMENTS = frozenset({"fullDocument", "fullDocumentBeforeChange", DESCRIPTION})
"""Fields of an event in which fields of a document stand."""

Changes = Mapping[str, Any]
"""The values that an update has given, by their paths."""

RECEIPTS = COLLECTION
"""Where two-phase commit keeps its receipts, in each database with participants."""

_RECEIPT_PARTS = {"t", "b"}
_OF_RECEIPTS = RECEIPTS.encode() + b"\0\0"
"""How the bytes of their namespace end."""

_GONE = object()
"""In the place of a value: it was removed, or cut from an array."""

_DESCRIPTION = b"\x03updateDescription\0"
_LOCK_PARTS = frozenset({"application", "at", "id"})
_VERSION_PARTS = frozenset({"of", "at"})
_STAMP_PARTS = frozenset({"g", "p", "l"})
_PATHS = ("updatedFields", "disambiguatedPaths")
_ALTERING = frozenset({"$redact"})


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """
    The bookkeeping of an app.

    Args:
        outboxes: the fields of outboxes, by the full names of their collections.
        collections: full names of those that hold nothing but bookkeeping.
    """

    outboxes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    collections: frozenset[str] = frozenset()
    _traces: tuple[bytes, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        names = {LOCK, PARTICIPANT_VERSION, FENCE}.union(*self.outboxes.values())
        object.__setattr__(self, "_traces", tuple(sorted(name.encode() for name in names)))

    def is_all_of(self, event: Mapping[str, Any], namespace: str | None = None) -> bool:
        """
        Return True if an event is an update that touches nothing else; False where that cannot be told. Never raises.

        Args:
            event: of whatever operation.
            namespace: of its collection, where that is known without it.
        """
        if isinstance(event, RawEvent) and not self._may_be_in(event.raw):
            return False
        try:
            return event.get("operationType") == "update" and self._is_all_of(event, namespace)
        except Exception:  # noqa: BLE001 - whatever a pipeline has made of the event
            return False

    def _may_be_in(self, raw: bytes) -> bool:
        """Return True if one of the names is in the description of an update: most updates need no further look."""
        # Where a value looks like a description, what is behind it may be too little; then the update is given.
        begin = raw.rfind(_DESCRIPTION)
        if begin < 0:
            return False
        for name in self._traces:  # noqa: SIM110 - it is asked of every update, and a generator takes longer
            if raw.find(name, begin) > 0:
                return True
        return False

    def _is_all_of(self, event: Mapping[str, Any], namespace: str | None) -> bool:
        touched = _touched_by_field(event[DESCRIPTION])
        if namespace is None:
            namespace = f"{event['ns']['db']}.{event['ns']['coll']}"
        kept = _find_kept(touched, self.outboxes.get(namespace, frozenset()))
        return bool(touched) and kept == touched.keys()


def is_receipt(event: Mapping[str, Any]) -> bool:
    """Return True if an event is about a receipt of two-phase commit; False where that cannot be told. Never raises."""
    if isinstance(event, RawEvent) and not (event.origin or b"").endswith(_OF_RECEIPTS):
        return False
    try:
        key = event["documentKey"]["_id"]
        return event["ns"]["coll"] == RECEIPTS and set(key) == _RECEIPT_PARTS and isinstance(key["t"], ObjectId)
    except Exception:  # noqa: BLE001 - whatever a pipeline has made of the event
        return False


def fields_touched(description: Mapping[str, Any]) -> set[str]:
    """Return the fields at the top of a document that an update has touched; none where that cannot be told."""
    try:
        return {_field_of(path) for path, _ in _touched(description)}
    except Exception:  # noqa: BLE001 - whatever a pipeline has made of the event
        return set()


def _touched(description: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield from description["updatedFields"].items()
    for path in description["removedFields"]:
        yield path, _GONE
    for array in description.get("truncatedArrays") or ():
        yield array["field"], _GONE


def _touched_by_field(description: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    touched: dict[str, dict[str, Any]] = {}
    for path, value in _touched(description):
        touched.setdefault(_field_of(path), {})[path] = value
    return touched


def _field_of(path: str) -> str:
    return path.partition(".")[0]


def shown(event: Mapping[str, Any], name: str, outboxes: Collection[str], asks_for: Callable[[str], bool]) -> Any:
    """
    Return one of an event's `DOCUMENTS` without the fields that this package keeps. Never raises.

    Args:
        event: plain, as the server sent it; it stays as it is.
        name: one of `DOCUMENTS`.
        outboxes: fields of the outboxes on its collection.
        asks_for: says of a field whether it stays.
    """
    value = event[name]
    try:
        if name == DESCRIPTION:
            kept = _find_kept(_touched_by_field(value), outboxes)
            if MARKERS in _find_kept(_as_touched(event.get("fullDocument") or {}), ()):
                kept.add(MARKERS)
            return _described(value, {field for field in kept if not asks_for(field)})
        hidden = {field for field in _find_kept(_as_touched(value), outboxes) if not asks_for(field)}
    except Exception:  # noqa: BLE001 - whatever a pipeline has made of the event
        return value
    return {field: value[field] for field in value if field not in hidden} if hidden else value


def _described(description: Mapping[str, Any], hidden: set[str]) -> Mapping[str, Any]:
    """Return the description of an update without some fields at the top of its document."""
    if not hidden:
        return description
    shown = dict(description)
    for name in (name for name in _PATHS if name in description):
        shown[name] = {path: value for path, value in description[name].items() if _field_of(path) not in hidden}
    shown["removedFields"] = [path for path in description["removedFields"] if _field_of(path) not in hidden]
    if "truncatedArrays" in description:
        arrays = description["truncatedArrays"] or ()
        shown["truncatedArrays"] = [each for each in arrays if _field_of(each["field"]) not in hidden]
    return shown


def _as_touched(document: Mapping[str, Any]) -> dict[str, Changes]:
    """Return a document like an update that has written each of its fields as a whole."""
    return {name: {name: value} for name, value in document.items()}


def _find_kept(touched: Mapping[str, Changes], outboxes: Collection[str]) -> set[str]:
    """Return the fields in which nothing was written but by this package."""
    return {name for name in touched if name in outboxes or _is_kept(name, touched)}


def _is_kept(name: str, touched: Mapping[str, Changes]) -> bool:
    """Return True if a field was given what this package writes there: as a whole, or a part of it."""
    if name not in KNOWN_BY_VALUE:
        return False
    if name == MARKERS:
        return PARTICIPANT_VERSION in touched and _is_kept(PARTICIPANT_VERSION, touched)
    changes = touched[name]
    whole = changes.get(name)
    if whole is None:
        parts = {path.removeprefix(f"{name}."): value for path, value in changes.items()}
    elif isinstance(whole, Mapping) and len(changes) == 1:
        parts = dict(whole)
    else:
        return False
    if name == FENCE:
        return bool(parts) and all(_is_stamp(path, value) for path, value in parts.items())
    if name == PARTICIPANT_VERSION:
        return parts.keys() <= _VERSION_PARTS and isinstance(parts.get("at"), ObjectId)
    # An update may say only what differs from the lock before: its id always does.
    has_all = whole is None or parts.keys() == _LOCK_PARTS
    return has_all and parts.keys() <= _LOCK_PARTS and isinstance(parts.get("id"), ObjectId)


def _is_stamp(path: str, value: Any) -> bool:
    """Return True if a value is a stamp under a key of bridge and handler, or a part of one."""
    key, *parts = path.split(".")
    if "/" not in key or value is _GONE:
        return False
    if parts:
        return parts[0] in _STAMP_PARTS
    return isinstance(value, Mapping) and {"g", "p"} <= value.keys() <= _STAMP_PARTS


def is_judged_behind(pipeline: Sequence[Mapping[str, Any]]) -> bool:
    """
    Return True if updates can be told by their description when they have passed a user's pipeline.

    Not by what is left of one: a description that lacks the user's own fields would look like bookkeeping.
    """
    return not any(_may_alter(stage) for stage in pipeline)


def _may_alter(stage: Mapping[str, Any]) -> bool:
    ((operator, body),) = stage.items()
    if operator == "$match":
        return False
    return operator in _ALTERING or "updateDescription" in json_util.dumps(body, default=repr)


# -- on the server ---------------------------------------------------------------------------------


def left_out(fields: Mapping[str, Sequence[str]], *, is_alone: bool) -> list[Mapping[str, Any]]:
    """
    A stage that leaves out the updates which touch nothing but an outbox's field; none where there is no outbox.

    Args:
        fields: full names of collections, by the field of their outboxes.
        is_alone: whether the stream is open on the one collection that can be among them.
    """
    if not fields:
        return []
    kept = [
        {"$and": [*([_is_in(names)] if len(fields) > 1 else []), {"$allElementsTrue": [_are_of(name)]}]}
        for name, names in sorted(fields.items())
    ]
    # In this order, so that nobody else's updates cost more than a look-up. One that touches nothing passes.
    conditions = [
        {"$eq": ["$operationType", "update"]},
        *([] if is_alone else [_is_in({each for names in fields.values() for each in names})]),
        {"$let": {"vars": {"paths": _paths()}, "in": {"$and": [{"$ne": ["$$paths", []]}, {"$or": kept}]}}},
    ]
    return [{"$match": {"$expr": {"$not": [{"$and": conditions}]}}}]


def _is_in(names: Iterable[str]) -> Mapping[str, Any]:
    return {"$in": [{"$concat": ["$ns.db", ".", "$ns.coll"]}, sorted(names)]}


def _are_of(name: str) -> Mapping[str, Any]:
    """For each path whether it lies in a field; told by bytes, since a path need not be valid text."""
    begins = {"$eq": [{"$indexOfBytes": ["$$path", f"{name}."]}, 0]}
    is_of = {"$or": [{"$eq": ["$$path", name]}, begins]}
    return {"$map": {"input": "$$paths", "as": "path", "in": is_of}}


def _paths() -> Mapping[str, Any]:
    updated = {"$objectToArray": {"$ifNull": ["$updateDescription.updatedFields", {}]}}
    return {
        "$concatArrays": [
            {"$map": {"input": updated, "as": "each", "in": "$$each.k"}},
            {"$ifNull": ["$updateDescription.removedFields", []]},
            {"$ifNull": ["$updateDescription.truncatedArrays.field", []]},
        ]
    }
