"""
An app whose handlers write down each start and each accepted effect, in a database that no test faults.

Everything about it comes from the environment, so that one module serves all tests:

- `PROJECT_MONGO`, `PROJECT_BROKER`: the bridge's servers;
- `PROJECT_SINK`: the server that remembers; `PROJECT_NAMES`: the name that all databases begin with;
- `PROJECT_OPTIONS`: the bridge's options as JSON;
- `PROJECT_FAIL`: how often the handler fails for the key `failing` before it succeeds.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change

NAMES = os.environ["PROJECT_NAMES"]
ITEMS = f"{NAMES}_data.items"
GATE_SECONDS_MAX = 120.0
SLOW = "slow"
FAILING = "failing"

app = Celery("project", broker=os.environ["PROJECT_BROKER"])
app.conf.worker_hijack_root_logger = True
app.conf.broker_connection_retry_on_startup = True
_options = json.loads(os.environ.get("PROJECT_OPTIONS", "{}"))
bridge = Bridge(app, os.environ["PROJECT_MONGO"], name="project", database=f"{NAMES}_state", **_options)


@functools.cache
def _sink_of(pid: int) -> Database[dict[str, Any]]:
    del pid  # a client of its own for each forked child
    return MongoClient(os.environ["PROJECT_SINK"])[f"{NAMES}_facts"]


def sink() -> Database[dict[str, Any]]:
    """The database that remembers."""
    return _sink_of(os.getpid())


def number_of(change: Change) -> int:
    """The number that this very change wrote; the looked-up document may be newer."""
    if change.operation_type == "update":
        assert change.update_description is not None, "updates have a description"
        return int(change.update_description["updatedFields"]["n"])
    assert change.full_document is not None, "inserts have a document"
    return int(change.full_document["n"])


@bridge.on_change(ITEMS, name="record")
def record(change: Change) -> None:
    """Write down the start, behave as the key asks, and write the effect under the fence."""
    key, n = str(change.document_key["_id"]), number_of(change)
    fact = {"handler": "record", "key": key, "n": n}
    sink()["starts"].insert_one(dict(fact))
    if key.startswith(SLOW):
        _wait_for_gate(key)
    if key == FAILING:
        _fail(fact)
    registers = change.fenced(sink()["registers"])
    registers.update_one({"_id": f"record/{key}"}, {"$push": {"log": fact}}, upsert=True)


def _wait_for_gate(key: str) -> None:
    pause = threading.Event()
    until = time.monotonic() + GATE_SECONDS_MAX
    while sink()["gates"].find_one({"_id": key}) is None and time.monotonic() < until:
        pause.wait(0.02)


def _fail(fact: dict[str, Any]) -> None:
    if sink()["starts"].count_documents(fact) <= int(os.environ.get("PROJECT_FAIL", "0")):
        raise ValueError("as the test asked")
