"""
Calls inside an open transaction: all that they store and change is a part of it.

It is committed and aborted with that transaction, exactly once, however often the body is repeated. Nothing is repeated
here: whoever has begun the transaction repeats the whole. Participants are looked at before they are changed, in the
same snapshot, so that a transfer that cannot be paid leaves nothing half done in a transaction that continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from pymongo import MongoClient
from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError, TransactionStateError
from mongo_celery.mongo.cluster import connections_in_transaction, is_same_cluster
from mongo_celery.mongo.transaction.scopes import (
    after_commit,
    current,
    innermost_session,
    is_beside_transaction,
    join_transaction,
    scope_of,
)
from mongo_celery.twophase.compensation import Compensations
from mongo_celery.twophase.completion import Completion, still_mine
from mongo_celery.twophase.log import KnownError, TransactionLog
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.request import refuse_other_request
from mongo_celery.twophase.states import State, Transaction


class JoinedCalls:
    """
    The calls of a `TwoPhaseCommit` in one open transaction.

    Args:
        log: of the transactions.
        completion: of transactions of this log.
        compensations: of this log's transactions.
        session: of the open transaction.
    """

    def __init__(
        self, log: TransactionLog, completion: Completion, compensations: Compensations, session: ClientSession
    ) -> None:
        self._log = log
        self._completion = completion
        self._compensations = compensations
        self._session = session

    def begin(self, fields: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, *, run: bool) -> str | None:
        """
        Store a transaction, and do it if it is to be run.

        Returns:
            Why it is canceled; None if it is stored, or done.

        Raises:
            TransactionStateError: one of this id has other fields, or is in progress.
            ConfigurationError: it is to be run, and one MongoDB transaction cannot do it.
        """
        with _part(self._session):
            if run:
                self._completion.refuse_beyond_transaction(parts)
            self._prepare_later()
            try:
                return self._completion.within.store_joined(fields, parts, identity, self._session, run=run)
            except KnownError:
                stored = self._log.collection.find_one({"_id": {"$eq": identity}}, session=self._session)
                refuse_other_request(stored or {}, fields, self._log.collection.codec_options)
                ended = self._run(identity) if run else None
        return None if ended is None or ended.state is State.DONE else ended.reason or "canceled"

    def run(self, identity: Any) -> Transaction:
        """Do a transaction that nobody has begun; one that is final stays as it is."""
        with _part(self._session):
            return self._run(identity)

    def cancel(self, identity: Any, reason: str, *, any_application: bool) -> Transaction:
        """Cancel a transaction that nobody has begun; the others are returned as they are."""
        with _part(self._session):
            seen = self._log.get(identity, self._session)
            if not any_application:
                self._log.refuse_foreign(seen)
            if seen.state is State.INITIAL:
                return still_mine(self._log.drop(seen, reason, self._session))
            self._refuse_begun(seen)
            return seen

    def compensate(self, identity: Any, *, run: bool) -> tuple[Any, Transaction | None]:
        """The id of what takes a transaction back, stored if there is none; and how it has ended, if it is run."""
        with _part(self._session):
            if run:
                self._completion.refuse_beyond_transaction(self._log.get(identity, self._session).parts)
            opposite = self._compensations.stored(identity, 0.0, self._session)
            return opposite, self._run(opposite) if run else None

    def queue(self, identity: Any, publish: Callable[[], object]) -> None:
        """
        Note that Celery is to advance a transaction, and ask it to after the commit.

        Raises:
            ConfigurationError: nobody would know of the commit.
            TransactionStateError: nothing is left to do, or it is another application's.
        """
        hook = self._commit_hook()
        if hook is None:
            raise ConfigurationError(
                "Neither `transactional` nor Django runs the transaction of this session, so its commit is not noticed "
                "here. Nothing was changed. Use transactional(client), or call delay after the commit."
            )
        with _part(self._session):
            self._log.queue(identity, self._session)
        hook(publish)

    def _prepare_later(self) -> None:
        """Make the log's indexes after the commit: a snapshot that is older cannot be read from any more."""
        hook = None if self._log.is_prepared else self._commit_hook()
        if hook is not None:
            hook(self._log.prepare)

    def _commit_hook(self) -> Callable[[Callable[[], object]], object] | None:
        """Return what has something called after the commit; None where nobody notices it."""
        if scope_of(self._session) is not None:
            return partial(after_commit, session=self._session)
        connection = next((each for each in connections_in_transaction() if each.session is self._session), None)
        return None if connection is None else partial(connection.on_commit, robust=True)

    def _run(self, identity: Any) -> Transaction:
        seen = self._log.get(identity, self._session)
        if seen.state.is_final:
            return seen
        self._log.refuse_foreign(seen)
        self._refuse_begun(seen)
        self._completion.refuse_beyond_transaction(seen.parts)
        return self._completion.within.run_joined(seen, self._session)

    @staticmethod
    def _refuse_begun(seen: Transaction) -> None:
        if seen.state in {State.PENDING, State.APPLIED, State.CANCELING}:
            raise TransactionStateError(
                f"transaction {seen.id!r} is {seen.state}: its coordinator works outside of the open transaction. "
                "Nothing was changed. Make this call after the commit, with after_commit.",
                id=seen.id,
                state=seen.state,
            )


@contextmanager
def _part(session: ClientSession) -> Iterator[None]:
    """Inside, an error of a server fails the open transaction, also if it is caught; a refusal has changed nothing."""
    with join_transaction(session):
        refusal = None
        try:
            yield
        except (ConfigurationError, TransactionStateError) as error:
            refusal = error
    if refusal is not None:
        raise refusal


def session_to_join(client: MongoClient[Any], given: object) -> ClientSession | None:
    """
    Return the session of the open transaction that a call is a part of; None outside of any.

    Args:
        client: of the transactions.
        given: the session that the call was given, if any.

    Raises:
        ConfigurationError: there is an open transaction that the call cannot be a part of.
    """
    if given is not None:
        if not isinstance(given, ClientSession) or given.client is not client or not given.in_transaction:
            raise ConfigurationError(
                "session= needs a session of the transactions' own client, with a transaction in progress. Nothing was "
                "changed. Give the one that transactional(client) passes to its function."
            )
        joined: ClientSession | None = given
    else:
        joined = current(client) or _session_of_django(client)
    around = innermost_session()
    is_apart = around is None and given is None and is_beside_transaction()
    # In one that was begun inside of the joined one, the call would be made again with each repetition of that.
    if is_apart or (around is not None and around is not joined and (joined is None or scope_of(joined) is not None)):
        raise ConfigurationError(
            "The innermost transaction that is open around this call is of another client, thread or task, and the "
            "call cannot be a part of it: it would stay when that one is aborted, and be made again with it. Nothing "
            "was changed. Make the call after the commit, with after_commit. In another thread, give session=."
        )
    return joined


def _session_of_django(client: MongoClient[Any]) -> ClientSession | None:
    """Return the session of Django's own `atomic` in this thread; errors as of `session_to_join`."""
    for connection in connections_in_transaction():
        session: ClientSession = connection.session
        if session.client is client:
            return session
        if is_same_cluster(session.client, client):
            raise ConfigurationError(
                "A transaction of Django is open here, and this client cannot join it: the call would stay when "
                "that one is aborted. Nothing was changed. Give TwoPhaseCommit a collection of Django's client: "
                "lambda: connection.get_collection('transactions')."
            )
    return None
