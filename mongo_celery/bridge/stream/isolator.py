"""
The isolator reads events one by one. If the server cannot send a complete event, the isolator requests less of it.

It opens ever narrower streams with only this event, until the server can send the event. So the isolator need not
interpret errors, and all other events stay complete.

| attempt, in this order | if | read error |
|---|---|---|
| without the flags of `match` expressions that fail on it | the event comes without any flag | of these handlers only |
| whole, in fragments (MongoDB 6.0.9, 7.0 and later) | it is too large | none |
| evaluated whole, sent without pre-image and lookup | it is too large | of all handlers that it may concern |
| evaluated whole, sent without its documents | it is too large | the same |
| without lookup, images and flags | | the same |
| with our own filters only, without its documents | | the same |

An event whose token is too large arrives as a stand-in (`oversized`). The stream itself excludes such events, so its
next place is already after them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import bson
import pymongo
from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.change import read_namespace, token_data
from mongo_celery.bridge.existing import unread_place
from mongo_celery.bridge.stream.cursor import AWAIT_SECONDS, EventCursor, Position, token_of
from mongo_celery.bridge.stream.items import ReadError
from mongo_celery.bridge.stream.verdicts import closes_connection, concerns_an_event, judge_stream_error
from mongo_celery.findings import list_some
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.verdicts import Code, Verdict, brief, judge_error, quote

if TYPE_CHECKING:
    from mongo_celery.bridge.stream.source import Scope

ClientFactory = Callable[[float], MongoClient[RawBSONDocument]]

Token = Mapping[str, Any]

_FRAGMENT = "splitEvent"
_IN_FRAGMENTS: Mapping[str, Any] = {"$changeStreamSplitLargeEvent": {}}
_IMAGES = ["fullDocument", "fullDocumentBeforeChange"]
_WITHOUT_IMAGES = {"$unset": _IMAGES}
_WITHOUT_PRE_IMAGE = {"$unset": "fullDocumentBeforeChange"}
_WITHOUT_DOCUMENTS = {"$unset": [*_IMAGES, "updateDescription"]}
_LONG_TOKEN = 100_000  # characters that may make an answer too large
_NAMES_MAX = 5
_REFUSAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reread:
    """
    An event that was read alone.

    Attributes:
        document: everything that the server could send.
        error: reason why it is less than requested. None if it is complete.
    """

    document: RawBSONDocument
    error: ReadError | None = None


class EventIsolator:
    """
    Reads the events of a stream one by one.

    Args:
        client: the client of the stream.
        scope: the whole stream.
        comment: the comment of all commands.
    """

    def __init__(
        self, client: MongoClient[RawBSONDocument], scope: Scope, comment: str | Mapping[str, Any] | None
    ) -> None:
        self._client = client
        self._scope = scope
        self._comment = comment

    def read_events(self, start: Position, last_stand_in: str = "") -> Iterator[Reread | Token]:
        """
        Read the next events that pass the filters, as completely as the server can send each.

        It yields the final place as a token. The iterator ends when there are no more events for now, and after events
        that are too large to read.

        Args:
            last_stand_in: comparable part of the last stand-in's token. Empty for none.

        Raises:
            PyMongoError: reading event by event fails too, so no single event is the reason.
        """
        last, time_ = token_data(start.token) if start.token is not None else "", start.time
        follows_stand_in, last = last_stand_in > last, max(last_stand_in, last)
        with self._open(self._bare(_WITHOUT_OVERSIZED, _WITHOUT_DOCUMENTS), start) as cursor:
            cursor.limit_batch(1)
            while cursor.is_alive:
                candidate = cursor.read_event()
                token = token_of(candidate) if candidate is not None else cursor.token
                if token is None:
                    return
                while stand_in := self._find_oversized(Position(None, time_), last, token):
                    follows_stand_in, last, time_ = True, token_data(stand_in["_id"]), stand_in["clusterTime"]
                    yield Reread(stand_in, ReadError(explain_oversized(stand_in)))
                yield token if candidate is None else self._read(candidate)
                if follows_stand_in and token_data(token) <= last:
                    cursor.set_await(AWAIT_SECONDS)  # the oplog ends with a stand-in, where no stream opens
                elif follows_stand_in or candidate is None:
                    return
                else:
                    last, time_ = token_data(token), candidate["clusterTime"]

    def _bare(self, *stages: Mapping[str, Any]) -> Scope:
        """Return the scope with only the bridge's filters and some stages, without images."""
        return replace(self._scope.without_images, selection=(*self._scope.selection, *stages), flags={}, last=())

    def _find_oversized(self, start: Position, after: str, until: Token) -> RawBSONDocument | None:
        """Return the stand-in of the next oversized event between two places. None if there is none."""
        try:
            with self._open(self._bare(*naming_stages(after, token_data(until))), start) as cursor:
                cursor.read_event()
        except OperationFailure as error:
            return find_oversized(error)
        return None

    def _read(self, candidate: RawBSONDocument) -> Reread | Token:
        """
        Return the event as completely as possible, or its token if it no longer exists.

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
            failed = self._find_failed(candidate, sorted(scope.flags))  # none if a lookup finds another document by now
            steps.append((scope.with_flags(scope.flags.keys() - failed), _explain_match(error, failed)))
        if judge_error(error) is Verdict.TOO_LARGE:
            whole = self._read_fragments(candidate)
            if whole is not None:
                return Reread(whole)
            # Flags are computed before these stages. So handlers whose `match` excludes the event are not affected.
            is_update = candidate.get("operationType") == "update"  # else `fullDocument` is in the event
            fewer = _WITHOUT_IMAGES if is_update else _WITHOUT_PRE_IMAGE
            steps += [(scope.add_stage(stage), explained) for stage in (fewer, _WITHOUT_DOCUMENTS)]
        steps.append((scope.without_images.with_flags(()), explained))
        for narrower, read_error in steps:
            document = self._try(candidate, narrower)
            if document is not None:
                return Reread(document, read_error)
        return Reread(candidate, explained)

    def _find_failed(self, candidate: RawBSONDocument, names: Sequence[str]) -> set[str]:
        """Return the handlers whose `match` fails on the event. It halves the list, which is cheap if few fail."""
        if self._try(candidate, self._scope.with_flags(names)) is not None:
            return set()
        if len(names) == 1:
            return set(names)
        half = len(names) // 2
        return self._find_failed(candidate, names[:half]) | self._find_failed(candidate, names[half:])

    def _read_fragments(self, candidate: RawBSONDocument) -> RawBSONDocument | None:
        """
        Read an event that is too large for one answer. None if the server cannot split it.

        Tokens of a splitting stream differ. So the event is found by its time and document. Only changes of one
        transaction share these, and they are not read in fragments.
        """
        if "txnNumber" in candidate:
            return None
        pin = {
            "$match": {name: {"$eq": candidate.get(name)} for name in ("clusterTime", "operationType", "documentKey")}
        }
        scope = self._scope.add_stage(_IN_FRAGMENTS)
        start = Position(None, candidate["clusterTime"])
        try:
            with self._open(replace(scope, selection=(pin, *scope.selection)), start) as cursor:
                return join_fragments(iter(cursor.read_event, None), token_of(candidate))
        except PyMongoError as error:  # for example, a server that does not know the stage
            if not (self._is_unanswered(error) or concerns_an_event(error)):
                raise
            return None

    def _try(self, candidate: RawBSONDocument, scope: Scope) -> RawBSONDocument | None:
        """Read this event alone. Return None if that fails because of the event."""
        try:
            return self._read_alone(candidate, scope)
        except PyMongoError as error:
            if not concerns_an_event(error):
                raise
            return None

    def _read_alone(self, candidate: RawBSONDocument, scope: Scope) -> RawBSONDocument | None:
        """
        Read this event alone. Return None if it no longer exists.

        If an answer has room for the event but not for its token, a server refuses it as too large, or closes the
        connection. If asked for a second event, which does not arrive, the server reads to the end of the oplog, where
        the token is short.
        """
        data = token_data(token_of(candidate))
        pin: Mapping[str, Any] = {"$match": {"_id._data": data}}
        alone, start = replace(scope, selection=(pin, *scope.selection)), Position(None, candidate["clusterTime"])
        failure: PyMongoError | None = None
        for count in (1, 2, 2):
            try:
                with self._open(alone, start, count) as cursor:
                    document = cursor.read_event()
                if document is not None:
                    token_of(document)
                return document
            except PyMongoError as error:
                failure = error
                may_fit = len(data) >= _LONG_TOKEN and count == 1 and judge_error(error) is Verdict.TOO_LARGE
                if not (may_fit or self._is_unanswered(error)):
                    raise
        raise OperationFailure(
            "the server closes the connection instead of sending this change", Code.BSONObjectTooLarge
        ) from failure

    def _is_unanswered(self, error: PyMongoError) -> bool:
        """Return True if the server has closed the connection. Raise if it does not answer a ping either."""
        is_closed = closes_connection(error)
        if is_closed:
            self._client.admin.command("ping")
        return is_closed

    def _open(self, scope: Scope, start: Position, first_batch: int = 1) -> EventCursor:
        return EventCursor(self._client, scope, start, first_batch=first_batch, comment=self._comment)


def join_fragments(fragments: Iterable[RawBSONDocument], token: Token) -> RawBSONDocument | None:
    """
    Return the whole event with its token from a stream that does not split. None if a fragment is missing.

    The server has cut the event. Each fragment has some whole top-level fields, and its number and total in
    `splitEvent`. Only the event's own fragments are read. The event may be larger than 16 MB, and no server accepts it
    back.
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
    Find the refused `match` expressions: open the stream with each one alone, if the server refuses all together.

    Args:
        make_client: makes a client for the stream, with a socket timeout in seconds.

    Returns:
        The server's message, by handler. Empty if the stream can be opened, or fails for another reason.
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
        with EventCursor(client, scope, Position(None, None)):
            return None
    except PyMongoError as error:
        return brief(error) if judge_stream_error(error, opening=True) is Verdict.REFUSED else None


