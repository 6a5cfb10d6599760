"""
Places in the stream as people name them: a time, a resume token, the oldest entry, now.

A place that is taken is one that the stream can be read from. A time must lie within the oplog. A token must be one of
this bridge's stream, which is looked up there: tokens of all streams of all clusters compare with each other, so one of
another would be taken for some place, and nobody would notice. A token that has the form without being that of a change
means the time in it, as long as it is as the server, or a reset, writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.bridge.existing import is_existing, opens_stream
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.stream.cursor import Position, open_cursor, post_batch_token
from mongo_celery.bridge.stream.isolator import WITHOUT_OVERSIZED
from mongo_celery.command_line import ANY_APP
from mongo_celery.errors import AccessError, CommandRefusedError, DeploymentError
from mongo_celery.mongo.oplog import earliest_token, operation_time, read_oplog, time_of_token
from mongo_celery.mongo.verdicts import ErrorContext, Verdict, explain_error, judge_error

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

OLDEST, NOW = "oldest", "now"
_TIME_CHARS = 18  # of a token: its type, and seconds and increment of its cluster time
_LOOKUP_SECONDS = 60.0
_SOCKET_SECONDS = 30.0
_LATEST = 2**32 - 1
_HEX = re.compile(r"[0-9A-Fa-f]{18,}(~[0-9A-Fa-f]*)?")  # with the tilde that of a snapshot row
_FORMS = "give a time (ISO 8601, UTC without an offset), a resume token, 'oldest' or 'now'"


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """
    A place in the stream.

    Attributes:
        token: changes after it are read. It compares with tokens, and may open no stream.
        time: its cluster time.
    """

    token: Mapping[str, Any]
    time: Timestamp

    @property
    def iso(self) -> str:
        """For people."""
        return str(iso(self.time))


def find_place(wiring: Wiring, text: str) -> StreamPlace:
    """
    Return the place that a text names.

    Raises:
        CommandRefusedError: the text names no place, or the stream cannot be read from there.
        AccessError: the oplog or the stream may not be read.
    """
    token = _parse_token(text)
    time = None if text in (OLDEST, NOW) else _parse_time(text) if token is None else time_of_token(token, None)
    now = operation_time(wiring.client)
    if text == NOW:
        time = Timestamp(now.time, now.inc + 1)
        return StreamPlace(earliest_token(time), time)
    time = _limit_time(wiring, text, time, now, is_token=token is not None)
    if token is None:
        return StreamPlace(earliest_token(time), time)
    data = str(token["_data"])
    if len(data) == _TIME_CHARS or _is_in_stream(wiring, data, time):  # a reset writes a time so
        return StreamPlace(token, time)
    raise CommandRefusedError(
        f"{_short(text)} is no token of the stream of bridge {wiring.name}: it is from another stream or cluster, or "
        f"of a collection that no handler watches any more. Its time can be given: --to {iso(time)}.",
    )


def _limit_time(wiring: Wiring, text: str, time: Timestamp | None, now: Timestamp, *, is_token: bool) -> Timestamp:
    """Return a time within the oplog; None stands for its oldest entry."""
    try:
        first = read_oplog(wiring.client).first
    except AccessError as error:
        raise AccessError(
            "The MongoDB user may not see how far the oplog reaches back: grant the action serverStatus on the "
            f"cluster, as the role that `{ANY_APP.changes('grants')}` prints has it.",
        ) from error
    except DeploymentError:  # a mongos has none
        if time is None:
            raise CommandRefusedError(
                "oldest: there is no oplog to look at here (a mongos has none); give a time."
            ) from None
        first = time
    if time is None:
        return first
    if time > now:
        raise CommandRefusedError(
            f"{_short(text)} lies in the future, since the cluster's time is {iso(now)}"
            + (": the token is from another cluster." if is_token else "; `now` is the latest place."),
        )
    if time.time < first.time:
        raise CommandRefusedError(
            f"{_short(text)} lies before the oldest entry of the oplog, which is of {iso(first)}: nothing before that "
            "can be read again. `oldest` is the farthest place.",
        )
    return max(time, first)  # of that second nothing lies before it


def _parse_time(text: str) -> Timestamp:
    """Return the first cluster time of the second that a text names, in ISO 8601; without an offset it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise CommandRefusedError(f"{_short(text)} is no place in a stream: {_FORMS}.") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    try:
        seconds = int(moment.timestamp())
    except (OverflowError, ValueError):
        seconds = -1
    if not 0 < seconds <= _LATEST:
        raise CommandRefusedError(f"{_short(text)} is a time that no change can have: {_FORMS}.")
    return Timestamp(seconds, 0)


def _parse_token(text: str) -> Mapping[str, Any] | None:
    """Return the token that a text is, as JSON or its `_data` alone; None for any other text."""
    data: Any = text
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)["_data"].strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            data = ""
        if not _HEX.fullmatch(data):
            raise CommandRefusedError(f"{_short(text)} is no resume token: it has no hexadecimal `_data`; {_FORMS}.")
    if not _HEX.fullmatch(data):
        return None
    token = {"_data": data.upper()}
    time = time_of_token(token, None)
    if time is None or time.time == 0:
        raise CommandRefusedError(f"{_short(text)} is no resume token of a change stream: {_FORMS}.")
    if not opens_stream(token["_data"]):
        moment = datetime.fromtimestamp(time.time, UTC).isoformat()
        what = "a snapshot row" if is_existing(token["_data"]) else "a change that was too large to be read"
        raise CommandRefusedError(f"{_short(text)} is the place of {what}. No stream opens there: give {moment}.")
    return token


def _short(text: str) -> str:
    shown = text if len(text) <= 2 * _TIME_CHARS else f"{text[: 2 * _TIME_CHARS]}..."
    return repr(shown)


def _is_in_stream(wiring: Wiring, data: str, time: Timestamp) -> bool:
    """Return True if the stream of a bridge has a change with this token, or the server gives it for this time."""
    _, scope = wiring.stream()
    # What is looked up and matched is of no interest: a change is one all the same.
    bare = replace(scope, options={}, flags={}).add_stage(WITHOUT_OVERSIZED)
    until = monotonic() + _LOOKUP_SECONDS
    client = wiring.stream_client(_SOCKET_SECONDS)
    try:
        with open_cursor(client, bare, Position(None, time)) as cursor:
            event = None
            while cursor.alive:
                # Where it begins first: so it is known what a place without a change looks like on this server.
                passed = (post_batch_token(cursor) or {}).get("_data", "") if event is None else ""
                event = cursor.try_next()
                found = passed if event is None else str(event["_id"]["_data"])
                if data == found or (passed and passed[_TIME_CHARS:] == data[_TIME_CHARS:]):
                    return True
                if found > data:
                    return False
                if monotonic() > until:
                    raise CommandRefusedError(
                        f"The stream could not be read within {_LOOKUP_SECONDS:.0f} s: give a later token, or repeat "
                        "the command when the server has less to do.",
                    )
        return False
    except PyMongoError as error:
        if judge_error(error) is Verdict.HISTORY_LOST:
            raise CommandRefusedError(
                f"The oplog no longer holds {iso(time)}, so nothing can be read from there. "
                "`oldest` is the farthest place.",
            ) from error
        concern = ErrorContext("the change stream of this bridge", "changeStream and find on what its handlers watch")
        known = explain_error(error, concern)
        if known is not None:
            raise known from error
        raise
    finally:
        client.close()
