"""
Calls inside an open transaction. All their writes are part of it.

They commit or abort with that transaction, exactly once, however often its body repeats. Nothing is repeated here: the
owner of the transaction repeats the whole body.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pymongo
from bson import ObjectId
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from mongo_celery.mongo.cluster import connections_in_transaction, is_same_cluster
from mongo_celery.mongo.driver_internals import prevent_commit
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.transaction.scopes import (
    after_commit,
    current,
    innermost_session,
    is_beside_transaction,
    join_transaction,
    scope_of,
)
from mongo_celery.twophase.compensation import store_compensation
from mongo_celery.twophase.engine import Engine
from mongo_celery.twophase.local import RefusedError
from mongo_celery.twophase.log import KnownError, log_cancel
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.transaction import UNFINISHED, State, Transaction, refuse_other_request


class JoinedCalls:
    """
    The calls of a `TwoPhaseCommit` in one open transaction.

    Args:
        engine: the engine of the log.
        session: the session of the open transaction.
    """

    def __init__(self, engine: Engine, session: ClientSession) -> None:
        self._engine = engine
        self._log = engine.log
        self._session = session

    def begin(
        self,
        fields: Mapping[str, Any],
        parts: Sequence[Part],
        identity: Any,
        *,
        run: bool,
    ) -> Transaction | None:
        """
        Store a transaction, and make its changes with `run`.

        Args:
            fields: as for `TransactionLog.insert`.
            parts: participants of the transaction.
            identity: id of the transaction.
            run: True to make its changes.

        Returns:
            The transaction, done or canceled. None without `run`.

        Raises:
            TransactionStateError: this id has other fields, or is in progress.
            ConfigurationError: with `run`: one MongoDB transaction cannot do it.
        """
        with self._joining():
            if run:
                self._engine.refuse_beyond_transaction(parts)
            self._prepare_later()
            try:
                self._log.insert(fields, identity, session=self._session)
            except KnownError:
                stored = self._log.find_one(identity, self._session)
                refuse_other_request(stored or {}, fields, self._log.collection.codec_options)
            return self._run(identity) if run else None

    def run(self, identity: Any) -> Transaction:
        """Make the changes of a transaction that has not begun. A final one does not change."""
        with self._joining():
            return self._run(identity)

    def cancel(self, identity: Any, reason: str, *, any_application: bool) -> Transaction:
        """Cancel a transaction that has not begun. A final one is returned unchanged."""
        with self._joining():
            seen = self._log.get(identity, self._session)
            if not any_application:
                self._log.refuse_foreign(seen)
            if seen.state is State.INITIAL:
                return self._log.move(seen, State.CANCELED, session=self._session, reason=reason)
            self._refuse_begun(seen)
            return seen

    def compensate(self, identity: Any, *, run: bool) -> tuple[Any, Transaction | None]:
        """Return the id of the compensating transaction, and with `run` the transaction itself."""
        with self._joining():
            if run:
                self._engine.refuse_beyond_transaction(self._log.get(identity, self._session).parts)
            opposite = store_compensation(self._engine, identity, 0.0, self._session)
            return opposite, self._run(opposite) if run else None

    def queue(self, identity: Any, publish: Callable[[], object]) -> None:
        """
        Note that Celery runs a transaction, and publish the task after the commit.

        Raises:
            ConfigurationError: this process cannot observe the commit.
            TransactionStateError: it is final, or belongs to another application.
        """
        hook = self._find_commit_hook()
        if hook is None:
            raise ConfigurationError(
                "This session's transaction was not started by `transactional` or Django, so mongo_celery cannot "
                "see its commit. Nothing was changed. Use transactional(client), or call delay after the commit."
            )
        with self._joining():
            self._log.queue(identity, self._session)
        hook(publish)

    def _run(self, identity: Any) -> Transaction:
        seen = self._log.get(identity, self._session)
        if seen.state.is_final:
            return seen
        self._log.refuse_foreign(seen)
        self._refuse_begun(seen)
        self._engine.refuse_beyond_transaction(seen.parts)
        reason = self._engine.local.find_unmet(seen.parts, self._session)
        if reason is None:
            self._change(seen)
        fields: dict[str, Any] = {} if reason is None else {"reason": reason}
        state = State.DONE if reason is None else State.CANCELED
        ended = self._log.move(seen, state, coordinator=ObjectId(), session=self._session, **fields)
        hook = self._find_commit_hook()
        if reason is not None and hook is not None:  # without a commit it is not canceled
            hook(partial(log_cancel, identity, reason))
        return ended

    def _change(self, seen: Transaction) -> None:
        try:
            self._engine.local.change(seen.parts, self._session)
        except RefusedError as error:
            raise TransactionCanceledError(
                f"Transaction {seen.id!r} was rolled back, and the open transaction with it: {error}.",
                id=seen.id,
                reason=str(error),
            ) from error

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """If the server fails a call, fail the open transaction, even if the body catches the error."""
        with join_transaction(self._session):
            refusal = None
            try:
                yield
            except (ConfigurationError, TransactionStateError) as error:
                refusal = error
            except BaseException:
                if scope_of(self._session) is None:  # the driver would commit the partial changes
                    contextvars.Context().run(_abort_for_caller, self._session)  # without a time limit
                raise
        if refusal is not None:
            raise refusal

    def _prepare_later(self) -> None:
        """Create the log's indexes after the commit: afterwards older snapshots cannot be read."""
        hook = None if self._log.is_prepared else self._find_commit_hook()
        if hook is not None:
            hook(self._log.prepare)

    def _find_commit_hook(self) -> Callable[[Callable[[], object]], object] | None:
        """Return the function that registers a commit callback. None if this process cannot observe the commit."""
        if scope_of(self._session) is not None:
            return partial(after_commit, session=self._session)
        connection = next((each for each in connections_in_transaction() if each.session is self._session), None)
        return None if connection is None else partial(connection.on_commit, robust=True)

    @staticmethod
    def _refuse_begun(seen: Transaction) -> None:
        if seen.state in UNFINISHED:
            raise TransactionStateError(
                f"Transaction {seen.id!r} is {seen.state}, so it cannot join the open transaction. Nothing was "
                "changed. Make this call after the commit, with after_commit.",
                id=seen.id,
                state=seen.state,
            )


