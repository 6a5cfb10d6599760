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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.errors import AutoReconnect, InvalidOperation, OperationFailure, PyMongoError

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.stream.cursor import (
    AWAIT_SECONDS,
    Position,
    limit_batch,
    post_batch_token,
    token_of,
    wait_for,
)
from mongo_celery.bridge.stream.items import Flaw
from mongo_celery.bridge.stream.oversized import WITHOUT_OVERSIZED, explain_oversized, find_oversized, naming_stages
from mongo_celery.bridge.stream.reactions import closes_connection, concerns_an_event
from mongo_celery.mongo.verdicts import Code, Verdict, quote, verdict_on

if TYPE_CHECKING:
    from pymongo.command_cursor import CommandCursor

    from mongo_celery.bridge.stream.source import Scope

Open = Callable[["Scope", Position, int], "CommandCursor[RawBSONDocument]"]
"""Opens a stream: what, from where, and how many events its first batch may hold."""

Token = Mapping[str, Any]

SPLIT_STAGE: Mapping[str, Any] = {"$changeStreamSplitLargeEvent": {}}
_FRAGMENT = "splitEvent"
_DOCUMENTS = ("fullDocument", "fullDocumentBeforeChange", "updateDescription")
_WITHOUT_DOCUMENTS = {"$project": dict.fromkeys(_DOCUMENTS, 0)}
_NAMES_MAX = 5


