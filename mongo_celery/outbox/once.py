"""
Idempotent functions: a call whose id has run does not run again.

An outbox dispatches at least once, with the same task id each time. `once` keeps an idempotency record of each id for a
given time, by the server's clock (`idempotency`).

It also stores the result as JSON. A worker may die after the function, but before Celery has sent a chain's next step.
Then the duplicate sends that step, with the first run's result.

| event | effect |
|---|---|
| the function failed, or requested a retry | no record: the next delivery runs |
| the process died while the function ran | its claim lapses, and a duplicate runs |
| the process was frozen for longer than `claim_ttl` | a second run beside it; with `session` only one commits |
| the call is inside a transaction | the record is part of it: both commit, or neither |
| MongoDB did not answer before the function | repeated for half a minute; then the error, and nothing has run |
| MongoDB did not answer after it | repeated for half a minute; then a log record, and the task has succeeded |
| MongoDB did not answer at the commit | with `session`, repeated. Then the task fails, and may have run |
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import bson
import pymongo
from bson import ObjectId
from celery import current_task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from kombu.utils.json import dumps, loads
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.arguments import Duration, positive
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import transactional
from mongo_celery.mongo.cluster import connections_in_transaction
from mongo_celery.mongo.opening import Source, check_source
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses, retry_until_answered
from mongo_celery.mongo.transaction import Collects, hide_session
from mongo_celery.mongo.transaction.scopes import innermost_session, scope_of
from mongo_celery.outbox.idempotency import IdempotencyClaim, IdempotencyStore, describe_identity, renew_claim

logger = logging.getLogger("mongo_celery.outbox")

_RESULT_SIZE_MAX = 2**20
_ANSWER_SECONDS = 30.0
"""Time limit for claiming an id, and for recording its success."""
_FREE_SECONDS = 5.0
_PAUSES = Pauses(0.1, 2.0, jitter=0.5)

Result = TypeVar("Result")


class RunningElsewhereError(Retry):
    """Another run has the id. The task or change comes again later, without counting a retry."""


def once(
    collection: Source,
    *,
    keep: Duration = timedelta(days=7),
    claim_ttl: Duration = 60.0,
    key: Callable[..., Any] | None = None,
    outbox: Collects | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """
    Decorate a function so that a call whose id has run does not run again.

    Put it below `@app.task(...)` on a task's function, or on a *step*: a function that a task, a handler or a
    transaction's body calls. If the function has a parameter `session`, the idempotency record and the function's own
    writes are one transaction: its effects in that cluster always happen once. Otherwise the record is
    written after the function has succeeded, so a crash in between repeats it. While it runs, duplicates are sent again
    for later, and no retry is counted. An exception, including `retry()`, leaves no record.

    Inside a transaction of `transactional` or of a handler with `transactional=True`, or with its `session` as an
    argument, the call joins: its record commits or aborts with that transaction.

    A duplicate returns the first run's result. If Celery's JSON cannot hold the result, or it exceeds 1 MB, it is not
    stored, which is logged once per function (`result_not_kept`). Then a duplicate returns None. A duplicate of a
    task's function ends by `Ignore` instead, so no later task gets a wrong argument.

    ::

        @once(lambda: client.shop.done, key=lambda order_id: order_id)
        def send_receipt(order_id): ...

    Args:
        collection: the collection of the records, or a callable that returns it. Several functions may share it.
        keep: seconds or `timedelta` for which a finished id is remembered. A later duplicate runs.
        claim_ttl: without `session`: seconds for which a run stops duplicates after its last renewed
            claim. The process renews it while the function runs. After a crash, a duplicate runs when the claim lapses.
            It also runs beside a process that was frozen for longer, which only `session` makes harmless.
        key: returns the key from the function's arguments. The id is then the task (or the step) with that key: another
            task with the same key has another record. If it returns None, the function runs without a record. A step
            needs a key. For a task's function the default is the task's id, and a direct call runs without a record.
        outbox: an `OutboxCollection`, for a function with a parameter `session`. Tasks that the function sends are then
            part of the same transaction.

    Raises:
        ConfigurationError: at the decorator, if it cannot work. At a call, if the key cannot be stored, a step has no
            key, or the surrounding transaction belongs to another client.
    """
    kept, claimed = positive(keep, "keep"), positive(claim_ttl, "claim_ttl")
    check_source("The collection of the records", collection)
    if key is not None and not callable(key):
        raise ConfigurationError(
            f"key={key!r} must be a function of the task's arguments, such as lambda order: order."
        )
    store = IdempotencyStore(collection, kept, claimed)

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        _refuse(function)
        if outbox is not None and "session" not in inspect.signature(function).parameters:
            raise ConfigurationError(
                f"once(outbox=...) stores tasks with a transaction, so {function.__name__} must take session= "
                "and pass it to every operation.",
            )
        return _guard(function, store, key, outbox)

    return decorate


def _refuse(function: Callable[..., Any]) -> None:
    if hasattr(function, "apply_async"):
        raise ConfigurationError("once is above @app.task(...). Put it below, directly on the function.")
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"once needs a function, not {type(function).__name__}.")
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(function) for is_kind in kinds):
        raise ConfigurationError("once runs plain functions, not coroutines or generators.")


@dataclass(frozen=True, slots=True)
class _Call:
    """
    One call of a function under `once`.

    Attributes:
        name: the name of the task, if this is its own function, or of the step.
        identity: `_id` of its record. None for no record.
        is_own: True if a worker runs it as a task's own function.
    """

    name: str
    identity: Any
    is_own: bool


def _guard(
    function: Callable[..., Any], store: IdempotencyStore, key: Callable[..., Any] | None, outbox: Collects | None
) -> Callable[..., Any]:
    signature = inspect.signature(function)
    takes_session = "session" in signature.parameters
    transaction = transactional(lambda: store.client, outbox=outbox)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        joined = kwargs.pop("session", None) if takes_session else _find_session(args, kwargs)
        this = _identify(call, key, store, args, kwargs)
        run = functools.partial(function, *args, **kwargs)
        if this.identity is None and not takes_session:
            return run()
        if joined is not None and joined.client is not store.client:
            raise ConfigurationError(
                f"{this.name} is called inside a transaction of another client. If that is aborted, the "
                "idempotency record would stay and the effect would be lost. Call it after the commit, with "
                "after_commit. Or give once() a collection of the transaction's client: session.client, or "
                "bridge.client in a handler."
            )
        if takes_session:
            return _run_in_transaction(this, store, transaction, joined, lambda session: run(session=session))
        if joined is not None:
            return _run_in_transaction(this, store, transaction, joined, lambda _session: run())
        return _run_claimed(this, store, run)

    if takes_session:
        hide_session(call, function)
    return call


def _find_session(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the session of a call's transaction: one in its arguments, otherwise the innermost open one."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, ClientSession) and each.in_transaction:
            return each
    return innermost_session() or next((each.session for each in connections_in_transaction()), None)


def _run_in_transaction(
    this: _Call,
    store: IdempotencyStore,
    transaction: transactional,
    joined: Any,
    run: Callable[[ClientSession], Any],
) -> Any:
    """Run a call and store its record in one transaction. Use the surrounding one, if there is one."""
    identity, results = this.identity, dict[ObjectId | None, Any]()

    def body(session: ClientSession) -> tuple[IdempotencyClaim, Any]:
        owner = ObjectId()  # a new one each time: an earlier attempt may have committed without an answer
        claim = IdempotencyClaim(owner) if identity is None else store.claim_done(identity, owner, session)
        if claim.owner is None:
            return claim, None
        try:
            result = run(session)
        except BaseException:
            if identity is not None and scope_of(session) is None:  # the driver may commit the partial data
                with suppress(PyMongoError):  # otherwise the server has ended the transaction
                    store.free(identity, owner, session)
            raise
        if identity is not None:
            store.add_result(identity, _encode_result(this, result), session)
        results[owner] = result
        return claim, result

    claim, result = transaction.run(body, session=joined)
    if claim.finisher in results:  # an earlier attempt has committed, and its result may not be stored
        return results[claim.finisher]
    return result if claim.owner is not None else _duplicate(this, claim)


def _run_claimed(this: _Call, store: IdempotencyStore, run: Callable[[], Any]) -> Any:
    """Run a call under a claim. After its success the task has succeeded, even if MongoDB does not store the record."""
    started, owner = time.monotonic(), ObjectId()
    claim = _ask_until_answered(lambda: store.claim(this.identity, owner))
    if claim.owner is None:
        return _duplicate(this, claim)
    with renew_claim(store, this.identity, owner, started) as end_renewal:
        try:
            result = run()
        except BaseException:
            end_renewal()  # before another run may claim it
            with suppress(PyMongoError), pymongo.timeout(_FREE_SECONDS):  # otherwise it lapses
                _log_if_lost(this, is_mine=store.free(this.identity, owner))
            raise
        text = _encode_result(this, result)
        try:
            _log_if_lost(this, is_mine=_ask_until_answered(lambda: store.finish(this.identity, owner, text)))
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - a failure would be repeated, and with it the effects
            logger.warning(
                "%s has run, but its idempotency record could not be written, so a duplicate would run it again: %s",
                describe_identity(this.identity),
                short(error),
                extra={"event": "mark_unwritten"},
            )
    return result


def _log_if_lost(this: _Call, *, is_mine: bool) -> None:
    if not is_mine:
        logger.warning(
            "%s may have run twice, because this process was frozen and lost its claim",
            describe_identity(this.identity),
            extra={"event": "mark_lost"},
        )


def _ask_until_answered(ask: Callable[[], Result]) -> Result:
    with pymongo.timeout(_ANSWER_SECONDS):
        return retry_until_answered(ask, deadline=time.monotonic() + _ANSWER_SECONDS, pauses=_PAUSES)


def _duplicate(this: _Call, claim: IdempotencyClaim) -> Any:
    """End a call that does not run. Only a task's own function ends its task, because a step's caller continues."""
    if claim.wait is not None:
        _send_again(this, claim.wait)
    if claim.result is not None:
        with suppress(ValueError):  # the type may not be registered here
            return loads(claim.result)
    if this.is_own:
        raise Ignore(f"{describe_identity(this.identity)} has already run, and its result was not stored")
    return None


def _send_again(this: _Call, wait: float) -> NoReturn:
    """Return later, not by `Task.retry`: waiting must neither reach nor use up its limit for failures."""
    said = f"{describe_identity(this.identity)} is running in another process"
    if not _is_run_by_a_worker():
        raise ConfigurationError(f"{said}. A direct call cannot wait for it. Call the task with delay() instead.")
    request = current_task.request
    if request.is_eager:
        raise current_task.retry(countdown=wait)
    again = current_task.signature_from_request(request, countdown=wait, retries=request.retries)
    try:
        again.apply_async()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        raise Reject(error, requeue=True) from error
    raise RunningElsewhereError(said, when=wait, sig=again)  # type: ignore[arg-type] # a number


_unkept: set[str] = set()
"""Functions for which this process has logged an unstored result."""


def _encode_result(this: _Call, result: object) -> str | None:
    """Return a result as Celery's JSON. None if it cannot be encoded or is too large."""
    try:
        text: str = dumps(result)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever an object's `__json__` raises
        reason = short(error)
    else:
        if len(text) <= _RESULT_SIZE_MAX:
            return text
        reason = f"its result has more than {_RESULT_SIZE_MAX} characters"
    if this.name not in _unkept:
        _unkept.add(this.name)
        logger.warning(
            "once cannot store the results of %s (%s). Duplicates return None or end their task. Return a small "
            "JSON value, or nothing",
            this.name,
            reason,
            extra={"event": "result_not_kept"},
        )
    return None


