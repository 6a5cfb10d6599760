"""
Steps: code that calls MongoDB, shared by threads and asyncio.

Steps are a generator. It calls the client, yields the result, and continues with the answer. The result of a
`MongoClient` is the answer. The result of an `AsyncMongoClient` is awaited first. PyMongo's two clients have the same
methods with the same arguments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.cursor import Cursor
from pymongo.errors import PyMongoError

from mongo_celery.mongo.opening import STRICT, open_session, renew_connections

Result = TypeVar("Result")
Steps = Generator[Any, Any, Result]
Session = ClientSession | AsyncClientSession
"""A session of either kind of client."""

AnyCollection = Collection[Any] | AsyncCollection[Any]
"""A collection of either kind of client."""


def run_sync(steps: Steps[Result]) -> Result:
    """Run the steps of a call on a `MongoClient`."""
    answer = None
    while True:
        try:
            answer = steps.send(answer)
        except StopIteration as ended:
            result: Result = ended.value
            return result


async def run_async(steps: Steps[Result]) -> Result:
    """Run a call's steps on an `AsyncMongoClient`. An answer's error, or a cancellation, is raised in the steps."""
    go_on: Callable[[], Awaitable[Any]] = partial(steps.send, None)
    while True:
        try:
            called = go_on()
        except StopIteration as ended:
            result: Result = ended.value
            return result
        try:
            go_on = partial(steps.send, await called)
        except BaseException as error:  # noqa: BLE001 - the steps raise it again, or an error in its place
            go_on = partial(steps.throw, error)


def read_batch(cursor: Cursor[Any] | AsyncCursor[Any], size: int) -> Steps[list[Any]]:
    """Return the next documents of a cursor, at most `size`. An empty list at its end."""
    if isinstance(cursor, Cursor):
        return list(islice(cursor, size))
    found: list[Any] = []
    while len(found) < size and (document := (yield anext(cursor, None))) is not None:
        found.append(document)
    return found


def transact(
    client: Any, session: Any, body: Callable[[Any], Steps[Result]], *options: Any
) -> Result | Awaitable[Result]:
    """
    Run steps in a transaction with PyMongo's `with_transaction`. Steps yield the result.

    Args:
        client: the client.
        session: its session. None for a new one.
        body: returns the steps for the session. They may run several times.
        options: further arguments of `with_transaction`.
    """
    if isinstance(client, AsyncMongoClient):
        return _transact_async(client, session, body, *options)
    with open_session(client) if session is None else nullcontext(session) as used:
        result: Result = used.with_transaction(lambda inside: run_sync(body(inside)), *options)
        return result


async def _transact_async(client: Any, session: Any, body: Callable[[Any], Steps[Result]], *options: Any) -> Result:
    async def run(inside: AsyncClientSession) -> Result:
        return await run_async(body(inside))

    async with _open_session_async(client) if session is None else nullcontext(session) as used:
        result: Result = await used.with_transaction(run, *options)
        return result


@asynccontextmanager
async def _open_session_async(client: AsyncMongoClient[Any]) -> AsyncIterator[AsyncClientSession]:
    try:
        async with client.start_session(default_transaction_options=STRICT) as session:
            yield session
    except PyMongoError as error:
        renew_connections(client, error)
        raise


def see_collection(collection: Collection[Any], session: Session | None) -> Any:
    """Return a collection of ours as the client of a session sees it, which may be an `AsyncMongoClient`."""
    if not isinstance(session, AsyncClientSession):
        return collection
    database = session.client.get_database(collection.database.name)
    return database.get_collection(collection.name, codec_options=collection.codec_options)
