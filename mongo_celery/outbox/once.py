"""
Consumers that bear duplicates: what has run under an id does not run again.

An outbox dispatches at least once, with the same task id each time. `once` remembers ids in a collection, for a
stated time by the server's clock::

    {_id, state: "running" | "done", until, expiresAt}
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast

from bson import ObjectId
from bson.codec_options import CodecOptions
from celery import current_task
from pymongo import ReadPreference, ReturnDocument, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import transactional
from mongo_celery.options import seconds
from mongo_celery.state.expressions import after, literal

Duration = float | timedelta
Source = Collection[Any] | Callable[[], Collection[Any]]

_INDEX = "expires-at"


def once(
    collection: Source,
    *,
    keep: Duration = timedelta(days=7),
    claim_ttl: Duration = 60.0,
    key: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Decorate a Celery task's function so that a repeated delivery of the same message does nothing.

    Stands below `@app.task(...)`. If the function has a parameter `session`, the mark and the function's own
    writes are one transaction: its effects in that cluster happen once. Otherwise the mark is written after the
    function has succeeded, so a crash in between repeats it; while it runs, duplicates are retried later instead
    of being dropped. An exception, `retry()` included, takes no mark.

    Args:
        collection: where ids are remembered, or a callable that returns it; all users of it share the ids.
        keep: seconds or `timedelta` for which a finished id is remembered. A duplicate that comes later runs.
        claim_ttl: without `session`: how long a run keeps duplicates away; longer than the function takes. After a
            crash the duplicate runs when it is over.
        key: gives the id from the function's arguments; by default it is the task's id, and a call outside a
            task just runs the function.

    Returns:
        A decorator. The decorated function returns None where it did nothing.

    Raises:
        ConfigurationError: when the decorator runs, if it cannot work.
    """
    kept, claimed = seconds(keep, "keep"), seconds(claim_ttl, "claim_ttl")
    if kept <= 0 or claimed <= 0:
        raise ConfigurationError(f"keep={keep!r} and claim_ttl={claim_ttl!r} must be more than 0 seconds.")
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
        source = self._source if isinstance(self._source, Collection) else self._source()
        opened: Collection[dict[str, Any]] = source.with_options(
            codec_options=CodecOptions(tz_aware=True, uuid_representation=source.codec_options.uuid_representation),
            write_concern=WriteConcern("majority"),
            read_concern=ReadConcern("majority"),
            read_preference=ReadPreference.PRIMARY,
        )
        if not self._indexed:
            opened.create_index([("expiresAt", 1)], name=_INDEX, expireAfterSeconds=0)
            self._indexed = True
        return opened

    def claim(self, identity: Any) -> tuple[ObjectId | None, float]:
        """
        Claim an id to run.

        Returns:
            The claim, and 0; or None and the seconds after which to try again, which are negative if it is done.
        """
        owner, collection = ObjectId(), self.collection
        free = {"_id": identity, "state": "running", "$expr": {"$lte": ["$until", "$$NOW"]}}
        running = {"state": "running", "owner": literal(owner), "until": after(self._claim_ttl)}
        change = [{"$set": {**running, "expiresAt": after(self._claim_ttl + self._keep)}}]
        if collection.find_one_and_update(free, change) is not None:
            return owner, 0.0
        with suppress(DuplicateKeyError):
            found: Any = collection.find_one_and_update(
                {"_id": identity},
                [{"$replaceWith": {"$cond": [_IS_NEW, {"_id": "$_id", **change[0]["$set"]}, "$$ROOT"]}}],
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
            if found["owner"] == owner:
                return owner, 0.0
            if found["state"] == "done":
                return None, -1.0
        return None, min(self._claim_ttl, _RETRY_SECONDS)

    def done(self, identity: Any, owner: ObjectId) -> None:
        """Remember that an id has run."""
        change = [{"$set": {"state": "done", "expiresAt": after(self._keep)}}]
        self.collection.update_one({"_id": identity, "owner": owner}, change)

    def free(self, identity: Any, owner: ObjectId) -> None:
        """Forget a claim whose run has failed."""
        self.collection.delete_one({"_id": identity, "owner": owner, "state": "running"})

    def mark(self, identity: Any, session: ClientSession) -> bool:
        """Mark an id inside a transaction; False if it is done already. Two at once conflict, and one is repeated."""
        collection = self.collection
        found = collection.find_one_and_update(
            {"_id": identity},
            [
                {
                    "$replaceWith": {
                        "$cond": [
                            _IS_NEW,
                            {"_id": "$_id", "state": "done", "expiresAt": after(self._keep), "owner": None},
                            "$$ROOT",
                        ],
                    },
                },
            ],
            upsert=True,
            return_document=ReturnDocument.BEFORE,
            session=session,
        )
        return found is None


_RETRY_SECONDS = 10.0
_IS_NEW = {"$eq": [{"$size": {"$objectToArray": "$$ROOT"}}, 1]}
"""An upsert starts from `_id` alone."""


class _HasSignature(Protocol):
    __signature__: inspect.Signature
    __wrapped__: object


def _in_transaction(
    function: Callable[..., Any], signature: inspect.Signature, marks: Marks, key: Callable[..., Any] | None
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        identity = _identity(key, args, kwargs)
        client = marks.collection.database.client

        def body(session: ClientSession) -> Any:
            if identity is not None and not marks.mark(identity, session):
                return None
            return function(*args, session=session, **kwargs)

        return transactional(client).run(body)

    shown = cast("_HasSignature", call)
    visible = [each for name, each in signature.parameters.items() if name != "session"]
    shown.__signature__ = signature.replace(parameters=visible)
    del shown.__wrapped__
    return call


def _claimed(function: Callable[..., Any], marks: Marks, key: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        identity = _identity(key, args, kwargs)
        if identity is None:
            return function(*args, **kwargs)
        owner, pause = marks.claim(identity)
        if owner is None:
            if pause < 0:
                return None
            if not current_task:
                raise ConfigurationError(f"{identity!r} is running elsewhere, and outside a task it cannot be retried.")
            raise current_task.retry(countdown=pause, max_retries=None)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            with suppress(PyMongoError):  # else it lapses
                marks.free(identity, owner)
            raise
        marks.done(identity, owner)
        return result

    return call


def _identity(key: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if key is not None:
        return key(*args, **kwargs)
    request = current_task.request if current_task else None
    return None if request is None or request.called_directly else request.id
