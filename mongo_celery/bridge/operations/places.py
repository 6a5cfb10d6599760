"""
Places in the stream as people write them: a time, a resume token, the oldest entry, now.

A place is a cluster time within the oplog, before all changes of that time. Only the time in a token is used, because
tokens of another stream or cluster look the same.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bson import Timestamp

from mongo_celery.bridge.operations.times import iso
from mongo_celery.command_line import ANY_APP
from mongo_celery.errors import AccessError, CommandRefusedError, DeploymentError
from mongo_celery.mongo.oplog import operation_time, read_oplog, time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

OLDEST, NOW = "oldest", "now"
_LATEST = 2**32 - 1
_HEX = re.compile(r"[0-9A-Fa-f]{18}[0-9A-Fa-f~]*")  # the tilde is for snapshot rows
_SHOWN_CHARS = 36
_FORMS = "Use a time such as '2030-12-31T12:00:00' (UTC if it has no offset), a resume token, 'oldest' or 'now'"


def find_place(wiring: Wiring, text: str) -> Timestamp:
    """
    Return the cluster time of a text's place.

    Raises:
        CommandRefusedError: the text is not a place, or the stream cannot be read from there.
        AccessError: there is no right to read the oplog.
    """
    time = None if text in (OLDEST, NOW) else _parse_token(text) if _HEX.fullmatch(text) else _parse_time(text)
    now = operation_time(wiring.client)
    return Timestamp(now.time, now.inc + 1) if text == NOW else _limit_time(wiring, text, time, now)


def _limit_time(wiring: Wiring, text: str, time: Timestamp | None, now: Timestamp) -> Timestamp:
    """Return a time within the oplog. None means its oldest entry."""
    try:
        first = read_oplog(wiring.client).first
    except AccessError as error:
        raise AccessError(
            "The MongoDB user may not read how far the oplog reaches back. Grant it the action serverStatus on the "
            f"cluster, or the role that this command prints: {ANY_APP.changes('grants')}",
        ) from error
    except DeploymentError:  # a mongos has no oplog
        if time is None:
            raise CommandRefusedError(
                "'oldest' cannot be used, because this server has no readable oplog, like every mongos. Use a time."
            ) from None
        first = time
    if time is None:
        return first
    if time > now:
        raise CommandRefusedError(
            f"{_short(text)} is in the future: the cluster's time is {iso(now)}. Use an earlier time, or 'now'.",
        )
    if time.time < first.time:
        raise CommandRefusedError(
            f"{_short(text)} is before the oldest entry of the oplog, {iso(first)}. Earlier changes cannot be read "
            "again. Use a later time, or 'oldest'.",
        )
    return max(time, first)  # of that second nothing lies before it


def _parse_time(text: str) -> Timestamp:
    """Return the first cluster time of a second in ISO 8601. A time without an offset is in UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise CommandRefusedError(f"{_short(text)} is neither a time nor a resume token. {_FORMS}.") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    try:
        seconds = int(moment.timestamp())
    except (OverflowError, ValueError):
        seconds = -1
    if not 0 < seconds <= _LATEST:
        raise CommandRefusedError(f"{_short(text)} is a time that no change can have. {_FORMS}.")
    return Timestamp(seconds, 0)


def _parse_token(text: str) -> Timestamp:
    """Return the cluster time of a token's `_data`."""
    time = time_of_token({"_data": text}, None)
    if time is None or time.time == 0:
        raise CommandRefusedError(f"{_short(text)} is not the resume token of a change. {_FORMS}.")
    return time


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
