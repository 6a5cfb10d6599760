"""
The end of an attempt: another attempt, a commit, or an error. Threads and asyncio share these decisions.

PyMongo's `with_transaction` repeats the body, with pauses, until `pymongo.timeout` ends it. An attempt ends its own
transaction, so an abort has time even after the limit, and functions, blocks and asyncio share the rules for a commit.

| failure | effect |
|---|---|
| write conflict, election, lost connection in the body | aborted, a pause, the body again |
| the answer of the commit is lost | the commit again: the server knows its result |
| the commit finds the transaction gone | a pause, the body again |
| any other error of the body | aborted, the error is raised unchanged |
| a joined call fails, and the body catches the error | aborted; again if it was transient, otherwise TransactionError |
| the same, and the body has ended the transaction | TransactionError |
| a joined call runs when the body returns | aborted, TransactionError |
| a lock is given up, and the body catches the error | aborted, DocumentLockedError is raised anyway |
| the time is used up before a commit is sent | aborted, TransactionTimeoutError with the outcome `aborted` |
| the time is used up while no commit was answered | TransactionTimeoutError with the outcome `unknown` |
| an asyncio task is canceled in the body | aborted, CancelledError is raised |
| the same during the commit | wait for its answer, run callbacks, then raise CancelledError |
| a process that was forked in the body ends it | left to its parent: its own error, or TransactionError |
| the process dies | the server aborts after `transactionLifetimeLimitSeconds`, 60 by default |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pymongo
from pymongo.errors import ClientBulkWriteException, PyMongoError

from mongo_celery.errors import TransactionError, TransactionTimeoutError
from mongo_celery.mongo import verdicts
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.steps import Session
from mongo_celery.mongo.transaction.scopes import TransactionScope

_TRANSIENT = "TransientTransactionError"
_UNKNOWN_RESULT = "UnknownTransactionCommitResult"
_ROUND_TRIP = 0.25
"""Seconds before the deadline: a timeout after that counts as caused by the deadline."""

AFTER_CRASH = (
    "If the process that holds it has crashed, the server aborts its transaction within 1.5 times "
    "transactionLifetimeLimitSeconds (90 s by default). docs/transactions.md has a query that shows open "
    "transactions."
)

_ADVICE = (
    "Pass session= to every operation of the body: a write without it waits for its own transaction. Otherwise "
    f"look for contention, an election, or another transaction that holds a document. {AFTER_CRASH}"
)

_COMMIT_MARGIN = 0.01
"""Seconds that a commit needs in addition to a round trip. With less, PyMongo sends none."""

_PAUSES = Pauses(first=0.005, longest=0.5, growth=1.5, jitter=1.0)
"""The pauses in the drivers' specification, "Convenient API for Transactions"."""

_DRIVER_PAUSES = pymongo.version_tuple >= (4, 17)
"""False for older drivers, which repeat a body without a pause."""


def begin_attempt(scope: TransactionScope) -> float:
    """
    Reset the state of the last attempt. Return the seconds to wait first.

    Raises:
        TransactionTimeoutError: the time is used up.
    """
    scope.reset_attempt()
    if scope.transient_error is None:
        return 0.0
    pause = 0.0 if _DRIVER_PAUSES else _PAUSES.nth(scope.attempts - 2)
    if pause >= scope.remaining:
        raise _make_timeout(scope, None, "aborted") from scope.transient_error
    return pause


def pause_before_commit(scope: TransactionScope, error: PyMongoError, count: int) -> float:
    """
    Return the seconds to wait before a commit is sent again.

    PyMongo knows only a few errors with an unknown result. For example, killOp or killSessions end the wait for the
    majority of a finished commit (Interrupted). If it is sent again, the server reports the result.

    Args:
        scope: the scope of the transaction.
        error: the error of the last commit.
        count: number of earlier pauses.

    Raises:
        PyMongoError: the error, if the commit must not be sent again.
        TransactionTimeoutError: the time is used up, and the result of the commit is unknown.
    """
    if _is_transient(error) or not (error.has_error_label(_UNKNOWN_RESULT) or verdicts.is_transient(error)):
        raise error
    renew_connections(scope.client, error)
    pause = _PAUSES.nth(count)
    is_expired = getattr(error, "code", None) == verdicts.Code.MaxTimeMSExpired  # only the deadline limits a commit
    if is_expired or pause >= scope.remaining:
        raise _make_timeout(scope, error, "unknown") from error
    return pause


