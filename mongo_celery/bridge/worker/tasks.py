"""
The Celery edge: the class of handler tasks, and the commit task.

The work is done in `__call__`, which the worker calls with the message's arguments: it can replace them
by a change, and calls on to the app's own `__call__` (Flask's application context, Django's task).

`self.retry()` keeps Celery's logic of limits, backoff and jitter, but its signature publishes nothing:
the retry is parked in MongoDB. So a long countdown holds no message, survives restarts, and never lets
a successor overtake.

Nothing here calls MongoDB from hooks that run in the worker's parent process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from celery import Celery, signals
from celery.app.annotations import resolve_all
from celery.app.task import Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.utils.imports import symbol_by_name
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.bridge.change import Change, ChangeFailed, Changes
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.dropping import Repetitions
from mongo_celery.bridge.worker.envelope import Envelope, Run
from mongo_celery.bridge.worker.execution import ANSWER_SECONDS, Execution, current, persist
from mongo_celery.bridge.worker.limits import RUN_SECONDS, RunLimits, run_limits, worker_limits
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import HandlerUsageError, InvalidEnvelopeError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.transaction.ending import raise_lock_error, raise_rollback_only
from mongo_celery.mongo.transaction.scopes import current as open_session
from mongo_celery.mongo.transaction.scopes import join_transaction, open_scope
from mongo_celery.mongo.verdicts import error_text, is_transient, is_unanswered
from mongo_celery.quantities import number
from mongo_celery.tracing import committing, is_heard, processing, received

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.mongo.transaction.scopes import TransactionScope

logger = logging.getLogger("mongo_celery.worker")

COMMIT_TASK = "mongo_celery.commit"
_nameless = Repetitions()
_LINK_RETRIES = {
    "max_retries": 1,
    "interval_start": 0,
}  # for a connection that has gone stale; more would hold the slot
_ENDING_SECONDS = 5.0
_LIMIT_REACHED = 0.9  # the driver gives up a little early; an error long before is of a limit of the handler's own
PROTOCOL_ATTRIBUTES: dict[str, Any] = {
    "acks_late": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
    "acks_on_failure_or_timeout": True,
    "reject_on_worker_lost": False,
    "ignore_result": True,
    "store_errors_even_if_ignored": False,
    "serializer": "json",
    "expires": None,
}
"""What the protocol needs of a task; `check` and every worker look whether annotations override it."""

PROTOCOL_METHODS = frozenset(
    {"Request", "__call__", "add_to_chord", "apply_async", "replace", "retry", "signature_from_request"}
)
"""What makes a task one of ours; annotations that replace or wrap one of these run outside the claim, without count."""


class SignedTask:
    """Mixed into the classes of both kinds of task: of a message, only what is signed has power."""

    @property
    def Request(self) -> Any:  # noqa: N802 - Celery's name
        """The class that the worker's consumer makes of a message. Only workers import it."""
        from mongo_celery.bridge.worker.request import harden_request

        return harden_request(symbol_by_name(super().Request))  # type: ignore[misc]


