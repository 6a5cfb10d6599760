"""
Transactions that repeat themselves: the drivers' callback API with a stated limit.

The loop is that of `withTransaction` in MongoDB's specifications ("Convenient API for Transactions"): an error
labelled TransientTransactionError repeats the body, an unknown result of the commit repeats the commit, and
whatever else the body raises ends the transaction and passes through. PyMongo's own has a fixed limit of 120
seconds that does not bound a call to a server that hangs; here the limit is the caller's, and bounds those too.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import pymongo
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import ConfigurationError, TopologyError, TransactionTimeoutError
from mongo_celery.locking.attempts import Attempts, attempts_of, begin
from mongo_celery.options import seconds
from mongo_celery.redaction import short

Client = MongoClient[Any] | Callable[[], MongoClient[Any]]
Result = TypeVar("Result")

TIMEOUT = 120.0
"""Seconds for which a transaction is repeated by default, as long as the drivers' own."""

_TRANSIENT = "TransientTransactionError"
_UNKNOWN_RESULT = "UnknownTransactionCommitResult"
_MAX_TIME_EXPIRED = 50
_NO_TRANSACTIONS = {20, 263}  # IllegalOperation on a standalone; OperationNotSupportedInTransaction


def after_commit(session: ClientSession, callback: Callable[[], object]) -> bool:
    """
    Run something once a transaction has been committed.

    It is dropped if the transaction is aborted, and if its body is repeated (which registers it again). What it
    raises is logged.

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
    times, so whatever else it does must bear repetition. If the caller passes the `session` of a transaction in
    progress, the function joins that one.

    ::

        @app.task(autoretry_for=(ConnectionError,))     # outside: it must not see transient errors
        @transactional(lambda: bridge.client)
        def book(seat, *, session): ...

    As a context manager, `with transactional(client) as session:`, a body cannot be repeated: a commit whose
    result is unknown is, but transient errors of the body pass to the caller with their labels.

    Args:
        client: the client, or a callable that returns it (prefork workers make theirs after the fork).
        timeout: seconds or `timedelta`; no attempt begins later, and no call to the server lasts longer.
        read_concern: by default snapshot.
        write_concern: by default majority.
        read_preference: by default the primary.

    Raises:
        ConfigurationError: it decorates what it cannot run, such as a Celery task.
        TransactionTimeoutError: from the call, when the time is used up. Its attribute `outcome` is `aborted`, or
            `unknown` when a commit was sent and not answered.
        TopologyError: from the call, on a standalone server.
    """

    def __init__(
        self,
        client: Client,
        *,
        timeout: float | timedelta = TIMEOUT,
        read_concern: ReadConcern | None = None,
        write_concern: WriteConcern | None = None,
        read_preference: Any = None,
    ) -> None:
        if not isinstance(client, MongoClient) and not callable(client):
            raise ConfigurationError(
                f"transactional needs a MongoClient, or a callable that returns one, not {type(client).__name__}.",
            )
        self._client = client
        self._timeout = seconds(timeout, "timeout")
        if self._timeout <= 0:
            raise ConfigurationError(f"timeout={timeout!r} must be more than 0 seconds.")
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
                return function(*args, session=given, **kwargs)
            return self.run(lambda session: function(*args, session=session, **kwargs), session=given)

        # Celery checks a task's arguments against the signature, where the session has no place.
        signature = inspect.signature(function)
        visible = [each for name, each in signature.parameters.items() if name != "session"]
        shown = cast("_HasSignature", call)
        shown.__signature__ = signature.replace(parameters=visible)
        del shown.__wrapped__
        return call

    def run(self, body: Callable[[ClientSession], Result], *, session: ClientSession | None = None) -> Result:
        """
        Run a body in a transaction, as the decorator does.

        Args:
            body: called with the session, maybe several times.
            session: to use; by default one is made.
        """
        with ExitStack() as stack:
            if session is None:
                session = stack.enter_context(self._open().start_session())
            attempts = Attempts(time.monotonic() + self._timeout)
            begin(session, attempts)
            stack.enter_context(pymongo.timeout(self._timeout))
            result = self._repeat(session, attempts, body)
        attempts.run_callbacks()
        return result

    def __enter__(self) -> ClientSession:
        stack = ExitStack()
        try:
            session = stack.enter_context(self._open().start_session())
            attempts = Attempts(time.monotonic() + self._timeout)
            begin(session, attempts)
            session.start_transaction(**self._options)
        except BaseException:
            stack.close()
            raise
        entered = self._entered.__dict__.setdefault("stack", [])
        entered.append((stack, session, attempts))
        return session

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        stack, session, attempts = self._entered.stack.pop()
        with stack:
            if error is not None:
                _abort(session)
                _explain_topology(error)
                return
            if session.in_transaction:
                with pymongo.timeout(max(attempts.remaining, 0.001)), _explained():
                    self._commit(session, attempts)
        attempts.run_callbacks()

    def _open(self) -> MongoClient[Any]:
        return self._client if isinstance(self._client, MongoClient) else self._client()

    def _repeat(self, session: ClientSession, attempts: Attempts, body: Callable[[ClientSession], Result]) -> Result:
        while True:
            attempts.callbacks.clear()
            session.start_transaction(**self._options)
            try:
                with _explained():
                    result = body(session)
            except BaseException as error:
                _abort(session)
                if not _has_label(error, _TRANSIENT):
                    if isinstance(error, PyMongoError) and attempts.remaining <= 0:
                        raise _timed_out(error, "aborted") from error
                    raise
                self._wait(attempts, cast("PyMongoError", error))
                continue
            if not session.in_transaction:
                return result  # the body has ended the transaction itself
            try:
                self._commit(session, attempts)
            except PyMongoError as error:
                if not _has_label(error, _TRANSIENT):
                    raise
                self._wait(attempts, error)
                continue
            return result

    def _commit(self, session: ClientSession, attempts: Attempts) -> None:
        """Commit, again and again while the result is unknown."""
        while True:
            try:
                session.commit_transaction()
            except PyMongoError as error:
                expired = getattr(error, "code", None) == _MAX_TIME_EXPIRED
                if _has_label(error, _TRANSIENT) and not _has_label(error, _UNKNOWN_RESULT):
                    raise
                if not _has_label(error, _UNKNOWN_RESULT) and attempts.remaining > 0:
                    raise
                if attempts.remaining <= 0 or expired:
                    raise _timed_out(error, "unknown") from error
                _pause(attempts)
            else:
                return

    @staticmethod
    def _wait(attempts: Attempts, error: PyMongoError) -> None:
        pause = attempts.next_pause()
        if pause >= attempts.remaining:
            raise _timed_out(error, "aborted") from error
        _sleep(pause)


