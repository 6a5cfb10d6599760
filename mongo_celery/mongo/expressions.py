"""Expressions for updates of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bson.int64 import Int64

SHIFT = 1 << 20
"""Terms and fencing tokens count in units of 2^-20 seconds of cluster time."""

CLUSTER_SECONDS: dict[str, Any] = {
    "$toLong": {"$floor": {"$divide": [{"$toLong": {"$toDate": {"$dateToString": {"date": "$$CLUSTER_TIME"}}}}, 1000]}},
}


def next_number(field: str) -> dict[str, Any]:
    """
    Return a field's next term or fencing token: max(old + 1, cluster time in seconds x 2^20).

    It uses the cluster's logical clock, which never goes back. So a dropped or restored state database never counts
    below the numbers that targets have already seen.
    """
    return {
        "$max": [
            {"$add": [{"$ifNull": [f"${field}", Int64(0)]}, Int64(1)]},
            {"$multiply": [CLUSTER_SECONDS, Int64(SHIFT)]},
        ],
    }


def after(seconds: float) -> dict[str, Any]:
    """Return the server's time plus these seconds."""
    return {"$add": ["$$NOW", millis(seconds)]}


LONGEST_SECONDS = 100 * 365 * 86_400.0
"""The longest stored time ahead: many programs cannot read a date beyond the year 9999."""


def remaining(field: str) -> dict[str, Any]:
    """Return the milliseconds until a stored time, by the server's clock. Negative after it, null without one."""
    longest = millis(LONGEST_SECONDS)
    left = {"$subtract": [f"${field}", "$$NOW"]}
    # Compare before subtracting: the server refuses a difference beyond 64 bits.
    return {"$cond": [{"$gt": [f"${field}", {"$add": ["$$NOW", longest]}]}, longest, left]}


def millis(seconds: float) -> Int64:
    """Return a duration in whole milliseconds, at most `LONGEST_SECONDS`."""
    return Int64(round(min(seconds, LONGEST_SECONDS) * 1000))


REMOVED = "$$REMOVE"
"""The value of a field that a pipeline removes."""


def whole(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an expression that replaces the stored document. `$set` would merge into it."""
    return {"$mergeObjects": [fields]}


def literal(value: object) -> dict[str, Any]:
    """Return a value that the server does not read as an expression."""
    return {"$literal": value}


def insert_if_absent(document: object) -> list[dict[str, Any]]:
    """Return the update of an upsert by `_id`: a new document gets this content, an existing one does not change."""
    is_new = {"$eq": [{"$size": {"$objectToArray": "$$ROOT"}}, 1]}  # it has only its _id
    return [{"$replaceWith": {"$cond": [is_new, document, "$$ROOT"]}}]