def _abort_for_caller(session: ClientSession) -> None:
    """Abort the open transaction, but leave it open for its caller, whose next statement or commit fails."""
    try:
        with pymongo.timeout(ANSWER_SECONDS), suppress(PyMongoError):
            session.client.admin.command("abortTransaction", session=session)
    finally:
        prevent_commit(session)  # without an answer, the server may still have half of the call's changes


def find_session(client: MongoClient[Any], given: object) -> ClientSession | None:
    """
    Return the session of the open transaction that a call joins. None outside of any.

    Args:
        client: the transactions' client.
        given: the session passed to the call, if any.

    Raises:
        ConfigurationError: the call cannot join the open transaction.
    """
    if given is not None:
        if not isinstance(given, ClientSession) or given.client is not client or not given.in_transaction:
            raise ConfigurationError(
                "session= needs a session of the transactions' client, with a transaction in progress. Nothing "
                "was changed. Pass the session that transactional(client) passes to its function."
            )
        joined: ClientSession | None = given
    else:
        joined = current(client) or _find_session_of_django(client)
    around = innermost_session()
    is_apart = around is None and given is None and is_beside_transaction()
    # Inside another transaction beside the joined one, the call would repeat with each repetition of that one.
    if is_apart or (around is not None and around is not joined):
        raise ConfigurationError(
            "The call cannot join the transaction that is open here, because that belongs to another client, "
            "thread or task. The call would stay if that transaction is aborted. Nothing was changed. Make the "
            "call after the commit, with after_commit. In another thread, give session=."
        )
    return joined


def _find_session_of_django(client: MongoClient[Any]) -> ClientSession | None:
    """Return the session of Django's `atomic` in this thread. Errors as in `find_session`."""
    for connection in connections_in_transaction():
        session: ClientSession = connection.session
        if session.client is client:
            return session
        if is_same_cluster(session.client, client):
            raise ConfigurationError(
                "A transaction of Django is open here, and this client cannot join it: the call would stay if "
                "that is aborted. Nothing was changed. Give TwoPhaseCommit a collection of Django's client: "
                "lambda: connection.get_collection('transactions')."
            )
    return None
