"""Many quiet handlers, a collection each, and one that records every kind of event in a database of its own."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from mongo_celery import Bridge, Change

NAMES = os.environ.get("SCAN_NAMES", "scan")
DATA = f"{NAMES}_data"
QUIET = int(os.environ.get("SCAN_QUIET", "0"))

app = Celery("scan_project", broker=os.environ.get("SCAN_BROKER", "memory://"))
app.conf.update(broker_connection_retry_on_startup=True, worker_prefetch_multiplier=4)
bridge = Bridge(
    app,
    os.environ.get("SCAN_MONGO", "mongodb://localhost/?replicaSet=rs0"),
    name="scan",
    database=f"{NAMES}_state",
    autodiscover=False,
    **json.loads(os.environ.get("SCAN_OPTIONS", "{}")),
)


def handle(change: Change) -> None:
    """Nothing ever changes where the quiet handlers listen."""
    raise AssertionError(change)


def quiet_name(number: int) -> str:
    """Of a quiet handler, and of its collection."""
    return f"quiet_{number:03}"


def _quiet(name: str) -> None:
    def stay_quiet(change: Change) -> None:
        handle(change)

    stay_quiet.__name__ = stay_quiet.__qualname__ = name
    bridge.on_change(f"{DATA}.{name}", name=name)(stay_quiet)


for _number in range(QUIET):
    _quiet(quiet_name(_number))

if not QUIET:

    @bridge.on_change(f"{DATA}.*", operations="*")
    def record(change: Change) -> None:
        """Keep what a handler gets of an event."""
        fact: dict[str, Any] = {
            "_id": change.resume_token["_data"],
            "operation": change.operation_type,
            "namespace": change.namespace,
            "to": change.to.get("coll"),
            "description": change.operation_description is not None,
            "uuid": change.collection_uuid is not None,
            "key": change.document_key.get("_id"),
        }
        events = bridge.client[f"{NAMES}_facts"]["events"]
        events.update_one({"_id": fact.pop("_id")}, {"$set": fact, "$inc": {"times": 1}}, upsert=True)
