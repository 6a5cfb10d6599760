"""
The updates of participants: look, apply, settle, undo. Each is one or more conditional updates of a document.

**The version of a participant.** In MongoDB's tutorial the marker in `pendingTransactions` prevents a second
application of a change, until it is pulled. Suppose a coordinator pauses before it applies, and recovery overtakes it.
If it wakes up after the marker was pulled, it applies a second time. A list of settled transactions would only help as
long as it is kept. Here a version helps permanently, in constant space: every participant has in `transactionFence` a
unique value that is renewed when a transaction is settled or undone in it. (The transaction also has a version, a
number. Here "version" is the participant's.) A change is applied in three steps, in this order:

1. look: read the participant's version (majority). If it has none, give it one (majority) and look again.
2. prove: a majority write on the transaction that matches only while it is pending and mine.
3. apply: only if the version is still the same. A missing version never matches.

A transaction is settled or undone in a document only after it has left `pending`. If I looked before that, the version
has changed since, so my change matches nothing. If I looked after that, my proof matches nothing. The same protects
against a late copy of the update in the network. So an undo renews the version even if it finds no marker, because a
coordinator may be on its way.

A counter is not enough, nor a missing version that counts as seen. A document that was deleted and inserted again, or
replaced, would begin with a version that a paused coordinator has seen before. A version is an ObjectId that is made
for each renewal, so no value occurs twice. (If someone restores an old copy of the document with its version, this is
not detectable.)

If an undo finds neither marker nor version, it leaves the document alone. Nothing can be applied there before a
coordinator looks and gives it a version. That look comes after the transaction has left `pending`, so its proof fails.
So a collection whose validator forbids the field is never left half applied.

**Its incarnation.** An application may rewrite a whole participant during a transaction, and remove marker and version.
Whether its data includes the change is then unknown. So the version has two parts, `{of, at}`. `at` is renewed as
above, `of` only if it is missing. When a transaction begins, it records each `of`. Until it is applied, a participant
without its marker whose `of` is missing or different was replaced, or deleted and created again. Then nothing is
applied or undone there, and a person decides. Only another transaction gives a version there, with another `of`. The
tutorial's own code records no `of`.

If another transaction settles in the same document, it also renews the version. Then the three steps are repeated,
which is harmless.

Conditions compare ids by `$eq`, so that an id is always a value, never a query.

Source: MongoDB, "Perform Two Phase Commits". The version is our addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError

from mongo_celery.mongo.writes import single_error
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part

Document = dict[str, Any]

UNRECORDED: Any = object()
"""The incarnation of a participant if its transaction has recorded none."""

_OF = f"{PARTICIPANT_VERSION}.of"
_UNDO_ROUNDS = 3
"""A late coordinator can apply once between the two updates of an undo. The next round finds its marker."""


@dataclass(frozen=True, slots=True)
class View:
    """
    A coordinator's view of a participant.

    Attributes:
        exists: True if the document exists.
        marked: True if it has the transaction's marker.
        participant_version: the condition of `apply`. None if the document was replaced during the look.
        incarnation: the part of its version that lasts until replacement or re-creation. None if it has none.
        id: the `_id` in the server, which may differ in type from the requested one. None if none was found or read.
        refusal: reason why it cannot get a version. None if it can.
    """

    exists: bool
    marked: bool
    participant_version: Any
    incarnation: Any = None
    id: Any = None
    refusal: str | None = None


class Undone(Enum):
    """The possible results of an undo."""

    UNDONE = "undone"
    GONE = "gone"
    REPLACED = "replaced"
    REFUSED = "refused"


def look(collection: Collection[Document], part: Part, transaction_id: Any, *, give: bool = True) -> View:
    """
    Read a participant's version and marker.

    Args:
        collection: the collection of the participant.
        part: the participant.
        transaction_id: the marker to look for.
        give: True to give it a version and an incarnation, if it has none.

    Raises:
        WriteError: the collection's validator does not allow its field.
    """
    view = _read_view(collection, part, transaction_id)
    if not give or not view.exists or view.incarnation is not None:
        return view
    # Null counts as missing in both languages.
    as_seen = {"_id": {"$eq": part.id}, PARTICIPANT_VERSION: {"$eq": view.participant_version}}
    collection.update_one(as_seen, {"$set": {PARTICIPANT_VERSION: {"of": ObjectId(), "at": ObjectId()}}})
    return _read_view(collection, part, transaction_id)


def apply(collection: Collection[Document], part: Part, transaction_id: Any, participant_version: Any) -> bool:
    """Apply the change and push the marker. Return False if version, `require` or marker does not allow it."""
    if participant_version is None:
        return False
    guard = {
        "_id": {"$eq": part.id},
        MARKERS: {"$ne": transaction_id},
        PARTICIPANT_VERSION: {"$eq": participant_version},
        "$and": [part.require or {}],
    }
    change = _merge(part.apply, {"$push": {MARKERS: transaction_id}})
    return bool(collection.update_one(guard, change).matched_count)


def settle(collection: Collection[Document], parts: Sequence[Part], transaction_id: Any) -> None:
    """
    Remove the markers and renew the versions of all participants in one collection.

    Participants without a version come first. If another transaction gives one a version meanwhile, it is then renewed.
    Versions are never removed, so none is missed.
    """
    updates = [
        UpdateOne(_marker_filter(part, transaction_id, is_versioned), _pull(transaction_id, is_versioned))
        for is_versioned in (False, True)
        for part in parts
    ]
    try:
        collection.bulk_write(updates)
    except BulkWriteError as error:
        raise single_error(error) from error


def undo(collection: Collection[Document], part: Part, transaction_id: Any, incarnation: Any = UNRECORDED) -> Undone:
    """
    Undo the change if the marker shows that it was applied. Always renew an existing version.

    Args:
        collection: the collection of the participant.
        part: the participant.
        transaction_id: the marker to look for.
        incarnation: the incarnation of the participant when the transaction began, if recorded.
    """
    unmarked: Document = {"_id": {"$eq": part.id}, MARKERS: {"$ne": transaction_id}}
    if incarnation is not UNRECORDED and incarnation is not None:
        unmarked[_OF] = {"$eq": incarnation}
    for _ in range(_UNDO_ROUNDS):
        for is_versioned in (True, False):
            guard = {**_marker_filter(part, transaction_id, is_versioned), "$and": [part.revert_require or {}]}
            if _matches(collection, guard, _merge(part.revert, _pull(transaction_id, is_versioned))):
                return Undone.UNDONE
        if _renew_version(collection, unmarked):
            return Undone.UNDONE
        view = _read_view(collection, part, transaction_id)
        if not view.exists:
            return Undone.GONE
        if not view.marked and _OF in unmarked and view.incarnation != incarnation:
            return Undone.REPLACED
    return Undone.REFUSED


def _read_view(collection: Collection[Document], part: Part, transaction_id: Any) -> View:
    markers = {"$cond": [{"$isArray": f"${MARKERS}"}, f"${MARKERS}", []]}
    marked = {"$in": [{"$literal": transaction_id}, markers]}  # the server compares, with BSON's equality
    found = collection.find_one({"_id": {"$eq": part.id}}, {PARTICIPANT_VERSION: 1, "marked": marked})
    if found is None:
        return View(exists=False, marked=False, participant_version=None)
    version = found.get(PARTICIPANT_VERSION)
    incarnation = version.get("of") if isinstance(version, dict) and set(version) == {"of", "at"} else None
    return View(
        exists=True,
        marked=bool(found["marked"]),
        participant_version=version,
        incarnation=incarnation,
        id=found["_id"],
    )


def _marker_filter(part: Part, transaction_id: Any, is_versioned: bool) -> Document:
    """Return a filter that matches while the marker exists, for a participant with or without a version."""
    return {"_id": {"$eq": part.id}, MARKERS: {"$eq": transaction_id}, _OF: {"$exists": is_versioned}}


def _pull(transaction_id: Any, is_versioned: bool) -> Document:
    renewed = {"$set": {f"{PARTICIPANT_VERSION}.at": ObjectId()}} if is_versioned else {}
    return {"$pull": {MARKERS: {"$in": [transaction_id]}}, **renewed}


def _renew_version(collection: Collection[Document], guard: Document) -> bool:
    """Renew a participant's version, if it has one. Return True if the guard matches."""
    # Same order as in `settle`. Not a pipeline, which MongoDB 4.4 shows to handlers as a replacement.
    if _OF not in guard and _matches(collection, {**guard, _OF: {"$exists": False}}, {"$unset": {_OF: ""}}):
        return True
    renewed = {"$set": {f"{PARTICIPANT_VERSION}.at": ObjectId()}}
    return _matches(collection, {_OF: {"$exists": True}, **guard}, renewed)


def _matches(collection: Collection[Document], guard: Document, change: Mapping[str, Any]) -> bool:
    return bool(collection.update_one(guard, change).matched_count)


def _merge(change: Mapping[str, Any], ours: Mapping[str, Any]) -> Document:
    merged = {operator: dict(fields) for operator, fields in change.items()}
    for operator, fields in ours.items():
        merged.setdefault(operator, {}).update(fields)
    return merged
