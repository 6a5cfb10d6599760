"""
The classes of handler tasks, and the commit task.

`__call__` does the work. The worker calls it with the message's arguments. It replaces them with a change, and calls
the app's own `__call__` (Flask's application context, Django's task).

`self.retry()` uses Celery's limits, backoff and jitter, but its signature publishes nothing: MongoDB stores the retry.
So a long countdown holds no message, survives restarts, and never lets a later change overtake.

No hook that runs in the worker's parent process calls MongoDB.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import pymongo
from celery import Celery
from celery.app.task import Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.utils.imports import symbol_by_name
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.bridge.change import Change, ChangeFailed, Changes
from mongo_celery.bridge.event_loop import EVENT_LOOP
from mongo_celery.bridge.state.claims import name_place
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.dropping import Repetitions
from mongo_celery.bridge.worker.envelope import Envelope, Run
from mongo_celery.bridge.worker.execution import Execution, current, persist
from mongo_celery.bridge.worker.limits import RUN_SECONDS, wait_seconds
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import HandlerUsageError, InvalidEnvelopeError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.steps import Session, Steps, run_async, run_sync, see_collection, transact
from mongo_celery.mongo.transaction.ending import raise_lock_error, raise_rollback_only
from mongo_celery.mongo.transaction.scopes import current as open_session
from mongo_celery.mongo.transaction.scopes import join_transaction, open_scope, refuse_coroutine
from mongo_celery.mongo.verdicts import error_text, is_transient, is_unanswered
from mongo_celery.quantities import number
from mongo_celery.tracing import committing, continue_trace, is_heard, processing

if TYPE_CHECKING:
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
_UNKNOWN_RESULT = "UnknownTransactionCommitResult"
_LIMIT_REACHED = 0.9  # the driver gives up a little early: a much earlier error comes from the handler's own limit
NOT_AWAITED = (
    "The handler returned a coroutine that nothing awaits, so it has done nothing. Write it as async def, and let its "
    "decorators return coroutine functions."
)
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
"""Task attributes that the protocol needs, whatever `task_annotations` set."""

PROTOCOL_METHODS = frozenset(
    {"Request", "__call__", "add_to_chord", "apply_async", "replace", "retry", "signature_from_request"}
)
"""Methods that the protocol needs. An annotation of one of them would run outside the claim."""


class SignedTask:
    """Mixed into both task classes. Only the signed part of a message has an effect."""

    if TYPE_CHECKING:
        name: str

    @property
    def Request(self) -> Any:  # noqa: N802 - Celery's name
        """The class of the requests that the worker's consumer makes. Only workers import it."""
        from mongo_celery.bridge.worker.request import harden_request

        return harden_request(symbol_by_name(super().Request))  # type: ignore[misc]

    @classmethod
    def annotate(cls) -> None:
        """Apply `task_annotations`, except to the protocol's options. Log those without effect."""
        super().annotate()  # type: ignore[misc]
        ignored = sorted(PROTOCOL_METHODS & vars(cls).keys())
        for name in ignored:
            delattr(cls, name)
        for name, value in PROTOCOL_ATTRIBUTES.items():
            if getattr(cls, name, value) != value:
                ignored.append(name)
            setattr(cls, name, value)
        if ignored:
            logger.warning(
                "task_annotations cannot change %s of %s, because the bridge sets them. Exclude this task from "
                "task_annotations",
                ", ".join(ignored),
                cls.name,
                extra={"event": "annotations_ignored"},
            )


