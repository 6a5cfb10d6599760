"""
Consumers that bear duplicates: what has run under an id does not run again.

An outbox dispatches at least once, with the same task id each time. `once` remembers ids in a collection, for a
stated time by the server's clock (`marks.py`).

The result is remembered too, as Celery would encode it. A worker can die after the function and before Celery has
sent the next step of a chain; the duplicate then sends that step, with the argument that the first run had for it.

| what happened | what follows |
|---|---|
| the function failed, or asked for a retry | no mark: the next delivery runs |
| the process died while it ran | its claim lapses, and a duplicate runs |
| the process stood still for longer than `claim_ttl` | a second run beside it; with `session` one of both commits |
| MongoDB did not answer before the function | asked again for half a minute; then the error, and nothing has run |
| MongoDB did not answer after it | asked again for half a minute; then a record, and the task has succeeded |
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import bson
import pymongo
from bson import ObjectId
from celery import current_app, current_task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.result import ResultBase
from kombu.serialization import dumps, loads, prepare_accept_content
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.arguments import Duration, positive
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import transactional
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses, until_answered
from mongo_celery.mongo.transaction import Collects, hide_session
from mongo_celery.outbox.mark_heartbeat import HEARTBEATS, RunningMark, described
from mongo_celery.outbox.marks import MarkClaim, Marks

logger = logging.getLogger("mongo_celery.outbox")

_RESULT_SIZE_MAX = 2**20
_ANSWER_SECONDS = 30.0
"""How long MongoDB is asked for a claim, and told that its function has succeeded."""
_FREE_SECONDS = 5.0
_PAUSES = Pauses(0.1, 2.0, jitter=0.5)

Result = TypeVar("Result")


def once(
    collection: Source,
    *,
    keep: Duration = timedelta(days=7),
    claim_ttl: Duration = 60.0,
    key: Callable[..., Any] | None = None,
    outbox: Collects | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """
    Decorate a Celery task's function so that a repeated delivery of the same message does not run it again.

    Stands below `@app.task(...)`. If the function has a parameter `session`, the mark and the function's own
    writes are one transaction: its effects in that cluster happen once, whatever happens. Otherwise the mark is
    written after the function has succeeded, so a crash in between repeats it; while it runs, duplicates are sent
    again for later instead of being dropped, and use up no retries. An exception, `retry()` included, takes no mark.

    A duplicate ends with the result of the run that counted, so what Celery does next is the same: the next step
    of a chain gets its argument, a chord its part.

    Args:
        collection: where ids are remembered, or a callable that returns it; any number of tasks may share it.
        keep: seconds or `timedelta` for which a finished id is remembered. A duplicate that comes later runs.
        claim_ttl: without `session`: how long a run keeps duplicates away after its process was last heard of. It is
            renewed while the function runs, however long that takes. After a crash the duplicate runs when it is
            over; so it does beside a process that stood still for longer, which only `session` makes harmless.
        key: gives the key from the function's arguments, and what has run is then the task with that key: another
            task with the same key has a mark of its own. Where it gives None, the function just runs. By default
            the task's id counts, and a call outside a task just runs the function. What a bridge's handler calls needs
            one: several changes may come with one message.
        outbox: an `OutboxCollection`, with a parameter `session`: what the function sends is then part of the same
            transaction, too. What was done, what came of it and what is to follow are there together or not at all.

    Returns:
        A decorator. Where the decorated function did nothing it returns what it returned before. A result that
        Celery could not encode, or of more than 1 MB, is not remembered: a duplicate then ends by `Ignore`, and
        nothing follows it.

    Raises:
        ConfigurationError: when the decorator runs, if it cannot work; when the function is called, if its key
            cannot be stored.
    """
    kept, claimed = positive(keep, "keep"), positive(claim_ttl, "claim_ttl")
    if not isinstance(collection, Collection) and not callable(collection):
        raise ConfigurationError(f"{collection!r} is no PyMongo collection and no callable that returns one.")
    if key is not None and not callable(key):
        raise ConfigurationError(
            f"key={key!r} must be a function of the task's arguments, such as lambda order: order."
        )
    marks = Marks(collection, kept, claimed)

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        _refuse(function)
        signature = inspect.signature(function)
        if "session" in signature.parameters:
            return _in_transaction(function, signature, marks, key, outbox)
        if outbox is not None:
            raise ConfigurationError(
                f"once(outbox=...) stores what is sent with a transaction; {function.__name__} must take session=, and "
                "pass it to every operation.",
            )
        return _claimed(function, marks, key)

    return decorate


def _refuse(function: Callable[..., Any]) -> None:
    if hasattr(function, "apply_async"):
        raise ConfigurationError("once stands on a Celery task; put it below @app.task(...), on the function.")
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"once needs a function, not {type(function).__name__}.")
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise ConfigurationError("once runs plain functions; neither coroutines nor generators.")


def _in_transaction(
    function: Callable[..., Any],
    signature: inspect.Signature,
    marks: Marks,
    key: Callable[..., Any] | None,
    outbox: Collects | None,
) -> Callable[..., Any]:
    transaction = transactional(lambda: marks.collection.database.client, outbox=outbox)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        identity, owner = _identity(call, key, marks, args, kwargs), ObjectId()

        def body(session: ClientSession) -> tuple[MarkClaim, Any]:
            claim = MarkClaim(owner) if identity is None else marks.mark(identity, owner, session)
            if claim.owner is None:
                return claim, None
            result = function(*args, session=session, **kwargs)
            if identity is not None:
                marks.note(identity, _encoded(result), session)
            return claim, result

        claim, result = transaction.run(body)
        return result if claim.owner is not None else _duplicate(identity, claim)

    hide_session(call, signature)
    return call


def _claimed(function: Callable[..., Any], marks: Marks, key: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        identity = _identity(call, key, marks, args, kwargs)
        if identity is None:
            return function(*args, **kwargs)
        started, owner = time.monotonic(), ObjectId()
        claim = _answered(lambda: marks.claim(identity, owner))
        if claim.owner is None:
            return _duplicate(identity, claim)
        running = HEARTBEATS.get().begin(marks, identity, owner, started)
        try:
            result = _run_or_free(running, functools.partial(function, *args, **kwargs))
            _remember(running, _encoded(result))
        finally:
            HEARTBEATS.get().end(running)
        return result

    return call


def _run_or_free(running: RunningMark, run: Callable[[], Result]) -> Result:
    try:
        return run()
    except BaseException:
        HEARTBEATS.get().end(running)  # before somebody else may have it
        with suppress(PyMongoError), pymongo.timeout(_FREE_SECONDS):  # else it lapses
            running.marks.free(running.identity, running.owner)
        raise


def _remember(running: RunningMark, result: Mapping[str, Any]) -> None:
    """The function has succeeded, and so does its task, whatever becomes of the mark."""
    try:
        if not _answered(lambda: running.marks.done(running.identity, running.owner, result)):
            running.lose()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - a failure would be repeated, and with it the effects
        logger.warning(
            "%s has run, and its mark cannot be written, so a duplicate would run again: %s",
            described(running.identity),
            short(error),
            extra={"event": "mark_unwritten"},
        )


def _answered(ask: Callable[[], Result]) -> Result:
    with pymongo.timeout(_ANSWER_SECONDS):
        return until_answered(ask, deadline=time.monotonic() + _ANSWER_SECONDS, pauses=_PAUSES)


def _duplicate(identity: Any, claim: MarkClaim) -> Any:
    """How a call ends that does not run."""
    if claim.wait is not None:
        _send_again(identity, claim.wait)
    return _decoded(identity, claim.result)


def _send_again(identity: Any, wait: float) -> NoReturn:
    """Come back later. Not by `Task.retry`: its limit is for failures; waiting must neither meet it nor use it up."""
    if not _is_run_by_a_worker():
        raise ConfigurationError(f"{described(identity)} is running elsewhere, and a direct call cannot be sent again.")
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
    raise Retry(f"{described(identity)} is running elsewhere", when=wait, sig=again)  # type: ignore[arg-type] # a number


def _encoded(result: object) -> dict[str, Any]:
    """A result as Celery encodes it; empty if it cannot, or if it is too large to keep."""
    app = current_task.app if current_task else current_app
    if isinstance(result, ResultBase):
        result = result.as_tuple()  # type: ignore[attr-defined] # as Celery's backends store it
    accepted = _accepted(app)
    for serializer in (app.conf.result_serializer, app.conf.task_serializer):
        try:
            content_type, encoding, payload = dumps(result, serializer=serializer)
            if content_type in accepted and len(payload) <= _RESULT_SIZE_MAX:
                found = {"contentType": content_type, "contentEncoding": encoding, "payload": payload}
                bson.encode(found)
                return found
        except Exception as error:  # noqa: BLE001 - whatever a serializer raises: Celery will meet it too, and say so
            _pass_time_limit(error)
    return {}


def _decoded(identity: Any, result: Mapping[str, Any]) -> Any:
    app = current_task.app if current_task else current_app
    if result:
        try:
            return loads(result["payload"], result["contentType"], result["contentEncoding"], accept=_accepted(app))
        except Exception as error:  # noqa: BLE001 - a serializer that was given up since: no reason to fail a duplicate
            _pass_time_limit(error)
            logger.warning(
                "%s has run, and its result cannot be read: %s",
                described(identity),
                short(error),
                extra={"event": "result_unreadable"},
            )
    logger.info(
        "%s has run, and its result is not remembered",
        described(identity),
        extra={"event": "result_not_remembered"},
    )
    if _is_run_by_a_worker():
        raise Ignore(f"{described(identity)} has run, and its result is not remembered")
    return None


def _pass_time_limit(error: BaseException) -> None:
    """Raise Celery's soft time limit where it is what a serializer met; Kombu has it wrapped as one of its errors."""
    for met in (error, error.__cause__, error.__context__):
        if isinstance(met, SoftTimeLimitExceeded):
            raise met


