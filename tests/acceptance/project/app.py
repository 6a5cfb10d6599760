"""
An app whose handlers write down each start and each accepted effect, in a database that no test faults.

Everything about it comes from the environment, so that one module serves all tests:

- `PROJECT_MONGO`, `PROJECT_BROKER`: the bridge's servers;
- `PROJECT_SINK`: the server that remembers; `PROJECT_NAMES`: the name that all databases begin with;
- `PROJECT_DATA`, `PROJECT_STATE`: databases with other names, where the rights of a user say so;
- `PROJECT_OPTIONS`: the bridge's options as JSON; `PROJECT_HANDLERS`: names, separated by commas;
- `PROJECT_AUDIT`: where the handler `audit` begins, as `start_from` in `PROJECT_OPTIONS`; else where the bridge does;
- `PROJECT_FAIL`: how often the handler fails for the key `failing` before it succeeds.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from typing import Any

from bson import Timestamp
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.bridge.worker.execution import current

NAMES = os.environ["PROJECT_NAMES"]
ITEMS = os.environ.get("PROJECT_DATA", f"{NAMES}_data") + ".items"
STATE = os.environ.get("PROJECT_STATE", f"{NAMES}_state")
GATE_SECONDS_MAX = 120.0
RETRY_SECONDS = 3600
SLOW = "slow"
FAILING = "failing"
HALTING = "halting"
PARKING = "parking"


def _options() -> dict[str, Any]:
    options: dict[str, Any] = {"database": STATE}
    options |= json.loads(os.environ.get("PROJECT_OPTIONS", "{}"))
    if "start_from" in options:
        options["start_from"] = _start(options["start_from"])
    return options


def _start(given: Any) -> Any:
    return Timestamp(*given) if isinstance(given, list) else given


app = Celery("project", broker=os.environ["PROJECT_BROKER"])
app.conf.worker_hijack_root_logger = True
app.conf.broker_connection_retry_on_startup = True
bridge = Bridge(app, os.environ["PROJECT_MONGO"], name="project", **_options())


@functools.cache
def _sink_of(pid: int) -> Database[dict[str, Any]]:
    del pid  # a client of its own for each forked child
    return MongoClient(os.environ["PROJECT_SINK"])[f"{NAMES}_sink"]


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


def note(handler: str, change: Change) -> None:
    """Write down the start, behave as the key asks, and write the effect under the fence."""
    key, n = str(change.document_key["_id"]), number_of(change)
    fact = {"handler": handler, "key": key, "n": n, "fence": change.fencing_token, "pid": os.getpid()}
    sink()["starts"].insert_one(dict(fact))
    if key.startswith(SLOW):
        _wait_for_gate(key)
    if key == FAILING:
        _fail(fact)
    execution = current.get()
    assert execution is not None, "a handler runs in an execution"
    effect = {
        **fact,
        "partition": change.partition,
        "generation": execution.subject.run.generation,
        "place": change.resume_token["_data"],
    }
    registers = change.fenced(sink()["registers"])
    registers.update_one({"_id": f"{handler}/{key}"}, {"$push": {"log": effect}}, upsert=True)


def _wait_for_gate(key: str) -> None:
    pause = threading.Event()
    until = time.monotonic() + GATE_SECONDS_MAX
    while sink()["gates"].find_one({"_id": key}) is None and time.monotonic() < until:
        pause.wait(0.02)


_ERRORS: dict[str, type[Exception]] = {HALTING: ValueError, PARKING: ConnectionError}


def _fail(fact: dict[str, Any]) -> None:
    same = {name: fact[name] for name in ("handler", "key", "n")}
    if sink()["starts"].count_documents(same) <= int(os.environ.get("PROJECT_FAIL", "0")):
        raise ValueError("as the test asked")


@bridge.on_change(
    ITEMS, name="record", autoretry_for=(ConnectionError,), max_retries=3, default_retry_delay=RETRY_SECONDS
)
def record(change: Change) -> None:
    """The handler that every test has; the first change of some keys fails until their gate is open."""
    key, n = str(change.document_key["_id"]), number_of(change)
    kind = key.partition(" ")[0]
    if kind in _ERRORS and n == 1 and sink()["gates"].find_one({"_id": key}) is None:
        sink()["starts"].insert_one(
            {"handler": "record", "key": key, "n": n, "fence": change.fencing_token, "pid": os.getpid()}
        )
        raise _ERRORS[kind]("as the test asked")
    note("record", change)


if "audit" in os.environ.get("PROJECT_HANDLERS", ""):

    @bridge.on_change(ITEMS, name="audit", start_from=_start(json.loads(os.environ.get("PROJECT_AUDIT", "null"))))
    def audit(change: Change) -> None:
        """A handler that some tests add later."""
        note("audit", change)
