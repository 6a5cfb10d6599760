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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from bson import ObjectId
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.arguments import Duration, not_negative
from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionRequiredError
from mongo_celery.locking import freeing, holders
from mongo_celery.mongo.transaction.frames import Place, Session, Waits, note_conflict, note_locked, waits_of
from mongo_celery.mongo.verdicts import Code, said, standalone_refused

Document = dict[str, Any]

_FILTER_CHARS = 300
"""As much of a filter as a message shows."""

_HELD = {Code.WriteConflict, Code.LockTimeout}
"""Of a document; and of a collection, of which a transaction waits for some milliseconds only."""


@dataclass(frozen=True, slots=True)
class LockCall:
    """
    A call that locks documents of one collection.

    Attributes:
        collection: where.
        session: of a transaction in progress.
        field: that is written.
        filter: what is to be locked.
        place: by which the call is known again at the next attempt.
        bound: seconds to wait; 0 to fail at once, None for no bound.
        value: that is written, but for its time.
    """

    collection: Collection[Any]
    session: ClientSession
    field: str
    filter: Mapping[str, Any]
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

    @contextmanager
    def judged(self, *, locks: bool = True) -> Iterator[None]:
        """Inside, the server is asked to lock, or just to read; its refusals are what the table above says."""
        waits = self.waits
        try:
            with standalone_refused():
                yield
        except BaseException as error:
            waits.failed()
            if isinstance(error, OperationFailure) and error.code == Code.DocumentValidationFailure:
                raise _invalid(self, error) from error
            if isinstance(error, OperationFailure) and error.code in _HELD:
                self._conflicted(error)
            raise
        if locks:
            waits.ended(self.place)

    def _conflicted(self, error: OperationFailure) -> None:
        """Return where the conflict is to pass to whoever repeats the body."""
        waits = self.waits
        waited = waits.conflicted(self.place)
        if self.bound is None or waited < self.bound:
            if waited >= freeing.FIRST_LOOK_SECONDS:
                freeing.free_dead(self.collection.database.client)
            note_conflict(self.session, _suspects)
            return
        waits.ended(self.place)
        locked = _locked(self, self.bound, error)
        note_locked(self.session, locked)
        raise locked from error


def lock_call(
    collection: Collection[Any],
    filter_: Mapping[str, Any],
    session: object,
    *,
    field: str,
    application: str | None,
    nowait: bool,
    wait: Duration | None,
    skip_locked: bool = False,
    kind: type[Session] = ClientSession,
) -> LockCall:
    """Check what a call was given, with a session of this kind; errors as of `select_for_update`."""
    if not isinstance(session, kind) or not session.in_transaction:
        raise TransactionRequiredError
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
        session=cast("ClientSession", session),  # asyncio's has the same name and state
        field=field,
        filter=filter_,
        place=(collection.full_name, waits_of(session).next_call(), b""),
        bound=_bound(nowait=nowait, wait=wait, skip_locked=skip_locked),
        value={"application": application or f"{socket.gethostname()}:{os.getpid()}", "at": None, "id": ObjectId()},
    )


def _bound(*, nowait: bool, wait: Duration | None, skip_locked: bool) -> float | None:
    if nowait + (wait is not None) + skip_locked > 1:
        raise ConfigurationError("nowait, wait and skip_locked exclude each other; give one of them.")
    if wait is None:
        return 0.0 if nowait else None
    return not_negative(wait, "wait")


def _suspects(session: Session) -> str:
    return holders.in_words(holders.candidates(cast("ClientSession", session)))


def _locked(call: LockCall, limit: float, error: OperationFailure) -> DocumentLockedError:
    found = holders.candidates(call.session)
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
        f"refused it before: {said(error)}. If it is the field, allow it there, as an object, or name one that it "
        "allows with field=; if the document was invalid before, cure that, or set validationLevel to moderate.",
    )
