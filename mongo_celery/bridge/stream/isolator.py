"""
The isolator: it reads events one by one, and one that the server cannot give as it was asked for with less.

Such an event is asked for alone, by one narrower stream after the other, until the server can give it. So nobody has to
guess from an error, and no other event is read with less.

| tried in this order | if | read error |
|---|---|---|
| without the flags of those `match` that fail on it | the event comes without any flag | of these handlers alone |
| whole, in fragments (MongoDB 6.0.9, 7.0 and later) | it is too large | none |
| judged whole, sent without pre-image, and without look-up | it is too large | of all handlers that it may concern |
| judged whole, sent without its documents | it is too large | the same |
| without look-up, images and flags | | the same |
| by our own filters alone, without its documents | | the same |

An event whose token is too large comes as a stand-in (`oversized`). The stream leaves such events out, and so reaches
the place of the next event, or of its end, which is after them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import bson
import pymongo
from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from mongo_celery.bridge.change import read_namespace, token_data
from mongo_celery.bridge.existing import unread_place
from mongo_celery.bridge.stream.cursor import (
    AWAIT_SECONDS,
    Position,
    limit_batch,
    open_cursor,
    post_batch_token,
    set_await,
    token_of,
)
from mongo_celery.bridge.stream.items import ReadError
from mongo_celery.bridge.stream.reactions import Reaction, classify_error, closes_connection, concerns_an_event
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.verdicts import Code, Verdict, brief, judge_error, quote

if TYPE_CHECKING:
    from pymongo.command_cursor import CommandCursor

    from mongo_celery.bridge.stream.source import Scope

ClientFactory = Callable[[float], MongoClient[RawBSONDocument]]

OpenStream = Callable[["Scope", Position, int], "CommandCursor[RawBSONDocument]"]
"""Opens a scope at a position; the number is that of the events in its first batch."""

Token = Mapping[str, Any]

_FRAGMENT = "splitEvent"
_IN_FRAGMENTS: Mapping[str, Any] = {"$changeStreamSplitLargeEvent": {}}
_IMAGES = ["fullDocument", "fullDocumentBeforeChange"]
_WITHOUT_IMAGES = {"$unset": _IMAGES}
_WITHOUT_PRE_IMAGE = {"$unset": "fullDocumentBeforeChange"}
_WITHOUT_DOCUMENTS = {"$unset": [*_IMAGES, "updateDescription"]}
_NAMES_MAX = 5
_REFUSAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reread:
    """
    An event that was read alone.

    Attributes:
        document: as much as the server could give.
        error: why that is not what was asked for. None if it is.
    """

    document: RawBSONDocument
    error: ReadError | None = None


class EventIsolator:
    """
    Reads the events of a stream one by one.

    Args:
        scope: the whole stream.
        open_stream: opens a stream.
        ping: asks the server anything. Raises if it does not answer.
    """

    def __init__(self, scope: Scope, open_stream: OpenStream, ping: Callable[[], object]) -> None:
        self._scope = scope
        self._open = open_stream
        self._ping = ping

    def read_events(self, start: Position, last_stand_in: str = "") -> Iterator[Reread | Token]:
        """
        Read the next events that the filters let through, with as much as the server can give of each.

        The place at the end comes as its token. The iterator ends when there are no more events for now, and after
        events that are too large to be read.

        Args:
            last_stand_in: comparable part of the token of the last stand-in that was read. Empty for none.

        Raises:
            PyMongoError: these cannot be read either. Then no single event is the reason.
        """
        last, time_ = token_data(start.token) if start.token is not None else "", start.time
        follows_stand_in, last = last_stand_in > last, max(last_stand_in, last)
        with closing(self._open(self._bare(WITHOUT_OVERSIZED, _WITHOUT_DOCUMENTS), start, 1)) as cursor:
            limit_batch(cursor, 1)
            while cursor.alive:
                candidate = cursor.try_next()
                token = token_of(candidate) if candidate is not None else post_batch_token(cursor)
                if token is None:
                    return
                while stand_in := self._find_oversized(Position(None, time_), last, token):
                    follows_stand_in, last, time_ = True, token_data(stand_in["_id"]), stand_in["clusterTime"]
                    yield Reread(stand_in, ReadError(explain_oversized(stand_in)))
                yield token if candidate is None else self._read(candidate)
                if follows_stand_in and token_data(token) <= last:
                    set_await(cursor, AWAIT_SECONDS)  # the oplog ends with a stand-in, at which no stream opens
                elif follows_stand_in or candidate is None:
                    return
                else:
                    last, time_ = token_data(token), candidate["clusterTime"]

    def _bare(self, *stages: Mapping[str, Any]) -> Scope:
        """Return the scope with our own filters and some stages, without images."""
        return replace(self._scope.without_images, selection=(*self._scope.selection, *stages), flags={}, last=())

    def _find_oversized(self, start: Position, after: str, until: Token) -> RawBSONDocument | None:
        """Return the stand-in of the next event between two places that is too large. None if there is none."""
        try:
            with closing(self._open(self._bare(*naming_stages(after, token_data(until))), start, 1)) as cursor:
                cursor.try_next()
        except OperationFailure as error:
            return find_oversized(error)
        return None

    def _read(self, candidate: RawBSONDocument) -> Reread | Token:
        """
        Return the event with as much as the server can give, or its token if it is gone by now.

        Raises:
            PyMongoError: the event is not the reason.
        """
        try:
            whole = self._read_alone(candidate, self._scope)
            return token_of(candidate) if whole is None else Reread(whole)
        except PyMongoError as error:
            if not concerns_an_event(error):
                raise
            return self._read_with_less(candidate, error)

    def _read_with_less(self, candidate: RawBSONDocument, error: PyMongoError) -> Reread:
        scope = self._scope
        explained: ReadError | None = _explain(error)
        steps: list[tuple[Scope, ReadError | None]] = []
        if scope.flags and self._try(candidate, scope.with_flags(())) is not None:
            failed = self._find_failed(candidate, sorted(scope.flags))  # none if a look-up finds something else by now
            steps.append((scope.with_flags(scope.flags.keys() - failed), _explain_match(error, failed)))
        if judge_error(error) is Verdict.TOO_LARGE:
            whole = self._read_fragments(candidate)
            if whole is not None:
                return Reread(whole)
            # Flags are computed before these stages. So no handler is concerned whose `match` rules the event out.
            is_update = candidate.get("operationType") == "update"  # of all others `fullDocument` is their own
            fewer = _WITHOUT_IMAGES if is_update else _WITHOUT_PRE_IMAGE
            steps += [(scope.add_stage(stage), explained) for stage in (fewer, _WITHOUT_DOCUMENTS)]
        steps.append((scope.without_images.with_flags(()), explained))
        for narrower, read_error in steps:
            document = self._try(candidate, narrower)
            if document is not None:
                return Reread(document, read_error)
        return Reread(candidate, explained)

    def _find_failed(self, candidate: RawBSONDocument, names: Sequence[str]) -> set[str]:
        """Return the handlers whose `match` fails on the event. Halves are tried, so that one of many costs little."""
        if self._try(candidate, self._scope.with_flags(names)) is not None:
            return set()
        if len(names) == 1:
            return set(names)
        half = len(names) // 2
        return self._find_failed(candidate, names[:half]) | self._find_failed(candidate, names[half:])

    def _read_fragments(self, candidate: RawBSONDocument) -> RawBSONDocument | None:
        """
        Read an event that is too large for one answer. None if the server cannot split it.

        Tokens of a stream that splits are others. So the event is found by its time and its document, which only
        changes of one transaction share: these are not read in fragments.
        """
        if "txnNumber" in candidate:
            return None
        pin = {
            "$match": {name: {"$eq": candidate.get(name)} for name in ("clusterTime", "operationType", "documentKey")}
        }
        scope = self._scope.add_stage(_IN_FRAGMENTS)
        start = Position(None, candidate["clusterTime"])
        try:
            with closing(self._open(replace(scope, selection=(pin, *scope.selection)), start, 1)) as cursor:
                return join_fragments(iter(cursor.try_next, None), token_of(candidate))
        except PyMongoError as error:  # among them: a server that does not know the stage
            if not concerns_an_event(error):
                raise
            return None

    def _try(self, candidate: RawBSONDocument, scope: Scope) -> RawBSONDocument | None:
        """Read this event alone. None if that fails because of the event."""
        try:
            return self._read_alone(candidate, scope)
        except PyMongoError as error:
            if not concerns_an_event(error):
                raise
            return None

    def _read_alone(self, candidate: RawBSONDocument, scope: Scope) -> RawBSONDocument | None:
        """
        Read this event alone. None if it is gone by now.

        A server closes the connection if the event fits into an answer and its token does not. If it is asked for a
        second event, which does not come, it reads to the end of the oplog, and the token there is short.
        """
        pin: Mapping[str, Any] = {"$match": {"_id._data": token_data(token_of(candidate))}}
        alone, start = replace(scope, selection=(pin, *scope.selection)), Position(None, candidate["clusterTime"])
        closed: AutoReconnect | None = None
        for count in (1, 2, 2):
            try:
                with closing(self._open(alone, start, count)) as cursor:
                    document = cursor.try_next()
                if document is not None:
                    token_of(document)
                return document
            except AutoReconnect as error:
                if not closes_connection(error):
                    raise
                self._ping()  # raises if the network is the reason
                closed = error
        raise OperationFailure(
            "the server closes the connection instead of answering", Code.BSONObjectTooLarge
        ) from closed


def join_fragments(fragments: Iterable[RawBSONDocument], token: Token) -> RawBSONDocument | None:
    """
    Return the whole event, under the token that it has in a stream that does not split. None if a fragment is missing.

    A server has cut it. Each fragment has some of the event's top-level fields, whole, and says in `splitEvent` which
    one of how many it is. No more fragments are read than belong to the event. The event may be larger than 16 MB, and
    no server takes it back.
    """
    whole: dict[str, Any] = {"_id": dict(token)}
    for expected, fragment in enumerate(fragments, start=1):
        position = fragment.get(_FRAGMENT)
        if position is None or position["fragment"] != expected:
            return None
        whole.update((name, value) for name, value in fragment.items() if name not in {"_id", _FRAGMENT})
        if position["of"] == expected:
            return RawBSONDocument(bson.encode(whole))
    return None


def find_refused_matches(make_client: ClientFactory, scope: Scope) -> dict[str, str]:
    """
    Open the stream with each `match` alone, if the server refuses it with all of them, whatever the change.

    Args:
        make_client: makes a client for the stream, with a socket timeout in seconds.

    Returns:
        What the server said, by handler. Empty where the stream can be opened, or fails for another reason.
    """
    if not scope.flags:
        return {}
    bare = replace(scope, selection=(), options={})
    with make_client(_REFUSAL_SECONDS) as client, pymongo.timeout(_REFUSAL_SECONDS):
        if _find_refusal(client, bare) is None:
            return {}
        refusals = {name: _find_refusal(client, bare.with_flags([name])) for name in scope.flags}
        return {name: refusal for name, refusal in refusals.items() if refusal is not None}


def _find_refusal(client: MongoClient[RawBSONDocument], scope: Scope) -> str | None:
    try:
        with closing(open_cursor(client, scope, Position(None, None))):
            return None
    except PyMongoError as error:
        return brief(error) if classify_error(error, opening=True) is Reaction.REFUSED else None


def _explain_match(error: PyMongoError, names: Collection[str]) -> ReadError | None:
    if not names:
        return None
    failed = sorted(names)
    handlers = ", ".join(failed[:_NAMES_MAX]) + (" and others" if len(failed) > _NAMES_MAX else "")
    sentence = (
        f"The `match` of {handlers} failed on this change; make it hold for every document, for example with $ifNull, "
        f"$type or $convert. Then reset the handler to before this change, or skip it. {quote(error)}"
    )
    return ReadError(sentence, only_match=True)


def _explain(error: PyMongoError) -> ReadError:
    """Return the reason why an event was read with less than was asked for, with what to do."""
    verdict = judge_error(error)
    if verdict is Verdict.TOO_LARGE:
        sentence = (
            "This change is larger than 16 MB with all that was asked for, and was read without its documents. Keep "
            "documents and _ids smaller, or set full_document and full_document_before_change so that less travels."
        )
    elif verdict is Verdict.IMAGE_MISSING:
        sentence = (
            "A required image of this change is missing, and it was read without look-up and images. Let the "
            "collection keep pre- and post-images, and for longer, or ask for 'whenAvailable'."
        )
    else:
        sentence = "This change could not be read as it was asked for, and was read without its documents."
    return ReadError(f"{sentence} {quote(error)}")


TOKEN_MAX = 6_700_000
"""
Characters of a token, for an `_id` of up to 3 MB. An event without its documents has token and key, which is half as
long, and its token follows it in the answer: two and a half times this fits into 16 MB.
"""

_LENGTH = {"$strLenBytes": "$_id._data"}
_NAMED = re.compile(r"<(\d+) ([0-9A-F]+) (\w+) (.*)>", re.DOTALL)
_TEXT = {
    "$concat": [
        "<", {"$toString": _LENGTH}, " ", {"$substrBytes": ["$_id._data", 0, 200]}, " ", "$operationType",
        " ", {"$ifNull": ["$ns.db", ""]}, ".", {"$ifNull": ["$ns.coll", ""]}, ">",
    ],
}  # fmt: skip

WITHOUT_OVERSIZED: Mapping[str, Any] = {"$match": {"$expr": {"$lte": [_LENGTH, TOKEN_MAX]}}}
"""The stage that leaves oversized events out."""


def naming_stages(after: str, until: str) -> Sequence[Mapping[str, Any]]:
    """
    Return stages that fail on the first event of a range that is too large, and name it in the text of the error.

    They fail as well on the first event after the range, so that the server reads no further.

    Args:
        after: comparable part of a token. The events after it are asked about.
        until: that of the token where the range ends.
    """
    ends = {"$or": [{"$gt": [_LENGTH, TOKEN_MAX]}, {"$gte": ["$_id._data", until]}]}
    return [
        {"$match": {"$expr": {"$and": [{"$gt": ["$_id._data", after]}, ends]}}},
        {"$set": {"named": {"$toInt": _TEXT}}},
    ]


def find_oversized(error: OperationFailure) -> RawBSONDocument | None:
    """
    Return the stand-in of an event that is too large, from the error of `naming_stages`. None if the event fits.

    Raises:
        OperationFailure: `error` itself, if it has another reason.
    """
    found = _NAMED.search(str((error.details or {}).get("errmsg", "")))
    if found is None:
        raise error
    length, beginning, operation, namespace = found.groups()
    if int(length) <= TOKEN_MAX:
        return None
    database, _, collection = namespace.partition(".")
    ns = {"db": database, "coll": collection} if collection else {"db": database}
    return _make_stand_in(beginning, operation, ns if database else {})


def shorten(event: Mapping[str, Any], data: str) -> RawBSONDocument:
    """Return the stand-in of an event that was read and whose token `data` is too large to be kept."""
    return _make_stand_in(data, str(event.get("operationType")), dict(event.get("ns") or {}))


def _make_stand_in(data: str, operation: str, ns: Mapping[str, Any]) -> RawBSONDocument:
    time_ = time_of_token({"_data": data}, Timestamp(1, 1))
    event = {"_id": {"_data": unread_place(data)}, "operationType": operation, "clusterTime": time_, "ns": ns}
    return RawBSONDocument(bson.encode(event))


def explain_oversized(event: Mapping[str, Any]) -> str:
    """Return the sentence that names the change that was not read, and what to do."""
    written = event["clusterTime"].as_datetime().isoformat()
    return (
        f"The `_id` is too large (above 3 MB): no handler gets this {event['operationType']} in "
        f"{read_namespace(event)}, written at {written}. Later changes are handled. Repair what depends on it, then "
        "discard the dead letter. Bound the length of `_id` with a validator."
    )
