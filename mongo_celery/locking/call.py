"""
One call that locks: what it was given, the value that it writes, and what a refusal of the server means.

| the server says | what happens |
|---|---|
| write conflict, with time left to wait | it passes, labelled as transient: `transactional` repeats the body |
| the same, for longer than two seconds | before it passes, holders are looked at, and the dead ended (`freeing`) |
| the same, at the bound that the caller has given | DocumentLockedError with the open transactions that may hold it |
| an operation on the collection has it for itself | the same three |
| the collection's validator refuses the field | ConfigurationError: repeating cannot help |
| no replica set | TopologyError |
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

from mongo_celery.arguments import Duration, check_flags, not_negative
from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionRequiredError
from mongo_celery.locking import freeing, holders
from mongo_celery.locking.plans import Plan, Result, carried_out
from mongo_celery.locking.waits import Place, Waits, waits_of
from mongo_celery.mongo.transaction.scopes import Session, scope_of
from mongo_celery.mongo.verdicts import Code, server_words, standalone_refused

Document = dict[str, Any]

_FILTER_CHARS = 300
"""As much of a filter as a message shows."""

_HELD = {Code.WriteConflict, Code.LockTimeout}
"""Of a document; and of a collection, of which a transaction waits for some milliseconds only."""

_LAST_SECONDS = 1.0
"""Longer than any pause: an attempt that conflicts with less time left may be the last."""


class LockOptions(TypedDict, total=False):
    """
    What may be given to every call that locks.

    Attributes:
        field: the field that is written, by default `_lock`; it belongs to locks alone.
        application: who locks, for people who look; by default `host:pid`.
        nowait: fail with `DocumentLockedError` at the first conflict, instead of letting `transactional` repeat the
            body. Who may hold it is asked for the error, at most four times a second: three more commands. Where the
            server does not answer those, the error comes two seconds later, at most once in five seconds.
        wait: seconds or `timedelta` for which the body is repeated because of this call, over all attempts; then
            `DocumentLockedError`. It is looked at when an attempt conflicts, so it may be exceeded by a pause and
            the body's own time. Without it, the limit of `transactional` counts alone. A call is known again by
            its collection and by being the n-th lock of its attempt; a body that locks in another order at each
            attempt may wait longer. In transactions that `transactional` does not run, attempts count together
            only if each conflicts within a second of the one before, whichever transaction it is of.
    """

    field: str
    application: str | None
    nowait: bool
    wait: Duration | None


class SkippingOptions(LockOptions, total=False):
    """
    `LockOptions`, and one more.

    Attributes:
        skip_locked: take what others do not hold, as far as that can be guessed: at random among the first sixteen
            or so that match, and others each time that a conflict has the body repeated. Not promised: that it is the
            first by `sort`; or that there is none where none is returned, when others hold all that it has tried. Let
            it be the first statement of the body, which may then be repeated for nothing.
    """

    skip_locked: bool


@dataclass(frozen=True, slots=True)
class LockCall:
    """
    A call that locks documents of one collection.

    Attributes:
        collection: where; of the session's kind, for threads or for asyncio.
        session: of a transaction in progress.
        field: that is written.
        filter: what is to be locked.
        skip_locked: whether others that match will do.
        place: by which the call is known again at the next attempt.
        bound: seconds to wait; 0 to fail at once, None for no bound.
        value: that is written, but for its time.
    """

    collection: Any
    session: Session
    field: str
    filter: Mapping[str, Any]
    skip_locked: bool
    place: Place
    bound: float | None
    value: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What is to be locked, for people."""
        text = repr(dict(self.filter))
        return f"{self.collection.full_name} {text if len(text) <= _FILTER_CHARS else text[:_FILTER_CHARS] + '...'}"

    @property
    def waits(self) -> Waits:
        """Those of the transaction that it is of."""
        return waits_of(self.session)

    @property
    def update(self) -> list[Document]:
        """The write that locks; by two stages, since a document in one would be merged into what the field held."""
        return [{"$set": {self.field: {"$literal": self.value}}}, {"$set": {f"{self.field}.at": "$$NOW"}}]

    @property
    def own(self) -> Document:
        """What is true of the documents that this call has locked, and of no others."""
        return {f"{self.field}.id": self.value["id"]}

    def find(self, filter_: Mapping[str, Any], projection: Any, sort: Any = None, limit: int = 0) -> Plan[list[Any]]:
        """Read documents in the transaction."""
        found = self.collection.find(filter_, projection, sort=sort, limit=limit, session=self.session)
        documents = yield found.to_list()
        return cast("list[Any]", documents)

    def lock_one(self, filter_: Mapping[str, Any], sort: Any, projection: Any) -> Plan[Any]:
        """Lock the first document that matches, and read it; None where none does."""
        found = yield self.collection.find_one_and_update(
            filter_,
            self.update,
            sort=sort,
            projection=projection,
            return_document=ReturnDocument.AFTER,
            session=self.session,
        )
        return found


