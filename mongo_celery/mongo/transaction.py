"""
Transactions that repeat themselves: the drivers' callback API with a stated limit.

The loop is that of `withTransaction` in MongoDB's specifications ("Convenient API for Transactions"): an error
labelled TransientTransactionError repeats the body, an unknown result of the commit repeats the commit, and
whatever else the body raises ends the transaction and passes through. PyMongo's own has a fixed limit of 120
seconds that does not bound a call to a server that hangs; here the limit is the caller's, and bounds those too.

| failure | what happens |
|---|---|
| write conflict, election, lost connection in the body | aborted, a pause, the body again |
| the answer of the commit is lost | the commit again: the server knows whether it was done |
| the commit finds the transaction gone | a pause, the body again |
| any other error of the body | aborted, the error passes through unchanged |
| a lock is given up, and the body catches that | aborted, the DocumentLockedError all the same |
| the time is used up before a commit is tried | aborted, TransactionTimeoutError with the outcome `aborted` |
| the time is used up while no commit was answered | TransactionTimeoutError with the outcome `unknown` |
| the process dies | the server aborts after `transactionLifetimeLimitSeconds`, 60 by default |
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import pymongo
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import ClientBulkWriteException, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.arguments import Duration, positive
from mongo_celery.errors import ConfigurationError, TransactionTimeoutError
from mongo_celery.mongo.attempts import Attempts, attempts_of, remembered
from mongo_celery.mongo.opening import Client, client_of
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Code, refuse_standalone, standalone_refused

Result = TypeVar("Result")

TIMEOUT = 120.0
"""Seconds for which a transaction is repeated by default, as long as the drivers' own."""

_TRANSIENT = "TransientTransactionError"
_UNKNOWN_RESULT = "UnknownTransactionCommitResult"
_ABORT_SECONDS = 2.0
_ROUND_TRIP = 0.25
"""Seconds before the deadline from which on a call that timed out did so because of the deadline."""

_COMMIT_MARGIN = 0.01
"""Seconds, beside a round trip, that must be left for a commit: PyMongo sends none for which there is no time."""


class _HasSignature(Protocol):
    __signature__: inspect.Signature
    __wrapped__: object


class Collects(Protocol):
    """What gathers, while the body runs, what is to be written just before the commit: an `OutboxCollection`."""

    def collect(self, session: ClientSession) -> AbstractContextManager[object]:
        """Gather inside; it is written when the block ends, in the session's transaction unless that has ended."""


