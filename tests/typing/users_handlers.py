"""Users' code: a bridge at module level, and handlers. It is checked, and never run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, assert_type

from bson import ObjectId
from celery import Celery
from pymongo import MongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.results import DeleteResult

from mongo_celery import AsyncFencedCollection, Bridge, Change, Changes, Fence, FencedCollection
from mongo_celery.errors import HandlerUsageError

app = Celery("shop", broker="redis://localhost:6379/0")
bridge = Bridge(app, "mongodb://localhost:27017/?replicaSet=rs0", name="shop", claim_ttl=timedelta(seconds=20))
late = Bridge(name="late")


def create_app() -> Celery:
    made = Celery("late")
    late.init_app(made)
    assert_type(late.of(made), Bridge)
    assert_type(late.app, Celery)
    assert_type(late.client, MongoClient[dict[str, Any]])
    assert_type(late.collection("shop.orders"), Collection[dict[str, Any]])
    return made


@bridge.on_change("shop.orders", fields={"lines"}, max_retries=5)
def summarise(change: Change) -> int:
    document = change.full_document
    if document is None:
        return 0
    target = change.fenced("shop.summaries")
    assert_type(target, FencedCollection)
    assert_type(change.operation_type, str)
    assert_type(change.document_key, Mapping[str, Any])
    assert_type(change.fencing_token, int)
    target.replace_one({"_id": document["_id"]}, {"total": 1}, upsert=True)
    return 1


@bridge.on_change("shop.orders", bind=True, transactional=True, autoretry_for=(ConnectionError,))
def bill(self: Any, change: Change) -> ObjectId:
    if self.request.retries > 3:
        raise self.retry(countdown=5)
    session: ClientSession | None = change.session
    bridge.collection("shop.bills").insert_one({}, session=session)
    return ObjectId()


@bridge.on_change("shop.orders", transactional=True)
async def bill_later(change: Change) -> ObjectId:
    bills = bridge.async_client["shop"]["bills"]
    assert_type(change.fenced(bills), AsyncFencedCollection)
    assert_type(change.fenced("shop.bills"), FencedCollection)
    assert_type(await change.fenced(bills).delete_one(change.document_key), DeleteResult)
    await bills.insert_one({}, session=change.session)
    return ObjectId()


@late.on_changes("shop.carts", batch_size=100, coalesce=True, delay=timedelta(minutes=1))
def count(changes: Changes) -> dict[str, int]:
    for change in changes:
        assert_type(change, Change)
        if not change.full_document:
            raise changes.failed_at(change)
    changes.fenced("shop.counts").bulk_write([UpdateOne({"_id": 1}, {"$inc": {"n": len(changes)}})])
    return {}


def use() -> None:
    fence = Fence("shop/summarise", 0, 0, 1)
    change = Change.build("insert", ns="shop.orders", full_document={"_id": 1}, fence=fence)
    assert_type(summarise(change), int)
    assert_type(summarise.name, str)
    assert_type(bill(change), ObjectId)
    assert_type(asyncio.run(bill_later(change)), ObjectId)
    assert_type(count([change]), dict[str, int])
    assert_type([handler.name for handler in bridge.handlers], list[str])
    summarise("no change")  # type: ignore[arg-type]
    summarise.delay(change)  # type: ignore[attr-defined] # the listener dispatches it
    count(change)  # type: ignore[arg-type]
    summarise(change.fullDocument)  # type: ignore[attr-defined] # a field of an event, not of a change
    error: HandlerUsageError = HandlerUsageError()
    assert_type(error.retryable, bool)


@bridge.on_change("shop.orders")  # type: ignore[arg-type] # a change is no text
def wrong(change: str) -> None:
    """A handler of something else."""


bridge.on_change("shop.orders", max_retires=5)  # type: ignore[call-arg] # misspelt
late.on_change("shop.orders", max_retries="5")  # type: ignore[arg-type]
