"""
Consumers that bear duplicates: what has run under an id does not run again.

An outbox dispatches at least once, with the same task id each time. `once` remembers ids in a collection, for a
stated time by the server's clock::

    {_id, state: "running" | "done", owner, until, expiresAt, result: {contentType, contentEncoding, payload}}

The result is remembered too, as Celery would encode it. A worker can die after the function and before Celery has
sent the next step of a chain; the duplicate then sends that step, with the argument that the first run had for it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from bson import ObjectId
from celery import current_app, current_task
from celery.exceptions import Ignore, Reject, Retry
from celery.result import ResultBase
from kombu.serialization import dumps, loads, prepare_accept_content
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, PyMongoError

from mongo_celery.arguments import Duration, positive
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import transactional
from mongo_celery.mongo.expressions import after, created, literal
from mongo_celery.mongo.opening import Source, collection_of, plain_types, strict
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction import hide_session

logger = logging.getLogger("mongo_celery.outbox")

_INDEX = "expires-at"
_RESULT_SIZE_MAX = 2**20
_WAIT_SECONDS = 10.0


def once(
    collection: Source,
    *,
    keep: Duration = timedelta(days=7),
    claim_ttl: Duration = 60.0,
    key: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Decorate a Celery task's function so that a repeated delivery of the same message does not run it again.

    Stands below `@app.task(...)`. If the function has a parameter `session`, the mark and the function's own
    writes are one transaction: its effects in that cluster happen once. Otherwise the mark is written after the
    function has succeeded, so a crash in between repeats it; while it runs, duplicates are sent again for later
    instead of being dropped, and use up no retries. An exception, `retry()` included, takes no mark.

    A duplicate ends with the result of the run that counted, so what Celery does next is the same: the next step
    of a chain gets its argument, a chord its part.

    Args:
        collection: where ids are remembered, or a callable that returns it; all users of it share the ids.
        keep: seconds or `timedelta` for which a finished id is remembered. A duplicate that comes later runs.
        claim_ttl: without `session`: how long a run keeps duplicates away; longer than the function takes. After a
            crash the duplicate runs when it is over.
        key: gives the id from the function's arguments; by default it is the task's id, and a call outside a
            task just runs the function.

    Returns:
        A decorator. Where the decorated function did nothing it returns what it returned before. A result that
        Celery could not encode, or of more than 1 MB, is not remembered: a duplicate then ends by `Ignore`, and
        nothing follows it.

    Raises:
        ConfigurationError: when the decorator runs, if it cannot work.
    """
    kept, claimed = positive(keep, "keep"), positive(claim_ttl, "claim_ttl")
    if not isinstance(collection, Collection) and not callable(collection):
        raise ConfigurationError(f"{collection!r} is no PyMongo collection and no callable that returns one.")
    marks = Marks(collection, kept, claimed)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(function, "apply_async"):
            raise ConfigurationError("once stands on a Celery task; put it below @app.task(...), on the function.")
        signature = inspect.signature(function)
        if "session" in signature.parameters:
            return _in_transaction(function, signature, marks, key)
        return _claimed(function, marks, key)

    return decorate


@dataclass(frozen=True, slots=True)
class MarkClaim:
    """
    What came of asking for an id.

    Attributes:
        owner: of the claim; None if it was not given.
        wait: seconds after which to ask again, where another run has it.
        result: as it was stored, where it has run.
    """

    owner: ObjectId | None = None
    wait: float | None = None
    result: Mapping[str, Any] = field(default_factory=dict)


