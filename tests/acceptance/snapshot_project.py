"""
Four handlers that copy, or count, what a snapshot and the stream bring them: `celery -A ... listener` and `... worker`.

Everything comes from the environment: `COPIES_MONGO`, `COPIES_BROKER`, `COPIES_NAMES` (the name that all databases
begin with) and `COPIES_OPTIONS` (the bridge's options as JSON). Each handler watches the collection of its name.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery
from pymongo import MongoClient, UpdateOne

from mongo_celery import Bridge, Change, Changes
from mongo_celery.forking import PerProcess

NAMES = os.environ["COPIES_NAMES"]
DATA, COPIES = f"{NAMES}_data", f"{NAMES}_copies"
SNAPSHOT = "snapshot"
PLAIN, FENCED, TRANSACTIONAL, LOOKED_UP = "plain", "fenced", "transactional", "looked_up"

app = Celery("copies", broker=os.environ["COPIES_BROKER"])
app.conf.update(
    worker_prefetch_multiplier=4,
    worker_hijack_root_logger=True,
    broker_transport_options={"visibility_timeout": 60, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
)
bridge = Bridge(
    app,
    os.environ["COPIES_MONGO"],
    name="copies",
    database=f"{NAMES}_state",
    autodiscover=False,
    start_from="now",
    **json.loads(os.environ.get("COPIES_OPTIONS", "{}")),
)
client: PerProcess[MongoClient[dict[str, Any]]] = PerProcess(
    lambda: MongoClient(os.environ["COPIES_MONGO"], connect=False)
)

_HALF_MORE = {"$add": [{"$floor": {"$ifNull": ["$n", 0]}}, 0.5]}


@bridge.on_changes(f"{DATA}.{PLAIN}", start_from=SNAPSHOT, batch_size=500)
def plain(changes: Changes) -> None:
    """Note the newest number that came, a half more for a delete, and how often the snapshot brought it."""
    client.get()[COPIES][PLAIN].bulk_write([_note(change) for change in changes])


def _note(change: Change) -> UpdateOne:
    key = dict(change.document_key)
    if change.operation_type == "delete":
        return UpdateOne(key, [{"$set": {"n": _HALF_MORE}}], upsert=True)
    read = int(change.operation_type == SNAPSHOT)
    return UpdateOne(key, {"$max": {"n": _written(change)["n"]}, "$inc": {"read": read}}, upsert=True)


@bridge.on_change(f"{DATA}.{FENCED}", start_from=SNAPSHOT)
def fenced(change: Change) -> None:
    """Keep a copy of what the change itself says, through the fence."""
    copies = change.fenced(f"{COPIES}.{FENCED}")
    if change.operation_type == "delete":
        copies.delete_one(change.document_key)
    else:
        copies.replace_one(change.document_key, {**_written(change), **_where(change)}, upsert=True)


@bridge.on_change(f"{DATA}.{TRANSACTIONAL}", transactional=True)
def transactional(change: Change) -> None:
    """Keep a copy of what the change itself says, together with the mark that it is done."""
    session = change.session
    assert session is not None, "the handler is transactional"
    copies = session.client[COPIES][TRANSACTIONAL]
    if change.operation_type == "delete":
        copies.delete_one(change.document_key, session=session)
    else:
        copy = {**_written(change), **_where(change)}
        copies.replace_one(change.document_key, copy, upsert=True, session=session)


@bridge.on_change(f"{DATA}.{LOOKED_UP}", start_from=SNAPSHOT)
def looked_up(change: Change) -> None:
    """Keep a copy of the document as it was looked up: what most handlers do."""
    copies = change.fenced(f"{COPIES}.{LOOKED_UP}")
    if change.full_document is None:
        copies.delete_one(change.document_key)
    else:
        document = {name: value for name, value in change.full_document.items() if name != "_id"}
        copies.replace_one(change.document_key, {**document, **_where(change)}, upsert=True)


def _written(change: Change) -> dict[str, Any]:
    """What the change itself says: an update names every field but `_id`, so nothing newer is looked at."""
    if change.update_description is not None:
        return dict(change.update_description["updatedFields"])
    assert change.full_document is not None, "inserts, replaces and snapshots carry their document"
    return {name: value for name, value in change.full_document.items() if name != "_id"}


def _where(change: Change) -> dict[str, Any]:
    return {"place": {"partition": change.partition, "seq": change.seq, "fence": change.fencing_token}}
