"""The opposite of a transaction, stored once."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pymongo.client_session import ClientSession

from mongo_celery.errors import TransactionStateError
from mongo_celery.twophase.engine import Engine
from mongo_celery.twophase.log import KnownError, OvertakenError, TransactionLog
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.transaction import State, Transaction


def store_compensation(engine: Engine, identity: Any, deadline: float, session: ClientSession | None = None) -> Any:
    """
    Return the id of the single compensation of a transaction. Store one if there is none, or it was canceled.

    Recovery finishes it from then on, or from the commit of the session's transaction. The transaction stores the
    number of its last attempt. If that attempt was removed from the log, its outcome is unknown, and no other attempt
    may follow.

    Args:
        engine: the engine of the log.
        identity: the id of the transaction.
        deadline: the deadline on the monotonic clock. Unused with a session.
        session: the session of the surrounding open MongoDB transaction, if any.

    Raises:
        TransactionStateError: it is not done, or its compensation was removed.
        OvertakenError: it changed meanwhile. Call again.
    """
    log = engine.log
    done = log.get(identity, session)
    if done.state is not State.DONE:
        raise TransactionStateError(
            f"Transaction {identity!r} is {done.state}. Only a transaction that is done can be compensated.",
            id=identity,
            state=done.state,
        )
    noted = _read_attempt(done)
    if noted is not None:
        last = _find_last(log, done, noted, session)
        if last is not None:
            return last
    attempt = (noted or 0) + 1
    opposite, next_id = _opposite_fields(done), compensation_id(done, attempt)

    def store(joined: ClientSession | None) -> None:
        try:
            log.insert(opposite, next_id, session=joined, is_queued=joined is not None)
        except KnownError as error:
            if joined is not None:  # another caller has just stored it
                raise OvertakenError from error
        log.note_compensated(done, attempt, noted, joined)
        if joined is None:  # after the note: if that is refused, recovery must not run the compensation
            _queue(log, next_id)

    if session is not None:
        store(session)
    else:
        log.prepare()
        engine.write_together(store, deadline)
    return next_id


def _find_last(log: TransactionLog, done: Transaction, noted: int, session: ClientSession | None) -> Any:
    """Return the id of the attempt in a transaction's note. None if it was canceled, so another may follow."""
    last = compensation_id(done, noted)
    found = log.find_one(last, session)
    if found is None:
        raise TransactionStateError(
            f"Transaction {done.id!r} was compensated by {last!r}, which was removed from the log. It is not "
            "compensated again.",
            id=done.id,
        )
    state = log.read(found).state
    if state is State.INITIAL and "queuedAt" not in found:  # a process died before queuing it
        _queue(log, last, session)
    return None if state is State.CANCELED else last


def _queue(log: TransactionLog, compensation: Any, session: ClientSession | None = None) -> None:
    with suppress(TransactionStateError):  # another process has just finished it
        log.queue(compensation, session)


def compensation_id(done: Transaction, attempt: int) -> dict[str, Any]:
    """
    Return the id of an attempt to compensate a transaction, counting from 1.

    It includes the coordinator: after the retention an id may be used again, and the new transaction has its own
    compensations.
    """
    coordinator = {} if done.coordinator is None else {"of": done.coordinator}
    return {"compensates": done.id, **coordinator, **({"attempt": attempt} if attempt > 1 else {})}


def _opposite_fields(done: Transaction) -> dict[str, Any]:
    """Return the fields of a compensating transaction, besides id and state."""
    if "source" not in done.document:
        turned = [
            Part(each.cluster, each.namespace, each.id, each.revert, each.apply, each.revert_require, each.require)
            for each in reversed(done.parts)
        ]
        return {"participants": [part.to_document() for part in turned]}
    document = done.document
    return {
        "source": document["destination"],
        "destination": document["source"],
        "value": document["value"],
        **({"accounts": document["accounts"]} if "accounts" in document else {}),
    }


def _read_attempt(done: Transaction) -> int | None:
    """Return the number of the attempt in a transaction's note, or None."""
    noted = done.document.get("compensatedBy")
    if noted is None:
        return None
    if isinstance(noted, bool) or not isinstance(noted, int):
        raise TransactionStateError(
            f"Transaction {done.id!r} names {noted!r} as its compensation, which is not an attempt. Correct the "
            "document.",
            id=done.id,
        )
    return noted