class ChangeTask(SignedTask):
    """
    Mixed into the app's task class: turns a message into claim, handler calls and an outcome.

    Calling the task with a `Change` just runs the function, for unit tests.
    """

    wiring: Wiring
    handler: Handler
    shares_messages = True
    """Several changes may come with one message: its id is none of a change, as `once` has to know."""
    _limits: tuple[tuple[Any, ...], RunLimits] = ((), RunLimits(0.0))
    """Those of its messages, and what they are made of."""
    if TYPE_CHECKING:
        request: Any
        run: Callable[..., Any]
        app: Celery
        name: str
        time_limit: float | None
        soft_time_limit: float | None
        rate_limit: Any

    @classmethod
    def annotate(cls) -> None:
        """Apply `task_annotations`. A `before_start` of theirs has to wait for the claim, like that of a class."""
        super().annotate()  # type: ignore[misc]
        if "before_start" in vars(cls):
            cls._begin = vars(cls)["before_start"]  # type: ignore[method-assign]
            del cls.before_start

    def before_start(self, *arguments: Any) -> None:
        """The user's own, under a claim. Celery calls it before there is one: nothing happens yet."""
        if current.get() is not None:
            super().before_start(*arguments)  # type: ignore[misc]

    def _begin(self, *arguments: Any) -> None:
        """Call what annotations have put in the place of `before_start`, or around it."""
        self.before_start(*arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one message, or, with a `Change` (a list of them for a bulk handler), just the function."""
        since = time.monotonic()  # before MongoDB is asked: a hard time limit's clock runs already
        takes_list = self.handler.batch_size is not None
        if args and not isinstance(args[0], str) and _is_given(args[0], takes_list=takes_list):
            view = self.wiring.make_view(self.handler)
            given = Changes(each.with_view(view) for each in args[0]) if takes_list else args[0].with_view(view)
            return super().__call__(given, *args[1:], **kwargs)  # type: ignore[misc]
        if self.request.called_directly:
            raise HandlerUsageError(
                f"{self.name} takes a {'list of Change' if takes_list else 'Change'}; in a unit test make one with "
                f"{'[' * takes_list}Change.build('insert', ns=...){']' * takes_list}.",
            )
        runtime = self.wiring.of_process(WorkerRuntime)
        run = runtime.open("run", args[0] if args else None, self.handler.name, self.request)
        if run is None:
            raise Ignore
        run_seconds = self.request.get(RUN_SECONDS)
        is_limited = any(self.request.timelimit or ()) or run_seconds == 0
        execution = Execution(
            self.wiring, self.handler, run, self._patience(), run_seconds, is_limited=is_limited, since=since
        )
        try:
            if is_heard(self.request):
                with received(self.request):
                    execution.execute(functools.partial(self._trace_call, run))
            else:
                execution.execute(self._call_handler)
        except MemoryError as error:  # its outcome is written; Celery ends the whole worker by it
            raise Ignore from error

    def limits_of_runs(self) -> RunLimits:
        """Of a message that comes now. Asked in the worker's parent process, where they may change at any time."""
        whole = worker_limits.get(self.app)
        made_of = self.wiring.options, whole, self.rate_limit, self.time_limit, self.soft_time_limit
        if made_of != self._limits[0]:
            self._limits = made_of, run_limits(self)
        return self._limits[1]

    def _trace_call(self, run: Run, given: Change | Changes, retries: int) -> None:
        name = f"{run.bridge}/{run.subscription}"
        with processing(name, lambda: _span_attributes(self.request, run, given, retries)):
            self._call_handler(given, retries)

    def _patience(self) -> float:
        """Seconds to wait for MongoDB at the end: a hard time limit would kill the process, and charge the change."""
        hard, _ = self.request.timelimit or (None, None)
        hard = hard or self.time_limit
        return min(ANSWER_SECONDS, hard / 4) if hard else ANSWER_SECONDS

    def _call_handler(self, given: Change | Changes, retries: int) -> None:
        request, execution = self.request, current.get()
        assert execution is not None, "a handler runs under a claim"
        request.retries = retries
        if not execution.begun:
            self._begin(request.id, request.args, request.kwargs)
            execution.begun = True
        inherited = super().__call__  # type: ignore[misc]
        if getattr(inherited, "__func__", None) is Task.__call__:
            self.run(given)  # Celery's own would push another request, without attempts
            return
        request._protected = 0  # noqa: SLF001 - a run of several changes passes here several times
        inherited(given)

    def signature_from_request(self, *_args: Any, **_kwargs: Any) -> ParkedSignature:
        """Return what `retry` would publish: nothing (the execution stores the retry)."""
        return ParkedSignature(args=(self.request.argsrepr,))

    def retry(self, args: Any = None, kwargs: Any = None, *rest: Any, throw: bool = True, **options: Any) -> Any:
        """
        Celery's `retry`, parked in MongoDB. It always raises, whatever `throw` says.

        An outage that an `autoretry_for=(Exception,)` has taken in passes: the change waits, and nothing is counted.
        """
        del throw
        if args is not None or kwargs:
            raise HandlerUsageError("A handler's retry() repeats its change; it takes no args or kwargs.")
        # One that another handler calls leaves everything to that one.
        execution, error = None if self.request.called_directly else current.get(), options.get("exc")
        named = getattr(self, "autoretry_for", ())
        if execution is not None and error is not None and execution.must_wait(error, named):
            raise error
        try:
            return super().retry(None, None, *rest, throw=True, **options)  # type: ignore[misc]
        except Retry:
            raise
        except Exception as exhausted:
            if execution is not None:
                execution.attempt.exhausted = exhausted
            raise

    def apply_async(self, *_args: Any, **_options: Any) -> Any:
        """Refused: the listener dispatches changes."""
        raise HandlerUsageError(self.explain_refusal())

    def explain_refusal(self) -> str:
        """Return why nobody but the listener sends it. An outbox asks, too."""
        return (
            f"{self.name} is a change handler: the listener dispatches it when a document changes. Write to the "
            "watched collection, or call the function with a Change."
        )

    def replace(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused: a replaced task would commit before its replacement has run."""
        raise HandlerUsageError("A change handler cannot replace itself; start the other task with delay().")

    def add_to_chord(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused: a change handler is part of its own chain."""
        raise HandlerUsageError("A change handler cannot join a chord; start the chord with delay().")


def _is_given(argument: object, *, takes_list: bool) -> bool:
    """Return True if the handler is called directly, with what it takes."""
    if not takes_list:
        return isinstance(argument, Change)
    return isinstance(argument, list | tuple) and all(isinstance(each, Change) for each in argument)


def _span_attributes(request: Any, run: Run, given: Change | Changes, retries: int) -> dict[str, Any]:
    """Return what a trace shows of an execution: no contents and no `_id` of documents. Of a list its first change."""
    change = given if isinstance(given, Change) else given[0]
    return {
        **({} if isinstance(given, Change) else {"messaging.batch.message_count": len(given)}),
        **_message_attributes(request, run),
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "mongo_celery.namespace": change.namespace,
        "mongo_celery.operation_type": change.operation_type,
        "mongo_celery.seq": change.seq,
        "mongo_celery.fencing_token": change.fencing_token,
        "mongo_celery.retries": retries,
    }


def _message_attributes(request: Any, run: Run) -> dict[str, Any]:
    return {
        "messaging.destination.name": str((request.delivery_info or {}).get("routing_key")),
        "messaging.destination.partition.id": str(run.index),
        "messaging.message.id": str(request.id),
    }


@dataclass(frozen=True, slots=True)
class ParkedSignature:
    """
    The signature that `Task.retry` would publish.

    A retry waits in MongoDB, not in the broker, so its `apply_async` publishes nothing.
    """

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def apply_async(self, *_args: Any, **_options: Any) -> None:
        """Publish nothing."""


def make_task(wiring: Wiring, app: Celery, handler: Handler, options: dict[str, Any]) -> Any:
    """Register a handler's Celery task. The returned proxy becomes the task when the app is finalized."""
    function = handler.function if handler.batch_size is None else report_failed_change(handler.function)
    if handler.transactional:
        function = in_transaction(wiring, handler, function)
    base = options.pop("base", None)
    ignored = tuple(options.pop("dont_autoretry_for", ()))
    register: Any = app.task
    return register(
        name=handler.task_name,
        base=type("ChangeTask", (ChangeTask, base or app.Task), {"abstract": True}),
        wiring=wiring,
        handler=handler,
        typing=False,
        shared=False,
        dont_autoretry_for=(*ignored, StaleFencingTokenError, OutdatedChangeError, Reject),
        **PROTOCOL_ATTRIBUTES,
        **options,
    )(function)


def report_failed_change(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return the function of a bulk handler that reports `ChangeFailed` to its execution, and raises the cause of that.

    So `autoretry_for`, a transaction's driver and others outside of it see the error itself.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        execution = current.get()
        if execution is None:  # called directly, in a unit test
            return function(*args)
        # A handler may call that of another one, whose word about its own list is none about this one.
        is_own = execution.handler.function is function
        if is_own:
            execution.attempt.failed = None
        try:
            return function(*args)
        except ChangeFailed as failed:
            if is_own and failed.changes is args[-1]:  # of a list of its own making nobody knows what was finished
                execution.attempt.failed = failed.place
            error = failed.error
            if error is None or isinstance(error, Ignore):  # what passes over a change is no failure of one
                raise
        raise error

    return run


def in_transaction(wiring: Wiring, handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    """
    The function, run inside a transaction whose last write is the mark that it has been handled.

    So its effects in the same cluster happen exactly once: they and the mark are there together or not
    at all. It stands inside `autoretry_for`, which would otherwise take transient errors before the
    driver can repeat the body.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        execution = current.get()
        if execution is None:  # called directly, in a unit test
            return function(*args)
        session = execution.find_session(handler)
        if session is None:
            return _join(wiring, handler, function, args)
        _commit_handled(wiring, execution, session, function, args)
        return None

    return run


def _commit_handled(
    wiring: Wiring, execution: Execution, session: ClientSession, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run a handler's own transaction: its effects and its mark are committed when this returns."""
    *before, change = args
    seconds, started = wiring.options.transaction_seconds, time.monotonic()

    def is_at_limit() -> bool:
        return time.monotonic() - started >= seconds * _LIMIT_REACHED

    def body(session: ClientSession) -> None:
        scope.reset_attempt()
        try:
            _run_body(scope, session, lambda: function(*before, change.with_session(session)))
            execution.write_in_transaction(session)
        except Exception as error:
            if not is_at_limit():
                execution.attempt.note_body_error(error)
            raise

    try:
        with open_scope(session, seconds, "bridge.client") as scope, pymongo.timeout(seconds):
            session.with_transaction(body, ReadConcern("snapshot"))
    except PyMongoError as error:
        # A commit without an answer was not kept from it by the body.
        if error.timeout and is_at_limit() and not error.has_error_label("UnknownTransactionCommitResult"):
            execution.attempt.timeout = error
        if is_unanswered(error):
            _end_later(wiring, execution.give_session())
        raise
    execution.note_commit()
    scope.run_callbacks()


def _join(wiring: Wiring, handler: Handler, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run the function for another handler, or for a part of one: its execution commits this with its own effects."""
    *before, change = args
    session = open_session(wiring.client)
    if session is None:
        raise HandlerUsageError(
            f"{handler.name} has transactional=True, and no transaction of its bridge is open here: its effects would "
            "be repeated with those of the caller. Give the calling handler transactional=True, or move the common "
            "work into a plain function."
        )
    with join_transaction(session):
        return function(*before, change.with_session(session))


def _run_body(scope: TransactionScope, session: ClientSession, handle: Callable[[], object]) -> None:
    """Run the handler as the body of `transactional`: its joined calls and locks may have made it rollback-only."""
    try:
        handle()
    except Exception as error:
        raise_lock_error(scope, error)
        raise
    raise_rollback_only(scope, session)


def _end_later(wiring: Wiring, session: ClientSession) -> None:
    """
    End what a lost answer may have left open on the server, as soon as it answers.

    Else the documents of that transaction stay locked for `transactionLifetimeLimitSeconds`. A newer transaction of
    the same session ends it, also where its last command has not even arrived.
    """
    partitions = wiring.client[wiring.options.database]["partitions"]

    def end() -> bool:
        with pymongo.timeout(_ENDING_SECONDS), session.start_transaction():
            partitions.find_one({"_id": None}, session=session)
        session.end_session()
        return True

    wiring.of_process(DeferredWrites).add("the end of a transaction", end)


class CommitTask(SignedTask):
    """Mixed into the app's task class: publishes the link of a chain without what only user tasks need."""

    if TYPE_CHECKING:
        app: Celery
        name: str

    @functools.cached_property
    def _announces(self) -> bool:
        """True if Celery sends an event for each task that it sends. Its settings are slow to read."""
        return bool(self.app.conf.task_send_sent_event)

    def apply_async(self, args: Any = None, _kwargs: Any = None, *_rest: Any, **options: Any) -> Any:
        """
        Publish the link that the worker takes from a handler's message after the handler has succeeded.

        The listener has already chosen queue, id and label, so routes, canvas and representations of the
        arguments need not be worked out again.

        It never fails: the handler has succeeded, and MongoDB knows it. Without the link the listener commits.
        """
        try:
            self._publish(args, options)
        except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
            logger.warning(
                "the commit message behind %s was not published; the listener commits: %s",
                options.get("parent_id"),
                error_text(error),
                extra={"event": "commit_unpublished"},
            )
        return self.app.AsyncResult(options["task_id"])

    def _publish(self, args: Any, options: Mapping[str, Any]) -> None:
        amqp, task_id, queue = self.app.amqp, options["task_id"], options["queue"]
        message = amqp.as_task_v2(
            task_id,
            self.name,
            tuple(args or ()),
            {},
            root_id=options.get("root_id"),
            parent_id=options.get("parent_id"),
            ignore_result=True,
            argsrepr=options.get("argsrepr", "()"),
            kwargsrepr="{}",
            create_sent_event=self._announces,
        )
        with self.app.producer_or_acquire(options.get("producer")) as producer:
            amqp.send_task_message(
                producer,
                self.name,
                message,
                queue=queue,
                serializer="json",
                declare=[],
                retry_policy=_LINK_RETRIES,
                headers=options.get("headers"),
            )


def register_commit(app: Celery) -> None:
    """Register the commit task of an app, once for all its bridges."""

    def commit(task: Any, *args: Any, **_kwargs: Any) -> None:
        """Turn what is handled into the new position. Whatever arguments a forged message has, it is dropped."""
        envelope = wiring = None
        with contextlib.suppress(InvalidEnvelopeError):
            envelope = Envelope(args[0] if args else None)
            wiring = BRIDGES.find(app, envelope.bridge)
        if wiring is None:
            if count := _nameless.add("commit"):
                logger.warning(
                    "dropped %s that name no bridge of this app",
                    number(count, "commit message", "commit messages"),
                    extra={"event": "message_dropped"},
                )
            raise Ignore
        run = wiring.of_process(WorkerRuntime).open("commit", envelope, None, task.request)
        if run is None:
            raise Ignore
        if not is_heard(task.request):
            _commit(wiring, run)
            return
        name = f"{run.bridge}/{run.subscription}"
        with received(task.request), committing(name, lambda: _commit_attributes(task.request, run)):
            _commit(wiring, run)

    base = type("CommitTask", (CommitTask, app.Task), {"abstract": True})
    register: Any = app.task
    register(name=COMMIT_TASK, base=base, bind=True, shared=False, typing=False, **PROTOCOL_ATTRIBUTES)(commit)


def _commit(wiring: Wiring, run: Run) -> None:
    claims = wiring.store.claims
    try:
        if not persist(
            lambda: claims.commit(run.partition_id, run.first, lasting=False), f"a commit of {run.partition_id}"
        ):
            logger.debug("commit of %s found its work done", run.partition_id)
    except PyMongoError as error:
        if not is_transient(error):
            raise
        logger.warning(
            "commit of %s was not written; the listener commits: %s",
            run.partition_id,
            error_text(error),
            extra={"event": "commit_unwritten"},
        )
        raise Ignore from error


def _commit_attributes(request: Any, run: Run) -> dict[str, Any]:
    return {
        **_message_attributes(request, run),
        "messaging.operation.name": "commit",
        "messaging.operation.type": "settle",
        "mongo_celery.first": run.first,
    }


def overridden_attributes(app: Celery) -> dict[str, list[str]]:
    """Attributes and methods of our tasks that `task_annotations` have changed, by task name."""
    found: dict[str, list[str]] = {}
    for name, task in app.tasks.items():
        if name != COMMIT_TASK and not hasattr(task, "handler"):
            continue
        wrong = [key for key, value in PROTOCOL_ATTRIBUTES.items() if getattr(task, key, value) != value]
        annotated = {key.removeprefix("@") for each in resolve_all(app.annotations, task) for key in each}
        wrong += sorted(annotated & PROTOCOL_METHODS)
        if wrong:
            found[name] = wrong
    return found


@signals.celeryd_after_setup.connect(weak=False)
def _check_annotations(instance: Any = None, **_: Any) -> None:
    """A `task_annotations` entry that overrides the protocol's attributes is an error in every worker's log."""
    if instance is None or not BRIDGES.of(instance.app):
        return
    for task, attributes in overridden_attributes(instance.app).items():
        logger.error(
            "task_annotations override %s of %s, which the bridge depends on; exclude the task there",
            ", ".join(attributes),
            task,
            extra={"event": "attributes_overridden"},
        )
