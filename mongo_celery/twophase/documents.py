"""
What is done to the documents of a transaction, each time one conditional update.

**The fence.** In MongoDB's tutorial the marker in `pendingTransactions` keeps a change from being applied twice,
until it is pulled. A driver that is paused before it applies, is overtaken by recovery and wakes up after the
marker was pulled applies a second time. Remembering settled transactions would close the hole for as long as
they are remembered. Here it is closed for good, in constant space: every document counts in `transactionFence`
how often a transaction was settled or undone in it, and a change is applied in three acts, in this order:

1. look: read the document's fence (majority);
2. prove: a majority write on the transaction that matches only while it is pending and mine;
3. apply: only where the fence is still the one that was seen.

A transaction is settled or undone in a document only after it has left `pending`. If I looked before that, the
fence has moved since and my change matches nothing; if I looked after that, my proof matches nothing. A copy of
the update that the network delivers late is refused for the same reason. For this an undo moves the fence also
where it finds no marker: a driver may be on its way there.

Another transaction that is settled in the same document moves the fence as well. Then the three acts are
repeated, which is harmless.

Source: MongoDB, "Perform Two Phase Commits"; the fence is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bson.int64 import Int64
from pymongo.collection import Collection

from mongo_celery.twophase.participants import FENCE, MARKERS, Part

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """What was seen in a participant: whether it exists, whether it has the marker, and its fence."""

    exists: bool
    marked: bool
    fence: Any


class Undone(Enum):
    """How an undo ended."""

    UNDONE = "undone"
    GONE = "gone"
    REFUSED = "refused"


def look(collection: Collection[Document], part: Part, transaction_id: Any) -> View:
    """Read what `apply` will be conditional on."""
    markers = {"$cond": [{"$isArray": f"${MARKERS}"}, f"${MARKERS}", []]}
    marked = {"$in": [{"$literal": transaction_id}, markers]}  # compared by the server: BSON's equality
    found = collection.find_one({"_id": part.id}, {FENCE: 1, "marked": marked})
    if found is None:
        return View(exists=False, marked=False, fence=None)
    return View(exists=True, marked=bool(found["marked"]), fence=found.get(FENCE))


def apply(collection: Collection[Document], part: Part, transaction_id: Any, fence: Any) -> bool:
    """Apply the change and leave the marker; False where the fence has moved, the rule fails, or it was done."""
    guard = {"_id": part.id, MARKERS: {"$ne": transaction_id}, FENCE: fence, "$and": [part.require or {}]}
    change = _merged(part.apply, {"$push": {MARKERS: transaction_id}})
    return bool(collection.update_one(guard, change).matched_count)


def settle(collection: Collection[Document], part: Part, transaction_id: Any) -> bool:
    """Take the marker away, and move the fence; False where there is none any more."""
    return bool(collection.update_one({"_id": part.id, MARKERS: transaction_id}, _pull(transaction_id)).matched_count)


def undo(collection: Collection[Document], part: Part, transaction_id: Any) -> Undone:
    """Undo the change where the marker shows that it was applied; move the fence in any case."""
    marked = {"_id": part.id, MARKERS: transaction_id}
    guard = {**marked, "$and": [part.revert_require or {}]}
    if collection.update_one(guard, _merged(part.revert, _pull(transaction_id))).matched_count:
        return Undone.UNDONE
    unmarked = {"_id": part.id, MARKERS: {"$ne": transaction_id}}
    if collection.update_one(unmarked, {"$inc": {FENCE: Int64(1)}}).matched_count:
        return Undone.UNDONE
    return Undone.REFUSED if collection.find_one({"_id": part.id}, {"_id": 1}) else Undone.GONE


def _pull(transaction_id: Any) -> Document:
    return {"$pull": {MARKERS: {"$in": [transaction_id]}}, "$inc": {FENCE: Int64(1)}}


def _merged(change: Mapping[str, Any], ours: Mapping[str, Any]) -> Document:
    merged = {operator: dict(fields) for operator, fields in change.items()}
    for operator, fields in ours.items():
        merged.setdefault(operator, {}).update(fields)
    return merged