def _is_run_by_a_worker() -> bool:
    return bool(current_task) and not current_task.request.called_directly


def _identify(
    call: Callable[..., Any],
    key: Callable[..., Any] | None,
    store: IdempotencyStore,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Call:
    task, is_run = current_task or None, _is_run_by_a_worker()
    is_own = task is not None and _has_call(task.run, call)
    name = task.name if task is not None and is_own else f"{call.__module__}.{call.__qualname__}"
    if key is not None:
        found = key(*args, **kwargs)
        identity = None if found is None else {"t": name, "k": found}
        try:
            bson.encode({"_id": identity}, codec_options=store.types)
        except Exception as error:
            raise ConfigurationError(
                f"The key of {name} cannot be stored ({short(error)}). Let key= return a string, a number or an "
                "ObjectId."
            ) from error
        return _Call(name, identity, is_own and is_run)
    if task is None or not is_run:
        return _Call(name, None, is_own=False)
    if getattr(task, "shares_messages", False):
        raise ConfigurationError(
            f"One message of {task.name} may contain several changes, so its id cannot identify a change. Give "
            "once() a key, such as key=lambda change: change.resume_token.",
        )
    if not is_own:
        raise ConfigurationError(
            f"{name} is a step of {task.name}. All its calls have the same task id, so only the first one would "
            "run. Give once() a key made of the step's arguments, such as key=lambda order: order.",
        )
    return _Call(name, task.request.id, is_own=True)


def _has_call(run: Any, call: Callable[..., Any]) -> bool:
    """Return True if a task's `run` is or wraps this function. A task may also call steps with records."""
    while run is not None:
        run = getattr(run, "__func__", run)
        if run is call:
            return True
        run = getattr(run, "__wrapped__", None)
    return False
