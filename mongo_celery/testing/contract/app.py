"""The worker's app for checking a broker: one handler that records its changes."""

from __future__ import annotations

import os

from celery import Celery

from mongo_celery import Bridge, Change

DATABASE = os.environ.get("MONGO_CELERY_CONTRACT_DATABASE", "mongo_celery_contract")
URL = os.environ.get("MONGO_CELERY_CONTRACT_MONGODB", "mongodb://localhost/?replicaSet=rs0")

app = Celery(DATABASE, broker=os.environ.get("CELERY_BROKER_URL", "memory://"), set_as_current=False)
bridge = Bridge(
    app,
    URL,
    name=DATABASE,
    database=f"{DATABASE}_state",
    autodiscover=False,
    partitions=4,
    lease_ttl=2.0,
    claim_ttl=4.0,
    dispatch_grace=3.0,
    commit_grace=1.0,
)


@bridge.on_change(f"{DATABASE}.orders", operations={"insert", "update", "replace"}, max_retries=2, bind=True)
def note(task: object, change: Change) -> None:
    """Append the change's number to a list. The first start of some orders requests a retry."""
    document = change.full_document or {}
    if document.get("again") and not task.request.retries:  # type: ignore[attr-defined]
        task.retry(countdown=0.1)  # type: ignore[attr-defined]
    notes = change.fenced(bridge.client[DATABASE]["notes"])
    notes.update_one({"_id": document["_id"]}, {"$push": {"ns": document["n"]}}, upsert=True)
