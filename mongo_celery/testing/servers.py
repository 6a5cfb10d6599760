"""The servers of a test session: embedded ones, unless there are others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.outbox.signing import COLLECTION as KEYS
from mongo_celery.outbox.signing import KEYS_OF_OUTBOXES

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
    """Remove all documents; collections and their indexes stay, and so do the keys by which outboxes sign."""
    for database in client.list_database_names():
        if database in _NOT_OURS:
            continue
        for name in client[database].list_collection_names(filter={"type": "collection"}):
            if not name.startswith("system."):
                # This process has read them, and would sign with keys that a worker started later does not know.
                client[database][name].delete_many({"$nor": [KEYS_OF_OUTBOXES]} if name == KEYS else {})
