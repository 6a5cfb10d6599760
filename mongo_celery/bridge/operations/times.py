"""Stored moments in the form for JSON and messages."""

from __future__ import annotations

from datetime import UTC, datetime

from bson import Timestamp


def to_time(moment: object) -> datetime | None:
    """Return a stored moment, a `datetime` or a `Timestamp`, in UTC. None for any other value."""
    if isinstance(moment, Timestamp):
        moment = moment.as_datetime()
    if not isinstance(moment, datetime):
        return None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def iso(moment: object) -> str | None:
    """Return a stored moment in ISO 8601, like `to_time`."""
    found = to_time(moment)
    return None if found is None else found.isoformat()