class _HasSignature(Protocol):
    __signature__: inspect.Signature
    __wrapped__: object


def _pause(attempts: Attempts) -> None:
    _sleep(min(attempts.next_pause(), max(attempts.remaining, 0.0)))


def _sleep(pause: float) -> None:
    threading.Event().wait(pause)


def _has_label(error: BaseException, label: str) -> bool:
    return isinstance(error, PyMongoError) and error.has_error_label(label)


def _timed_out(error: PyMongoError, outcome: str) -> TransactionTimeoutError:
    ending = "was aborted" if outcome == "aborted" else "may or may not be committed: no commit was answered"
    return TransactionTimeoutError(
        f"The time for repeating the transaction is used up; it {ending}. The last error was: {short(error)}. Look for "
        "a holder that stands still, for contention, or for an election; then try again.",
        outcome=outcome,
    )


def _abort(session: ClientSession) -> None:
    if session.in_transaction:
        session.abort_transaction()  # PyMongo ignores what the server says to it


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OperationFailure as error:
        _explain_topology(error)
        raise


def _explain_topology(error: BaseException) -> None:
    """A standalone server refuses the first operation of a transaction; say what to do instead."""
    if isinstance(error, OperationFailure) and error.code in _NO_TRANSACTIONS and "replica set" in str(error):
        raise TopologyError(
            "Transactions need a replica set or a sharded cluster. Start mongod with --replSet and run rs.initiate(); "
            "a set of one member is enough.",
        ) from error


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
    accepts = "session" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not accepts:
        raise ConfigurationError(
            f"{getattr(function, '__name__', 'the function')} must take session=, and pass it to every operation.",
        )
