"""Preflight of what is pending: entries that nobody here can send, and documents that hold too many."""

from __future__ import annotations

from collections.abc import Collection as AnyOf
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pymongo
from pymongo.collection import Collection

from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.quantities import duration, number

_DOCUMENTS_MAX = 10_000
_NAMED = 4
_LARGE_BYTES = 12 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """
    Pending entries of one app and name.

    Attributes:
        app: whose they are; empty where the entry does not say.
        name: of the task; empty for events.
        entries: how many.
        seconds: age of the oldest by the server's clock, as far as it can be read.
    """

    app: str
    name: str
    entries: int
    seconds: float


def read_kinds(collection: Collection[dict[str, Any]], field: str) -> list[Kind]:
    """What is pending, by app and task, in the first documents that the index has."""
    entry = "$entries"
    is_task = {"$eq": [f"{entry}.kind", "task"]}
    pipeline: list[dict[str, Any]] = [
        {"$match": {f"{field}.count": {"$gt": 0}}},
        {"$limit": _DOCUMENTS_MAX},
        {"$project": {"entries": f"${field}.events"}},
        {"$match": {"entries": {"$type": "array"}}},
        {"$unwind": entry},
        {
            "$group": {
                "_id": {"app": f"{entry}.app", "name": {"$cond": [is_task, f"{entry}.name", ""]}},
                "count": {"$sum": 1},
                "at": {"$min": {"$convert": {"input": f"{entry}.at", "to": "date", "onError": None, "onNull": None}}},
            }
        },
        {"$set": {"seconds": {"$divide": [{"$subtract": ["$$NOW", "$at"]}, 1000]}}},
        {"$sort": {"count": -1}},
    ]
    with pymongo.timeout(ANSWER_SECONDS):
        return [
            Kind(_text(each["_id"].get("app")), _text(each["_id"].get("name")), each["count"], each["seconds"] or 0.0)
            for each in collection.aggregate(pipeline)
        ]


def _text(value: object) -> str:
    """What somebody else may have written in the place of a name."""
    return value if isinstance(value, str) else ""


def check_contents(
    collection: Collection[dict[str, Any]],
    field: str,
    *,
    apps: AnyOf[str],
    tasks: Mapping[str, Any] | None,
    late: float,
    max_pending: int | None,
) -> Iterator[Finding]:
    """
    Look at what is pending.

    Args:
        collection: with plain types.
        field: in which entries are stored.
        apps: whose entries this app delivers.
        tasks: those that it knows; None where it sends what it does not know.
        late: seconds after which an entry should have been sent.
        max_pending: how many entries a document may hold; None where nothing is added to one.
    """
    kinds = read_kinds(collection, field)
    own = [each for each in kinds if not each.app or each.app in apps]
    yield from judge_apps([each for each in kinds if each not in own], late)
    if tasks is not None:
        yield from judge_tasks([each for each in own if each.name and each.name not in tasks])
    if max_pending is not None:
        yield from _check_sizes(collection, field, max_pending)


def judge_apps(others: Iterable[Kind], late: float) -> Iterator[Finding]:
    """Entries of other apps, at which a relay of this one stops."""
    by_app: dict[str, list[Kind]] = {}
    for each in others:
        by_app.setdefault(each.app, []).append(each)
    for app, kinds in sorted(by_app.items()):
        seconds = max(each.seconds for each in kinds)
        entries = number(sum(each.entries for each in kinds), "entry waits", "entries wait")
        report = failing if seconds > late else degraded
        yield report(
            "apps",
            f"{entries} for the app {app!r}, the oldest for {duration(seconds)}, and what was written behind them, "
            f"too: run beat and a worker of that app, or make this outbox with delivers=[{app!r}].",
        )
    if not by_app:
        yield ok("apps", "Nothing waits for another app.")


def judge_tasks(unknown: Iterable[Kind]) -> Iterator[Finding]:
    """Pending tasks that this app does not know."""
    names = sorted({each.name for each in unknown})
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield failing(
            "tasks",
            f"This app does not know {', '.join(names[:_NAMED])}{more}, which is pending: import the module, for "
            "example with include=[...], or make the outbox with foreign_tasks=True if another app runs it.",
        )


def _check_sizes(collection: Collection[dict[str, Any]], field: str, max_pending: int) -> Iterator[Finding]:
    count = f"{field}.count"
    large = {count: {"$gt": 0}, "$expr": {"$gt": [{"$bsonSize": "$$ROOT"}, _LARGE_BYTES]}}
    with pymongo.timeout(ANSWER_SECONDS):
        crowded = collection.find_one({count: {"$gt": max_pending}}, {count: 1})
        how_many = collection.count_documents({count: {"$gt": max_pending}}) if crowded else 0
        heavy = collection.find_one(large, {"_id": 1})
    if crowded:
        yield degraded(
            "max_pending",
            f"{number(how_many, 'document holds', 'documents hold')} more than {max_pending} entries, such as "
            f"{crowded['_id']!r}: writes through the outbox are refused there until they are sent. Operators "
            "(`with_tasks`) keep no bound but MongoDB's 16 MB.",
        )
    if heavy:
        yield failing(
            "size",
            f"Document {heavy['_id']!r} has more than 12 of the 16 MB that MongoDB allows, and something is pending in "
            "it: soon it cannot be written to. Have its entries sent.",
        )
