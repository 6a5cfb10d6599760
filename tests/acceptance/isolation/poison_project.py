"""A project that meets poison: handlers by failure policy, and a partition rule that fails on some."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import bson
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change

NAME = os.environ["POISON_NAME"]
DATA = f"{NAME}_data"
CURED = "POISON_CURED" in os.environ

app = Celery("poison", broker=os.environ["POISON_BROKER"])
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=True)
bridge = Bridge(
    app,
    os.environ["POISON_MONGO"],
    name="poison",
    database=f"{NAME}_state",
    autodiscover=False,
    lease_ttl=2,
    claim_ttl=4,
    dispatch_grace=3,
    commit_grace=1,
    max_crashes=1,
    **{"partitions": 4, **json.loads(os.environ.get("POISON_OPTIONS", "{}"))},
)
_facts: dict[int, Any] = {}


def record(handler: str, change: Change) -> None:
    """Note that a handler has a change: the bytes of its key, and the number that it sets."""
    facts = _facts.setdefault(os.getpid(), MongoClient(os.environ["POISON_MONGO"]))
    key = bson.encode({"": change.document_key["_id"]}, codec_options=bridge.client.codec_options)
    described = change.update_description
    n = described["updatedFields"].get("n") if described else (change.full_document or {}).get("n")
    fact = {"handler": handler, "key": key, "n": n, "partition": change.partition, "at": time.monotonic_ns()}
    facts[f"{NAME}_facts"]["handled"].insert_one(fact)


def customer(event: Mapping[str, Any]) -> Any:
    """The partition rule: it fails on documents without a customer, until it is corrected."""
    document = event["fullDocument"]
    return document.get("customer") if CURED else document["customer"]


def _asked_retries() -> Mapping[str, Mapping[str, Any]]:
    west, east = timezone(timedelta(hours=-12)), timezone(timedelta(hours=12))
    return {
        "far": {"countdown": 1.7e12},
        "infinite": {"countdown": float("inf")},
        "nan": {"countdown": float("nan")},
        "year 10000": {"eta": datetime.max.replace(tzinfo=west)},
        "before the epoch": {"eta": datetime.min.replace(tzinfo=east)},
        "naive": {"eta": datetime(9999, 12, 31)},  # noqa: DTZ001 - as users write it
        "negative": {"countdown": -1e300},
        "recent": {"eta": datetime(1980, 1, 1, tzinfo=UTC)},
    }


def _handler(policy: str) -> None:
    def handle(task: Any, change: Change) -> None:
        document = change.full_document or {}
        if document.get("spoil"):  # a handler may do to its event what it likes
            event = cast("dict[str, Any]", change.raw)
            event["_id"]["_data"] = "F" * 60
            event["_id"] = {"_data": "FF"}
            event.clear()
            change = Change({"documentKey": {"_id": document["_id"]}, "fullDocument": document}, change.partition)
        record(policy, change)
        asked = document.get("retry")
        if asked and not task.request.retries:
            task.retry(**_asked_retries()[asked])

    handle.__name__ = handle.__qualname__ = policy
    bridge.on_change(
        f"{DATA}.{policy}",
        name=policy,
        bind=True,
        max_retries=3,
        operations={"insert"},
        partition_by=customer,
        failure_policy=policy,
    )(handle)


for each in ("halt", "dead_letter", "skip"):
    _handler(each)


@bridge.on_change(f"{DATA}.odd", name="odd", failure_policy="dead_letter")
def odd(change: Change) -> None:
    """Every kind of key."""
    record("odd", change)


@bridge.on_change(f"{DATA}.fielded", name="fielded", failure_policy="dead_letter", fields={"n"})
def fielded(change: Change) -> None:
    """Judged by the names of updated fields."""
    record("fielded", change)


@bridge.on_change(f"{DATA}.matched", name="matched", match={"$eq": [{"$toInt": "$fullDocument.good"}, 1]})
def matched(change: Change) -> None:
    """Judged by a flag; the server cannot tell it of what is no number."""
    record("matched", change)


MATCHES: Mapping[str, Mapping[str, Any] | None] = {
    "any": None,
    "sound": {"$ne": ["$fullDocument.good", "never"]},
    "picky": {"$gte": [{"$toInt": "$fullDocument.good"}, 0]},
    "aloof": {"$eq": ["$fullDocument.good", "never"]},
}
"""Handlers of one collection: without a `match`, with one that holds, one that may fail, and one that never holds."""


def _updated(kind: str, policy: str) -> None:
    name = f"{kind}_{policy}"

    def handle(change: Change) -> None:
        record(name, change)

    handle.__name__ = handle.__qualname__ = name
    bridge.on_change(f"{DATA}.updated", name=name, operations={"update"}, match=MATCHES[kind], failure_policy=policy)(
        handle
    )


for each in ("halt", "dead_letter", "skip"):
    for matching in MATCHES:
        _updated(matching, each)