@dataclass(frozen=True, slots=True)
class Reread:
    """
    An event, read once more.

    Attributes:
        document: what the server could give.
        flaw: why that is not what was asked for; None where it is.
    """

    document: RawBSONDocument
    flaw: Flaw | None = None


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
                    yield Reread(event, Flaw(explain_oversized(event)))
                yield token if candidate is None else self._read(candidate)
                if is_passing and token_data(token) <= last:
                    wait_for(cursor, AWAIT_SECONDS)  # for now the oplog ends with one that is too large
                elif is_passing or candidate is None:
                    return
                else:
                    last, time_ = token_data(token), candidate["clusterTime"]

    def _bare(self, *stages: Mapping[str, Any]) -> Scope:
        """Return the scope with our own filters and some stages, without images."""
        return replace(self._scope.without_images, selection=(*self._scope.selection, *stages), flags={}, given=())

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
        names, flagless = self._scope.flags.keys(), self._scope.with_flags(())
        if names and self._attempt(candidate, flagless) is not None:
            failed = self._find_failing(candidate, names)
            document = self._attempt(candidate, self._scope.with_flags(names - failed))
            if document is not None:  # none has failed when the look-up finds something else by now
                return Reread(document, _explain_match(error, failed)) if failed else Reread(document)
        judged = self._judged(candidate, error)
        if judged is not None:
            return judged
        if self._has_images:
            document = self._attempt(candidate, flagless.without_images)
            if document is not None:
                return Reread(document, _explain_images(error))
        return Reread(candidate, _explain_rest(error, given=bool(self._scope.given)))

    @property
    def _has_images(self) -> bool:
        return self._scope.without_images != self._scope

    def _judged(self, candidate: RawBSONDocument, error: PyMongoError) -> Reread | None:
        """
        Return an event that is too large to be sent, judged whole and sent with less; None if it fails otherwise.

        So an event concerns nobody whose `match` rules it out. Left out are look-up and images, at last all documents.
        """
        if verdict_on(error) is not Verdict.TOO_LARGE:
            return None
        is_own = candidate.get("operationType") != "update"  # the document of others is no look-up
        images = ["fullDocumentBeforeChange"] if is_own else ["fullDocumentBeforeChange", "fullDocument"]
        shorter: list[tuple[Mapping[str, Any], Callable[[PyMongoError], Flaw]]] = []
        if self._has_images:
            shorter.append(({"$unset": images}, _explain_images))
        for stage, explain in (*shorter, (_WITHOUT_DOCUMENTS, _explain_rest)):
            document = self._attempt(candidate, replace(self._scope, given=(*self._scope.given, stage)))
            if document is not None:
                return Reread(document, explain(error))
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
        split = (SPLIT_STAGE,) if in_fragments else ()
        scope = replace(scope, selection=(pin, *scope.selection), given=(*scope.given, *split))
        start = Position(None, candidate["clusterTime"])
        with closing(self._open(scope, start, count)) as cursor:
            if in_fragments:
                return join_fragments(iter(cursor.try_next, None), token)
            document = cursor.try_next()
        if document is not None:
            token_of(document)
        return document

    def _splits(self) -> bool:
        try:
            return can_split(self._version())
        except OperationFailure:  # a server, or an API version, that does not tell
            return False

    def _find_failing(self, candidate: RawBSONDocument, names: Collection[str]) -> set[str]:
        """Return the flags whose expression fails on the event, of some that fail together: halves are tried apart."""
        if len(names) == 1:
            return set(names)
        each = sorted(names)
        halves = (each[: len(each) // 2], each[len(each) // 2 :])
        return {
            name
            for half in halves
            if self._attempt(candidate, self._scope.with_flags(half)) is None
            for name in self._find_failing(candidate, half)
        }


def _explain_match(error: PyMongoError, names: Collection[str]) -> Flaw:
    failed = sorted(names)
    handlers = ", ".join(failed[:_NAMES_MAX]) + (" and others" if len(failed) > _NAMES_MAX else "")
    sentence = (
        f"The `match` of {handlers} failed on this change; make it hold for every document, for example with $ifNull, "
        f"$type or $convert. Then rewind the handler to before this change, or skip it. {quote(error)}"
    )
    return Flaw(sentence, only_match=True)


def _explain_images(error: PyMongoError) -> Flaw:
    fix = (
        "Keep documents smaller, or set full_document and full_document_before_change so that less travels."
        if verdict_on(error) is Verdict.TOO_LARGE
        else "Let the collection keep pre- and post-images, and for longer, or ask for 'whenAvailable'."
    )
    return Flaw(
        f"This change could not be read with its look-up and images, and was read without them. {fix} {quote(error)}"
    )


def _explain_rest(error: PyMongoError, *, given: bool = False) -> Flaw:
    if verdict_on(error) is Verdict.TOO_LARGE:
        fix = "This change is larger than 16 MB, and was read without its documents. Keep documents and _ids smaller."
    elif given:
        fix = (
            "The bridge's `pipeline` failed on this change, which was read without it and without its documents. Make "
            "the pipeline hold for every event."
        )
    else:
        fix = "This change could not be read as it was asked for, and was read without its documents."
    return Flaw(f"{fix} {quote(error)}")


def can_split(version: Sequence[int]) -> bool:
    """Return True if a server of this version has the stage: since 6.0.9 and 7.0, but none of the releases between."""
    return tuple(version[:2]) >= (7, 0) or (tuple(version[:2]) == (6, 0) and tuple(version[:3]) >= (6, 0, 9))


def join_fragments(fragments: Iterable[RawBSONDocument], token: Mapping[str, Any]) -> RawBSONDocument | None:
    """
    Return the whole event, under the token that it has in a stream that does not split; None if there is none.

    A server has cut it (`$changeStreamSplitLargeEvent`). Each fragment has some of the event's top-level fields, whole,
    and says in `splitEvent` which one of how many it is.

    Reads no more fragments than belong to it. It may be larger than 16 MB: no server takes it back.

    Raises:
        InvalidOperation: the fragments are not those of one event, from the first to the last.
    """
    whole: dict[str, Any] = {"_id": dict(token)}
    for expected, fragment in enumerate(fragments, start=1):
        mark = fragment.get(_FRAGMENT)
        if mark is None and expected == 1:
            return fragment  # small enough to come as it is
        if mark is None or mark["fragment"] != expected:
            break
        whole.update((name, value) for name, value in fragment.items() if name not in {"_id", _FRAGMENT})
        if mark["of"] == expected:
            return RawBSONDocument(bson.encode(whole))
    if len(whole) == 1:
        return None
    raise InvalidOperation("The fragments of a large event did not come one after the other.")