class Marks:
    """
    What has run, and what runs.

    Args:
        source: the collection, or a callable that returns it.
        keep: seconds for which a finished id is remembered.
        claim_ttl: seconds for which a run keeps duplicates away.
    """

    def __init__(self, source: Source, keep: float, claim_ttl: float) -> None:
        self._source = source
        self._keep = keep
        self._claim_ttl = claim_ttl
        self._indexed = False

    @property
    def collection(self) -> Collection[dict[str, Any]]:
        """With majority writes; its TTL index exists afterwards."""
        given = collection_of(self._source)
        opened = strict(given, plain_types(given))
        if not self._indexed:
            opened.create_index([("expiresAt", 1)], name=_INDEX, expireAfterSeconds=0)
            self._indexed = True
        return opened

    def claim(self, identity: Any) -> MarkClaim:
        """Claim an id to run."""
        owner, collection = ObjectId(), self.collection
        free = {"_id": identity, "state": "running", "$expr": {"$lte": ["$until", "$$NOW"]}}
        running = {"state": "running", "owner": literal(owner), "until": after(self._claim_ttl)}
        claimed = {**running, "expiresAt": after(self._claim_ttl + self._keep)}
        if collection.find_one_and_update(free, [{"$set": claimed}]) is not None:
            return MarkClaim(owner)
        with suppress(DuplicateKeyError):
            found: Any = collection.find_one_and_update(
                {"_id": identity},
                created({"_id": "$_id", **claimed}),
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
            if found["owner"] == owner:
                return MarkClaim(owner)
            if found["state"] == "done":
                return MarkClaim(result=found.get("result", {}))
        return MarkClaim(wait=min(self._claim_ttl, _WAIT_SECONDS))

    def done(self, identity: Any, owner: ObjectId, result: Mapping[str, Any]) -> None:
        """Remember that an id has run, and with which result."""
        change = [{"$set": {"state": "done", "result": literal(result), "expiresAt": after(self._keep)}}]
        self.collection.update_one({"_id": identity, "owner": owner}, change)

    def free(self, identity: Any, owner: ObjectId) -> None:
        """Forget a claim whose run has failed."""
        self.collection.delete_one({"_id": identity, "owner": owner, "state": "running"})

    def mark(self, identity: Any, session: ClientSession) -> Mapping[str, Any] | None:
        """
        Mark an id inside a transaction. Two at once conflict, and one is repeated.

        Returns:
            The stored result if it has run already, else None.
        """
        found = self.collection.find_one_and_update(
            {"_id": identity},
            created({"_id": "$_id", "state": "done", "expiresAt": after(self._keep), "owner": None}),
            upsert=True,
            return_document=ReturnDocument.BEFORE,
            session=session,
        )
        return None if found is None else found.get("result", {})

    def note(self, identity: Any, result: Mapping[str, Any], session: ClientSession) -> None:
        """Add the result to a mark of the same transaction."""
        self.collection.update_one({"_id": identity}, {"$set": {"result": result}}, session=session)


def _in_transaction(
    function: Callable[..., Any], signature: inspect.Signature, marks: Marks, key: Callable[..., Any] | None
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        identity = _identity(key, args, kwargs)
        client = marks.collection.database.client

        def body(session: ClientSession) -> Any:
            if identity is None:
                return function(*args, session=session, **kwargs)
            before = marks.mark(identity, session)
            if before is not None:
                return _decoded(identity, before)
            result = function(*args, session=session, **kwargs)
            marks.note(identity, _encoded(result), session)
            return result

        return transactional(client).run(body)

    hide_session(call, signature)
    return call


def _claimed(function: Callable[..., Any], marks: Marks, key: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        identity = _identity(key, args, kwargs)
        if identity is None:
            return function(*args, **kwargs)
        claim = marks.claim(identity)
        if claim.wait is not None:
            _send_again(identity, claim.wait)
        if claim.owner is None:
            return _decoded(identity, claim.result)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            with suppress(PyMongoError):  # else it lapses
                marks.free(identity, claim.owner)
            raise
        marks.done(identity, claim.owner, _encoded(result))
        return result

    return call


def _send_again(identity: Any, wait: float) -> NoReturn:
    """Come back later. Not by `Task.retry`: its limit is for failures; waiting must neither meet it nor use it up."""
    if not _is_run_by_a_worker():
        raise ConfigurationError(f"{identity!r} is running elsewhere, and a direct call cannot be sent again.")
    request = current_task.request
    if request.is_eager:
        raise current_task.retry(countdown=wait)
    again = current_task.signature_from_request(request, countdown=wait, retries=request.retries)
    try:
        again.apply_async()
    except Exception as error:
        raise Reject(error, requeue=True) from error
    raise Retry(f"{identity!r} is running elsewhere", when=wait, sig=again)  # type: ignore[arg-type] # a number


def _encoded(result: object) -> dict[str, Any]:
    """A result as Celery encodes it; empty if it cannot, or if it is too large to keep."""
    app = current_task.app if current_task else current_app
    if isinstance(result, ResultBase):
        result = result.as_tuple()  # type: ignore[attr-defined] # as Celery's backends store it
    accepted = _accepted(app)
    for serializer in (app.conf.result_serializer, app.conf.task_serializer):
        with suppress(Exception):  # whatever a serializer raises: Celery will meet it too, and say so
            content_type, encoding, payload = dumps(result, serializer=serializer)
            if content_type in accepted and len(payload) <= _RESULT_SIZE_MAX:
                return {"contentType": content_type, "contentEncoding": encoding, "payload": payload}
    return {}


def _decoded(identity: Any, result: Mapping[str, Any]) -> Any:
    app = current_task.app if current_task else current_app
    if result:
        try:
            return loads(result["payload"], result["contentType"], result["contentEncoding"], accept=_accepted(app))
        except Exception as error:  # noqa: BLE001 - a serializer that was given up since: no reason to fail a duplicate
            logger.warning(
                "%r has run, and its result cannot be read: %s",
                identity,
                short(error),
                extra={"event": "result_unreadable"},
            )
    logger.info("%r has run, and its result is not remembered", identity, extra={"event": "result_not_remembered"})
    if _is_run_by_a_worker():
        raise Ignore(f"{identity!r} has run, and its result is not remembered")
    return None


def _accepted(app: Any) -> Any:
    return prepare_accept_content(app.conf.result_accept_content or app.conf.accept_content) or ()


def _is_run_by_a_worker() -> bool:
    return bool(current_task) and not current_task.request.called_directly


def _identity(key: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if key is not None:
        return key(*args, **kwargs)
    request = current_task.request if current_task else None
    return None if request is None or request.called_directly else request.id
