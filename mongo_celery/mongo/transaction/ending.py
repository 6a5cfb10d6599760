"""
What an error means for a transaction: once more, or the end. Decided in one place for threads and for asyncio.

| failure | what happens |
|---|---|
| write conflict, election, lost connection in the body | aborted, a pause, the body again |
| the answer of the commit is lost | the commit again: the server knows whether it was done |
| the commit finds the transaction gone | a pause, the body again |
| any other error of the body | aborted, the error passes through unchanged |
| a part that has joined fails, and the body catches that | aborted; again if it was transient, else TransactionError |
| the same, and the transaction was ended in the body, too | TransactionError |
| a part has not ended when the body returns | aborted, TransactionError |
| a lock is given up, and the body catches that | aborted, the DocumentLockedError all the same |
| the time is used up before a commit is tried | aborted, TransactionTimeoutError with the outcome `aborted` |
| the time is used up while no commit was answered | TransactionTimeoutError with the outcome `unknown` |
| a process that was forked in the body comes to its end | left to its parent; its own error, or TransactionError |
| an asyncio task is canceled in the body | aborted, the CancelledError passes |
| the same during the commit | its answer is waited for, callbacks run, and then the CancelledError passes |
| the process dies | the server aborts after `transactionLifetimeLimitSeconds`, 60 by default |
"""

from __future__ import annotations

import contextvars

from pymongo.errors import ClientBulkWriteException, PyMongoError

from mongo_celery.errors import TransactionError, TransactionTimeoutError
from mongo_celery.mongo import verdicts
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction.frames import Frame, Session

ABORT_SECONDS = 2.0
"""An abort's own time, also where that of the transaction is used up: one that is not aborted keeps its documents."""

_TRANSIENT = "TransientTransactionError"
_UNKNOWN_RESULT = "UnknownTransactionCommitResult"
_ROUND_TRIP = 0.25
"""Seconds before the deadline from which on a call that timed out did so because of the deadline."""

_SESSIONLESS = (
    "The likeliest cause is a write without session= in the body: it waits for a document that its own transaction has "
    "locked. Pass session= to every operation."
)

_COMMIT_MARGIN = 0.01
"""Seconds, beside a round trip, that must be left for a commit: PyMongo sends none for which there is no time."""


def pause_before_body(frame: Frame, error: BaseException) -> float | None:
    """
    Seconds to wait before the body is run again, after an attempt that was aborted; None if its error is to pass.

    Raises:
        DocumentLockedError: a lock was given up in it.
        TransactionTimeoutError: the time is used up.
    """
    raise_locked(frame, error)
    renew_connections(frame.client, error)
    if _is_transient(error) or verdicts.is_refused_session(error):
        return _pause(frame, error, "aborted")
    raise_timed_out(frame, error)
    return None


def pause_before_commit(frame: Frame, error: PyMongoError) -> float | None:
    """
    Seconds to wait before a commit is tried again; None if its error is to pass. Labelled transient: not committed.

    PyMongo knows a few errors after which the result is unknown. There are more: a commit whose wait for the majority
    is ended by killOp or killSessions (Interrupted, beside what *is* committed). Sent again, the server says how it is.

    Raises:
        TransactionTimeoutError: the time is used up, and what became of the commit is unknown.
    """
    if _is_transient(error) or not (_has_label(error, _UNKNOWN_RESULT) or verdicts.is_transient(error)):
        return None
    renew_connections(frame.client, error)
    if getattr(error, "code", None) == verdicts.Code.MaxTimeMSExpired:  # only the deadline limits a commit
        raise _timed_out(frame, error, "unknown") from error
    return _pause(frame, error, "unknown")