def raise_rollback_only(scope: TransactionScope, session: Session) -> None:
    """
    Raise after a body returned if its transaction must not be committed.

    A transaction that the body ended can no longer be aborted. It is not repeated, because it may be committed.
    """
    if scope.is_inherited:
        raise TransactionError(
            "This process was forked inside a transaction and has reached the end of its body. Nothing was "
            "committed here, because only the parent may commit. End the process inside the body, as "
            "multiprocessing does, or fork before the transaction."
        )
    reason, has_ended = scope.rollback_reason, not session.in_transaction
    if reason is None and scope.joined_calls and not has_ended:
        raise TransactionError(
            "The transaction was aborted: its body returned while a joined call (of a generator or another "
            "thread) was still running. End that call first, or make it independent with independent=True."
        )
    if reason is None or (reason is scope.lock_error and has_ended):
        return
    if reason is scope.lock_error or (_is_transient(reason) and not has_ended):
        raise reason
    fact = "The body had ended the transaction" if has_ended else "The transaction was aborted"
    raise TransactionError(
        f"{fact}: a joined call failed, and the body caught its error. Do not catch the error, or make the call "
        f"independent with independent=True. The error was {type(reason).__name__}: {short(reason)}.",
    ) from reason


def needs_commit(scope: TransactionScope, session: Session) -> bool:
    """
    Return True if a commit must be sent. If the body ended the transaction, drop the callbacks.

    Raises:
        TransactionTimeoutError: no commit could be sent any more.
    """
    if not session.in_transaction:
        scope.callbacks.clear()
        return False
    # After PyMongo refuses a commit, it no longer aborts, and the documents would stay locked.
    if scope.remaining < _round_trip(session) + _COMMIT_MARGIN:
        raise _make_timeout(scope, None, "aborted") from scope.transient_error
    return True


def raise_verdict(scope: TransactionScope, error: BaseException) -> None:
    """
    After the abort, replace an attempt's error by a more precise one, or return.

    Raises:
        DocumentLockedError: the attempt gave up a lock.
        PyMongoError: a transient error, with the label that PyMongo needs.
        TransactionTimeoutError: the deadline ended the call.
    """
    raise_lock_error(scope, error)
    renew_connections(scope.client, error)
    is_timeout = isinstance(error, PyMongoError) and error.timeout
    if is_timeout and scope.remaining < _ROUND_TRIP:
        raise _make_timeout(scope, error, "aborted") from error
    if _is_transient(error) or verdicts.is_refused_session(error):
        scope.transient_error = error
        if not isinstance(error, PyMongoError) or not error.has_error_label(_TRANSIENT):
            raise PyMongoError(str(error), [_TRANSIENT]) from error
    elif is_timeout:
        error.add_note(_ADVICE)


def raise_lock_error(scope: TransactionScope, error: BaseException) -> None:
    """Raise the error of a given-up lock. Later commands of the body fail as transient, and so would a repetition."""
    if scope.lock_error is not None and _is_transient(error):
        raise scope.lock_error


@contextmanager
def ending_with_time(scope: TransactionScope) -> Iterator[None]:
    """Raise TransactionTimeoutError if PyMongo has no time to repeat the transaction."""
    try:
        yield
    except PyMongoError as error:
        if not _is_transient(error):
            raise
        raise _make_timeout(scope, None, "aborted") from scope.transient_error


def _is_transient(error: BaseException) -> bool:
    """Return True if MongoDB requests another run of the body."""
    if isinstance(error, ClientBulkWriteException) and isinstance(error.error, PyMongoError):
        error = error.error  # PyMongo hides the label there
    return isinstance(error, PyMongoError) and error.has_error_label(_TRANSIENT)


def _round_trip(session: Session) -> float:
    """Return PyMongo's estimate of a command's round trip in seconds."""
    servers = session.client.topology_description.server_descriptions().values()
    return max((server.min_round_trip_time for server in servers if server.is_writable), default=0.0)


def _make_timeout(scope: TransactionScope, error: BaseException | None, outcome: str) -> TransactionTimeoutError:
    ending = "was aborted" if outcome == "aborted" else "may or may not be committed, because the server did not answer"
    # The last attempt may only have had time to time out. Earlier errors are the reason.
    met = dict.fromkeys(short(each) for each in (scope.transient_error, error) if each is not None)
    reason = (
        f"The last errors were: {'; '.join(met)}. {_ADVICE}" if met else "Shorten the body, or give a larger timeout=."
    )
    return TransactionTimeoutError(
        f"The transaction could not be finished in time. It {ending}. {reason}", outcome=outcome
    )
