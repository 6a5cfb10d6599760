"""
The app of every test that runs command lines: a bridge, an outbox and a `TwoPhaseCommit`.

`PROJECT_HANDLER` is the name of its handler, `PROJECT_GROUP` that of a second handler's group; without it there is
none. `PROJECT_SETTINGS` are the app's, as JSON. The rest of the environment is that of `rig/project.py`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Bridge, Change, Outbox, TwoPhaseCommit

NAMES = os.environ["PROJECT_NAMES"]
URL = os.environ["PROJECT_MONGO"]
STATE = os.environ.get("PROJECT_STATE", f"{NAMES}_state")


@cache
def collection(name: str) -> Collection[dict[str, Any]]:
    """Give a collection of users' data, by a client of this process."""
    return MongoClient[dict[str, Any]](URL)[f"{NAMES}_data"][name]


app = Celery("cli", broker=os.environ["PROJECT_BROKER"])
app.conf.update(json.loads(os.environ.get("PROJECT_SETTINGS", "{}")))
bridge = Bridge(app, URL, name="shop", database=STATE, **json.loads(os.environ.get("PROJECT_OPTIONS", "{}")))
outbox = Outbox(app, lambda: collection("invoices"), name="invoices", sweep_every=None, database=f"{NAMES}_state")
transfers = TwoPhaseCommit(app, lambda: collection("transfers"), name="transfers", timeout=2, recover_every=None)


@app.task
def confirm(order: str) -> None:
    """Do nothing: only its message matters."""


@bridge.on_change(f"{NAMES}_data.orders", operations={"insert"}, name=os.environ.get("PROJECT_HANDLER"))
def summarise(change: Change) -> None:
    """Write down the order, or fail as the order asks, or for as long as its customer is missing."""
    document = change.full_document
    assert document is not None, "inserts have a document"
    _fail_as_asked(document)
    data = bridge.client[f"{NAMES}_data"]
    if "customer" in document and data["customers"].find_one(document["customer"]) is None:
        raise LookupError("no such customer")
    key = {"_id": document["_id"]}
    data["summaries"].replace_one(key, key, upsert=True)


def _fail_as_asked(document: dict[str, Any]) -> None:
    if document.get("bad"):
        raise ValueError(document["bad"])


if "PROJECT_GROUP" in os.environ:

    @bridge.on_change(
        f"{NAMES}_data.slow", group=os.environ["PROJECT_GROUP"], failure_policy="dead_letter", max_retries=0
    )
    def slow(change: Change) -> None:
        """Fail as the document asks."""
        _fail_as_asked(change.full_document or {})
