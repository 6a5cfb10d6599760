"""The opposite of a transaction, stored once."""

from __future__ import annotations

from typing import Any

from pymongo.client_session import ClientSession

from mongo_celery.errors import TransactionStateError
from mongo_celery.twophase.completion import Completion
from mongo_celery.twophase.coordinator import BusyError
from mongo_celery.twophase.log import KnownError, TransactionLog
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import State, Transaction

_TAKES_BACK = "takesBack"


class Compensations:
    """
    The compensations of one log's transactions.

    Args:
        log: of the transactions.
        completion: of transactions of this log.
    """

    def __init__(self, log: TransactionLog, completion: Completion) -> None:
        self._log = log
        self._completion = completion

    def stored(self, id: Any, deadline: float, session: ClientSession | None = None) -> Any:  # noqa: A002 - what it is
        """
        Return the id of the one compensation of a transaction that is not canceled; stored now, if there is none.

        From then on recovery finishes it. What is done already is read from the transaction itself: of a compensation
        that is gone nobody can tell.

        Args:
            id: of the transaction.
            deadline: on the monotonic clock; of no account with a session.
            session: of an open MongoDB transaction that this is part of.

        Raises:
            TransactionStateError: it is not done, or its compensation is gone.
            ConfigurationError: it is a transfer between other accounts.
            BusyError: it changed meanwhile; ask again.
        """
        seen = self._done(id, deadline, session)
        before = noted_attempt(seen)
        attempt = before or 1
        while True:
            identity = compensation_id(id, attempt)
            found = self._log.find_one(identity, session)
            if found is None and attempt == before:
                raise TransactionStateError(
                    f"transaction {id!r} was compensated by {identity!r}, of which nothing is known any more: it is "
                    "not compensated again.",
                    id=id,
                )
            if found is None:
                self._store(seen, attempt, before, deadline, session)
                return identity
            is_its_own = attempt == before or takes_back(found, seen)
            if is_its_own and found.state is not State.CANCELED:
                if attempt != before and not self._log.note_compensated(seen, attempt, before, session):
                    raise BusyError("it changed meanwhile")
                return identity
            attempt += 1

    def _done(self, id: Any, deadline: float, session: ClientSession | None) -> Transaction:  # noqa: A002
        seen = self._log.get(id, session)
        self._log.refuse_other_accounts(seen)
        if session is None and self._completion.is_decided(seen, deadline):  # the log has not followed yet
            self._completion.to_the_end(seen, deadline)
            seen = self._log.get(id)
        if seen.state is not State.DONE:
            raise TransactionStateError(
                f"transaction {id!r} is {seen.state}: only one that is done can be compensated.",
                id=id,
                state=seen.state,
            )
        return seen

    def _store(
        self, seen: Transaction, attempt: int, before: int | None, deadline: float, joined: ClientSession | None
    ) -> None:
        """Store an attempt, and note it in what it compensates: in one MongoDB transaction, where there are any."""
        fields, identity = opposite(seen), compensation_id(seen.id, attempt)

        def both(session: ClientSession | None) -> None:
            try:
                self._log.insert(fields, identity, session=session, is_queued=True)
            except KnownError as error:  # there is one of this id, since just now
                raise BusyError("it changed meanwhile") from error
            if not self._log.note_compensated(seen, attempt, before, session):
                raise BusyError("it changed meanwhile")

        if joined is not None:
            both(joined)
        else:
            self._log.prepare()
            self._completion.in_one(both, deadline)


def opposite(done: Transaction) -> dict[str, Any]:
    """What a transaction that takes another back has beside its id and state."""
    if "source" not in done.document:
        turned = [
            Part(each.cluster, each.namespace, each.id, each.revert, each.apply, each.revert_require, each.require)
            for each in reversed(done.parts)
        ]
        return {"participants": [part.to_document() for part in turned], _TAKES_BACK: _mark_of(done)}
    document = done.document
    return {
        "source": document["destination"],
        "destination": document["source"],
        "value": document["value"],
        **({"accounts": document["accounts"]} if "accounts" in document else {}),
        _TAKES_BACK: _mark_of(done),
    }


def takes_back(compensation: Transaction, done: Transaction) -> bool:
    """Return True if a compensation belongs to this transaction, not to a removed one of the same id."""
    return bool(compensation.document.get(_TAKES_BACK) == _mark_of(done))


def _mark_of(done: Transaction) -> Any:
    """What tells it from all others of its id, as long as it is there."""
    return done.key or done.driver or done.document.get("lastModified")


def compensation_id(transaction_id: Any, attempt: int) -> dict[str, Any]:
    """The id of an attempt to compensate a transaction, from 1; always the same one."""
    return {"compensates": transaction_id, **({"attempt": attempt} if attempt > 1 else {})}


def noted_attempt(done: Transaction) -> int | None:
    """Which attempt a transaction says has compensated it; None where none has been noted."""
    noted = done.document.get("compensatedBy")
    if noted is None:
        return None
    if isinstance(noted, bool) or not isinstance(noted, int):
        raise TransactionStateError(
            f"transaction {done.id!r} says that {noted!r} has compensated it, which is no attempt; put it right.",
            id=done.id,
        )
    return noted
