"""Two-phase commit over documents: begin, run, cancel, recover."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bson import ObjectId
from celery import Celery, uuid
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.app import Registry, app_name, check_app, schedule
from mongo_celery.arguments import Duration, not_negative, positive
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from mongo_celery.forking import per_process
from mongo_celery.mongo.opening import Client, Source, resolve_collection
from mongo_celery.twophase.abandoned import AbandonedTransactions
from mongo_celery.twophase.clusters import Clusters, opened
from mongo_celery.twophase.compensation import Compensations
from mongo_celery.twophase.completion import NOT_BEGUN, Completion, Way, still_mine
from mongo_celery.twophase.coordinator import BusyError, OvertakenError, StuckError
from mongo_celery.twophase.joined import JoinedCalls, session_to_join
from mongo_celery.twophase.local import RefusedError
from mongo_celery.twophase.log import KnownError, TransactionLog
from mongo_celery.twophase.options import RETENTION, TwoPhaseOptions
from mongo_celery.twophase.participants import Part, is_same, part_of
from mongo_celery.twophase.purge import Purge, Purger
from mongo_celery.twophase.recoveries import COLLECTION as RECOVERIES
from mongo_celery.twophase.recoveries import Recovery, RecoveryRecords, patience, recovery_watch
from mongo_celery.twophase.recovery import Recoverer
from mongo_celery.twophase.request import refuse_other_request
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
    Changes several documents as one, also in several collections and clusters, and on standalone servers.

    A transaction is a document; every step of it may be repeated, and finished by anybody. Afterwards it is `done`
    with each participant changed once, or `canceled` with none changed. Where all participants are in its own cluster
    it is carried out by one MongoDB transaction; across clusters by one in each, with a receipt beside the documents;
    and on standalone servers by markers in the documents (`pendingTransactions`).

    Not promised: isolation, but within one cluster. Others can see one cluster, or with markers one participant,
    changed before the other; a `require` rule is what keeps a balance from going below a limit.

    Inside an open transaction of the same client, `begin`, `transfer`, `run`, `delay`, `cancel` and `compensate` are a
    part of it: committed and aborted with it, once, however often its body is repeated. That is the transaction of
    `transactional`, of a handler with `transactional=True` or of Django that this thread is in, or that of `session=`.
    What cannot be a part of it is refused with a `ConfigurationError`: another client, participants in other clusters,
    markers.

    Args:
        app: the Celery app; None if Celery advances nothing.
        transactions: the collection of transaction documents, or a callable that returns it; it is asked once in
            each process, since prefork workers make their clients after the fork.
        application: marks the transactions of this application; by default the name of the Celery app. Recovery takes
            over only what carries it, or no marker.
        name: for the command line and for tasks, if an app has several.
        accounts: the documents that `transfer` names, or a callable, in the transactions' cluster; by default the
            collection `accounts` beside the transactions. Its name is stored with a transfer, in the field `accounts`:
            whoever shares the transactions and has other accounts refuses it.
        clients: other clusters by alias: clients, or callables that return them, asked as above.
        older_than: seconds after which an unfinished transaction counts as abandoned.
        timeout: seconds that a call may last, whatever a server does: transient errors are repeated for so long. A
            MongoDB transaction that has to be aborted may take 2 s more. A shorter `pymongo.timeout` around a call ends
            each attempt, and not the call: PyMongo lets nobody ask for the time that is left.
        recover_every: seconds between two recoveries, by `celery beat` and by whoever leads a bridge of the app; None
            where something else sees to them. A process says so whose transactions nobody recovers.
        protocol: `"auto"`: one MongoDB transaction where all participants are in the transactions' cluster, receipts
            where they are in several, markers in the documents of standalone servers; or `"documents"`: markers always.
        deadline: seconds after which a transaction that was begun and is not applied cancels itself.
        retention: seconds for which a transaction is kept that is done or canceled, 90 days by default, not less than
            `deadline`; None for ever. Afterwards its id is free: a repeated call does it again. No other transaction is
            removed. With a value of your own, recovery cancels what nobody has begun for so long.

    Raises:
        ConfigurationError: an option cannot work, or the app has another of this name.
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
        options = TwoPhaseOptions(
            application=_application_of(app) if application is None else application,
            name=name,
            older_than=positive(older_than, "older_than"),
            timeout=positive(timeout, "timeout"),
            recover_every=None if recover_every is None else positive(recover_every, "recover_every"),
            protocol=protocol,
            deadline=positive(deadline, "deadline"),
            retention=None if retention is None else positive(retention, "retention"),
        )
        for option, source in (("transactions", transactions), ("accounts", accounts)):
            if source is not None and not isinstance(source, Collection) and not callable(source):
                raise ConfigurationError(f"{option} must be a PyMongo collection, or a callable that returns one.")
        self.app = app
        self.name = options.name
        self.application = options.application
        self.older_than = options.older_than
        self.recover_every = None if app is None else options.recover_every
        self._options = options
        self._given = (transactions, accounts)
        self._clusters = Clusters(lambda: self.transactions, clients or {})
        self._watch = recovery_watch(name, lambda: self.recoveries, patience(self.recover_every))
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
        return opened(resolve_collection(self._given[0]))

    @per_process
    def accounts(self) -> Collection[dict[str, Any]]:
        """The documents that `transfer` names."""
        given = self._given[1]
        return opened(self.transactions.database["accounts"] if given is None else resolve_collection(given))

    @per_process
    def log(self) -> TransactionLog:
        """Reads and writes of the transactions' documents."""
        return TransactionLog(
            self.transactions,
            self.application,
            self.accounts.full_name,
            older_than=self.older_than,
            deadline=self._options.deadline,
            retention=self._options.retention,
        )

    @per_process
    def recoveries(self) -> RecoveryRecords:
        """The notes of who has recovered."""
        return RecoveryRecords(self.transactions, self.application)

    @property
    def full_names(self) -> Sequence[str]:
        """The namespaces of transactions and of the notes of recoveries; receipts and participants lie elsewhere."""
        return [self.transactions.full_name, f"{self.transactions.database.name}.{RECOVERIES}"]

    @per_process
    def _completion(self) -> Completion:
        return Completion(self.log, self._clusters, self._options.timeout, self._options.protocol)

    @per_process
    def _compensations(self) -> Compensations:
        return Compensations(self.log, self._completion)

    # -- beginning ---------------------------------------------------------------------------------

    def begin(
        self,
        participants: Sequence[object],
        *,
        id: Any = None,  # noqa: A002 - what it is
        run: bool = False,
        session: ClientSession | None = None,
    ) -> Any:
        """
        Store a transaction; afterwards it survives a crash, and nothing is changed yet.

        Args:
            participants: `Participant`s; they are changed in this order.
            id: of the transaction; by default a new ObjectId. It has to be unique over all collections of
                transactions that share participants. With an id that is stored already, the same participants get the
                same outcome: see `transfer`.
            run: whether to run it here too, which takes fewer round trips than `run` afterwards.
            session: of the open MongoDB transaction that the call is a part of; see the class.

        Returns:
            The id, for `run`, `delay` and `cancel`.

        Raises:
            ConfigurationError: a participant cannot work, or a document takes part twice.
            TransactionCanceledError: it was rolled back; only where it is run.
            TransactionStateError: a transaction of this id has other participants, or is another application's.
        """
        codec = self.transactions.codec_options
        parts = [part_of(each, self._clusters.alias, codec) for each in participants]
        if not parts:
            raise ConfigurationError("a transaction needs at least one participant.")
        for index, part in enumerate(parts):
            if any(is_same(part, other) for other in parts[:index]):
                raise ConfigurationError(f"{part} takes part twice; combine both changes in one participant.")
        fields = {"participants": [part.to_document() for part in parts]}
        if (joined := self._joined(session)) is not None:
            return self._begun_inside(joined, fields, tuple(parts), id, run=run)
        with self._completion.bounded() as deadline:
            return self._begun(fields, tuple(parts), id, deadline, run=run)

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
        Move an amount from one document's `balance` to another's.

        The stored transaction has the tutorial's fields: source, destination, value, state, lastModified; beside them
        `accounts`, the collection's name; and once somebody has begun it, who has.

        An `id` makes the call repeatable, as for a message that comes twice: `transfer("A", "B", 100, id="pay-7")`.
        The same id with the same fields moves the amount once and gives the same outcome. If it is done, the id is
        returned. If it was canceled, the same error is raised, also if it could be paid by now. If it was only stored
        or is in progress, this call finishes it. The transaction is known for as long as `retention` keeps it.

        Args:
            source: `_id` of the document that pays.
            destination: `_id` of the document that is paid.
            value: how much; a number of more than zero, decimals included.
            id: of the transaction; by default a new ObjectId.
            require: a filter that the source must match; by default a balance of at least `value`. It is stored
                with the transaction.
            run: whether to run it here; else call `run` or `delay` with the returned id.
            session: of the open MongoDB transaction that the call is a part of; see the class.

        Raises:
            ConfigurationError: the value is no amount, an `_id` can be none, both are the same, or the accounts are in
                another cluster than the transactions.
            TransactionCanceledError: it was rolled back: a document is missing, or the source's rule fails.
            TransactionStateError: a transaction of this id has other fields, or is another application's.
        """
        codec = self.accounts.codec_options
        source, destination = plain_id("source", source, codec), plain_id("destination", destination, codec)
        value = plain("value", amount(value), codec)
        require = None if require is None else plain("require", dict(require), codec)
        accounts = self.accounts.full_name
        source_part, destination_part = transfer_parts(accounts, source, destination, value, require)
        if is_same(source_part, destination_part):
            raise ConfigurationError(f"source and destination are both {source!r}; a transfer needs two documents.")
        fields = {"source": source, "destination": destination, "value": value, "accounts": accounts}
        given = fields if require is None else {**fields, "require": require}
        if (joined := self._joined(session)) is not None:
            self._clusters.refuse_elsewhere(self.accounts)
            return self._begun_inside(joined, given, (source_part, destination_part), id, run=run)
        with self._completion.bounded() as deadline:
            self._completion.until_answered(
                lambda: self._clusters.refuse_elsewhere(self.accounts), deadline, hint="nothing was stored"
            )
            return self._begun(given, (source_part, destination_part), id, deadline, run=run)

    # -- advancing ---------------------------------------------------------------------------------

    def run(self, id: Any, *, session: ClientSession | None = None) -> Transaction:  # noqa: A002
        """
        Advance a transaction to its end, here; an unfinished one of this application is taken over at once.

        Args:
            id: what `begin` or `transfer` returned.
            session: of the open MongoDB transaction that the call is a part of; see the class.

        Returns:
            The transaction in state `done`.

        Raises:
            TransactionCanceledError: it was rolled back; `reason` says why.
            TransactionStateError: it is unknown, of another application, or stuck while it is undone.
            ConfigurationError: this process does not know a cluster of it, or has other accounts than the transfer.
            TransactionTimeoutError: MongoDB did not answer in time. Recovery will finish it if it was begun; the
                message says when that is not known, and `run` may be called again in any case.
        """
        if (joined := self._joined(session)) is not None:
            return _ended(joined.run(id))
        with self._completion.bounded() as deadline:
            return _ended(self._run(id, deadline))

    def delay(self, id: Any, *, session: ClientSession | None = None) -> Any:  # noqa: A002
        """
        Let Celery advance a transaction, one step a task, each retried.

        Afterwards it carries this application's marker, and recovery looks after it too, even if the broker loses
        the message. Inside an open transaction the task is sent after the commit. If the process dies in between,
        recovery advances the transaction.

        Args:
            id: what `begin` or `transfer` returned.
            session: of the open MongoDB transaction that the call is a part of; see the class.

        Returns:
            The `AsyncResult` of the first step; the outcome is in the transaction, not in a result.

        Raises:
            TransactionStateError: there is no such transaction that could be advanced here.
            ConfigurationError: there is no Celery app, or it is a transfer between other accounts.
        """
        if self.app is None:
            raise ConfigurationError("delay needs the Celery app: TwoPhaseCommit(app, transactions).")
        identity, task_id = plain_id("id", id, self.transactions.codec_options), uuid()
        publish = partial(publish_step, self.app, self.name, identity, task_id)
        if (joined := self._joined(session)) is not None:
            joined.queue(id, publish)
        else:
            with self._completion.bounded():
                self.log.queue(id)
            publish()
        self._watch.needed()
        return self.app.AsyncResult(task_id)

    def step(self, id: Any, version: int | None) -> Transaction | None:  # noqa: A002
        """
        One step, for the Celery task: None when there is nothing to do for a coordinator of this version.

        Raises:
            PyMongoError, BusyError: repeat it.
            TransactionStateError: no coordinator gets it any further.
        """
        with self._completion.bounded() as deadline:
            transaction = self.log.get(id)
            if transaction.state.is_final:
                return None
            try:
                return self._stepped(transaction, version, deadline)
            except StuckError as error:
                raise self._completion.stopped(transaction, error) from error
            except OvertakenError:
                now = self.log.get(id)
                if (now.state, now.version) == (transaction.state, transaction.version):
                    raise BusyError("it is as it was, though somebody has done more") from None
                return None

    def _stepped(self, transaction: Transaction, version: int | None, deadline: float) -> Transaction | None:
        way = self._completion.way_of(transaction)
        coordinator = self._completion.new_coordinator()
        if version is None and transaction.state is not State.INITIAL:
            return self.log.take_over(transaction, coordinator.identity)
        if transaction.version != version:
            return None
        if way is not Way.DOCUMENTS:
            return self._completion.advanced(transaction, way, deadline)
        return coordinator.begin(transaction) if version is None else coordinator.step(transaction)

    def read(self, id: Any) -> Transaction:  # noqa: A002
        """
        A transaction as it is stored now.

        Raises:
            TransactionStateError: there is none, or its state or shape is unknown.
            ConfigurationError: it is not final, and a transfer between other accounts.
        """
        return self._completion.once_bounded(lambda: self.log.get(id))

    def stored(self, id: Any) -> dict[str, Any] | None:  # noqa: A002
        """
        The document of a transaction as it is stored now, whatever its shape; None if there is none.

        Raises:
            PyMongoError: MongoDB did not answer in time, or refused it; asked once.
        """
        with self._completion.bounded():
            return self.transactions.find_one({"_id": {"$eq": id}})

    def found(
        self, states: Sequence[str] = (), older_than: Duration | None = None, *, limit: int = 50
    ) -> list[dict[str, Any]]:
        """
        Transactions as they are stored; for people to look at.

        First those of the given states that are not final, the oldest step first; then those that are `done` or
        `canceled`, in the order of their ids. Without states all come in that order. Nothing is sorted for it: where
        few of many are wanted by a state that is final, or by their age, it may take the time of a call.

        Args:
            states: only in these; by default in any.
            older_than: only those whose last step was so many seconds ago, by the server's clock.
            limit: how many at most.

        Raises:
            PyMongoError: as of `stored`.
        """
        age = None if older_than is None else not_negative(older_than, "older_than")
        with self._completion.bounded():
            return list(self.log.find(states, age, limit))

    def cancel(
        self,
        id: Any,  # noqa: A002
        reason: str = "canceled on request",
        *,
        all: bool = False,  # noqa: A002
        session: ClientSession | None = None,
    ) -> Transaction:
        """
        Roll a transaction back, as long as it is not applied.

        Args:
            id: of the transaction.
            reason: kept with it.
            all: whether it may belong to another application.
            session: of the open MongoDB transaction that the call is a part of; see the class.

        Returns:
            The transaction in state `canceled`; one that was canceled before is left as it is.

        Raises:
            TransactionStateError: it is applied or done (see `compensate`), unknown, or of another application.
            ConfigurationError: as of `run`.
        """
        if (joined := self._joined(session)) is not None:
            return _canceled_in_time(joined.cancel(id, reason, any_application=all))

        def attempt() -> Transaction:
            seen = self.log.get(id)
            if not all:
                self.log.refuse_foreign(seen)
            if seen.state is State.INITIAL:
                return still_mine(self.log.drop(seen, reason))
            if seen.state in {State.PENDING, State.CANCELING}:
                self._completion.prepare_taking([seen])
            if seen.state is State.PENDING:
                return still_mine(self.log.cancel(seen, self._completion.new_coordinator().identity, reason))
            if seen.state in {State.APPLIED, State.DONE}:
                raise _too_late(seen)
            if seen.state is State.CANCELING:
                return still_mine(
                    self.log.take_over(seen, self._completion.new_coordinator().identity, any_application=all)
                )
            return seen

        hint = "whether it is being canceled is not known: cancel it again"
        with self._completion.bounded() as deadline:
            begun = self._completion.until_answered(attempt, deadline, hint=hint, id=id)
            ended = self._completion.to_the_end(begun, deadline)
        return _canceled_in_time(ended)  # else its last cluster had decided already

    def compensate(self, id: Any, *, run: bool = True, session: ClientSession | None = None) -> Any:  # noqa: A002
        """
        Take back a transaction that is done, by the opposite transaction.

        Afterwards it is taken back, once, however many ask for it at the same time. If the call is interrupted, the
        same call finishes it, and so does recovery once the opposite transaction is stored. If the opposite transaction
        was canceled, since what was paid is spent, the next call makes another attempt.

        Args:
            id: of the transaction.
            run: whether to run the opposite transaction here. With False it is stored, and `run`, `delay` or recovery
                carries it out.
            session: of the open MongoDB transaction that the call is a part of; see the class.

        Returns:
            The id of the opposite transaction: `{"compensates": id}`, with `attempt` from the second on.

        Raises:
            TransactionCanceledError: the opposite transaction was rolled back, so nothing is taken back.
            TransactionStateError: the transaction is not done, or its compensation is gone or another application's.
            ConfigurationError: it is a transfer between other accounts.
            TransactionTimeoutError: MongoDB did not answer in time. Call it again, or leave it to recovery.
        """
        if (joined := self._joined(session)) is not None:
            identity, ended = joined.compensate(id, run=run)
            if ended is not None:
                _ended(ended)
            return identity
        with self._completion.bounded() as deadline:
            identity = self._completion.until_answered(
                lambda: self._compensations.stored(id, deadline), deadline, hint="compensate it again", id=id
            )
            if run:
                _ended(self._run(identity, deadline))
            else:
                self._watch.needed()
            return identity

    def flush(self, timeout: Duration | None = None) -> bool:
        """
        Wait until the log says what this process has done.

        Transactions over several clusters that `transfer` or `begin(..., run=True)` has carried out are done when the
        call returns; their documents in the log say so a moment later. Call it before a client is closed. At the end
        of a process it is done for up to two seconds; what is left then is finished by recovery.

        Args:
            timeout: seconds; by default the option.

        Returns:
            Whether nothing waits any more. What could not be finished in time was left to recovery, and logged.
        """
        seconds = self._options.timeout if timeout is None else not_negative(timeout, "timeout")
        return self._completion.flush(time.monotonic() + seconds)

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
            limit: how many are taken over at most; what cannot be read is reported beside them. What is in the same
                clusters is finished together: once one of these does not answer in time, the others are not tried.

        Returns:
            What became of each; one that fails does not stop the others.
        """
        age = self.older_than if older_than is None else not_negative(older_than, "older_than")
        return Recoverer(self.log, self._completion, self.recoveries, age, any_application=all).recover(limit)

    def abandoned(
        self,
        older_than: Duration | None = None,
        *,
        all: bool = False,  # noqa: A002
        limit: int = _RECOVER_LIMIT,
    ) -> list[dict[str, Any]]:
        """
        What `recover` would take over, the oldest step first, as it is stored; nothing is changed.

        Args:
            older_than: as of `recover`.
            all: as of `recover`.
            limit: how many at most.
        """
        age = self.older_than if older_than is None else not_negative(older_than, "older_than")
        abandoned = AbandonedTransactions(self.log)
        return self._completion.once_bounded(lambda: abandoned.find(age, any_application=all, limit=limit))

    def purge(self, older_than: Duration, *, all: bool = False, dry_run: bool = False) -> Purge:  # noqa: A002
        """
        Remove transactions that are done or canceled, or that nobody has begun or queued; all others stay.

        Afterwards nobody can show, run or compensate them, and their ids may be used again: what was removed and is
        begun once more under the same id is done once more, and has compensations of its own. A compensation stays as
        long as what it takes back. The option `retention` lets new ones expire by themselves. It lasts as long as there
        is something to remove; the timeout is one of each call to the server.

        Args:
            older_than: seconds since the last step, by the server's clock; not less than the deadline.
            all: also those of other applications.
            dry_run: whether nothing is removed.

        Returns:
            What was removed, or would be.

        Raises:
            ConfigurationError: it is too short a time.
        """
        age = not_negative(older_than, "older_than")
        if age < self._options.deadline:
            raise ConfigurationError(
                f"older_than={age:g} is less than the deadline of {self._options.deadline:g} s: whoever got no answer "
                "may ask for the same transaction again, and it would be done twice. Give more."
            )
        purger = Purger(self.log, self._completion.once_bounded, age, any_application=all, is_trial=dry_run)
        return purger.purge()

    # -- inside ------------------------------------------------------------------------------------

    def _joined(self, session: ClientSession | None) -> JoinedCalls | None:
        """Return the calls of the open transaction that this thread is in, or that is given; None outside of any."""
        found = session_to_join(self.transactions.database.client, session)
        return None if found is None else JoinedCalls(self.log, self._completion, self._compensations, found)

    def _begun_inside(
        self,
        joined: JoinedCalls,
        fields: Mapping[str, Any],
        parts: tuple[Part, ...],
        id: Any,  # noqa: A002
        *,
        run: bool,
    ) -> Any:
        identity = ObjectId() if id is None else id
        plain_id("id", identity, self.transactions.codec_options)
        reason = joined.begin(fields, parts, identity, run=run)
        if reason is not None:
            raise _canceled(identity, reason)
        return identity

    def _begun(
        self,
        fields: Mapping[str, Any],
        parts: tuple[Part, ...],
        id: Any,  # noqa: A002
        deadline: float,
        *,
        run: bool,
    ) -> Any:
        """Store a new transaction, and run it if that is asked for."""
        identity = ObjectId() if id is None else id
        plain_id("id", identity, self.transactions.codec_options)
        way = self._way_for(parts, deadline) if run else None
        if way in {Way.ACROSS, Way.DOCUMENTS}:
            self._watch.needed()
        try:
            if way is Way.WITHIN:
                self._store_done(fields, parts, identity, deadline)
            elif way is Way.ACROSS:
                begun = self._stored_and_begun(fields, parts, identity, deadline)
                _ended(self._completion.to_its_decision(begun, deadline))
            else:
                self._store(fields, identity, deadline)
        except KnownError:  # stored by somebody who asked for the same, or by an attempt whose answer was lost
            self._refuse_other(fields, identity, deadline)
            if run:
                _ended(self._run(identity, deadline))
            return identity
        if way is Way.DOCUMENTS:
            stored = self.log.read({**fields, "_id": identity, "state": str(State.INITIAL)})
            _ended(self._completion.to_the_end(stored, deadline))
        return identity

    def _refuse_other(self, fields: Mapping[str, Any], identity: Any, deadline: float) -> None:
        def attempt() -> None:
            stored = self.transactions.find_one({"_id": {"$eq": identity}})
            if stored is None:
                raise BusyError("it is stored, but not by a majority yet")
            refuse_other_request(stored, fields, self.transactions.codec_options)

        self._completion.until_answered(attempt, deadline, hint="ask for it again", id=identity)

    def _run(self, id: Any, deadline: float) -> Transaction:  # noqa: A002
        """Advance a transaction to its end, be it done or canceled."""
        taken = self._taken_over(id, deadline)
        if not taken.state.is_final and self._completion.way_asked(taken, deadline) is not Way.WITHIN:
            self._watch.needed()
        return self._completion.to_the_end(taken, deadline)

    def _stored_and_begun(
        self, fields: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, deadline: float
    ) -> Transaction:
        try:
            return self._completion.stored_and_begun(fields, parts, identity, deadline)
        except RefusedError as error:
            self._store({**fields, "reason": str(error)}, identity, deadline, State.CANCELED)
            raise _canceled(identity, str(error)) from error

    def _way_for(self, parts: tuple[Part, ...], deadline: float) -> Way:
        return self._completion.until_answered(
            lambda: self._completion.way_for(parts), deadline, hint="nothing was stored"
        )

    def _store_done(self, fields: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, deadline: float) -> None:
        """Store a transaction as done and do it, in one; or store it as canceled, and say so."""
        reason = self._completion.stored_and_done(fields, parts, identity, deadline)
        if reason is not None:
            self._store({**fields, "reason": reason}, identity, deadline, State.CANCELED)
            raise _canceled(identity, reason)

    def _store(self, fields: Mapping[str, Any], identity: Any, deadline: float, state: State = State.INITIAL) -> None:
        """Store a new transaction; KnownError where there is one, be it of an attempt whose answer was lost."""
        hint = (
            f"whether transaction {identity!r} was stored is not known, but nothing was changed: run it, or begin anew"
        )
        self._completion.until_answered(
            lambda: self.log.insert(fields, identity, state=state), deadline, hint=hint, id=identity
        )

    def _taken_over(self, id: Any, deadline: float) -> Transaction:  # noqa: A002
        """An initial transaction as it is, an unfinished one under a new version."""

        def attempt() -> Transaction:
            seen = self.log.get(id)
            if seen.state.is_final:
                return seen
            self.log.refuse_foreign(seen)
            if seen.state is State.INITIAL:
                return seen
            self._completion.prepare_taking([seen])
            return still_mine(self.log.take_over(seen, self._completion.new_coordinator().identity))

        return self._completion.until_answered(attempt, deadline, hint=NOT_BEGUN, id=id)


