"""The sweep's question to a large collection in which hardly anything is pending."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery
from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from mongo_celery import Outbox
from mongo_celery.bench.stage import Scene, Stage
from mongo_celery.outbox import index
from tests.benchmarks.readings import MILLISECONDS, Reading

PENDING = 100
_BATCH = 10_000
_REPETITIONS = 15
_LIMIT = 1000
_NOT_ASKED = ("lsid", "$clusterTime", "$db", "$readPreference", "readConcern")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingQuery:
    """
    What the server says of the sweep's query, and how long it takes.

    Attributes:
        documents: of the collection.
        pending: how many of them have an entry.
        index: that the server's plan uses; None for a scan of the collection.
        keys_examined: of the index.
        documents_examined: by the query.
        readings: the query, the status, and the same query without the index, in milliseconds.
    """

    documents: int
    pending: int
    index: str | None
    keys_examined: int
    documents_examined: int
    readings: tuple[Reading, ...]


def measure_pending_query(stage: Stage, documents: int, announce: Callable[[str], None]) -> PendingQuery:
    """Fill a collection of small documents, leave 100 of them pending, and have the server explain itself."""
    recorder = _Recorder()
    with stage.scene("pending-query") as scene, _client(stage.mongo_url, recorder) as client:
        collection = client[scene.setting.database].get_collection("orders", write_concern=WriteConcern("majority"))
        outbox = Outbox(
            Celery("mongo_celery_bench", broker=stage.redis_url),
            collection,
            at_once=False,
            sweep_every=None,
            foreign_tasks=True,
            database=scene.setting.state_database,
        )
        index.of_pending(collection, outbox.backing.field).create(patiently=True)
        _fill(scene, documents, announce)
        for number in range(0, documents, max(documents // PENDING, 1))[:PENDING]:
            outbox.update_one({"_id": number}, {"$inc": {"n": 1}}, tasks=[outbox.app.signature("bench.none")])
        announce("the sweep's query")
        plain, claims = outbox.backing.plain, outbox.backing.claims
        seconds = _timed(lambda: index.due_documents(plain, claims, 0.0, _LIMIT))
        question = recorder.last_find()
        explained = plain.database.command("explain", question, verbosity="executionStats")
        statistics = explained["executionStats"]
        naturally = {**question, "hint": {"$natural": 1}}
        readings = (
            _reading("sweep_query", seconds),
            _reading("status", _timed(lambda: index.waiting(plain, claims, 5))),
            _reading("sweep_query_without_index", _timed(lambda: plain.database.command(naturally), 3)),
        )
        return PendingQuery(
            documents=documents,
            pending=plain.count_documents(claims.with_entries),
            index=_index_of(explained["queryPlanner"]["winningPlan"]),
            keys_examined=statistics["totalKeysExamined"],
            documents_examined=statistics["totalDocsExamined"],
            readings=readings,
        )


class _Recorder(CommandListener):
    """Keeps what was asked last, so that the very query of the sweep is explained and no copy of it."""

    def __init__(self) -> None:
        self._find: dict[str, Any] = {}

    def last_find(self) -> dict[str, Any]:
        return {name: value for name, value in self._find.items() if name not in _NOT_ASKED}

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name == "find":
            self._find = dict(event.command)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


def _client(url: str, recorder: CommandListener) -> MongoClient[dict[str, Any]]:
    return MongoClient(url, event_listeners=[recorder])


def _fill(scene: Scene, documents: int, announce: Callable[[str], None]) -> None:
    """Quickly: nobody needs these documents to survive anything."""
    collection: Collection[dict[str, Any]] = scene.orders.with_options(write_concern=WriteConcern(1))
    for first in range(0, documents, _BATCH):
        announce(f"{first} of {documents} documents for the sweep's query")
        batch = [{"_id": number, "n": number} for number in range(first, min(first + _BATCH, documents))]
        collection.insert_many(batch, ordered=False)


def _timed(ask: Callable[[], object], repetitions: int = _REPETITIONS) -> list[float]:
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        ask()
        found.append(time.perf_counter() - began)
    return found


def _reading(name: str, seconds: list[float]) -> Reading:
    return Reading(name=name, unit=MILLISECONDS, rounds=tuple(each * 1000 for each in seconds))


def _index_of(plan: Mapping[str, Any]) -> str | None:
    """The index somewhere in a plan; the stages are nested differently by different engines."""
    found = plan.get("indexName")
    if found is not None:
        return str(found)
    stages = (*(plan.get(name) for name in ("inputStage", "queryPlan", "winningPlan")), *plan.get("inputStages", ()))
    return next((name for stage in stages if stage and (name := _index_of(stage))), None)
