"""
The end of an attempt: another attempt, a commit, or an error. Decided in one place for threads and for asyncio.

PyMongo's `with_transaction` repeats the body, and pauses, until `pymongo.timeout` ends it. An attempt ends its own
transaction: an abort has time also after the limit, and a commit has one judge for functions, blocks and asyncio.

| failure | effect |
|---|---|
| write conflict, election, lost connection in the body | aborted, a pause, the body again |
| the answer of the commit is lost | the commit again: the server knows if it was done |
| the commit finds the transaction gone | a pause, the body again |
| any other error of the body | aborted, the error passes through unchanged |
| a joined call fails, and the body catches that | aborted; again if it was transient, else TransactionError |
| the same, and the body has ended the transaction | TransactionError |
| a joined call runs when the body returns | aborted, TransactionError |
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
from collections.abc import Iterator
from contextlib import contextmanager

import pymongo
from pymongo.errors import ClientBulkWriteException, PyMongoError

from mongo_celery.errors import TransactionError, TransactionTimeoutError
from mongo_celery.mongo import verdicts
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction.scopes import Session, TransactionScope

_TRANSIENT = "TransientTransactionError"
_UNKNOWN_RESULT = "UnknownTransactionCommitResult"
_ROUND_TRIP = 0.25
"""Seconds before the deadline from which on a call that timed out did so because of the deadline."""

_SESSIONLESS = (
    "The likeliest cause is a write without session= in the body: it waits for a document that its own transaction has "
    "locked. Pass session= to every operation."
)

_COMMIT_MARGIN = 0.01
"""Seconds, beside a round trip, that a commit needs: PyMongo sends none without them."""

_DRIVER_PAUSES = pymongo.version_tuple >= (4, 17)
"""Older drivers repeat a body without a pause."""


def begin_attempt(scope: TransactionScope) -> float:
    """
    Forget the attempt before; return the seconds to wait first.

    Raises:
        TransactionTimeoutError: the time is used up.
    """
    scope.reset_attempt()
    if scope.transient_error is None:
        return 0.0
    pause = 0.0 if _DRIVER_PAUSES else scope.next_pause()
    if pause >= scope.remaining:
        raise _timed_out(scope, None, "aborted") from scope.transient_error
    return pause


def pause_before_commit(scope: TransactionScope, error: PyMongoError) -> float:
    """
    Return the seconds to wait before a commit is sent again.

    PyMongo knows a few errors that leave the result unknown. There are more: killOp or killSessions end the wait for
    the majority of a commit that is done (Interrupted). Sent again, the server tells the result.

    Raises:
        PyMongoError: the error, if the commit is not to be sent again.
        TransactionTimeoutError: the time is used up, and the result of the commit is unknown.
    """
    if _is_transient(error) or not (error.has_error_label(_UNKNOWN_RESULT) or verdicts.is_transient(error)):
        raise error
    renew_connections(scope.client, error)
    pause = scope.next_pause()
    is_expired = getattr(error, "code", None) == verdicts.Code.MaxTimeMSExpired  # only the deadline limits a commit
    if is_expired or pause >= scope.remaining:
        raise _timed_out(scope, error, "unknown") from error
    return pause


def raise_rollback_only(scope: TransactionScope, session: Session) -> None:
    """
    Raise if a body returned whose transaction is not to be committed.

    A transaction that ended in the body cannot be aborted any more. It is not repeated: it may be committed.
    """
    reason, has_ended = scope.rollback_reason, not session.in_transaction
    if scope.is_inherited:
        raise TransactionError(
            "A forked process has reached the end of a transaction that its parent began. Only the parent may commit "
            "it. End the process inside the body, as multiprocessing does, or fork it before."
        )
    if reason is None and scope.joined_calls and not has_ended:
        raise TransactionError(
            "The transaction was aborted: a joined call (of a generator or another thread) was still running when its "
            "body returned. End that call first, or make it independent with own=True."
        )
    if reason is None or (reason is scope.lock_error and has_ended):
        return
    if reason is scope.lock_error or (_is_transient(reason) and not has_ended):
        raise reason
    fact = "The body had ended the transaction" if has_ended else "The transaction was aborted"
    raise TransactionError(
        f"{fact}: a joined call failed, and the body caught its error. Let the error pass, or make the call "
        f"independent with own=True. The error was {type(reason).__name__}: {short(reason)}.",
    ) from reason


def check_time(scope: TransactionScope, session: Session) -> None:
    """Raise TransactionTimeoutError if no commit could be sent any more; the transaction is to be aborted then."""
    # Once PyMongo has refused a commit, it aborts no more, and the documents would stay locked.
    if scope.remaining < _round_trip(session) + _COMMIT_MARGIN:
        raise _timed_out(scope, None, "aborted") from scope.transient_error


def raise_verdict(scope: TransactionScope, error: BaseException) -> None:
    """
    Raise in place of an attempt's error, after its abort, what names it better; else return, and it passes.

    Raises:
        DocumentLockedError: a lock was given up in it.
        PyMongoError: a transient error with the label that PyMongo misses on it.
        TransactionTimeoutError: the deadline has ended the call.
    """
    raise_lock_error(scope, error)
    renew_connections(scope.client, error)
    is_timeout = isinstance(error, PyMongoError) and error.timeout
    if is_timeout and scope.remaining < _ROUND_TRIP:
        raise _timed_out(scope, error, "aborted") from error
    if _is_transient(error) or verdicts.is_refused_session(error):
        scope.transient_error = error
        if not isinstance(error, PyMongoError) or not error.has_error_label(_TRANSIENT):
            raise PyMongoError(str(error), [_TRANSIENT]) from error
    elif is_timeout:
        error.add_note(_SESSIONLESS)


def raise_lock_error(scope: TransactionScope, error: BaseException) -> None:
    """Raise the error of a given-up lock: what the body sent after it fails as transient, and would meet it again."""
    if scope.lock_error is not None and _is_transient(error):
        raise scope.lock_error


@contextmanager
def ending_with_time(scope: TransactionScope) -> Iterator[None]:
    """Raise TransactionTimeoutError if PyMongo has no time to repeat the block's transaction."""
    try:
        yield
    except PyMongoError as error:
        if not _is_transient(error):
            raise
        raise _timed_out(scope, None, "aborted") from scope.transient_error


