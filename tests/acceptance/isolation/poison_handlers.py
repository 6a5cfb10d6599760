"""Handlers that meet poison, by failure policy, and a partition rule that fails on some documents."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import bson

from mongo_celery import Change
from tests.rig.scripted import recording
from tests.rig.scripted.application import DATA, bridge


def record(handler: str, change: Change) -> None:
    """Note that a handler has a change: the bytes of its key, and the number that it sets."""
    key = bson.encode({"": change.document_key["_id"]}, codec_options=bridge.client.codec_options)
    described = change.update_description
    n = described["updatedFields"].get("n") if described else (change.full_document or {}).get("n")
    recording.record("handled", handler=handler, key=key, n=n, partition=change.partition)


def customer(event: Mapping[str, Any]) -> Any:
    """The partition rule: it fails on documents without a customer."""
    return event["fullDocument"]["customer"]


def _asked_retries() -> Mapping[str, Mapping[str, Any]]:
    west, east = timezone(timedelta(hours=-12)), timezone(timedelta(hours=12))
    return {
        "far": {"countdown": 1.7e12},
        "infinite": {"countdown": float("inf")},
        "year 10000": {"eta": datetime.max.replace(tzinfo=west)},
        "before the epoch": {"eta": datetime.min.replace(tzinfo=east)},
        "naive": {"eta": datetime(9999, 12, 31)},  # noqa: DTZ001 - as users write it
        "negative": {"countdown": -1e300},
        "recent": {"eta": datetime(1980, 1, 1, tzinfo=UTC)},
    }


def _handler(policy: str) -> None:
    def handle(task: Any, change: Change) -> None:
        document = change.full_document or {}
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
