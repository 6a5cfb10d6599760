"""Locks by both kinds of clients, a holder of documents, and a thread beside the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery import locking
from mongo_celery.locking import asynchronous, select_for_update, transactional

Document = dict[str, Any]
Client = MongoClient[Document]
Notes = Collection[Document]

SHORT = 1.5
GENEROUS = 30.0
NOTES_APP = "notes"
CONFLICT = {
    "failCommands": ["insert"],
    "appName": NOTES_APP,
    "errorCode": 112,
    "errorLabels": ["TransientTransactionError"],
}
"""A write conflict as the server reports it, at the next insert of the client of `notes`."""
_ANSWER_SECONDS_MAX = 60.0


class Threads:
    """The locks for threads, each call in a transaction of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self._client = MongoClient[Document](url, **options)
        self._client.admin.command("ping")  # which commands are right, a client knows once it is connected

    def lock(self, name: str, *args: Any, timeout: float = _ANSWER_SECONDS_MAX, **options: Any) -> Any:
        """What the function of this name gives; collections are those of any client."""
        call = transactional(self._client, timeout=timeout)(getattr(locking, name))
        return call(*(_of_client(self._client, each) for each in args), **options)

    def close(self) -> None:
        self._client.close()


class Tasks:
    """The same by the locks for asyncio, on an event loop of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.Runner()
        self._client = AsyncMongoClient[Document](url, **options)
        self._loop.run(self._client.admin.command("ping"))

    def lock(self, name: str, *args: Any, timeout: float = _ANSWER_SECONDS_MAX, **options: Any) -> Any:
        call = transactional(self._client, timeout=timeout)(getattr(asynchronous, name))
        return self._loop.run(call(*(_of_client(self._client, each) for each in args), **options))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()


def _of_client(client: Any, given: Any) -> Any:
    """A collection, or pairs of one and something else, of this client instead of another."""
    if isinstance(given, list):
        return [(_of_client(client, each), *others) for each, *others in given]
    if not isinstance(given, Collection):
        return given
    return client[given.database.name].get_collection(given.name, codec_options=given.codec_options)


def texts(notes: Notes) -> list[Any]:
    return [note["text"] for note in notes.find().sort("_id", 1)]


def as_block_or_function(
    client: Client, body: Callable[[ClientSession], Any], *, as_block: bool, **options: Any
) -> None:
    """Run a body in either form of `transactional`."""
    if not as_block:
        transactional(client, **options).run(body)
        return
    with transactional(client, **options) as session:
        body(session)


@contextmanager
def held(collection: Collection[Document], *document_ids: object) -> Iterator[None]:
    """Lock documents for as long as the block lasts, in a transaction that nothing inside can join."""
    with collection.database.client.start_session() as session, session.start_transaction():
        for document_id in document_ids:
            select_for_update(collection, {"_id": document_id}, session=session)
        yield


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[Any]:
    """Run work in a thread beside the block; what it raises is raised when its result is asked for."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)
