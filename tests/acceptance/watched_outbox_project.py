"""A Celery app whose outbox is delivered by its bridge alone: the writer leaves it to the listener, no beat runs."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change

NAME = os.environ.get("PROJECT_NAMES", "watched")
URL = os.environ.get("PROJECT_MONGO", "mongodb://localhost/")

app = Celery("watched", broker=os.environ.get("PROJECT_BROKER", "memory://"))
app.conf.update(task_acks_late=True, worker_hijack_root_logger=False)
bridge = Bridge(
    app, URL, name=NAME, database=f"{NAME}_state", partitions=4, lease_ttl=2, claim_ttl=3, autodiscover=False
)
orders = bridge.outbox(f"{NAME}_data.orders", at_once=False, claim_ttl=7, sweep_every=None)


def record(collection: str, change: Change) -> None:
    """Keep each change once, however often it is handled."""
    names = sorted((change.update_description or {}).get("updatedFields", ()))
    seen = {"order": change.document_key["_id"], "operation": change.operation_type, "names": names}
    database = bridge.client[f"{NAME}_data"]
    database[collection].update_one({"_id": change.resume_token["_data"]}, {"$set": seen}, upsert=True)


@bridge.on_change(f"{NAME}_data.orders")
def see(change: Change) -> None:
    """What a handler gets beside an outbox."""
    record("seen", change)


@bridge.on_change(f"{NAME}_data.orders", bookkeeping=True)
def see_all(change: Change) -> None:
    record("seen_all", change)


@app.task
def note(order: int, step: int) -> None:
    client: MongoClient[dict[str, Any]] = bridge.client
    client[f"{NAME}_data"]["notes"].insert_one({"order": order, "step": step})
