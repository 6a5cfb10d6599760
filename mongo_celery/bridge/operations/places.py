"""
Places in the stream as people name them: a time, a resume token, the oldest entry, now.

A place that is taken is one that the stream can be read from. A time must lie within the oplog. A token must be one of
this bridge's stream, which is looked up there: tokens of all streams of all clusters compare with each other, so one of
another would be taken for some place, and nobody would notice. What has a token's form without being that of a change
means the time in it, as long as it is as the server, or a rewind, writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.bridge.existing import is_existing, opens_stream
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.stream.cursor import Position, open_cursor, post_batch_token
from mongo_celery.bridge.stream.isolator import WITHOUT_OVERSIZED
from mongo_celery.command_line import ANY_APP
from mongo_celery.errors import AccessError, CommandRefusedError, DeploymentError
from mongo_celery.mongo.oplog import Oplog, earliest_token, operation_time, read_oplog, time_of_token
from mongo_celery.mongo.verdicts import Concern, Verdict, explain_error, judge_error

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument

    from mongo_celery.bridge.stream.source import Scope
    from mongo_celery.bridge.wiring import Wiring

OLDEST, NOW = "oldest", "now"
_TIME_CHARS = 18  # of a token: its type, and seconds and increment of its cluster time
LOOKED_UP_SECONDS = 60.0
"""For how long a stream is read to find one place."""

_SOCKET_SECONDS = 30.0
_LATEST = 2**32 - 1
_HEX = re.compile(r"[0-9A-Fa-f]{18,}(~[0-9A-Fa-f]*)?")  # with the tilde that of an existing document
_FORMS = "give a time (ISO 8601, UTC without an offset), a resume token, 'oldest' or 'now'"


@dataclass(frozen=True, slots=True)
class Asked:
    """
    A place as it was asked for: a word, a time, or a token; the others are None.

    Attributes:
        text: as it was given.
    """

    text: str
    word: str | None = None
    time: Timestamp | None = None
    token: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """
    A place in the stream.

    Attributes:
        token: behind which changes lie; it compares with tokens, and may open no stream.
        time: its cluster time.
    """

    token: Mapping[str, Any]
    time: Timestamp

    @property
    def iso(self) -> str:
        """For people."""
        return str(iso(self.time))


def parse_place(text: str) -> Asked:
    """
    What a text means. Asks nobody.

    Raises:
        CommandRefusedError: it is none of the forms.
    """
    if text in (OLDEST, NOW):
        return Asked(text, word=text)
    if _HEX.fullmatch(text):
        return _token(text, {"_data": text.upper()})
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        data = found.get("_data") if isinstance(found, dict) else None
        if isinstance(data, str) and _HEX.fullmatch(data.strip()):
            return _token(text, {"_data": data.strip().upper()})
        raise CommandRefusedError(f"{_short(text)} is no resume token: it has no hexadecimal `_data`; {_FORMS}.")
    return Asked(text, time=parse_time(text))


def parse_time(text: str) -> Timestamp:
    """
    The first cluster time of the second that a text names, in ISO 8601; without an offset it is UTC.

    Raises:
        CommandRefusedError: it is no time, or none that a server can have.
    """
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


def _token(text: str, token: Mapping[str, Any]) -> Asked:
    time = time_of_token(token, None)
    if time is None or time.time == 0:
        raise CommandRefusedError(f"{_short(text)} is no resume token of a change stream: {_FORMS}.")
    if not opens_stream(token["_data"]):
        moment = datetime.fromtimestamp(time.time, UTC).isoformat()
        what = "an existing document" if is_existing(token["_data"]) else "a change that was too large to be read"
        raise CommandRefusedError(f"{_short(text)} is the place of {what}. No stream opens there: give {moment}.")
    return Asked(text, time=time, token=token)


def _short(text: str) -> str:
    shown = text if len(text) <= 2 * _TIME_CHARS else f"{text[: 2 * _TIME_CHARS]}..."
    return repr(shown)


@dataclass(frozen=True, slots=True)
class Reach:
    """
    Where a stream can be read at this moment.

    Attributes:
        oplog: how far it reaches back; None behind a mongos, where nobody can see it.
        now: the cluster's time.
    """

    oplog: Oplog | None
    now: Timestamp

    @classmethod
    def of(cls, client: MongoClient[dict[str, Any]]) -> Reach:
        """
        As it is now.

        Raises:
            AccessError: the oplog may not be read.
        """
        try:
            oplog = read_oplog(client)
        except AccessError as error:
            raise AccessError(
                "The MongoDB user may not see how far the oplog reaches back: grant the action serverStatus on the "
                f"cluster, as the role that `{ANY_APP.changes('grants')}` prints has it.",
            ) from error
        except DeploymentError:
            oplog = None
        return cls(oplog, operation_time(client))

    def at(self, asked: Asked, option: str) -> Timestamp:
        """
        The cluster time of a place, which the stream can be read from.

        Args:
            option: as which it was given, for the sentence.

        Raises:
            CommandRefusedError: it cannot be read from there.
        """
        if asked.word == NOW:
            return Timestamp(self.now.time, self.now.inc + 1)
        if asked.word == OLDEST:
            if self.oplog is None:
                raise CommandRefusedError(
                    f"{option} oldest: there is no oplog to look at here (a mongos has none); give a time.",
                )
            return self.oplog.first
        assert asked.time is not None, "what is no word has a time"
        if asked.time > self.now:
            raise CommandRefusedError(
                f"{option} {_short(asked.text)} lies in the future, since the cluster's time is {iso(self.now)}"
                + (": the token is from another cluster." if asked.token else "; `now` is the latest place."),
            )
        if self.oplog is None or asked.time >= self.oplog.first:
            return asked.time
        if asked.time.time == self.oplog.first.time:  # of that second nothing lies before it
            return self.oplog.first
        raise CommandRefusedError(
            f"{option} {_short(asked.text)} lies before the oldest entry of the oplog, which is of "
            f"{iso(self.oplog.first)}: nothing before that can be read again. `oldest` is the farthest place.",
        )


def place_of(wiring: Wiring, asked: Asked, reach: Reach, option: str) -> StreamPlace:
    """
    The place that was asked for.

    Raises:
        CommandRefusedError: the stream cannot be read from there, or has no such token.
        AccessError: the token cannot be looked up, since the user may not read the stream.
    """
    time = reach.at(asked, option)
    if asked.token is None:
        return StreamPlace(earliest_token(time), time)
    data = str(asked.token["_data"])
    if len(data) == _TIME_CHARS:  # as a rewind writes a time
        return StreamPlace(asked.token, time)
    if not _is_in_stream(wiring, data, time):
        raise CommandRefusedError(
            f"{option} {_short(asked.text)} is no token of the stream of bridge {wiring.name}: it is from another "
            f"stream or cluster, or of a collection that no handler watches any more. Its time can be given: "
            f"{option} {iso(time)}.",
        )
    return StreamPlace(asked.token, time)


def _is_in_stream(wiring: Wiring, data: str, time: Timestamp) -> bool:
    """Whether the stream of a bridge has a change with this token, or the server would give it for this time."""
    _, scope = wiring.stream()
    # What is looked up and matched is of no interest: a change is one all the same.
    bare = replace(scope, options={}, flags={})
    with closing(read_from(wiring, bare, time)) as items:
        for item in items:
            found = str(item["_id"]["_data"])
            if found == data or (isinstance(item, PassedPlace) and found[_TIME_CHARS:] == data[_TIME_CHARS:]):
                return True
            if found > data:
                break
    return False


class PassedPlace(dict[str, Any]):
    """A place that a stream has passed without a change."""


def read_from(
    wiring: Wiring, scope: Scope, time: Timestamp, *, seconds: float = LOOKED_UP_SECONDS
) -> Generator[Mapping[str, Any], None, None]:
    """
    Read a stream from a cluster time on: where it begins, its events as they come, the place that it has passed where
    none comes. To be closed by who does not read it to its end.

    Args:
        seconds: for how long it may be read in all.

    Raises:
        CommandRefusedError: the server has lost the place, or the time was over.
        AccessError: the stream may not be read.
        PyMongoError: anything else that the server or the driver says.
    """
    until = monotonic() + seconds
    client = wiring.stream_client(_SOCKET_SECONDS)
    try:
        fitting = scope.add_stage(WITHOUT_OVERSIZED)
        with open_cursor(client, fitting, Position(None, time)) as cursor:
            for item in _items(cursor):
                yield item
                if monotonic() > until:
                    raise CommandRefusedError(
                        f"The stream could not be read within {seconds:.0f} s: narrow what is asked for, or repeat the "
                        "command when the server has less to do.",
                    )
    except PyMongoError as error:
        if judge_error(error) is Verdict.HISTORY_LOST:
            raise CommandRefusedError(
                f"The oplog no longer holds {iso(time)}, so nothing can be read from there. `oldest` is the farthest "
                "place.",
            ) from error
        concern = Concern("the change stream of this bridge", "changeStream and find on what its handlers watch")
        known = explain_error(error, concern)
        if known is not None:
            raise known from error
        raise
    finally:
        client.close()


def _items(cursor: Any) -> Iterator[Mapping[str, Any]]:
    """Where it begins first: so it is known what a place without a change looks like on this server."""
    document: RawBSONDocument | None = None
    while cursor.alive:
        token = post_batch_token(cursor) if document is None else None
        if token is not None:
            yield PassedPlace(_id=dict(token))
        document = cursor.try_next()
        if document is not None:
            yield document
