"""Handlers that meet poison, by failure policy, and a partition rule that fails on some documents."""

from __future__ import annotations

from collections.abc import Mapping
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


def _add(name: str, collection: str, **options: Any) -> None:
    def handle(change: Change) -> None:
        record(name, change)

    handle.__name__ = handle.__qualname__ = name
    bridge.on_change(f"{DATA}.{collection}", name=name, **options)(handle)


MATCHES: Mapping[str, Mapping[str, Any] | None] = {
    "any": None,
    "sound": {"$ne": ["$fullDocument.good", "never"]},
    "picky": {"$gte": [{"$toInt": "$fullDocument.good"}, 0]},
    "aloof": {"$eq": ["$fullDocument.good", "never"]},
}
"""Handlers of one collection: without a `match`, with one that holds, one that may fail, and one that never holds."""


_add("odd", "odd", failure_policy="dead_letter")
for each in ("halt", "dead_letter", "skip"):
    _add(each, each, operations={"insert"}, partition_by=customer, failure_policy=each)
    for kind, match in MATCHES.items():
        _add(f"{kind}_{each}", "updated", operations={"update"}, match=match, failure_policy=each)