def _application_of(app: Celery | None) -> str:
    """Return the app's name; services that share a log must not share a default."""
    if app is not None:
        check_app(app)
    name = None if app is None else app_name(app)
    if name is None:
        raise ConfigurationError(
            "No Celery app with a name of its own says whose transactions these are. Recovery would not know which to "
            "take over. Name this application: TwoPhaseCommit(..., application='shop')."
        )
    return name


def _ended(transaction: Transaction) -> Transaction:
    """What `run` returns; TransactionCanceledError if it was rolled back."""
    if transaction.state is State.CANCELED:
        raise _canceled(transaction.id, transaction.reason)
    return transaction


def _canceled(identity: Any, reason: str | None) -> TransactionCanceledError:
    return TransactionCanceledError(
        f"transaction {identity!r} was rolled back: {reason or 'canceled'}.", id=identity, reason=reason
    )


def _canceled_in_time(transaction: Transaction) -> Transaction:
    """What `cancel` returns; TransactionStateError if it can no longer be canceled."""
    if transaction.state in {State.APPLIED, State.DONE}:
        raise _too_late(transaction)
    return transaction


def _too_late(transaction: Transaction) -> TransactionStateError:
    identity = transaction.id
    return TransactionStateError(
        f"transaction {identity!r} is {transaction.state}: it can no longer be canceled. compensate({identity!r}) "
        "takes it back.",
        id=identity,
        state=transaction.state,
    )


def _named(app: Celery, name: str) -> TwoPhaseCommit:
    found = TWO_PHASE_COMMITS.find(app, name)
    if found is None:
        raise ConfigurationError(f"this worker's app has no TwoPhaseCommit named {name!r}.")
    return found


def _step(app: Celery, name: str, id: Any, version: int | None) -> Transaction | None:  # noqa: A002
    return _named(app, name).step(id, version)


def _recover(app: Celery, name: str) -> list[Recovery]:
    return _named(app, name).recover()
