"""Two-phase commit over documents: begin, run, cancel, recover."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bson import ObjectId
from celery import Celery
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.app import Registry, schedule
from mongo_celery.arguments import Duration, not_negative, positive
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from mongo_celery.forking import per_process
from mongo_celery.mongo.opening import Client, Source, collection_of
from mongo_celery.twophase.clusters import Clusters, opened
from mongo_celery.twophase.compensation import compensation_ids, opposite
from mongo_celery.twophase.completion import NOT_BEGUN, Completion, still_mine, stuck
from mongo_celery.twophase.coordinator import OvertakenError, StuckError
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.options import TwoPhaseOptions
from mongo_celery.twophase.participants import is_same, part_of
from mongo_celery.twophase.recovery import Recovery, recover
from mongo_celery.twophase.states import State, Transaction, amount, transfer_parts
from mongo_celery.twophase.steps import RECOVER_TASK, publish_step, register_tasks
from mongo_celery.twophase.values import plain, plain_id

_RECOVER_LIMIT = 1000

TWO_PHASE_COMMITS: Registry[TwoPhaseCommit] = Registry(
    "TwoPhaseCommit",
    create="mongo_celery.TwoPhaseCommit(app, transactions) where the app is made",
    rename="give this one name='...'",
)
"""Of all apps."""


class TwoPhaseCommit:
    """
    Changes several documents as one, also in several collections and clusters, without MongoDB's transactions.

    A transaction is a document; its participants remember in `pendingTransactions` that they have been changed.
    Every step is a conditional update that may be repeated. Afterwards a transaction is `done` with each
    participant changed once, or `canceled` with none changed.

    Not promised: isolation. Others can see one participant changed before the other; a `require` rule is what
    keeps a balance from going below a limit.

    Args:
        app: the Celery app; None if Celery advances nothing.
        transactions: the collection of transaction documents, or a callable that returns it; it is asked once in
            each process, since prefork workers make their clients after the fork.
        application: this application's marker: recovery takes over only what carries it, or no marker.
        name: for the command line and for tasks, if an app has several.
        accounts: the documents that `transfer` names, or a callable; by default the collection `accounts` beside
            the transactions.
        clients: other clusters by alias: clients, or callables that return them, asked as above.
        older_than: seconds after which an unfinished transaction counts as abandoned.
        timeout: seconds for which transient errors are repeated.
        recover_every: seconds between two recoveries by `celery beat`; None for no beat entry.

    Raises:
        ConfigurationError: an option cannot work, or the app has another of this name.
    """

    def __init__(
        self,
        app: Celery | None,
        transactions: Source,
        *,
        application: str = "App1",
        name: str = "default",
        accounts: Source | None = None,
        clients: Mapping[str, Client] | None = None,
        older_than: Duration = 1800.0,
        timeout: Duration = 30.0,
        recover_every: Duration | None = None,
    ) -> None:
        options = TwoPhaseOptions(
            application=application,
            name=name,
            older_than=positive(older_than, "older_than"),
            timeout=positive(timeout, "timeout"),
            recover_every=None if recover_every is None else positive(recover_every, "recover_every"),
        )
        for option, source in (("transactions", transactions), ("accounts", accounts)):
            if source is not None and not isinstance(source, Collection) and not callable(source):
                raise ConfigurationError(f"{option} must be a PyMongo collection, or a callable that returns one.")
        self.app = app
        self.name = options.name
        self.application = options.application
        self.older_than = options.older_than
        self._timeout = options.timeout
        self._given = (transactions, accounts)
        self._clusters = Clusters(lambda: self.transactions, clients or {})
        if app is not None:
            TWO_PHASE_COMMITS.add(app, self, name)
            register_tasks(app, partial(_step, app), partial(_recover, app))
            if options.recover_every is not None:
                schedule(app, RECOVER_TASK, options.recover_every, name)

    def __repr__(self) -> str:
        return f"<TwoPhaseCommit {self.name} application={self.application}>"

    @per_process
    def transactions(self) -> Collection[dict[str, Any]]:
        """The transactions' collection, with majority writes and reads from the primary."""
        return opened(collection_of(self._given[0]))

    @per_process
    def accounts(self) -> Collection[dict[str, Any]]:
        """The documents that `transfer` names."""
        given = self._given[1]
        return opened(self.transactions.database["accounts"] if given is None else collection_of(given))

    @per_process
    def log(self) -> TransactionLog:
        """Reads and writes of the transactions' documents."""
        return TransactionLog(self.transactions, self.application, self.accounts.full_name)

    @per_process
    def _completion(self) -> Completion:
        return Completion(self.log, self._clusters.open, self._timeout)

    # -- beginning ---------------------------------------------------------------------------------

    def begin(self, participants: Sequence[object], *, id: Any = None) -> Any:  # noqa: A002 - what it is
        """
        Store a transaction; afterwards it survives a crash, and nothing is changed yet.

        Args:
            participants: `Participant`s; they are changed in this order.
            id: of the transaction; by default a new ObjectId. It has to be unique over all collections of
                transactions that share participants.

        Returns:
            The id, for `run`, `delay` and `cancel`.

        Raises:
            ConfigurationError: a participant cannot work, or a document takes part twice.
            TransactionStateError: there is a transaction of this id.
        """
        codec = self.transactions.codec_options
        parts = [part_of(each, self._clusters.alias, codec) for each in participants]
        if not parts:
            raise ConfigurationError("a transaction needs at least one participant.")
        for index, part in enumerate(parts):
            if any(is_same(part, other) for other in parts[:index]):
                raise ConfigurationError(f"{part} takes part twice; combine both changes in one participant.")
        return self._store({"participants": [part.to_document() for part in parts]}, id)

    def transfer(
        self,
        source: Any,
        destination: Any,
        value: Any,
        *,
        id: Any = None,  # noqa: A002
        require: Mapping[str, Any] | None = None,
        run: bool = True,
    ) -> Any:
        """
        Move an amount from one document's `balance` to another's.

        The stored transaction has exactly the tutorial's fields: source, destination, value, state, lastModified.

        Args:
            source: `_id` of the document that pays.
            destination: `_id` of the document that is paid.
            value: how much; a number of more than zero, decimals included.
            id: of the transaction; by default a new ObjectId.
            require: a filter that the source must match; by default a balance of at least `value`. It is stored
                with the transaction.
            run: whether to run it here; else call `run` or `delay` with the returned id.

        Raises:
            ConfigurationError: the value is no amount, an `_id` can be none, or both are the same.
            TransactionCanceledError: it was rolled back: a document is missing, or the source's rule fails.
            TransactionStateError: there is a transaction of this id.
        """
        codec = self.accounts.codec_options
        source, destination = plain_id("source", source, codec), plain_id("destination", destination, codec)
        value = plain("value", amount(value), codec)
        require = None if require is None else plain("require", dict(require), codec)
        source_part, destination_part = transfer_parts(self.accounts.full_name, source, destination, value, require)
        if is_same(source_part, destination_part):
            raise ConfigurationError(f"source and destination are both {source!r}; a transfer needs two documents.")
        fields = {"source": source, "destination": destination, "value": value}
        identity = self._store(fields if require is None else {**fields, "require": require}, id)
        if run:
            self.run(identity)
        return identity

    # -- advancing ---------------------------------------------------------------------------------

    def run(self, id: Any) -> Transaction:  # noqa: A002
        """
        Advance a transaction to its end, here; an unfinished one of this application is taken over at once.

        Args:
            id: what `begin` or `transfer` returned.

        Returns:
            The transaction in state `done`.

        Raises:
            TransactionCanceledError: it was rolled back; `reason` says why.
            TransactionStateError: it is unknown, of another application, or stuck while it is undone.
            TransactionTimeoutError: MongoDB did not answer in time. Recovery will finish it if it was begun; the
                message says when that is not known, and `run` may be called again in any case.
        """
        ended = self._completion.to_the_end(self._taken_over(id))
        if ended.state is State.CANCELED:
            raise TransactionCanceledError(
                f"transaction {ended.id!r} was rolled back: {ended.reason or 'canceled'}.",
                id=ended.id,
                reason=ended.reason,
            )
        return ended

    def delay(self, id: Any) -> Any:  # noqa: A002
        """
        Let Celery advance a transaction, one step a task, each retried.

        Afterwards it carries this application's marker, and recovery looks after it too, even if the broker loses
        the message.

        Returns:
            The `AsyncResult` of the first step; the outcome is in the transaction, not in a result.

        Raises:
            TransactionStateError: there is no such transaction that could be advanced here.
            ConfigurationError: there is no Celery app.
        """
        if self.app is None:
            raise ConfigurationError("delay needs the Celery app: TwoPhaseCommit(app, transactions).")
        if not self.log.note_queued(id):
            seen = self.log.get(id)
            self._refuse_foreign(seen, allowed=False)
            state = seen.state
            raise TransactionStateError(f"transaction {id!r} is {state}: nothing is left to do.", id=id, state=state)
        return publish_step(self.app, self.name, plain_id("id", id, self.transactions.codec_options), None)

    def step(self, id: Any, version: int | None) -> Transaction | None:  # noqa: A002
        """
        One step, for the Celery task: None when there is nothing to do for a coordinator of this version.

        Raises:
            PyMongoError: repeat it.
        """
        transaction = self.log.get(id)
        if transaction.state.is_final:
            return None
        coordinator = self._completion.new_coordinator()
        try:
            if version is None:
                if transaction.state is State.INITIAL:
                    return coordinator.begin(transaction)
                return self.log.take_over(transaction, coordinator.identity)
            if transaction.version != version:
                return None
            return coordinator.step(transaction)
        except OvertakenError:
            return None

    def cancel(self, id: Any, reason: str = "canceled on request", *, all: bool = False) -> Transaction:  # noqa: A002
        """
        Roll a transaction back, as long as it is not applied.

        Args:
            id: of the transaction.
            reason: kept with it.
            all: whether it may belong to another application.

        Returns:
            The transaction in state `canceled`; one that was canceled before is left as it is.

        Raises:
            TransactionStateError: it is applied or done (see `compensate`), unknown, or of another application.
        """

        def attempt() -> Transaction:
            seen = self.log.get(id)
            self._refuse_foreign(seen, allowed=all)
            if seen.state is State.INITIAL:
                return still_mine(self.log.drop(seen, reason))
            if seen.state is State.PENDING:
                return still_mine(self.log.cancel(seen, self._completion.new_coordinator().identity, reason))
            if seen.state in {State.APPLIED, State.DONE}:
                raise TransactionStateError(
                    f"transaction {id!r} is {seen.state}: it can no longer be canceled. compensate({id!r}) begins the "
                    "opposite transaction.",
                    id=id,
                    state=seen.state,
                )
            if seen.state is State.CANCELING:
                return still_mine(
                    self.log.take_over(seen, self._completion.new_coordinator().identity, any_application=all)
                )
            return seen

        hint = "whether it is being canceled is not known: cancel it again"
        return self._completion.to_the_end(self._completion.until_answered(attempt, hint=hint, id=id))

    def compensate(self, id: Any) -> Any:  # noqa: A002
        """
        Begin the opposite of a transaction that is done; run it like any other.

        Afterwards there is one compensation that is not canceled, however many ask for it at once: nothing is
        compensated twice. One that was canceled is followed by another attempt.

        Returns:
            Its id: `{"compensates": id}`, with `attempt` from the second on.

        Raises:
            TransactionStateError: the transaction is not done.
        """
        seen = self.log.get(id)
        if seen.state is not State.DONE:
            raise TransactionStateError(
                f"transaction {id!r} is {seen.state}: only one that is done can be compensated.",
                id=id,
                state=seen.state,
            )
        fields = opposite(seen)
        for identity in compensation_ids(id):
            with contextlib.suppress(TransactionStateError):  # there is one of this id, since long ago or just now
                return self._store(fields, identity)
            if self.log.get(identity).state is not State.CANCELED:
                return identity
        raise AssertionError  # ids never end

    # -- recovery ----------------------------------------------------------------------------------

    def recover(
        self,
        older_than: Duration | None = None,
        *,
        all: bool = False,  # noqa: A002
        limit: int = _RECOVER_LIMIT,
    ) -> list[Recovery]:
        """
        Finish what was left unfinished: pending and applied go forward, canceling goes back.

        Any number of processes may recover at once: each transaction is taken over by one of them.

        Args:
            older_than: seconds since its last step, by the server's clock; by default the option.
            all: also those of other applications.
            limit: how many are taken over at most; what cannot be read is reported beside them.

        Returns:
            What became of each; one that fails does not stop the others.
        """
        age = self.older_than if older_than is None else not_negative(older_than, "older_than")
        return recover(self.log, self._completion, age, any_application=all, limit=limit)

    # -- inside ------------------------------------------------------------------------------------

    def _store(self, fields: Mapping[str, Any], id: Any) -> Any:  # noqa: A002
        """Store a new transaction. If an answer was lost, what is there is known to be ours by what it says."""
        identity = ObjectId() if id is None else id
        plain_id("id", identity, self.transactions.codec_options)
        repeated = False

        def attempt() -> None:
            nonlocal repeated
            try:
                self.log.insert(fields, identity, again=repeated)
            except PyMongoError:
                repeated = True
                raise

        hint = (
            f"whether transaction {identity!r} was stored is not known, but nothing was changed: run it, or begin anew"
        )
        self._completion.until_answered(attempt, hint=hint, id=identity)
        return identity

    def _taken_over(self, id: Any) -> Transaction:  # noqa: A002
        """An initial transaction as it is, an unfinished one under a new version."""

        def attempt() -> Transaction:
            seen = self.log.get(id)
            self._refuse_foreign(seen, allowed=seen.state.is_final)
            if seen.state is State.INITIAL or seen.state.is_final:
                return seen
            return still_mine(self.log.take_over(seen, self._completion.new_coordinator().identity))

        return self._completion.until_answered(attempt, hint=NOT_BEGUN, id=id)

    def _refuse_foreign(self, seen: Transaction, *, allowed: bool) -> None:
        if not allowed and seen.application not in {None, self.application}:
            raise TransactionStateError(
                f"transaction {seen.id!r} belongs to application {seen.application!r}, not to {self.application!r}.",
                id=seen.id,
                application=seen.application,
            )


def _named(app: Celery, name: str) -> TwoPhaseCommit:
    found = TWO_PHASE_COMMITS.find(app, name)
    if found is None:
        raise ConfigurationError(f"this worker's app has no TwoPhaseCommit named {name!r}.")
    return found


def _step(app: Celery, name: str, id: Any, version: int | None) -> Transaction | None:  # noqa: A002
    named = _named(app, name)
    try:
        return named.step(id, version)
    except StuckError as error:
        raise stuck(named.log.get(id), error) from error


def _recover(app: Celery, name: str) -> list[Recovery]:
    return _named(app, name).recover()
