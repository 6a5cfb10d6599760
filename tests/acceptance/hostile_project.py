"""
The app on which `test_hostile_text.py` runs the command lines: a bridge whose handlers fail with the text of their
document, an outbox and a TwoPhaseCommit.

`PROJECT_MONGO`, `PROJECT_NAMES` (the name that all databases begin with) and `PROJECT_STATE` (the bridge's state) come
from the environment.
"""

from __future__ import annotations

import os

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Outbox, TwoPhaseCommit

URL, NAMES = os.environ["PROJECT_MONGO"], os.environ["PROJECT_NAMES"]

app = Celery("hostile", broker="memory://", set_as_current=False)
bridge = Bridge(app, URL, name="shop", database=os.environ["PROJECT_STATE"], partitions=1, autodiscover=False)
client: MongoClient[dict[str, object]] = MongoClient(URL, connect=False)
data = client[f"{NAMES}_data"]
outbox = Outbox(app, lambda: data["parcels"], database=f"{NAMES}_state", name="parcels", sweep_every=None)
transfers = TwoPhaseCommit(app, lambda: data["transfers"], name="transfers", recover_every=None)


@bridge.on_change(f"{NAMES}_data.halting", max_retries=0)
def halting(change: Change) -> None:
    """Halts its partition."""
    _fail(change)


@bridge.on_change(f"{NAMES}_data.giving_up", failure_policy="dead_letter", max_retries=0)
def giving_up(change: Change) -> None:
    """Makes a dead letter."""
    _fail(change)


@app.task
def confirm(order: str) -> None:
    """A task of the outbox."""


def _fail(change: Change) -> None:
    assert change.full_document is not None, "inserts have a document"
    raise ValueError(change.full_document["text"])