def judged(call: LockCall, asked: Plan[Result], *, locks: bool = True) -> Plan[Result]:
    """Ask the server to lock, or just to read; its refusals are what the table above says."""
    waits = call.waits
    try:
        with standalone_refused():
            result = yield from asked
    except BaseException as error:
        waits.failed()
        if isinstance(error, OperationFailure) and error.code == Code.DocumentValidationFailure:
            raise _invalid(call, error) from error
        if isinstance(error, OperationFailure) and error.code in _HELD:
            yield from _conflicted(call, error)
        raise
    if locks:
        waits.ended(call.place)
    return result


def _conflicted(call: LockCall, error: OperationFailure) -> Plan[None]:
    """Return where the conflict is to pass to whoever repeats the body."""
    waits = call.waits
    waited = waits.conflicted(call.place)
    if call.bound is None or waited < call.bound:
        if waited >= freeing.FIRST_LOOK_SECONDS:
            yield from freeing.free_dead(call.session.client)
        yield from _note_holders(call.session)
        return
    waits.ended(call.place)
    locked = yield from _locked(call, call.bound, error)
    scope = scope_of(call.session)
    if scope is not None:
        scope.rollback_reason = locked  # the server has ended the transaction, also if the body catches this
    raise locked from error


def _note_holders(session: Session) -> Plan[None]:
    """Have the error at the end of the time name the holders of a refused document; a coroutine asks beforehand."""
    scope = scope_of(session)
    if scope is None:
        return
    if isinstance(session, ClientSession):
        scope.describe_holders = lambda refused: holders.in_words(carried_out(holders.candidates(refused)))
        return
    if scope.remaining < _LAST_SECONDS:
        yield from holders.candidates(session)
    scope.describe_holders = lambda refused: holders.in_words(holders.remembered(refused))


def lock_call(
    collection: Any,
    filter_: Mapping[str, Any],
    session: object,
    kind: type[Session],
    *,
    field: str = "_lock",
    application: str | None = None,
    nowait: bool = False,
    wait: Duration | None = None,
    skip_locked: bool = False,
) -> LockCall:
    """Check what a call was given, with a session of this kind; errors as of `select_for_update`."""
    if not isinstance(session, kind) or not session.in_transaction:
        raise TransactionRequiredError
    is_async = kind is AsyncClientSession
    if isinstance(collection, AsyncCollection) is not is_async:
        wanted = "locking.asynchronous locks in an AsyncCollection" if is_async else "locking locks in a Collection"
        raise ConfigurationError(
            f"mongo_celery.{wanted}, as its session's client has, not {type(collection).__name__}."
        )
    if (
        not isinstance(field, str)
        or not field
        or f"{field}.".startswith("_id.")
        or "\0" in field
        or any(not part or part.startswith("$") for part in field.split("."))
    ):
        raise ConfigurationError(f"field={field!r} cannot be written; choose a plain name such as '_lock'.")
    return LockCall(
        collection=collection,
        session=session,
        field=field,
        filter=filter_,
        skip_locked=skip_locked,
        place=(collection.full_name, waits_of(session).next_call(), b""),
        bound=_bound(nowait=nowait, wait=wait, skip_locked=skip_locked),
        value={"application": application or f"{socket.gethostname()}:{os.getpid()}", "at": None, "id": ObjectId()},
    )


def _bound(*, nowait: bool, wait: Duration | None, skip_locked: bool) -> float | None:
    check_flags(nowait=nowait, skip_locked=skip_locked)
    if nowait + (wait is not None) + skip_locked > 1:
        raise ConfigurationError("nowait, wait and skip_locked exclude each other; give one of them.")
    if wait is None:
        return 0.0 if nowait else None
    return not_negative(wait, "wait")


def _locked(call: LockCall, limit: float, error: OperationFailure) -> Plan[DocumentLockedError]:
    found = yield from holders.candidates(call.session)
    if limit:
        reason = f"it was not free within {limit:g} s"
    elif error.code == Code.LockTimeout:
        reason = "an operation such as createIndex has its collection, or waits for it"
    else:
        reason = "another transaction holds it, or has just changed it"
    return DocumentLockedError(
        f"The document of {call.name} is locked: {reason}. {holders.in_words(found)}"
        "Try again later, or allow more time for waiting.",
        document=call.name,
        candidates=found,
    )


def _invalid(call: LockCall, error: OperationFailure) -> ConfigurationError:
    return ConfigurationError(
        f"The validator of {call.collection.full_name} refuses a document with the lock's field {call.field!r}, or has "
        f"refused it before: {server_words(error)}. If it is the field, allow it there, as an object, or name one "
        "that it allows with field=; if the document was invalid before, cure that, or set validationLevel to "
        "moderate.",
    )
