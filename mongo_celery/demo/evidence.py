"""
Reading back what the handlers did: the final documents, and the history from the server's own oplog.

The history is read with a change stream of its own, so that an effect which was overwritten later is seen too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from bson import Timestamp
from pymongo import WriteConcern
from pymongo.database import Database

from mongo_celery.demo.history import Effect, Started
from mongo_celery.demo.plan import name_of
from mongo_celery.demo.setting import NAME_INTO_ORDER, SUMMARISE, DemoSetting
from mongo_celery.demo.verdict import WRONG, Evidence
from mongo_celery.errors import ServerUnavailableError

_END = "end of the run"
_HISTORY_SECONDS_MAX = 60.0


def read_evidence(database: Database[dict[str, Any]], setting: DemoSetting) -> Evidence:
    """
    Read back everything. Call it when all processes of the run have ended.

    Raises:
        ServerUnavailableError: the history did not come within a minute.
    """
    assert setting.start is not None, "a run begins with a time"
    history = list(_history(database, Timestamp(*setting.start)))
    return Evidence(
        started=[start for event in history for start in _starts(event)],
        effects=[effect for event in history for effect in _effects(event)],
        final=[*_summaries(database), *_names(database)],
        refused=database["refusals"].count_documents({}),
    )


def _summaries(database: Database[dict[str, Any]]) -> Iterator[Effect]:
    for summary in database["summaries"].find():
        yield Effect(handler=SUMMARISE, key=summary["_id"], n=summary["n"])


def _names(database: Database[dict[str, Any]]) -> Iterator[Effect]:
    for order in database["orders"].find({"customer_version": {"$exists": True}}):
        version = order["customer_version"]
        right = order["customer_name"] == name_of(order["customer"], version)
        yield Effect(handler=NAME_INTO_ORDER, key=order["_id"], n=version if right else WRONG)


def _history(database: Database[dict[str, Any]], start: Timestamp) -> Iterator[Mapping[str, Any]]:
    """All changes of the run up to now; a marker tells where now is."""
    database["journal"].with_options(write_concern=WriteConcern("majority")).insert_one({"_id": _END})
    wanted = [{"$match": {"ns.coll": {"$in": ["orders", "summaries", "journal"]}}}]
    deadline = time.monotonic() + _HISTORY_SECONDS_MAX
    with database.watch(wanted, start_at_operation_time=start, max_await_time_ms=500) as stream:
        while time.monotonic() < deadline:
            event = stream.try_next()
            if event is None:
                continue
            if event["ns"]["coll"] == "journal" and event["documentKey"]["_id"] == _END:
                return
            yield event
    raise ServerUnavailableError(
        f"The history of the demo could not be read within {_HISTORY_SECONDS_MAX:.0f} s: "
        "is the server busy? Start the demo again with fewer orders.",
    )


def _starts(event: Mapping[str, Any]) -> Iterator[Started]:
    if event["ns"]["coll"] == "journal" and event["operationType"] == "insert":
        entry = event["fullDocument"]
        yield Started(handler=entry["handler"], key=entry["key"], n=entry["number"], fence=entry["fence"])


def _effects(event: Mapping[str, Any]) -> Iterator[Effect]:
    key = event.get("documentKey", {}).get("_id")
    changed = event.get("fullDocument") or event.get("updateDescription", {}).get("updatedFields", {})
    match event["ns"]["coll"]:
        case "summaries" if "n" in changed:
            yield Effect(handler=SUMMARISE, key=key, n=changed["n"])
        case "orders" if "customer_version" in changed:
            yield Effect(handler=NAME_INTO_ORDER, key=key, n=changed["customer_version"])
