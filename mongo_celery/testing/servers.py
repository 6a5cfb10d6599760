"""The servers of a test session: embedded ones, unless there are others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

_NOT_OURS = {"admin", "config", "local"}


@contextlib.contextmanager
def serving_mongodb(url: str) -> Iterator[str]:
    """
    The given URL, or that of a replica set that runs inside.

    Raises:
        EmbeddedServerError: there is no program for it, or it does not start.
    """
    if url:
        yield url
        return
    with MongoReplicaSet() as started:
        yield started.url


@contextlib.contextmanager
def serving_redis(url: str) -> Iterator[str]:
    """
    The given URL, or that of a Redis that runs inside.

    Raises:
        EmbeddedServerError: there is no program for it, or it does not start.
    """
    if url:
        yield url
        return
    with RedisServer() as started:
        yield started.url


def empty(client: MongoClient[dict[str, Any]]) -> None:
    """Remove all documents; collections and their indexes stay."""
    for database in client.list_database_names():
        if database in _NOT_OURS:
            continue
        for name in client[database].list_collection_names(filter={"type": "collection"}):
            if not name.startswith("system."):
                client[database][name].delete_many({})
