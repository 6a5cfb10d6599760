"""The document that every mode carries, an order of some 600 bytes, and how documents are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import bson
from bson import ObjectId, Timestamp, json_util
from pymongo import MongoClient
from pymongo.collection import Collection

_BATCH = 1000


def order(number: int) -> dict[str, Any]:
    """One order; all are equally long."""
    return {
        "_id": ObjectId(),
        "number": number,
        "placed": datetime(2026, 3, 14, 15, 9, 26, tzinfo=UTC),
        "customer": {"id": number % 1000, "name": "Ada Byron, Countess of Lovelace", "country": "GB"},
        "lines": [
            {"sku": f"SKU-{line:04d}", "title": "A thing of moderate length", "quantity": line + 1, "price": 19.99}
            for line in range(4)
        ],
        "note": "Leave it with the neighbours. " * 3,
        "paid": False,
    }


def order_bytes() -> int:
    """Size of one order in BSON."""
    return len(bson.encode(order(0)))


def event_text() -> str:
    """A change event of one order as extended JSON, the form in which people hand events to tasks."""
    document = order(0)
    event = {
        "_id": {"_data": "82" + "0123456789abcdef" * 8},
        "operationType": "insert",
        "clusterTime": Timestamp(1_770_000_000, 1),
        "wallTime": document["placed"],
        "fullDocument": document,
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": document["_id"]},
    }
    return json_util.dumps(event)


def write_orders(collection: Collection[dict[str, Any]], count: int) -> None:
    """Insert that many orders, in batches."""
    for batch in _batches(count):
        collection.insert_many([order(number) for number in batch], ordered=False)


def write_documents(collection: Collection[dict[str, Any]], make: Callable[[], dict[str, Any]], count: int) -> None:
    """Insert that many documents of another making, in batches."""
    for batch in _batches(count):
        collection.insert_many([make() for _ in batch], ordered=False)


def present_time(client: MongoClient[dict[str, Any]]) -> Timestamp:
    """A cluster time from which a stream sees every later write and no acknowledged earlier one."""
    answer = client.admin.command("ping")
    time: Timestamp = answer["operationTime"]
    return Timestamp(time.time, time.inc + 1)


def _batches(count: int) -> Iterator[range]:
    for first in range(0, count, _BATCH):
        yield range(first, min(first + _BATCH, count))
