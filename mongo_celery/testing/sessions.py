"""A check for writes without their session in all code that a test calls."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.cluster import has_answers
from mongo_celery.mongo.transaction import current

_WRITES = (
    "bulk_write",
    "delete_many",
    "delete_one",
    "find_one_and_delete",
    "find_one_and_replace",
    "find_one_and_update",
    "insert_many",
    "insert_one",
    "replace_one",
    "update_many",
    "update_one",
)
_PACKAGE = "mongo_celery."


@contextmanager
def require_sessions() -> Iterator[None]:
    """
    In the block, fail each write without `session=` inside an open transaction.

    The write raises an AssertionError before it is sent, in the body of `transactional` and in a handler with
    `transactional=True`. If the code catches the error, the block raises it again. Writes to another cluster, and
    writes by this package, are allowed. The check does not find reads, or writes of a thread or an asyncio task of the
    body.

    The pytest plugin puts this block around each test, except tests with the marker `mongo_celery_sessionless`.

    ::

        with require_sessions():
            move(order=15, status="paid")

    Raises:
        AssertionError: raised by the write. It names the collection, or the client to use.
    """
    missing: list[AssertionError] = []
    with ExitStack() as stack:
        for owner, name in _methods():
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _check_session(original, missing))
        yield
    if missing:
        raise missing[0]


def _methods() -> Iterator[tuple[type[Any], str]]:
    for collection in (Collection, AsyncCollection):
        yield from ((collection, name) for name in _WRITES)
    yield from ((client, "bulk_write") for client in (MongoClient, AsyncMongoClient))


def _check_session(original: Callable[..., Any], missing: list[AssertionError]) -> Callable[..., Any]:
    """Return a method for either kind of client that checks before anything is sent or awaited."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def write(target: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - documented, with this name
        if not caller.startswith(_PACKAGE) and signature.bind(target, *args, **kwargs).arguments.get("session") is None:
            found = _violation(target, original.__name__)
            if found is not None:
                missing.append(found)
                raise found
        return original(target, *args, **kwargs)

    return write


def _violation(target: Any, method: str) -> AssertionError | None:
    client = target if isinstance(target, MongoClient | AsyncMongoClient) else target.database.client
    try:
        if current(client) is None:
            return None
    except ConfigurationError as error:
        return AssertionError(str(error)) if has_answers(client) else None
    name = getattr(target, "full_name", "client")
    return AssertionError(
        f"{name}.{method} has no session= inside an open transaction. The write stays after an abort, and is repeated "
        "with each attempt. Pass session=. For a write that is to stay, use transactional(client, independent=True)."
    )
