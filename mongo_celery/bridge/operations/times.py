"""Moments as JSON and messages have them."""

from __future__ import annotations

from datetime import UTC, datetime

from bson import Timestamp


def iso(moment: object) -> str | None:
    """Return a moment in UTC, a `datetime` or a `Timestamp`, in ISO 8601; None for anything else that is stored."""
    if isinstance(moment, Timestamp):
        moment = moment.as_datetime()
    if not isinstance(moment, datetime):
        return None
    return (moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
