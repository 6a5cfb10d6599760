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
that is made for each renewal, so no value comes twice.
(Who puts an old copy of the document back, version and all, puts the version back that was seen: that cannot be told
apart.)

Where an undo finds neither marker nor version, it leaves the document alone. Nothing can be applied there before
somebody looks and gives it a version; that look comes after the transaction has left `pending`, and its proof fails.
So a collection whose validator does not allow the field is never left half applied.

**Its incarnation.** An application may write a participant back as a whole while a transaction is half done, and takes
marker and version with them: whether the change is in what it wrote cannot be known. So the version has two parts,
`{of, at}`: `at` is made anew as above, `of` only where it is missing. The transaction records each `of` when it is
begun. From then on, until it is applied, a participant without its marker whose `of` is missing or another was
replaced, or deleted and made anew: nothing is applied or undone there, a person decides. Nobody gives a version there
but another transaction, and that one gives another `of`. The tutorial's own code records no `of`.

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
from pymongo import UpdateOne
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, WriteError

from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part

Document = dict[str, Any]

UNRECORDED: Any = object()
"""The incarnation of a participant of a transaction that has recorded none."""

_OF = f"{PARTICIPANT_VERSION}.of"
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
        incarnation: what lasts of its version until it is replaced or made anew; None if it has none.
        id: the `_id` that the server found, which may be written otherwise than the one that was asked for; None if
            none was found, or read.
        refusal: why it can have no version; None if it can.
    """

    exists: bool
    marked: bool
    participant_version: Any
    incarnation: Any = None
    id: Any = None
    refusal: str | None = None


class Undone(Enum):
    """How an undo ended."""

    UNDONE = "undone"
    GONE = "gone"
    REPLACED = "replaced"
    REFUSED = "refused"


def look(collection: Collection[Document], part: Part, transaction_id: Any, *, give: bool = True) -> View:
    """
    Read what `apply` will be conditional on.

    Args:
        collection: where the participant is.
        part: the participant.
        transaction_id: whose marker is looked for.
        give: whether it has a version and an incarnation afterwards, if it had none.

    Raises:
        WriteError: the collection's validator does not allow its field.
    """
    view = _seen(collection, part, transaction_id)
    if not give or not view.exists or view.incarnation is not None:
        return view
    # Null counts as missing, here as there.
    as_seen = {"_id": {"$eq": part.id}, PARTICIPANT_VERSION: {"$eq": view.participant_version}}
    collection.update_one(as_seen, {"$set": {PARTICIPANT_VERSION: {"of": ObjectId(), "at": ObjectId()}}})
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


def settle(collection: Collection[Document], parts: Sequence[Part], transaction_id: Any) -> None:
    """
    Remove the markers, and renew the versions, of all participants of one collection.

    Participants without a version come first: one that another transaction gives it meanwhile is then renewed. Versions
    are given and never taken away, so that none is missed.
    """
    updates = [
        UpdateOne(_marked(part, transaction_id, is_versioned), _pull(transaction_id, is_versioned))
        for is_versioned in (False, True)
        for part in parts
    ]
    try:
        collection.bulk_write(updates)
    except BulkWriteError as error:
        failures = (error.details or {}).get("writeErrors") or (error.details or {}).get("writeConcernErrors")
        if not failures:
            raise
        # The whole has a code that says nothing.
        raise WriteError(str(failures[0].get("errmsg")), failures[0].get("code"), failures[0]) from error


def undo(collection: Collection[Document], part: Part, transaction_id: Any, incarnation: Any = UNRECORDED) -> Undone:
    """
    Undo the change where the marker shows that it was applied; renew the version in any case, if there is one.

    Args:
        collection: where the participant is.
        part: the participant.
        transaction_id: whose marker is looked for.
        incarnation: of the participant when the transaction was begun, if that was recorded.
    """
    unmarked: Document = {"_id": {"$eq": part.id}, MARKERS: {"$ne": transaction_id}}
    if incarnation is not UNRECORDED and incarnation is not None:
        unmarked[_OF] = {"$eq": incarnation}
    for _ in range(_UNDO_ROUNDS):
        for is_versioned in (True, False):
            guard = {**_marked(part, transaction_id, is_versioned), "$and": [part.revert_require or {}]}
            if _matches(collection, guard, _merged(part.revert, _pull(transaction_id, is_versioned))):
                return Undone.UNDONE
        if _renew_version(collection, unmarked):
            return Undone.UNDONE
        view = _seen(collection, part, transaction_id)
        if not view.exists:
            return Undone.GONE
        if not view.marked and _OF in unmarked and view.incarnation != incarnation:
            return Undone.REPLACED
    return Undone.REFUSED


def _seen(collection: Collection[Document], part: Part, transaction_id: Any) -> View:
    markers = {"$cond": [{"$isArray": f"${MARKERS}"}, f"${MARKERS}", []]}
    marked = {"$in": [{"$literal": transaction_id}, markers]}  # compared by the server: BSON's equality
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


def _marked(part: Part, transaction_id: Any, is_versioned: bool) -> Document:
    """Return a filter that matches while the marker is there, for a participant with or without a version."""
    return {"_id": {"$eq": part.id}, MARKERS: {"$eq": transaction_id}, _OF: {"$exists": is_versioned}}


def _pull(transaction_id: Any, is_versioned: bool) -> Document:
    renewed = {"$set": {f"{PARTICIPANT_VERSION}.at": ObjectId()}} if is_versioned else {}
    return {"$pull": {MARKERS: {"$in": [transaction_id]}}, **renewed}


def _renew_version(collection: Collection[Document], guard: Document) -> bool:
    """Renew the version of a participant, if it has one; True where the guard matches, with a version or without."""
    # In this order, as in `settle`. No pipeline: MongoDB 4.4 shows one to handlers as a replacement.
    if _OF not in guard and _matches(collection, {**guard, _OF: {"$exists": False}}, {"$unset": {_OF: ""}}):
        return True
    renewed = {"$set": {f"{PARTICIPANT_VERSION}.at": ObjectId()}}
    return _matches(collection, {_OF: {"$exists": True}, **guard}, renewed)


def _matches(collection: Collection[Document], guard: Document, change: Mapping[str, Any]) -> bool:
    return bool(collection.update_one(guard, change).matched_count)


def _merged(change: Mapping[str, Any], ours: Mapping[str, Any]) -> Document:
    merged = {operator: dict(fields) for operator, fields in change.items()}
    for operator, fields in ours.items():
        merged.setdefault(operator, {}).update(fields)
    return merged