def _explain_match(error: PyMongoError, names: Collection[str]) -> ReadError | None:
    if not names:
        return None
    handlers = list_some(sorted(names), _NAMES_MAX)
    sentence = (
        f"The `match` of {handlers} failed on this change. Make it work for every document, for example with $ifNull, "
        f"$type or $convert. Then reset the handler to a time before this change, or skip it. {quote(error)}"
    )
    return ReadError(sentence, only_match=True)


def _explain(error: PyMongoError) -> ReadError:
    """Return the reason why an event was read with less than requested, and the fix."""
    verdict = judge_error(error)
    if verdict is Verdict.TOO_LARGE:
        sentence = (
            "This change is larger than 16 MB, so it was read without its documents. Keep documents and _ids smaller, "
            "or set full_document and full_document_before_change so that changes carry less."
        )
    elif verdict is Verdict.IMAGE_MISSING:
        sentence = (
            "A required image of this change is missing, so the change was read without its documents. Let the "
            "collection keep pre- and post-images for longer, or use 'whenAvailable' instead of 'required'."
        )
    else:
        sentence = "This change could not be read with its documents, so it was read without them."
    return ReadError(f"{sentence} {quote(error)}")


TOKEN_MAX = 6_700_000
"""
Largest number of characters in a token, for an `_id` of up to 3 MB. An event without documents has its token, its key
of half that size, and the token again after it in the answer: together two and a half times this, which fits into 16
MB.
"""

