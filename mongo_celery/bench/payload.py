"""The document of every mode, an order of about 600 bytes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bson import ObjectId, Timestamp
from pymongo import MongoClient
from pymongo.collection import Collection

_BATCH = 1000


def make_order(number: int) -> dict[str, Any]:
    """Return one order. All have the same length."""
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


def write_orders(collection: Collection[dict[str, Any]], count: int) -> None:
    """Insert `count` orders, in batches."""
    for first in range(0, count, _BATCH):
        batch = range(first, min(first + _BATCH, count))
        collection.insert_many([make_order(number) for number in batch], ordered=False)


def present_time(client: MongoClient[dict[str, Any]]) -> Timestamp:
    """Return a cluster time: a stream from there sees every later write and no earlier acknowledged one."""
    time: Timestamp = client.admin.command("ping")["operationTime"]
    return Timestamp(time.time, time.inc + 1)
