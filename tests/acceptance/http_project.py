"""
The app whose listener serves HTTP: a bridge, an outbox and a `TwoPhaseCommit`.

From the environment: `PROJECT_MONGO`, `PROJECT_BROKER`, `PROJECT_NAMES` (the name that all databases begin with).
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Bridge, Change, Outbox, TwoPhaseCommit

NAMES = os.environ["PROJECT_NAMES"]
URL = os.environ["PROJECT_MONGO"]

app = Celery("watched", broker=os.environ["PROJECT_BROKER"])
bridge = Bridge(app, URL, name="shop", database=f"{NAMES}_state", partitions=2, lease_ttl=3.0, claim_ttl=3.0)


def _collection(name: str) -> Collection[dict[str, Any]]:
    return MongoClient[dict[str, Any]](URL)[f"{NAMES}_data"][name]


outbox = Outbox(app, lambda: _collection("invoices"), name="invoices", sweep_every=None, database=f"{NAMES}_state")
transfers = TwoPhaseCommit(app, lambda: _collection("transactions"), name="transfers")


@bridge.on_change(f"{NAMES}_data.orders", operations={"insert"})
def summarise(change: Change) -> None:
    """Fail as the order asks."""
    if (change.full_document or {}).get("bad"):
        raise ValueError("a [bad] order")
