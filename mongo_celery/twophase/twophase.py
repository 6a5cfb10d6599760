"""Two-phase commit over documents: the public class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from bson import ObjectId
from celery import Celery, uuid
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.app import Registry, app_name, check_app, schedule
from mongo_celery.arguments import Duration, check_choice, check_texts, not_negative, positive
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from mongo_celery.forking import per_process
from mongo_celery.mongo.opening import Client, Source, check_source, resolve_collection
from mongo_celery.periodic import patience
from mongo_celery.twophase.clusters import Clusters, open_collection
from mongo_celery.twophase.compensation import store_compensation
from mongo_celery.twophase.engine import NOT_BEGUN, Engine
from mongo_celery.twophase.joined import JoinedCalls, find_session
from mongo_celery.twophase.log import KnownError, OvertakenError, TransactionLog, log_cancel
from mongo_celery.twophase.participants import Part, check_participant, refuse_repeated
from mongo_celery.twophase.recoveries import COLLECTION as RECOVERIES
from mongo_celery.twophase.recoveries import Recovery, RecoveryRecords, recovery_watch
from mongo_celery.twophase.recovery import Recoverer
from mongo_celery.twophase.tasks import RECOVER_TASK, publish_run, register_tasks
from mongo_celery.twophase.transaction import (
    State,
    Transaction,
    check_amount,
    refuse_other_request,
    transfer_parts,
)
from mongo_celery.twophase.values import plain, plain_id

PROTOCOLS = ("auto", "documents")

RETENTION = timedelta(days=90)
"""By default, a repeated id is recognised for this time."""

_RECOVER_LIMIT = 1000

TWO_PHASE_COMMITS: Registry[TwoPhaseCommit] = Registry(
    "TwoPhaseCommit",
    create="mongo_celery.TwoPhaseCommit(app, transactions) where the app is made",
    rename="give the new one another name with name='...'",
)
"""The instances of all apps."""


class TwoPhaseCommit:
    """
    Change several documents as one, in one or several collections and clusters, even on standalone servers.

    When `transfer` or `run` returns, the transaction is `done`, and each participant is changed once. If a participant
    is missing, refuses its change or fails its `require`, the call raises `TransactionCanceledError`, and nothing is
    changed. A transaction is a document: any process can finish one that another process has begun.

    ::

        bank = TwoPhaseCommit(app, lambda: client.bank.transactions)
        bank.transfer("A", "B", 100, id="payment 7")    # the same call again moves nothing

    There are two ways:

    - If all participants are in the cluster of the transactions, one MongoDB transaction changes them. Other readers
      see all changes or none.
    - Across clusters and on standalone servers, the steps of MongoDB's tutorial change them, with markers in the
      participants (`pendingTransactions`). Other readers can see one participant changed before the other. A `require`
      keeps a balance above a limit.

    **In an open MongoDB transaction** of the same client, the calls `begin`, `transfer`, `run`, `delay`, `cancel` and
    `compensate` join it. They commit or abort with it, once, however often its body repeats. They find the transaction
    of `transactional`, of a handler with `transactional=True` and of Django in the same thread, or use that of
    `session=`. If a call cannot join (another client, participants in other clusters, markers), it raises
    `ConfigurationError`, and nothing changes. If MongoDB fails a call, the open transaction can no longer be committed,
    even if your code catches the error.

    All times are seconds, or a `timedelta`.

    Args:
        app: the Celery app. None if Celery runs nothing.
        transactions: the collection of the transactions, or a callable that returns it. Each process calls it once,
            because prefork workers make their clients after the fork.
        application: the name that marks this application's transactions, by default the name of the Celery app.
            Recovery takes over only transactions with this name, or without any.
        name: the name for the command line and for tasks, if an app has several.
        accounts: the collection of the documents that `transfer` names, or a callable that returns it. It must have the
            client of the transactions. By default the collection `accounts` of the same database. Each transfer stores
            its name, and moves the amount there, whichever application runs it.
        clients: the clients of other clusters by alias, or callables that return them. Each process calls them once.
        older_than: seconds without progress after which recovery takes a transaction over, 30 minutes by default.
        timeout: seconds that a call may last, whatever a server does. Until then it repeats after transient errors. The
            abort of a MongoDB transaction may take 2 s more. A shorter `pymongo.timeout` of yours ends each attempt,
            not the call.
        recover_every: seconds between two recoveries by `celery beat`, or by the listener of a bridge of the app. None
            if something else runs them. If none runs, a process that begins transactions logs `nobody_recovers`.
        protocol: `"auto"` for one MongoDB transaction if possible. `"documents"` to always use the tutorial's steps.
        deadline: seconds after which recovery cancels a transaction that has begun but is not applied.
        retention: seconds for which a transaction is kept after its end, 90 days by default, at least `deadline` and
            `timeout`. None keeps it forever. Afterwards its id is free, and the same call does it again. Recovery
            cancels a stored transaction that has not begun for that time.

    Raises:
        ConfigurationError: an option cannot work, or the app has another instance of this name.
    """

    def __init__(
        self,
        app: Celery | None,
        transactions: Source,
        *,
        application: str | None = None,
        name: str = "default",
        accounts: Source | None = None,
        clients: Mapping[str, Client] | None = None,
        older_than: Duration = 1800.0,
        timeout: Duration = 30.0,
        recover_every: Duration | None = 60.0,
        protocol: str = "auto",
        deadline: Duration = 600.0,
        retention: Duration | None = RETENTION,
    ) -> None:
        self.name = name
        self.application = _find_application(app) if application is None else application
        every = None if recover_every is None else positive(recover_every, "recover_every")
        self.recover_every = None if app is None else every
        self._older_than = positive(older_than, "older_than")
        self._timeout = positive(timeout, "timeout")
        self._deadline = positive(deadline, "deadline")
        self._retention = None if retention is None else positive(retention, "retention")
        self._protocol = check_choice("protocol", protocol, PROTOCOLS)
        check_texts(name=name, application=self.application)
        for option, seconds in (("deadline", self._deadline), ("timeout", self._timeout)):
            if self._retention is not None and self._retention < seconds:
                raise ConfigurationError(
                    f"retention={self._retention:g} is less than the {option} of {seconds:g} s. A caller without "
                    "an answer may repeat a transaction, and it would run twice. Set a longer retention."
                )
        for option, source in (("transactions", transactions), ("accounts", accounts)):
            if source is not None:
                check_source(option, source)
        self.app = app
        self._given = (transactions, accounts)
        self._clusters = Clusters(lambda: self.transactions, clients or {})
        patient = patience(self.recover_every, least=180.0, periods=3)
        self._watch = recovery_watch(name, lambda: self._recoveries, patient)
        if app is not None:
            TWO_PHASE_COMMITS.add(app, self, name)
            register_tasks(app, lambda name, id_: _find(app, name).run(id_), lambda name: _find(app, name).recover())
            if self.recover_every is not None:
                schedule(app, RECOVER_TASK, self.recover_every, name)

    def __repr__(self) -> str:
        return f"<TwoPhaseCommit {self.name} application={self.application}>"

    @per_process
    def transactions(self) -> Collection[dict[str, Any]]:
        """The transactions' collection, with majority writes and reads from the primary."""
        return open_collection(resolve_collection(self._given[0]))

    @per_process
    def _accounts(self) -> Collection[dict[str, Any]]:
        given, own = self._given[1], self.transactions
        accounts = own.database["accounts"] if given is None else resolve_collection(given)
        if accounts.database.client != own.database.client:  # equal: the same hosts and replicaSet=
            raise ConfigurationError(
                f"The clients of accounts {accounts.full_name} and transactions {own.full_name} differ in hosts or "
                "replicaSet=. Pass a collection of the same client. For documents in other clusters, use begin "
                "with clients={...}."
            )
        return open_collection(accounts)

    @per_process
    def _engine(self) -> Engine:
        log = TransactionLog(
            self.transactions,
            self.application,
            self._accounts.full_name,
            older_than=self._older_than,
            deadline=self._deadline,
            retention=self._retention,
        )
        return Engine(log, self._clusters, self._timeout, is_local_allowed=self._protocol == "auto")

    @per_process
    def _recoveries(self) -> RecoveryRecords:
        return RecoveryRecords(self.transactions, self.application)

    # -- beginning ---------------------------------------------------------------------------------

    def begin(
        self,
        participants: Sequence[object],
        *,
        id: Any = None,  # noqa: A002 - its name in the document
        run: bool = False,
        session: ClientSession | None = None,
    ) -> Any:
        """
        Store a transaction of any participants. It survives a crash. No participant is changed yet.

        Args:
            participants: the `Participant`s, in the order of their changes.
            id: the id of the transaction, by default a new ObjectId. It must be unique over all collections of
                transactions that share participants. The same call with the same id has the same outcome: see
                `transfer`.
            run: True to also run it here. That takes fewer round trips than calling `run` afterwards.
            session: the session of the open MongoDB transaction to join. See the class.

        Returns:
            The id, for `run`, `delay` and `cancel`.

        Raises:
            ConfigurationError: a participant cannot work, or a document takes part twice.
            TransactionCanceledError: with `run`: it was rolled back.
            TransactionStateError: a transaction with this id has other participants, or belongs to another application.
        """
        codec = self.transactions.codec_options
        parts = [check_participant(each, self._clusters.find_alias, codec) for each in participants]
        if not parts:
            raise ConfigurationError("A transaction needs at least one participant.")
        fields = {"participants": [part.to_document() for part in parts]}
        return self._begin(fields, parts, id, session, run=run)

    def transfer(
        self,
        source: Any,
        destination: Any,
        value: Any,
        *,
        id: Any = None,  # noqa: A002
        require: Mapping[str, Any] | None = None,
        run: bool = True,
        session: ClientSession | None = None,
    ) -> Any:
        """
        Move an amount from the `balance` of one document to that of another.

        When the call returns, both balances are changed. With `run=False` it only stores the transfer.

        An `id` makes the call repeatable, for example for a message that arrives twice. The same call with the same id
        moves the amount once. If the transfer is done, it returns the id. If it was canceled, it raises the same error,
        even if it could be paid now. If it is stored or in progress, the call finishes it. The id is recognised during
        the `retention`.

        Args:
            source: the `_id` of the document that pays.
            destination: the `_id` of the document that is paid.
            value: the amount, a number above zero. Decimals are allowed.
            id: the id of the transaction, by default a new ObjectId.
            require: a filter that the source must match, by default a balance of at least `value`. The transaction
                stores it. Before MongoDB 5.0, a text as `$regex` is refused. Pass `re.compile(...)`.
            run: True to run it here. Otherwise call `run` or `delay` with the returned id.
            session: the session of the open MongoDB transaction to join. See the class.

        Returns:
            The id.

        Raises:
            ConfigurationError: the value is not an amount, an argument cannot be an `_id`, both are the same, `require`
                cannot be stored, or the accounts have another client than the transactions.
            TransactionCanceledError: it was rolled back: a document is missing, or the source does not match.
            TransactionStateError: a transaction with this id has other fields, or belongs to another application.
        """
        codec, accounts = self._accounts.codec_options, self._accounts.full_name
        source, destination = plain_id("source", source, codec), plain_id("destination", destination, codec)
        value = plain("value", check_amount(value), codec)
        require = None if require is None else plain("require", dict(require), codec)
        parts = transfer_parts(accounts, source, destination, value, require)
        fields = {"source": source, "destination": destination, "value": value, "accounts": accounts}
        given = fields if require is None else {**fields, "require": require}
        return self._begin(given, parts, id, session, run=run)

    # -- advancing ---------------------------------------------------------------------------------

    def run(self, id: Any, *, session: ClientSession | None = None) -> Transaction:  # noqa: A002
        """
        Finish a transaction in this process. If another process is working on it, take it over immediately.

        Args:
            id: the id from `begin` or `transfer`.
            session: the session of the open MongoDB transaction to join. See the class.

        Returns:
            The transaction in state `done`.

        Raises:
            TransactionCanceledError: it was rolled back. Its `reason` explains why.
            TransactionStateError: it does not exist, belongs to another application, or waits for a person. The message
                names the reason.
            ConfigurationError: this process does not know one of its clusters.
            TransactionTimeoutError: MongoDB did not answer in time. Call `run` again, or leave it to recovery if it has
                begun. The message says if this is known.
        """
        if (joined := self._join(session)) is not None:
            return _check_done(joined.run(id))
        with self._engine.limit_calls() as deadline:
            return _check_done(self._run(id, deadline))

    def delay(self, id: Any, *, session: ClientSession | None = None) -> Any:  # noqa: A002
        """
        Run a transaction in a Celery task, which is retried.

        When the call returns, the transaction is marked for this application, and recovery runs it even if the broker
        loses the message. In an open transaction the task is sent after the commit. If the process dies in between,
        recovery runs it.

        Args:
            id: the id from `begin` or `transfer`.
            session: the session of the open MongoDB transaction to join. See the class.

        Returns:
            The task's `AsyncResult`. Read the outcome from the transaction, not from the result.

        Raises:
            TransactionStateError: it does not exist, is final, or belongs to another application.
            ConfigurationError: there is no Celery app.
            TransactionTimeoutError: MongoDB did not answer in time, and no task was sent.
        """
        if self.app is None:
            raise ConfigurationError(
                "delay needs the Celery app. Make the object with TwoPhaseCommit(app, transactions)."
            )
        identity, task_id = plain_id("id", id, self.transactions.codec_options), uuid()
        publish = partial(publish_run, self.app, self.name, identity, task_id)
        if (joined := self._join(session)) is not None:
            joined.queue(id, publish)
        else:
            with self._engine.limit_calls() as deadline:
                hint = "Recovery may run it. To be sure, call delay again"
                self._engine.until_answered(lambda: self._engine.log.queue(id), deadline, hint=hint, id=identity)
            publish()
        self._watch.needed()
        return self.app.AsyncResult(task_id)

    def cancel(
        self,
        id: Any,  # noqa: A002
        reason: str = "canceled on request",
        *,
        all: bool = False,  # noqa: A002
        session: ClientSession | None = None,
    ) -> Transaction:
        """
        Cancel a transaction that is not applied yet, and take back its changes.

        Args:
            id: the id of the transaction.
            reason: a text that is stored with it.
            all: True to also cancel another application's transaction.
            session: the session of the open MongoDB transaction to join. See the class.

        Returns:
            The transaction in state `canceled`. One that was already canceled does not change.

        Raises:
            TransactionStateError: it is applied or done (see `compensate`), unknown, or belongs to another application.
            ConfigurationError: as in `run`.
        """
        if (joined := self._join(session)) is not None:
            return _check_canceled(joined.cancel(id, reason, any_application=all))
        engine, log = self._engine, self._engine.log
        coordinator = engine.make_coordinator(any_application=all)

        def attempt() -> Transaction:
            seen = log.get(id)
            if seen.coordinator == coordinator.identity:  # an answer was lost
                return seen
            if not all:
                log.refuse_foreign(seen)
            if seen.state is State.INITIAL:
                as_seen = {"application": seen.application}
                return log.move(seen, State.CANCELED, condition=as_seen, reason=reason)
            if seen.state in {State.PENDING, State.CANCELING}:
                engine.clusters.refuse_unknown(seen.parts)
            if seen.state is State.PENDING:
                return log.move(
                    seen, State.CANCELING, coordinator=coordinator.identity, any_application=all, reason=reason
                )
            if seen.state is State.CANCELING:
                return log.take_over(seen, coordinator.identity, any_application=all)
            return _check_canceled(seen)

        hint = "It may be canceled. Cancel it again to be sure"
        with engine.limit_calls() as deadline:
            begun = engine.until_answered(attempt, deadline, hint=hint, id=id)
            return _check_canceled(engine.finish(begun, deadline, coordinator))

    def compensate(self, id: Any, *, run: bool = True, session: ClientSession | None = None) -> Any:  # noqa: A002
        """
        Take back a finished transaction by the opposite transaction.

        When the call returns, it is taken back exactly once, however many processes call. If a call is interrupted,
        call again, or leave it to recovery. If the opposite transaction was canceled because the amount is spent, the
        next call makes another attempt.

        Args:
            id: the id of the transaction.
            run: True to run the opposite transaction here. With False it is only stored, and `run`, `delay` or recovery
                runs it.
            session: the session of the open MongoDB transaction to join. See the class.

        Returns:
            The id of the opposite transaction, a document with `compensates: id`.

        Raises:
            TransactionCanceledError: the opposite transaction was rolled back, so nothing is taken back.
            TransactionStateError: the transaction is not done, or its compensation was removed or belongs to another
                application.
            TransactionTimeoutError: MongoDB did not answer in time. Call it again, or leave it to recovery.
        """
        if (joined := self._join(session)) is not None:
            identity, ended = joined.compensate(id, run=run)
            if ended is not None:
                _check_done(ended)
            return identity
        with self._engine.limit_calls() as deadline:
            identity = self._engine.until_answered(
                lambda: store_compensation(self._engine, id, deadline), deadline, hint="Compensate it again", id=id
            )
            if run:
                _check_done(self._run(identity, deadline))
            else:
                self._watch.needed()
            return identity

    # -- reading and recovery ----------------------------------------------------------------------

    def read(self, id: Any) -> Transaction:  # noqa: A002
        """
        Return a transaction as it is stored now.

        Raises:
            TransactionStateError: it does not exist, or its state or shape is unknown.
        """
        return self._engine.call(lambda: self._engine.log.get(id))

    def find(self, states: Sequence[str] = tuple(State), *, limit: int = 50) -> list[dict[str, Any]]:
        """
        Return stored transactions of any shape, the one with the oldest step first.

        Args:
            states: only these. By default any.
            limit: largest number.

        Raises:
            PyMongoError: MongoDB did not answer in time, or refused it. The call is not repeated.
        """
        with self._engine.limit_calls():
            return self._engine.log.find(states, limit)

    def recover(
        self,
        older_than: Duration | None = None,
        *,
        all: bool = False,  # noqa: A002
        limit: int = _RECOVER_LIMIT,
    ) -> list[Recovery]:
        """
        Finish abandoned transactions: pending and applied ones go forward, canceling ones go back.

        Any number of processes may recover concurrently. Only one of them takes over each transaction.

        Args:
            older_than: seconds since the last step, by the server's clock. By default the option.
            all: True to include other applications.
            limit: largest number to take over. Unreadable transactions, and those of a silent cluster, are also
                reported.

        Returns:
            The outcome of each. A failure does not stop the others.
        """
        age = self._older_than if older_than is None else not_negative(older_than, "older_than")
        return Recoverer(self._engine, self._recoveries, age, any_application=all).recover(limit)

    # -- internals -----------------------------------------------------------------------------------

    def _join(self, session: ClientSession | None) -> JoinedCalls | None:
        """Return the calls of this thread's or the given open transaction. None outside of any."""
        found = find_session(self.transactions.database.client, session)
        return None if found is None else JoinedCalls(self._engine, found)

    def _begin(
        self,
        fields: Mapping[str, Any],
        parts: Sequence[Part],
        id: Any,  # noqa: A002
        session: ClientSession | None,
        *,
        run: bool,
    ) -> Any:
        """Store a new transaction, and run it with `run`."""
        refuse_repeated(parts)
        joined, engine = self._join(session), self._engine
        identity = ObjectId() if id is None else id
        plain_id("id", identity, self.transactions.codec_options)
        storer = ObjectId()  # its time is that of the call

        if joined is not None:
            ended = joined.begin(fields, parts, identity, run=run)
            if ended is not None:
                _check_done(ended)
            return identity
        with engine.limit_calls() as deadline:
            try:
                if run and engine.until_answered(lambda: engine.is_local(parts), deadline, hint="Nothing was stored"):
                    self._store_done(fields, parts, identity, deadline, storer)
                    return identity
                self._store(fields, identity, deadline, storer)
            except KnownError:  # stored by the same request elsewhere, or by an attempt with a lost answer
                self._refuse_other(fields, identity, deadline)
                if run:
                    _check_done(self._run(identity, deadline))
                return identity
            if run:
                self._watch.needed()
                initial = {"_id": identity, "state": str(State.INITIAL), "coordinator": storer}
                stored = engine.log.read({**fields, **initial})
                _check_done(engine.finish(stored, deadline))
        return identity

    def _store_done(
        self, fields: Mapping[str, Any], parts: Sequence[Part], identity: Any, deadline: float, storer: ObjectId
    ) -> None:
        """Store a transaction as done and make its changes, or store it as canceled and raise."""
        coordinator = ObjectId()
        reason = self._engine.until_answered(
            lambda: self._engine.local.store_done(fields, parts, identity, coordinator, deadline),
            deadline,
            hint=f"Transaction {identity!r} is done if it is in the log. Otherwise nothing was changed",
            id=identity,
        )
        if reason is not None:
            self._store({**fields, "reason": reason}, identity, deadline, storer, State.CANCELED)
            log_cancel(identity, reason)
            raise _make_canceled_error(identity, reason)

    def _store(
        self,
        fields: Mapping[str, Any],
        identity: Any,
        deadline: float,
        storer: ObjectId,
        state: State = State.INITIAL,
    ) -> None:
        """Store a new transaction. Raise KnownError if another call has stored one or begun this one."""
        hint = f"Transaction {identity!r} may be stored, but nothing was changed. Run it, or begin a new one"
        self._engine.until_answered(
            lambda: self._engine.log.insert(fields, identity, state=state, coordinator=storer),
            deadline,
            hint=hint,
            id=identity,
        )

    def _refuse_other(self, fields: Mapping[str, Any], identity: Any, deadline: float) -> None:
        def attempt() -> None:
            stored = self._engine.log.find_one(identity)
            if stored is None:
                raise OvertakenError  # it is stored, but not yet by a majority
            refuse_other_request(stored, fields, self.transactions.codec_options)

        self._engine.until_answered(attempt, deadline, hint="Repeat the call", id=identity)

    def _run(self, identity: Any, deadline: float) -> Transaction:
        """Advance a transaction to its end, done or canceled. Take it over if another process has begun it."""
        engine, log = self._engine, self._engine.log
        coordinator = engine.make_coordinator()

        def attempt() -> Transaction:
            seen = log.get(identity)
            if seen.state.is_final or seen.coordinator == coordinator.identity:
                return seen
            log.refuse_foreign(seen)
            engine.clusters.refuse_unknown(seen.parts)
            if seen.state is State.INITIAL:
                if not engine.is_local(seen.parts):
                    self._watch.needed()
                return seen
            return log.take_over(seen, coordinator.identity)

        taken = engine.until_answered(attempt, deadline, hint=NOT_BEGUN, id=identity)
        return engine.finish(taken, deadline, coordinator)