class ChangeTask(SignedTask):
    """
    Mixed into the app's task class. Turns a message into claim, handler calls and an outcome.

    If you call the task with a `Change`, it just runs the function, for unit tests.
    """

    wiring: Wiring
    handler: Handler
    shares_messages = True
    """One message may contain several changes, so its id is not a change's id. `once` needs to know."""
    if TYPE_CHECKING:
        run: Callable[..., Any]
        app: Celery
        name: str
        time_limit: float | None
        soft_time_limit: float | None
        rate_limit: Any

    @classmethod
    def annotate(cls) -> None:
        """Apply `task_annotations`. Their `before_start` must wait for the claim, like a class's."""
        super().annotate()
        if "before_start" in vars(cls):
            cls._begin = vars(cls)["before_start"]  # type: ignore[method-assign]
            del cls.before_start

    @property
    def request(self) -> Any:
        """The worker's request. A coroutine, its tasks and its threads have that of their execution."""
        found = self.request_stack.top  # type: ignore[attr-defined]
        execution = current.get() if found is None else None
        if execution is not None and execution.handler.task_name == self.name:
            found = execution.request
        return super().request if found is None else found  # type: ignore[misc]

    def before_start(self, *arguments: Any) -> None:
        """Call the user's `before_start` under a claim. Without one, as when Celery calls it, do nothing."""
        if current.get() is not None:
            super().before_start(*arguments)  # type: ignore[misc]

    def _begin(self, *arguments: Any) -> None:
        """Call the annotation that replaces or wraps `before_start`."""
        self.before_start(*arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one message. With a `Change` (a list of them for a bulk handler), run just the function."""
        since = time.monotonic()  # before MongoDB is used: a hard time limit's clock already runs
        takes_list = self.handler.batch_size is not None
        if args and not isinstance(args[0], str) and _is_given(args[0], takes_list=takes_list):
            view = self.wiring.make_view(self.handler)
            given = Changes(each.with_view(view) for each in args[0]) if takes_list else args[0].with_view(view)
            return super().__call__(given, *args[1:], **kwargs)  # type: ignore[misc]
        if self.request.called_directly:
            raise HandlerUsageError(
                f"{self.name} takes a {'list of Change' if takes_list else 'Change'}. In a unit test, make one with "
                f"{'[' * takes_list}Change.build('insert', ns=...){']' * takes_list}.",
            )
        request, runtime = self.request, self.wiring.of_process(WorkerRuntime)
        run = runtime.open("run", args[0] if args else None, self.handler.name, request)
        if run is None:
            raise Ignore
        run_seconds = request.get(RUN_SECONDS)
        is_limited = any(request.timelimit or ()) or run_seconds == 0
        execution = Execution(
            self.wiring, self.handler, run, wait_seconds(self), run_seconds, is_limited=is_limited, since=since
        )
        execution.request = request
        try:
            if is_heard(request):
                with continue_trace(request):
                    execution.execute(functools.partial(self._trace_call, run))
            else:
                execution.execute(self._call_handler)
        except MemoryError as error:  # its outcome is written: Celery ends the whole worker with this error
            raise Ignore from error

    def _trace_call(self, run: Run, given: Change | Changes, retries: int) -> None:
        name = f"{run.bridge}/{run.subscription}"
        with processing(name, lambda: _span_attributes(self.request, run, given, retries)):
            self._call_handler(given, retries)

    def _call_handler(self, given: Change | Changes, retries: int) -> None:
        execution = current.get()
        assert execution is not None, "a handler runs under a claim"
        request = execution.request
        request.retries = retries
        if not execution.begun:
            self._begin(request.id, request.args, request.kwargs)
            execution.begun = True
        inherited = super().__call__  # type: ignore[misc]
        if getattr(inherited, "__func__", None) is Task.__call__:
            refuse_coroutine(self.run(given), NOT_AWAITED)  # Celery's own would push another request, without attempts
            return
        request._protected = 0  # noqa: SLF001 - a run of several changes passes here several times
        refuse_coroutine(inherited(given), NOT_AWAITED)

    def signature_from_request(self, *_args: Any, **_kwargs: Any) -> ParkedSignature:
        """Return a signature that publishes nothing, because the execution stores the retry."""
        return ParkedSignature(args=(self.request.argsrepr,))

    def retry(self, args: Any = None, kwargs: Any = None, *rest: Any, throw: bool = True, **options: Any) -> Any:
        """
        Store Celery's `retry` in MongoDB. It always raises, even with `throw=False`.

        If `autoretry_for=(Exception,)` caught an outage, the change waits, and no attempt is counted.
        """
        del throw
        if args is not None or kwargs:
            raise HandlerUsageError("A handler's retry() repeats the same change. Leave out args and kwargs.")
        # If another handler calls this one, that handler decides.
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
        """Raise an error, because only the listener sends changes."""
        raise HandlerUsageError(self.explain_refusal())

    def explain_refusal(self) -> str:
        """Return the error for sending a handler's task. An outbox also raises it."""
        return (
            f"{self.name} is a change handler, so only the listener may send it. Write to the watched collection, or "
            "call the function with a Change."
        )

    def replace(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise an error, because a replaced task would commit before its replacement has run."""
        raise HandlerUsageError("A change handler cannot replace itself. Start the other task with delay().")

    def add_to_chord(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise an error, because a change handler is already part of a chain."""
        raise HandlerUsageError("A change handler cannot join a chord. Start the chord with delay().")


def _is_given(argument: object, *, takes_list: bool) -> bool:
    """Return True if the handler is called directly, with its own arguments."""
    if not takes_list:
        return isinstance(argument, Change)
    return isinstance(argument, list | tuple) and all(isinstance(each, Change) for each in argument)


def _span_attributes(request: Any, run: Run, given: Change | Changes, retries: int) -> dict[str, Any]:
    """Return an execution's trace attributes, without contents and `_id`. A list has those of its first change."""
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

    A retry waits in MongoDB, not in the broker, so `apply_async` publishes nothing.
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
    if handler.is_async:
        function = on_event_loop(handler, function)
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
    Wrap a bulk handler. The wrapper reports `ChangeFailed` to the execution, and raises the cause.

    So `autoretry_for`, a transaction's driver and other outer code see the error itself.
    """

    def call(*args: Any) -> Steps[Any]:
        execution = current.get()
        if execution is None:  # a direct call in a unit test
            return (yield function(*args))
        # If a handler calls another one's function, that reports about another list.
        is_own = execution.handler.function is function
        if is_own:
            execution.attempt.failed = None
        try:
            return (yield function(*args))
        except ChangeFailed as failed:
            if is_own and failed.changes is args[-1]:  # of its own list: no change is known to be finished
                execution.attempt.failed = failed.place
            error = failed.error
            if error is None or isinstance(error, Ignore):  # an exception that skips a change is not its failure
                raise
        raise error

    return _wrap(function, call)


def in_transaction(wiring: Wiring, handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return the function, run inside a transaction whose last write marks the change as handled.

    So its effects in the same cluster happen exactly once: effects and mark commit together or not at all. It is inside
    `autoretry_for`, which would otherwise catch transient errors before the driver can repeat the body.
    """

    def call(*args: Any) -> Steps[Any]:
        execution = current.get()
        if execution is None:  # a direct call in a unit test
            return (yield function(*args))
        session = execution.find_session(handler)
        if session is None:
            return (yield from _join(wiring, handler, function, args))
        return (yield from _commit_handled(wiring, execution, session, function, args))

    return _wrap(function, call)


def on_event_loop(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return a plain function that runs a handler's coroutine function on the process's event loop.

    An execution waits for its end. Another call, in a unit test or by another handler, returns a coroutine.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        loop, execution = EVENT_LOOP.get(), current.get()
        call = functools.partial(function, *args)
        if loop.is_here:
            return call()
        is_own = execution is not None and execution.handler.name == handler.name
        return loop.run(call) if is_own else loop.call(call)

    return run


def _wrap(function: Callable[..., Any], call: Callable[..., Steps[Any]]) -> Callable[..., Any]:
    """Return a function, or a coroutine function, that runs the steps of a call of this one."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return run_sync(call(*args))

    @functools.wraps(function)
    async def run_coroutine(*args: Any) -> Any:
        return await run_async(call(*args))

    return run_coroutine if inspect.iscoroutinefunction(function) else run


def _commit_handled(
    wiring: Wiring, execution: Execution, session: Session, function: Callable[..., Any], args: tuple[Any, ...]
) -> Steps[None]:
    """Run a handler's own transaction. Its effects and its mark are committed when this returns."""
    *before, change = args
    seconds, started, is_commit = wiring.options.transaction_seconds, time.monotonic(), False

    def is_at_limit() -> bool:
        return time.monotonic() - started >= seconds * _LIMIT_REACHED

    def body(session: Session) -> Steps[None]:
        nonlocal is_commit
        is_commit = False
        scope.reset_attempt()
        try:
            yield from _run_body(scope, session, lambda: function(*before, change.with_session(session)))
            if isinstance(session, AsyncClientSession):
                yield scope.await_writes()
            yield from execution.write_in_transaction(session)
            is_commit = True
        except Exception as error:
            if not is_at_limit():
                execution.attempt.note_body_error(error)
            raise

    try:
        with open_scope(session, seconds) as scope, pymongo.timeout(seconds):
            yield transact(session.client, session, body, ReadConcern("snapshot"))
    except BaseException as error:
        if _is_timeout(error) and is_at_limit():
            execution.attempt.timeout = error
        # PyMongo does not abort what it may have committed, for example if a soft time limit interrupts it.
        if is_unanswered(error) if isinstance(error, PyMongoError) else is_commit:
            _end_later(wiring, execution.give_session())
        raise
    execution.note_commit()
    if isinstance(session, AsyncClientSession):
        yield scope.await_callbacks()
    else:
        scope.run_callbacks()


def _is_timeout(error: BaseException) -> TypeGuard[PyMongoError]:
    """Return True for a time-out, except of a commit without an answer, which the body did not prevent."""
    return isinstance(error, PyMongoError) and error.timeout and not error.has_error_label(_UNKNOWN_RESULT)


def _join(wiring: Wiring, handler: Handler, function: Callable[..., Any], args: tuple[Any, ...]) -> Steps[Any]:
    """Run the function inside another handler or part. The outer execution commits this with its own effects."""
    *before, change = args
    session = open_session(wiring.async_client if handler.is_async else wiring.client)
    if session is None:
        raise HandlerUsageError(
            f"{handler.name} has transactional=True, but the handler that calls it has no open transaction, so its "
            "effects could happen twice. Give the calling handler transactional=True, or move the common work into a "
            "plain function."
        )
    with join_transaction(session):
        return (yield function(*before, change.with_session(session)))


def _run_body(scope: TransactionScope, session: Session, handle: Callable[[], object]) -> Steps[None]:
    """Run the handler as the body of `transactional`. Joined calls and locks may have made it rollback-only."""
    try:
        refuse_coroutine((yield handle()), NOT_AWAITED)
    except Exception as error:
        raise_lock_error(scope, error)
        raise
    raise_rollback_only(scope, session)


def _end_later(wiring: Wiring, session: Session) -> None:
    """
    End a transaction that a lost answer may have left open on the server, as soon as the server answers.

    Otherwise its documents stay locked for `transactionLifetimeLimitSeconds`. A newer transaction of the same session
    ends it, even if its last command never arrived.
    """
    partitions = see_collection(wiring.client[wiring.options.database]["partitions"], session)

    def read(inside: Session) -> Steps[None]:
        yield partitions.find_one({"_id": None}, session=inside)

    def steps() -> Steps[bool]:
        try:
            with pymongo.timeout(_ENDING_SECONDS):
                yield transact(session.client, session, read)
        except PyMongoError as error:
            renew_connections(session.client, error)
            raise
        yield session.end_session()
        return True

    is_async = isinstance(session, AsyncClientSession)
    end = (lambda: EVENT_LOOP.get().run(lambda: run_async(steps()))) if is_async else (lambda: run_sync(steps()))
    with contextlib.suppress(RuntimeError):  # no thread can start, so the server's time limit ends the transaction
        wiring.of_process(DeferredWrites).add("the end of a transaction", end)


class CommitTask(SignedTask):
    """Mixed into the app's task class. Publishes the link of a chain, and omits steps that only users' tasks need."""

    if TYPE_CHECKING:
        app: Celery
        name: str

    @functools.cached_property
    def _announces(self) -> bool:
        """Return True if Celery sends an event for each task that it sends. Its settings are slow to read."""
        return bool(self.app.conf.task_send_sent_event)

    def apply_async(self, args: Any = None, _kwargs: Any = None, *_rest: Any, **options: Any) -> Any:
        """
        Publish the link that the worker takes from a handler's message after the handler succeeds.

        The listener has already chosen queue, id and label. Routes, canvas and representations of the arguments are not
        computed again.

        It never fails: the handler has succeeded, and MongoDB has the success. Without the link the listener commits.
        """
        try:
            self._publish(args, options)
        except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
            logger.warning(
                "the worker could not send the commit message after task %s. The listener commits instead: %s",
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
    """Register an app's commit task, once for all its bridges."""

    def commit(task: Any, *args: Any, **_kwargs: Any) -> None:
        """Make the handled changes the new position. Drop a forged message, whatever its arguments."""
        envelope = wiring = None
        with contextlib.suppress(InvalidEnvelopeError):
            envelope = Envelope(args[0] if args else None)
            wiring = BRIDGES.find(app, envelope.bridge)
        if wiring is None:
            if count := _nameless.add("commit"):
                logger.warning(
                    "the worker has dropped %s of a bridge that this app does not have. Another app may use its queues",
                    number(count, "commit message", "commit messages"),
                    extra={"event": "message_dropped"},
                )
            raise Ignore
        run = wiring.of_process(WorkerRuntime).open("commit", envelope, None, task.request)
        if run is None:
            raise Ignore
        if not is_heard(task.request):
            _commit(task, wiring, run)
            return
        name = f"{run.bridge}/{run.subscription}"
        with continue_trace(task.request), committing(name, lambda: _commit_attributes(task.request, run)):
            _commit(task, wiring, run)

    base = type("CommitTask", (CommitTask, app.Task), {"abstract": True})
    register: Any = app.task
    register(name=COMMIT_TASK, base=base, bind=True, shared=False, typing=False, **PROTOCOL_ATTRIBUTES)(commit)


def _commit(task: Any, wiring: Wiring, run: Run) -> None:
    claims, where = wiring.store.claims, name_place(run.partition_id)
    try:
        if not persist(
            claims,
            lambda: claims.commit(run.partition_id, run.first, lasting=False),
            f"a commit of partition {where}",
            wait_seconds(task),
        ):
            logger.debug("the commit of partition %s was already done", where)
    except PyMongoError as error:
        if not is_transient(error):
            raise
        logger.warning(
            "the worker could not write the commit of partition %s. The listener commits instead: %s",
            where,
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