_LENGTH = {"$strLenBytes": "$_id._data"}
_NAMED = re.compile(r"<(\d+) ([0-9A-F]+) (\w+) (.*)>", re.DOTALL)
_TEXT = {
    "$concat": [
        "<", {"$toString": _LENGTH}, " ", {"$substrBytes": ["$_id._data", 0, 200]}, " ", "$operationType",
        " ", {"$ifNull": ["$ns.db", ""]}, ".", {"$ifNull": ["$ns.coll", ""]}, ">",
    ],
}  # fmt: skip

_WITHOUT_OVERSIZED: Mapping[str, Any] = {"$match": {"$expr": {"$lte": [_LENGTH, TOKEN_MAX]}}}
"""The stage that excludes oversized events."""


def naming_stages(after: str, until: str) -> Sequence[Mapping[str, Any]]:
    """
    Return stages that fail on the first oversized event of a range, and name it in the error's text.

    They also fail on the first event after the range, so that the server reads no further.

    Args:
        after: comparable part of a token. The range begins after it.
        until: comparable part of the token at the end of the range.
    """
    ends = {"$or": [{"$gt": [_LENGTH, TOKEN_MAX]}, {"$gte": ["$_id._data", until]}]}
    return [
        {"$match": {"$expr": {"$and": [{"$gt": ["$_id._data", after]}, ends]}}},
        {"$set": {"named": {"$toInt": _TEXT}}},
    ]


def find_oversized(error: OperationFailure) -> RawBSONDocument | None:
    """
    Return the stand-in of an oversized event, from the error of `naming_stages`. None if the event fits.

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
    """Return the stand-in of an event that was read, but whose token `data` is too large to store."""
    return _make_stand_in(data, str(event.get("operationType")), dict(event.get("ns") or {}))


def _make_stand_in(data: str, operation: str, ns: Mapping[str, Any]) -> RawBSONDocument:
    time_ = time_of_token({"_data": data}, Timestamp(1, 1))
    event = {"_id": {"_data": unread_place(data)}, "operationType": operation, "clusterTime": time_, "ns": ns}
    return RawBSONDocument(bson.encode(event))


def explain_oversized(event: Mapping[str, Any]) -> str:
    """Return the sentence that names the unread change, and the fix."""
    written = event["clusterTime"].as_datetime().isoformat()
    return (
        f"The `_id` is too large (above 3 MB), so no handler gets this {event['operationType']} in "
        f"{read_namespace(event)}, written at {written}. Repair its effects manually, then discard the dead letter. "
        "Limit the length of `_id` with a validator."
    )
