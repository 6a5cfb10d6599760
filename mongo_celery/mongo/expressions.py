"""Expressions that the state's updates share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bson.int64 import Int64

SHIFT = 1 << 20
"""Terms and fencing tokens count in units of 2^-20 of a second of cluster time."""

CLUSTER_SECONDS: dict[str, Any] = {
    "$toLong": {"$floor": {"$divide": [{"$toLong": {"$toDate": {"$dateToString": {"date": "$$CLUSTER_TIME"}}}}, 1000]}},
}


def next_number(field: str) -> dict[str, Any]:
    """
    The next term or fencing token of a field: max(old + 1, cluster time in seconds x 2^20).

    Taken from the cluster's logical clock, which never goes back, so that a state database that was
    dropped or restored never counts below what targets have already seen.
    """
    return {
        "$max": [
            {"$add": [{"$ifNull": [f"${field}", Int64(0)]}, Int64(1)]},
            {"$multiply": [CLUSTER_SECONDS, Int64(SHIFT)]},
        ],
    }


def after(seconds: float) -> dict[str, Any]:
    """The server's time, so many seconds from now."""
    return {"$add": ["$$NOW", millis(seconds)]}


LONGEST_SECONDS = 100 * 365 * 86_400.0
"""No time that is stored lies further ahead: a date beyond the year 9999 is one that many cannot read."""


def remaining(field: str) -> dict[str, Any]:
    """Milliseconds until a stored time, by the server's clock, negative when it is over; null without a time."""
    longest = millis(LONGEST_SECONDS)
    left = {"$subtract": [f"${field}", "$$NOW"]}
    # Compared before it is subtracted: the server refuses a difference beyond 64 bits.
    return {"$cond": [{"$gt": [f"${field}", {"$add": ["$$NOW", longest]}]}, longest, left]}


def millis(seconds: float) -> Int64:
    """Whole milliseconds of a duration, bounded by `LONGEST_SECONDS`."""
    return Int64(round(min(seconds, LONGEST_SECONDS) * 1000))


REMOVED = "$$REMOVE"
"""The value of a field that a pipeline removes."""


def whole(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document that takes the place of the stored one; in `$set` it would be merged into that."""
    return {"$mergeObjects": [fields]}


def literal(value: object) -> dict[str, Any]:
    """A value that is not read as an expression."""
    return {"$literal": value}


def insert_if_absent(document: object) -> list[dict[str, Any]]:
    """Return the update of an upsert by `_id` alone: a new document becomes this expression, an existing one stays."""
    is_new = {"$eq": [{"$size": {"$objectToArray": "$$ROOT"}}, 1]}  # it has nothing but its _id
    return [{"$replaceWith": {"$cond": [is_new, document, "$$ROOT"]}}]