def _accepted(app: Any) -> Any:
    return prepare_accept_content(app.conf.result_accept_content or app.conf.accept_content) or ()


def _is_run_by_a_worker() -> bool:
    return bool(current_task) and not current_task.request.called_directly


def _identity(
    call: Callable[..., Any],
    key: Callable[..., Any] | None,
    marks: Marks,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The `_id` of a call's mark; None for a call that just runs."""
    task = current_task or None
    is_its_own = task is not None and _leads_to(task.run, call)
    name = task.name if task is not None and is_its_own else f"{call.__module__}.{call.__qualname__}"
    if key is not None:
        found = key(*args, **kwargs)
        return None if found is None else _storable({"t": name, "k": found}, marks)
    if task is None or task.request.called_directly:
        return None
    if getattr(task, "shares_messages", False):
        raise ConfigurationError(
            f"Several changes may come with one message of {task.name}, so its id is none of theirs; give once a key, "
            "such as key=lambda change: change.resume_token.",
        )
    return task.request.id if is_its_own else {"t": name, "k": task.request.id}


def _leads_to(run: Any, call: Callable[..., Any]) -> bool:
    """Whether a task's `run` is this function, or wraps it; a task may call others that have marks of their own."""
    while run is not None:
        run = getattr(run, "__func__", run)
        if run is call:
            return True
        run = getattr(run, "__wrapped__", None)
    return False


def _storable(identity: dict[str, Any], marks: Marks) -> dict[str, Any]:
    types = marks.collection.codec_options
    try:
        bson.encode(identity, codec_options=types)
    except Exception as error:
        raise ConfigurationError(
            f"The key of {identity['t']} cannot be stored ({short(error)}); let key= return a text, a number or an "
            "ObjectId.",
        ) from error
    return identity
