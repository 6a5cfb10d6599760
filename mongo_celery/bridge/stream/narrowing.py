"""
Reading one event that the server cannot give as it was asked for.

The stream is opened on that event alone, by narrower and narrower pipelines, until the server can give it: without the
flags of `match`, then without look-up and images, at last without its documents. What is only too large to be sent is
still judged by all of it. So nobody has to guess from an error which part has failed, and no other event is read with
less.

An event whose token is too large comes as a stand-in (`oversized`). The stream leaves such events out, and so reaches
the place of the next event, or of its end, which is behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from mongo_celery.bridge.change import FLAGS, token_data
from mongo_celery.bridge.stream.cursor import (
    AWAIT_SECONDS,
    Position,
    limit_batch,
    post_batch_token,
    token_of,
    wait_for,
)
from mongo_celery.bridge.stream.fragments import SPLIT_STAGE, can_split, joined
from mongo_celery.bridge.stream.oversized import WITHOUT_OVERSIZED, explain_oversized, find_oversized, naming_stages
from mongo_celery.bridge.stream.reactions import closes_connection, concerns_an_event
from mongo_celery.mongo.verdicts import Code, Verdict, named, said, verdict_on

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument
    from pymongo.command_cursor import CommandCursor

    from mongo_celery.bridge.stream.source import Scope

Open = Callable[["Scope", Position, int], "CommandCursor[RawBSONDocument]"]
"""Opens a stream: what, from where, and how many events its first batch may hold."""

Token = Mapping[str, Any]

_DOCUMENTS = ("fullDocument", "fullDocumentBeforeChange", "updateDescription")
_WITHOUT_DOCUMENTS = {"$project": dict.fromkeys(_DOCUMENTS, 0)}
_NAMES_MAX = 5
_IMAGES = ("full_document", "full_document_before_change")


@dataclass(frozen=True, slots=True)
class Reread:
    """
    An event, read once more.

    Attributes:
        document: what the server could give.
        complaint: why that is not what was asked for; None where it is.
        only_match: whether it lacks nothing but flags, namely those of the handlers whose `match` failed on it.
    """

    document: RawBSONDocument
    complaint: str | None = None
    only_match: bool = False


class Narrowing:
    """
    Reads events one by one.

    Args:
        scope: the whole stream.
        open_: opens a stream.
        version: gives the server's version.
    """

    def __init__(self, scope: Scope, open_: Open, version: Callable[[], Sequence[int]]) -> None:
        self._scope = scope
        self._open = open_
        self._version = version

    def events(self, start: Position, told: str = "") -> Iterator[Reread | Token]:
        """
        Read the next events that our own filters let through, with as much as the server can give of each.

        An event that the user's pipeline leaves out comes as its token, and so does the place at the end. The iterator
        ends when there are no more events for now, and behind events that are too large to be read.

        Args:
            told: comparable part of the token of the last stand-in that was given; empty for none.

        Raises:
            PyMongoError: these cannot be read either; then no single event is the reason.
        """
        last, time_ = token_data(start.token) if start.token is not None else "", start.time
        is_passing, last = told > last, max(told, last)
        with closing(self._open(self._bare(WITHOUT_OVERSIZED, _WITHOUT_DOCUMENTS), start, 1)) as cursor:
            limit_batch(cursor, 1)
            while cursor.alive:
                candidate = cursor.try_next()
                token = token_of(candidate) if candidate is not None else post_batch_token(cursor)
                if token is None:
                    return
                while event := self._oversized(start if time_ is None else Position(None, time_), last, token):
                    is_passing, last, time_ = True, token_data(event["_id"]), event["clusterTime"]
                    yield Reread(event, explain_oversized(event))
                yield token if candidate is None else self._read(candidate)
                if is_passing and token_data(token) <= last:
                    wait_for(cursor, AWAIT_SECONDS)  # for now the oplog ends with one that is too large
                elif is_passing or candidate is None:
                    return
                else:
                    last, time_ = token_data(token), candidate["clusterTime"]

    def _bare(self, *stages: Mapping[str, Any]) -> Scope:
        """Return the scope with our own filters and some stages, without images."""
        options = {name: value for name, value in self._scope.options.items() if name not in _IMAGES}
        return replace(self._scope, pipeline=(*self._scope.selection, *stages), options=options, given=0)

    def _oversized(self, start: Position, after: str, until: Token) -> RawBSONDocument | None:
        """Return the stand-in of the next event between two places that is too large; None if there is none."""
        try:
            with closing(self._open(self._bare(*naming_stages(after, token_data(until))), start, 1)) as cursor:
                cursor.try_next()
        except OperationFailure as error:
            return find_oversized(error)
        return None

    def _read(self, candidate: RawBSONDocument) -> Reread | Token:
        """
        Return the event with as much as the server can give, or its token if the user's pipeline leaves it out.

        Raises:
            PyMongoError: what is no fault of this event.
        """
        try:
            whole = self._pinned(candidate, self._scope)
            return token_of(candidate) if whole is None else Reread(whole)
        except PyMongoError as error:
            if not concerns_an_event(error):
                raise
            return self._with_less(candidate, error)

    def _with_less(self, candidate: RawBSONDocument, error: PyMongoError) -> Reread:
        if verdict_on(error) is Verdict.TOO_LARGE and self._splits():
            fragments = self._attempt(candidate, self._scope, in_fragments=True)
            if fragments is not None:
                return Reread(fragments)
        names = self._flag_names()
        flagless = self._with_flags(())
        if names and self._attempt(candidate, flagless) is not None:
            sound = self._sound(candidate, names)
            document = self._attempt(candidate, self._with_flags(sound))
            failed = sorted({*names} - {*sound})
            if document is not None:  # none has failed when the look-up finds something else by now
                return Reread(document, _of_match(error, failed), only_match=True) if failed else Reread(document)
        judged = self._judged(candidate, error)
        if judged is not None:
            return judged
        if any(name in self._scope.options for name in _IMAGES):
            options = {name: value for name, value in self._scope.options.items() if name not in _IMAGES}
            document = self._attempt(candidate, replace(flagless, options=options))
            if document is not None:
                return Reread(document, _of_images(error))
        return Reread(candidate, _of_rest(error, given=bool(self._scope.given)))

    def _judged(self, candidate: RawBSONDocument, error: PyMongoError) -> Reread | None:
        """
        What is too large only to be sent, judged whole and sent with less; None for what fails otherwise.

        So an event concerns nobody whose `match` rules it out. Left out are look-up and images, at last all documents.
        """
        if verdict_on(error) is not Verdict.TOO_LARGE:
            return None
        is_own = candidate.get("operationType") != "update"  # the document of others is no look-up
        images = ["fullDocumentBeforeChange"] if is_own else ["fullDocumentBeforeChange", "fullDocument"]
        shorter: list[tuple[Mapping[str, Any], str]] = [
            ({"$unset": images}, _of_images(error)),
            (_WITHOUT_DOCUMENTS, _of_rest(error, given=False)),
        ]
        for stage, complaint in shorter if any(name in self._scope.options for name in _IMAGES) else shorter[1:]:
            scope = replace(self._scope, pipeline=(*self._scope.pipeline, stage), given=self._scope.given + 1)
            document = self._attempt(candidate, scope)
            if document is not None:
                return Reread(document, complaint)
        return None

    def _attempt(
        self, candidate: RawBSONDocument, scope: Scope, *, in_fragments: bool = False
    ) -> RawBSONDocument | None:
        try:
            return self._pinned(candidate, scope, in_fragments=in_fragments)
        except PyMongoError as error:
            if not concerns_an_event(error):
                raise
            return None

    def _pinned(
        self, candidate: RawBSONDocument, scope: Scope, *, in_fragments: bool = False
    ) -> RawBSONDocument | None:
        """
        Read this event alone through a pipeline; None if the pipeline leaves it out.

        A server closes the connection if the event fits into an answer and its token does not. Asked for a second
        event, which does not come, the server reads to the end of the oplog, and the token there is short.
        """
        closed: AutoReconnect | None = None
        for count in (1, 2, 2):
            try:
                return self._pinned_once(candidate, scope, count, in_fragments=in_fragments)
            except AutoReconnect as error:
                if not closes_connection(error):
                    raise
                self._splits()  # asks the server, and raises if the network is the reason
                closed = error
        raise OperationFailure(
            "the server closes the connection instead of answering", Code.BSONObjectTooLarge
        ) from closed

    def _pinned_once(
        self, candidate: RawBSONDocument, scope: Scope, count: int, *, in_fragments: bool
    ) -> RawBSONDocument | None:
        token = token_of(candidate)
        pin: Mapping[str, Any] = {"$match": {"_id._data": token_data(token)}}
        stages = (pin, *scope.pipeline, SPLIT_STAGE) if in_fragments else (pin, *scope.pipeline)
        start = Position(None, candidate["clusterTime"])
        with closing(self._open(replace(scope, pipeline=stages), start, count)) as cursor:
            if in_fragments:
                return joined(iter(cursor.try_next, None), token)
            document = cursor.try_next()
        if document is not None:
            token_of(document)
        return document

    def _splits(self) -> bool:
        try:
            return can_split(self._version())
        except OperationFailure:  # a server, or an API version, that does not tell
            return False

    # -- flags -------------------------------------------------------------------------------------

    def _flag_names(self) -> Sequence[str]:
        return [name for stage in self._scope.own_stages for name in stage.get("$addFields", {}).get(FLAGS, {})]

    def _sound(self, candidate: RawBSONDocument, names: Sequence[str]) -> Sequence[str]:
        """Those whose expression does not fail on the event: halves of what fails are tried apart."""
        if len(names) > 1:
            middle = len(names) // 2
            halves = (names[:middle], names[middle:])
            return [name for half in halves for name in self._sound_of_half(candidate, half)]
        return []

    def _sound_of_half(self, candidate: RawBSONDocument, half: Sequence[str]) -> Sequence[str]:
        fits = self._attempt(candidate, self._with_flags(half)) is not None
        return half if fits else self._sound(candidate, half)

    def _with_flags(self, names: Sequence[str]) -> Scope:
        """The scope with no other flags than these."""
        stages: list[Mapping[str, Any]] = []
        for stage in self._scope.own_stages:
            flags = stage.get("$addFields", {}).get(FLAGS)
            if flags is None:
                stages.append(stage)
            elif names:
                stages.append({"$addFields": {FLAGS: {name: flags[name] for name in names}}})
        return replace(self._scope, pipeline=(*stages, *self._scope.given_stages))


def _of_match(error: PyMongoError, failed: Sequence[str]) -> str:
    handlers = ", ".join(failed[:_NAMES_MAX]) + (" and others" if len(failed) > _NAMES_MAX else "")
    return (
        f"The `match` of {handlers} failed on this change; make it hold for every document, for example with $ifNull, "
        "$type or $convert. Then rewind the handler to before this change, or skip it. "
        f"The server said ({named(error)}): {said(error)}"
    )


def _of_images(error: PyMongoError) -> str:
    cure = (
        "Keep documents smaller, or set full_document and full_document_before_change so that less travels."
        if verdict_on(error) is Verdict.TOO_LARGE
        else "Let the collection keep pre- and post-images, and for longer, or ask for 'whenAvailable'."
    )
    return (
        "This change could not be read with its look-up and images, and was read without them. "
        f"{cure} The server said ({named(error)}): {said(error)}"
    )


def _of_rest(error: PyMongoError, *, given: bool) -> str:
    if verdict_on(error) is Verdict.TOO_LARGE:
        cure = "This change is larger than 16 MB, and was read without its documents. Keep documents and _ids smaller."
    elif given:
        cure = (
            "The bridge's `pipeline` failed on this change, which was read without it and without its documents. Make "
            "the pipeline hold for every event."
        )
    else:
        cure = "This change could not be read as it was asked for, and was read without its documents."
    return f"{cure} The server said ({named(error)}): {said(error)}"
