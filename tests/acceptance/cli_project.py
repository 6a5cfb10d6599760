"""
The app on which `test_cli.py` runs the command lines.

Everything comes from the environment: `PROJECT_MONGO`, `PROJECT_BROKER`, `PROJECT_NAMES` (the name that all
databases begin with), `PROJECT_OPTIONS` (the bridge's options as JSON), `PROJECT_HANDLER` (its name) and
`PROJECT_GROUP` (of a second handler; without it there is none), and `PROJECT_SETTINGS` (the
app's, as JSON).
"""

from __future__ import annotations

import json
import os

from celery import Celery

from mongo_celery import Bridge, Change

NAMES = os.environ["PROJECT_NAMES"]

app = Celery("cli", broker=os.environ["PROJECT_BROKER"])
app.conf.update(json.loads(os.environ.get("PROJECT_SETTINGS", "{}")))
bridge = Bridge(
    app,
    os.environ["PROJECT_MONGO"],
    name="shop",
    database=f"{NAMES}_state",
    **json.loads(os.environ.get("PROJECT_OPTIONS", "{}")),
)


@bridge.on_change(f"{NAMES}_data.orders", operations={"insert"}, name=os.environ.get("PROJECT_HANDLER"))
def summarise(change: Change) -> None:
    """Write down the order, or fail as the order asks, or for as long as its customer is missing."""
    document = change.full_document
    assert document is not None, "inserts have a document"
    if document.get("bad"):
        raise ValueError("a [bad] order")
    data = bridge.client[f"{NAMES}_data"]
    if "customer" in document and data["customers"].find_one(document["customer"]) is None:
        raise LookupError("no such customer")
    key = {"_id": document["_id"]}
    data["summaries"].replace_one(key, key, upsert=True)


if "PROJECT_GROUP" in os.environ:

    @bridge.on_change(f"{NAMES}_data.slow", group=os.environ["PROJECT_GROUP"])
    def slow(change: Change) -> None:
        """Do nothing."""
        del change
