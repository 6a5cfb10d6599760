"""
What is done to the documents of a transaction, each time one conditional update.

**The version of a participant.** In MongoDB's tutorial the marker in `pendingTransactions` keeps a change from being
applied twice, until it is pulled. A coordinator that is paused before it applies, is overtaken by recovery and wakes up
after the marker was pulled applies a second time. Remembering settled transactions would close the hole for as long as
they are remembered. Here it is closed for good, in constant space: every participant has in `transactionFence` a
version, a value that was never there before, made anew whenever a transaction is settled or undone in it. (The
transaction has a version too, a number; here "version" is the participant's.) A change is applied in three acts, in
this order:

1. look: read the participant's version (majority); if it has none, give it one (majority) and look again;
2. prove: a majority write on the transaction that matches only while it is pending and mine;
3. apply: only where the version is still the one that was seen. No version is no match.

A transaction is settled or undone in a document only after it has left `pending`. If I looked before that, the
version I saw is gone since and my change matches nothing; if I looked after that, my proof matches nothing. A copy of
the update that the network delivers late is refused for the same reason. For this an undo renews the version also
where it finds no marker: a coordinator may be on its way there.

A counter would not do, nor may a missing version be one that can be seen: a document that was deleted and inserted
again, or replaced, would begin with what a paused coordinator has seen in its predecessor. A version is an ObjectId
that is made for each renewal, so no value comes twice. An old integer is a version like any other, until it is renewed.
(Who puts an old copy of the document back, version and all, puts the version back that was seen: that cannot be told
apart.)

Where an undo finds neither marker nor version, it leaves the document alone. Nothing can be applied there before
somebody looks and gives it a version; that look comes after the transaction has left `pending`, and its proof fails.
So a collection whose validator does not allow the field is never left half applied.

Another transaction that is settled in the same document renews the version as well. Then the three acts are
repeated, which is harmless.

Ids stand behind `$eq` in every condition: what a transaction names is a value, and never a query.

Source: MongoDB, "Perform Two Phase Commits"; the version is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection

from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part

Document = dict[str, Any]

_UNDO_ROUNDS = 3
"""A late coordinator can apply between the two updates of an undo, once: then the next round finds its marker."""


@dataclass(frozen=True, slots=True)
class View:
    """
    What was seen in a participant.

    Attributes:
        exists: whether there is such a document.
        marked: whether it has the transaction's marker.
        participant_version: what `apply` is conditional on; None if it was replaced while it was looked at.
        id: the `_id` that the server found, which may be written otherwise than the one that was asked for; None if
            none was found, or read.
        refusal: why it can have no version; None if it can.
    """

    exists: bool
    marked: bool
    participant_version: Any
    id: Any = None
    refusal: str | None = None


class Undone(Enum):
    """How an undo ended."""

    UNDONE = "undone"
    GONE = "gone"
    REFUSED = "refused"


def look(collection: Collection[Document], part: Part, transaction_id: Any) -> View:
    """
    Read what `apply` will be conditional on; afterwards the document has a version.

    Raises:
        WriteError: the collection's validator does not allow its field.
    """
    view = _seen(collection, part, transaction_id)
    if not view.exists or view.participant_version is not None:
        return view
    # Null counts as missing, here as there.
    missing = {"_id": {"$eq": part.id}, PARTICIPANT_VERSION: None}
    collection.update_one(missing, {"$set": {PARTICIPANT_VERSION: ObjectId()}})
    return _seen(collection, part, transaction_id)


def apply(collection: Collection[Document], part: Part, transaction_id: Any, participant_version: Any) -> bool:
    """Apply the change and leave the marker; False where the version is another, the rule fails, or it was done."""
    if participant_version is None:
        return False
    guard = {
        "_id": {"$eq": part.id},
        MARKERS: {"$ne": transaction_id},
        PARTICIPANT_VERSION: {"$eq": participant_version},
        "$and": [part.require or {}],
    }
    change = _merged(part.apply, {"$push": {MARKERS: transaction_id}})
    return bool(collection.update_one(guard, change).matched_count)


def settle(collection: Collection[Document], part: Part, transaction_id: Any) -> bool:
    """Take the marker away, and renew the version; False where there is none any more."""
    return _matches(collection, _marked(part, transaction_id), _pull(transaction_id))


def undo(collection: Collection[Document], part: Part, transaction_id: Any) -> Undone:
    """Undo the change where the marker shows that it was applied; renew the version in any case, if there is one."""
    guard = {**_marked(part, transaction_id), "$and": [part.revert_require or {}]}
    unmarked = {"_id": {"$eq": part.id}, MARKERS: {"$ne": transaction_id}}
    for _ in range(_UNDO_ROUNDS):
        if _matches(collection, guard, _merged(part.revert, _pull(transaction_id))):
            return Undone.UNDONE
        if _matches(collection, unmarked, _renewed_if_there()):
            return Undone.UNDONE
        if collection.find_one({"_id": {"$eq": part.id}}, {"_id": 1}) is None:
            return Undone.GONE
    return Undone.REFUSED


def _seen(collection: Collection[Document], part: Part, transaction_id: Any) -> View:
    markers = {"$cond": [{"$isArray": f"${MARKERS}"}, f"${MARKERS}", []]}
    marked = {"$in": [{"$literal": transaction_id}, markers]}  # compared by the server: BSON's equality
    found = collection.find_one({"_id": {"$eq": part.id}}, {PARTICIPANT_VERSION: 1, "marked": marked})
    if found is None:
        return View(exists=False, marked=False, participant_version=None)
    version = found.get(PARTICIPANT_VERSION)
    return View(exists=True, marked=bool(found["marked"]), participant_version=version, id=found["_id"])


def _marked(part: Part, transaction_id: Any) -> Document:
    return {"_id": {"$eq": part.id}, MARKERS: {"$eq": transaction_id}}


def _pull(transaction_id: Any) -> Document:
    return {"$pull": {MARKERS: {"$in": [transaction_id]}}, "$set": {PARTICIPANT_VERSION: ObjectId()}}


def _renewed_if_there() -> list[Document]:
    """In one update: a look may not slip in between the question and the renewal."""
    renewed = {"$cond": [{"$gt": [f"${PARTICIPANT_VERSION}", None]}, ObjectId(), "$$REMOVE"]}
    return [{"$set": {PARTICIPANT_VERSION: renewed}}]


def _matches(
    collection: Collection[Document], guard: Document, change: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> bool:
    return bool(collection.update_one(guard, change).matched_count)


def _merged(change: Mapping[str, Any], ours: Mapping[str, Any]) -> Document:
    merged = {operator: dict(fields) for operator, fields in change.items()}
    for operator, fields in ours.items():
        merged.setdefault(operator, {}).update(fields)
    return merged
