"""Names, stamps and all kinds of writes, for the tests of fenced writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import DeleteOne, MongoClient, ReplaceOne, UpdateMany, UpdateOne
from pymongo.collection import Collection

from mongo_celery.bridge.fenced import TOMBSTONES, FencedCollection
from mongo_celery.bridge.fenced.fence import Fence
from tests.rig.commands import CommandRecorder

Document = dict[str, Any]
MakeClient = Callable[..., MongoClient[Document]]
Target = Collection[Document]
Spied = tuple[Target, CommandRecorder]
"""A collection, and the commands that its client sends."""

KEY = "shop/summarise"
DEADLINE_S = 120
FENCE = "_fence"


def fence(token: int, *, index: int = 0, partitioning: int = 1, key: str = KEY) -> Fence:
    return Fence(key, partitioning, index, token)


def stamp(token: int, *, index: int = 0, partitioning: int = 1, key: str = KEY) -> Document:
    return {key: {"g": partitioning, "p": {str(index): token}}}


def view(collection: Collection[Document], token: int, **options: Any) -> FencedCollection:
    return FencedCollection(collection, fence(token, **options))


def graves(collection: Collection[Document]) -> Collection[Document]:
    return collection.database[collection.name + TOMBSTONES]


def stored(collection: Collection[Document], document_id: Any = 1) -> Document | None:
    return collection.find_one({"_id": document_id})


Act = Callable[[FencedCollection], Any]

WRITES: dict[str, Act] = {
    "update_one": lambda c: c.update_one({"_id": 1}, {"$set": {"by": "stale"}}),
    "update_one upsert": lambda c: c.update_one({"_id": 1}, {"$set": {"by": "stale"}}, upsert=True),
    "update_one pipeline": lambda c: c.update_one({"_id": 1}, [{"$set": {"by": "stale"}}]),
    "replace_one": lambda c: c.replace_one({"_id": 1}, {"by": "stale"}),
    "replace_one upsert": lambda c: c.replace_one({"_id": 1}, {"by": "stale"}, upsert=True),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 1}, {"$set": {"by": "stale"}}),
    "find_one_and_update upsert": lambda c: c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, upsert=True),
    "delete_one": lambda c: c.delete_one({"_id": 1}),
    "update_many": lambda c: c.update_many({"kind": "a"}, {"$set": {"by": "stale"}}),
    "bulk update": lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$set": {"by": "stale"}})]),
    "bulk replace": lambda c: c.bulk_write([ReplaceOne({"_id": 1}, {"by": "stale"}, upsert=True)]),
    "bulk delete": lambda c: c.bulk_write([DeleteOne({"_id": 1})]),
    "bulk update_many": lambda c: c.bulk_write([UpdateMany({"kind": "a"}, {"$set": {"by": "stale"}})]),
    "by another field": lambda c: c.update_one({"kind": "a"}, {"$set": {"by": "stale"}}),
    "delete by another field": lambda c: c.delete_one({"kind": "a"}),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