def _is_transient(error: BaseException) -> bool:
    """Return True if MongoDB asks for the body to be run again."""
    if isinstance(error, ClientBulkWriteException) and isinstance(error.error, PyMongoError):
        error = error.error  # PyMongo hides the label there
    return isinstance(error, PyMongoError) and error.has_error_label(_TRANSIENT)


def _round_trip(session: Session) -> float:
    """Return the seconds that PyMongo takes a command to need for its way."""
    servers = session.client.topology_description.server_descriptions().values()
    return max((server.min_round_trip_time for server in servers if server.is_writable), default=0.0)


def _timed_out(scope: TransactionScope, error: BaseException | None, outcome: str) -> TransactionTimeoutError:
    ending = "was aborted" if outcome == "aborted" else "may or may not be committed: no commit was answered"
    # A last attempt may have no time but to time out; the errors of those before it are the reason.
    met = dict.fromkeys(short(each) for each in (scope.transient_error, error) if each is not None)
    reasons = []
    if not met:
        reasons.append("The body took all of it. Shorten the body, or give a larger timeout=.")
    else:
        reasons.append(f"The last errors were: {'; '.join(met)}.")
    if outcome == "aborted" and isinstance(error, PyMongoError) and error.timeout:
        reasons.append(_SESSIONLESS)
    if met:
        reasons.append("Otherwise look for a holder that stands still, for contention, or for an election.")
    session = scope.reference()
    if outcome == "aborted" and scope.describe_holders is not None and session is not None:
        # In a context of its own: the time of this one is used up.
        reasons.append(contextvars.Context().run(scope.describe_holders, session).strip())
    return TransactionTimeoutError(
        f"The time for repeating the transaction is used up; it {ending}. {' '.join(filter(None, reasons))}",
        outcome=outcome,
    )
