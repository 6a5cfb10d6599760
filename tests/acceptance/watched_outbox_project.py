"""A Celery app whose outbox is delivered by its bridge alone: the writer leaves it to the listener, no beat runs."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge

NAME = os.environ.get("WATCHED_NAME", "watched")
URL = os.environ.get("WATCHED_MONGO", "mongodb://localhost/")

app = Celery("watched", broker=os.environ.get("WATCHED_BROKER", "memory://"))
app.conf.update(task_acks_late=True, worker_hijack_root_logger=False)
bridge = Bridge(
    app, URL, name=NAME, database=f"{NAME}_state", partitions=4, lease_ttl=2, claim_ttl=3, autodiscover=False
)
orders = bridge.outbox(f"{NAME}_data.orders", at_once=False, claim_ttl=7, sweep_every=None)


@app.task
def note(order: int, step: int) -> None:
    """Record that it ran."""
    client: MongoClient[dict[str, Any]] = bridge.client
    client[f"{NAME}_data"]["notes"].insert_one({"order": order, "step": step})