def get_engine(commit: TwoPhaseCommit) -> Engine:
    """Return the engine of a `TwoPhaseCommit`, for commands and metrics."""
    return commit._engine  # noqa: SLF001 - no part of what users see


def get_recoveries(commit: TwoPhaseCommit) -> RecoveryRecords:
    """Return the recovery notes of a `TwoPhaseCommit`, for metrics."""
    return commit._recoveries  # noqa: SLF001 - no part of what users see


def list_namespaces(commit: TwoPhaseCommit) -> list[str]:
    """Return the namespaces of transactions and recovery notes. Participants are elsewhere."""
    return [commit.transactions.full_name, f"{commit.transactions.database.name}.{RECOVERIES}"]


def _find_application(app: Celery | None) -> str:
    """Return the app's name. Services that share a log must not share a default."""
    if app is not None:
        check_app(app)
    name = None if app is None else app_name(app)
    if name is None:
        raise ConfigurationError(
            "The name of this application is unknown, because no Celery app has a name. Recovery needs it to "
            "find its transactions. Pass the name: TwoPhaseCommit(..., application='shop')."
        )
    return name


def _check_done(transaction: Transaction) -> Transaction:
    """Return a transaction that is done. Raise TransactionCanceledError if it was rolled back."""
    if transaction.state is State.CANCELED:
        raise _make_canceled_error(transaction.id, transaction.reason)
    return transaction


def _make_canceled_error(identity: Any, reason: str | None) -> TransactionCanceledError:
    return TransactionCanceledError(
        f"Transaction {identity!r} was rolled back: {reason or 'canceled'}.", id=identity, reason=reason
    )


def _check_canceled(transaction: Transaction) -> Transaction:
    """Return a transaction that is canceled. Raise TransactionStateError if that is no longer possible."""
    if transaction.state in {State.APPLIED, State.DONE}:
        raise TransactionStateError(
            f"Transaction {transaction.id!r} is {transaction.state} and can no longer be canceled. To reverse "
            f"it, use compensate({transaction.id!r}).",
            id=transaction.id,
            state=transaction.state,
        )
    return transaction


def _find(app: Celery, name: str) -> TwoPhaseCommit:
    found = TWO_PHASE_COMMITS.find(app, name)
    if found is None:
        raise ConfigurationError(
            f"This worker's app has no TwoPhaseCommit named {name!r}. Import the module that makes it."
        )
    return found
