"""An app with receivers: one writes what it was sent to a database, and one never returns."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change
from mongo_celery.signals import change_dead_lettered, change_halted, leader_changed
from tests.rig.scripted.recording import take_time

NAMES = os.environ["PROJECT_NAMES"]

app = Celery("signals", broker=os.environ["PROJECT_BROKER"])
_options = json.loads(os.environ["PROJECT_OPTIONS"])
bridge = Bridge(app, os.environ["PROJECT_MONGO"], name="shop", database=f"{NAMES}_state", **_options)


@bridge.on_change(f"{NAMES}_data.orders", failure_policy="halt")
def bill(change: Change) -> None:
    """Fail for every order."""
    raise ValueError(change.document_key["_id"])


@change_halted.connect
@change_dead_lettered.connect
def note(sender: str, handler: str, **_: Any) -> None:
    """Write down a signal, as slowly as a pager's server."""
    take_time(1.0)
    with MongoClient[dict[str, Any]](os.environ["PROJECT_MONGO"]) as client:
        client[f"{NAMES}_facts"]["signals"].insert_one({"sender": sender, "handler": handler, "pid": os.getpid()})


@leader_changed.connect
def block(**_: Any) -> None:
    """Never return."""
    threading.Event().wait()