def doom_of(frame: Frame, session: Session) -> BaseException | None:
    """
    The error by which a transaction ends whose body has returned, though a part has failed or goes on; else None.

    One that was ended in the body cannot be aborted any more, nor may it be repeated: it may be committed.
    """
    doom, is_ended = frame.doom, not session.in_transaction
    if frame.is_inherited:
        return TransactionError(
            "A forked process has come to the end of a transaction that its parent has begun: it is the parent's to "
            "commit. End the process inside, as multiprocessing does, or fork it before."
        )
    if doom is None and frame.parts and not is_ended:
        return TransactionError(
            "The transaction was aborted: a part of it, as of a generator or another thread, had not ended when its "
            "body returned. Have the part end first, or give it a transaction of its own, with own=True."
        )
    if doom is None:
        return None
    if doom is frame.locked:
        return None if is_ended else doom
    if _is_transient(doom) and not is_ended:
        return doom
    what = "The transaction had been ended in its body" if is_ended else "The transaction was aborted"
    ended = TransactionError(
        f"{what}: a part of it had failed, and the error was caught inside. Let it pass; or give the part a "
        f"transaction of its own, with own=True. The error was {type(doom).__name__}: {short(doom)}.",
    )
    ended.__cause__ = doom
    return ended


def check_time(frame: Frame, session: Session) -> None:
    """Raise TransactionTimeoutError where no commit could be sent any more; the transaction is to be aborted then."""
    # Once PyMongo has refused a commit, it aborts no more, and the documents would stay locked.
    if frame.remaining < _round_trip(session) + _COMMIT_MARGIN:
        raise _timed_out(frame, None, "aborted") from frame.transient


def note_waiting(error: BaseException) -> None:
    """Name the likeliest cause in an error that passes, where a call has waited for its time."""
    if isinstance(error, PyMongoError) and error.timeout:
        error.add_note(_SESSIONLESS)


def raise_timed_out(frame: Frame, error: BaseException) -> None:
    """Raise TransactionTimeoutError for a call that the deadline has ended; the transaction is aborted by then."""
    if isinstance(error, PyMongoError) and error.timeout and frame.remaining < _ROUND_TRIP:
        raise _timed_out(frame, error, "aborted") from error


def raise_locked(frame: Frame, error: BaseException) -> None:
    """After a lock was given up, what the body sent fails as if to be repeated, and would only meet the lock again."""
    if frame.locked is not None and _is_transient(error):
        raise frame.locked


def _is_transient(error: BaseException) -> bool:
    """Whether MongoDB asks for the body to be run again."""
    return _has_label(error, _TRANSIENT)


def _pause(frame: Frame, error: BaseException, outcome: str) -> float:
    pause = frame.next_pause()
    if pause >= frame.remaining:
        raise _timed_out(frame, error, outcome) from error
    frame.transient = error
    return pause


def _round_trip(session: Session) -> float:
    """Seconds that PyMongo takes a command to need for its way."""
    servers = session.client.topology_description.server_descriptions().values()
    return max((server.min_round_trip_time for server in servers if server.is_writable), default=0.0)


def _has_label(error: BaseException, label: str) -> bool:
    if isinstance(error, ClientBulkWriteException) and isinstance(error.error, PyMongoError):
        error = error.error
    return isinstance(error, PyMongoError) and error.has_error_label(label)


def _timed_out(frame: Frame, error: BaseException | None, outcome: str) -> TransactionTimeoutError:
    ending = "was aborted" if outcome == "aborted" else "may or may not be committed: no commit was answered"
    # A last attempt may have no time but to time out; what the ones before it met is the reason.
    met = dict.fromkeys(short(each) for each in (frame.transient, error) if each is not None)
    reasons = []
    if error is None:
        reasons.append(
            "When its body returned, no time was left to commit. Shorten the body, or give a larger timeout=."
        )
    if met:
        reasons.append(f"The last errors were: {'; '.join(met)}.")
    if outcome == "aborted" and isinstance(error, PyMongoError) and error.timeout:
        reasons.append(_SESSIONLESS)
    if met:
        reasons.append("Otherwise look for a holder that stands still, for contention, or for an election.")
    if outcome == "aborted" and (found := _suspects(frame)):
        reasons.append(found)
    return TransactionTimeoutError(
        f"The time for repeating the transaction is used up; it {ending}. {' '.join(reasons)}",
        outcome=outcome,
    )


def _suspects(frame: Frame) -> str:
    """Who may hold what its last lock was refused, in words; asked in a context whose time is not used up."""
    session = frame.reference()
    if frame.suspects is None or session is None:
        return ""
    return contextvars.Context().run(frame.suspects, session).strip()