def hide_session(call: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give a wrapper the signature of its function without `session`: Celery checks a task's arguments against it."""
    shown = cast("_HasSignature", call)
    visible = [each for name, each in signature.parameters.items() if name != "session"]
    shown.__signature__ = signature.replace(parameters=visible)
    del shown.__wrapped__


def after_commit(session: ClientSession, callback: Callable[[], object]) -> bool:
    """
    Run something once a transaction has been committed.

    It is called once, outside the transaction and without its time limit. It is dropped if the transaction is
    aborted, if its body is repeated (which registers it again), and if the body ends the transaction itself. What
    it raises is logged. Not promised: that it is called at all, if the process dies after the commit.

    Args:
        session: of the transaction.
        callback: without arguments.

    Returns:
        Whether `transactional` runs this transaction; if not, the callback will never be called.
    """
    attempts = attempts_of(session)
    if attempts is None:
        return False
    attempts.callbacks.append(callback)
    return True


class transactional:  # noqa: N801 - a decorator and context manager, used like a function
    """
    Run a function in a transaction, repeated as long as MongoDB asks for it.

    As a decorator: the function is called with `session=`, and must pass it to every operation. Afterwards its
    writes are committed by a majority, all or none, and its return value is returned. Its body may run several
    times, so whatever else it does must bear repetition (see `after_commit`). Errors that are not MongoDB's
    abort the transaction and pass through, Celery's `Retry` too. If the caller passes the `session` of a
    transaction in progress, the function joins that one: whoever began it repeats and commits.

    ::

        @app.task(autoretry_for=(ConnectionError,))     # outside: it must not see transient errors
        @transactional(lambda: bridge.client)
        def book(seat, *, session): ...

    As a context manager, `with transactional(client) as session:`, a body cannot be repeated: a commit whose
    result is unknown is, but transient errors pass to the caller with their labels.

    One object serves any number of calls, threads and functions.

    A `DocumentLockedError` is to be caught outside: the server has aborted the transaction by then. If the body
    catches it and returns, or goes on with the session, the transaction ends with that error all the same.

    Args:
        client: the client, or a callable that returns it (prefork workers make theirs after the fork).
        timeout: seconds or `timedelta` for all attempts; no attempt begins later, and no call to a server inside
            lasts longer, by whatever client. Code that calls no server is not interrupted; if the time is used up
            when the body returns, the transaction is aborted instead of committed. An abort has up to 2 s of its
            own: a transaction that is not aborted keeps its documents locked. A shorter `pymongo.timeout` of the
            caller's ends the calls earlier, but is not known here: a commit that it forbids is `unknown`.
        read_concern: by default snapshot.
        write_concern: by default majority.
        read_preference: by default the primary.
        outbox: an `OutboxCollection`: what the body sends with `delay` and its like is then stored by the transaction,
            and dispatched after its commit; see its `collect`.

    Raises:
        ConfigurationError: it decorates what it cannot run, such as a Celery task.
        TransactionTimeoutError: from the call, when the time is used up. Its attribute `outcome` is `aborted`, or
            `unknown` when a commit was tried and not answered: it may be done, or may never have been sent, and
            then the documents stay locked until the server ends the transaction.
        DocumentLockedError: from the call, when the body caught that of a lock inside.
        TopologyError: from the call, on a standalone server.
    """

    def __init__(
        self,
        client: Client,
        *,
        timeout: Duration = TIMEOUT,
        read_concern: ReadConcern | None = None,
        write_concern: WriteConcern | None = None,
        read_preference: Any = None,
        outbox: Collects | None = None,
    ) -> None:
        if not isinstance(client, MongoClient) and not callable(client):
            raise ConfigurationError(
                f"transactional needs a MongoClient, or a callable that returns one, not {type(client).__name__}.",
            )
        if outbox is not None and not hasattr(outbox, "collect"):
            raise ConfigurationError(
                f"transactional(outbox=...) needs an OutboxCollection, not {type(outbox).__name__}; an Outbox stores "
                "tasks in the documents that it writes.",
            )
        self._outbox = outbox
        self._client = client
        self._timeout = positive(timeout, "timeout")
        self._options: dict[str, Any] = {
            "read_concern": read_concern or ReadConcern("snapshot"),
            "write_concern": write_concern or WriteConcern("majority"),
            "read_preference": read_preference or ReadPreference.PRIMARY,
        }
        self._entered = threading.local()

    def __call__(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Decorate a function."""
        _refuse(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            given = kwargs.pop("session", None)
            if given is not None and given.in_transaction:
                with self._collecting(given):
                    return function(*args, session=given, **kwargs)
            return self.run(lambda session: function(*args, session=session, **kwargs), session=given)

        hide_session(call, inspect.signature(function))
        return call

    def run(self, body: Callable[[ClientSession], Result], *, session: ClientSession | None = None) -> Result:
        """
        Run a body in a transaction, as the decorator does.

        Args:
            body: called with the session, maybe several times.
            session: to use; by default one is made.

        Returns:
            What the body has returned in the attempt that was committed.
        """
        with ExitStack() as stack:
            if session is None:
                session = stack.enter_context(client_of(self._client).start_session())
            attempts = self._begin(stack, session)
            result = self._repeat(session, attempts, body)
        attempts.run_callbacks()
        return result

    def __enter__(self) -> ClientSession:
        with ExitStack() as stack:
            session = stack.enter_context(client_of(self._client).start_session())
            attempts = self._begin(stack, session)
            session.start_transaction(**self._options)
            collecting = ExitStack()
            collecting.enter_context(self._collecting(session))
            entered = self._entered.__dict__.setdefault("stack", [])
            entered.append((stack.pop_all(), collecting, session, attempts))
        return session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack, collecting, session, attempts = self._entered.stack.pop()
        with stack:
            if error is not None:
                _abort(session)  # before the box is closed: what is in it is dropped
            try:
                collecting.__exit__(kind, error, traceback)
            except BaseException:
                _abort(session)
                raise
            if error is not None:
                refuse_standalone(error)
                _raise_locked(attempts, error)
                return
            if session.in_transaction:
                _check_committable(session, attempts)
                _commit(session, attempts)
            else:
                attempts.callbacks.clear()
        attempts.run_callbacks()

    def _collecting(self, session: ClientSession) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._outbox is None else self._outbox.collect(session)

    def _begin(self, stack: ExitStack, session: ClientSession) -> Attempts:
        attempts = Attempts(time.monotonic() + self._timeout)
        stack.enter_context(remembered(session, attempts))
        stack.enter_context(pymongo.timeout(self._timeout))
        return attempts

    def _repeat(self, session: ClientSession, attempts: Attempts, body: Callable[[ClientSession], Result]) -> Result:
        while True:
            attempts.begin()
            session.start_transaction(**self._options)
            try:
                with standalone_refused(), self._collecting(session), _aborted_by_errors(session):
                    result = body(session)
            except BaseException as error:
                _abort(session)
                _raise_locked(attempts, error)
                if not _has_label(error, _TRANSIENT):
                    if isinstance(error, PyMongoError) and error.timeout and attempts.remaining < _ROUND_TRIP:
                        raise _timed_out(attempts, error, "aborted") from error
                    raise
                _pause(attempts, error, "aborted")
                continue
            if not session.in_transaction:
                attempts.callbacks.clear()  # the body has ended the transaction itself; who knows how
                return result
            _check_committable(session, attempts)
            try:
                _commit(session, attempts)
            except PyMongoError as error:
                if not _has_label(error, _TRANSIENT):
                    raise
                _pause(attempts, error, "aborted")
                continue
            return result


def _raise_locked(attempts: Attempts, error: BaseException) -> None:
    """After a lock was given up, what the body sent fails as if to be repeated, and would only meet the lock again."""
    if attempts.locked is not None and _has_label(error, _TRANSIENT):
        raise attempts.locked


def _check_committable(session: ClientSession, attempts: Attempts) -> None:
    """Abort, and raise, where a first commit could not succeed."""
    if attempts.locked is not None:
        _abort(session)
        raise attempts.locked
    # Once PyMongo has refused a commit, it aborts no more, and the documents would stay locked.
    if attempts.remaining < _round_trip(session) + _COMMIT_MARGIN:
        _abort(session)
        raise _timed_out(attempts, None, "aborted") from attempts.transient


def _round_trip(session: ClientSession) -> float:
    """Seconds that PyMongo takes a command to need for its way."""
    servers = session.client.topology_description.server_descriptions().values()
    return max((server.min_round_trip_time for server in servers if server.is_writable), default=0.0)


def _commit(session: ClientSession, attempts: Attempts) -> None:
    """Commit, again and again while the result is unknown. An error labelled as transient means: not committed."""
    while True:
        try:
            session.commit_transaction()
        except PyMongoError as error:
            if not _has_label(error, _UNKNOWN_RESULT):
                raise
            if getattr(error, "code", None) == Code.MaxTimeMSExpired:  # only the deadline limits a commit
                raise _timed_out(attempts, error, "unknown") from error
            _pause(attempts, error, "unknown")
        else:
            return


def _pause(attempts: Attempts, error: BaseException, outcome: str) -> None:
    """Wait before the next attempt; TransactionTimeoutError if it would begin too late."""
    pause = attempts.next_pause()
    if pause >= attempts.remaining:
        raise _timed_out(attempts, error, outcome) from error
    attempts.transient = error
    threading.Event().wait(pause)


def _abort(session: ClientSession) -> None:
    """Free what is locked, as far as the server can be reached; else it does so itself after a while."""
    if session.in_transaction:
        # In a context of its own: a time limit that has passed must not keep the abort from the server.
        contextvars.Context().run(_abort_within_its_time, session)


@contextlib.contextmanager
def _aborted_by_errors(session: ClientSession) -> Iterator[None]:
    """Inside a box: what is sent in a body that fails is dropped, and need not be written for a commit."""
    try:
        yield
    except BaseException:
        _abort(session)
        raise


def _abort_within_its_time(session: ClientSession) -> None:
    with pymongo.timeout(_ABORT_SECONDS), contextlib.suppress(PyMongoError):
        session.abort_transaction()


def _has_label(error: BaseException, label: str) -> bool:
    if isinstance(error, ClientBulkWriteException) and isinstance(error.error, PyMongoError):
        error = error.error
    return isinstance(error, PyMongoError) and error.has_error_label(label)


def _timed_out(attempts: Attempts, error: BaseException | None, outcome: str) -> TransactionTimeoutError:
    ending = "was aborted" if outcome == "aborted" else "may or may not be committed: no commit was answered"
    # A last attempt may have no time but to time out; what the ones before it met is the reason.
    met = dict.fromkeys(short(each) for each in (attempts.transient, error) if each is not None)
    reasons = []
    if error is None:
        reasons.append(
            "When its body returned, no time was left to commit. Shorten the body, or give a larger timeout=."
        )
    if met:
        reasons.append(
            f"The last errors were: {'; '.join(met)}. Look for a holder that stands still, for contention, or for an "
            "election; then try again.",
        )
    return TransactionTimeoutError(
        f"The time for repeating the transaction is used up; it {ending}. {' '.join(reasons)}",
        outcome=outcome,
    )


def _refuse(function: object) -> None:
    if hasattr(function, "apply_async"):
        raise ConfigurationError(
            "transactional stands on a Celery task; put it below, on the function: @app.task(...), then "
            "@transactional(client). Else autoretry_for would take the transient errors before they are repeated here.",
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"transactional needs a function, not {type(function).__name__}.")
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise ConfigurationError("transactional runs plain functions; neither coroutines nor generators.")
    parameters = inspect.signature(function).parameters
    named = parameters.get("session")
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not takes_any and (named is None or named.kind is named.POSITIONAL_ONLY):
        raise ConfigurationError(
            f"{getattr(function, '__name__', 'the function')} must take session=, and pass it to every operation.",
        )
