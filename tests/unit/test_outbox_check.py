"""What the preflight of an outbox makes of the facts that it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.command_line import ANY_APP
from mongo_celery.outbox.health import Sweeping, judge_indexes, judge_state, judge_workers
from mongo_celery.outbox.pending_documents import UnknownTask
from mongo_celery.outbox.requirements import judge_kind, judge_validator
from mongo_celery.outbox.runtime import OutboxStatus
from mongo_celery.outbox.sweep import SWEEP_TASK

Document = dict[str, Any]


LISTED: Document = {"additionalProperties": False, "properties": {"_id": {}}}
PARTIAL: Document = {
    "name": "mine",
    "key": {"pendingEvents.count": 1, "pendingEvents.claim.until": 1},
    "partialFilterExpression": {"pendingEvents.count": {"$gt": 0}},
}


@pytest.mark.parametrize(
    ("about", "level"),
    [
        (None, "degraded"),
        ({"type": "view"}, "failing"),
        ({"type": "collection", "options": {"capped": True}}, "failing"),
        ({"type": "collection", "options": {}}, "ok"),
    ],
)
def test_documents_must_be_able_to_grow_and_to_stay(about: Document | None, level: str) -> None:
    """A name with a typo is a collection that does not exist. An index with a time to live takes entries along."""
    assert judge_kind("shop.orders", about).severity == level
    whole: Document = {"key": PARTIAL["key"], "name": "whole"}
    expiring: Document = {"key": {"at": 1}, "name": "old", "expireAfterSeconds": 60}
    for indexes, pending, levels in (
        ([whole], 1, ["degraded"]),
        ([], 0, ["ok"]),
        ([PARTIAL, expiring], 1, ["ok", "degraded"]),
    ):
        assert [each.severity for each in judge_indexes("orders", indexes, pending)] == levels


@pytest.mark.parametrize(
    ("validator", "options", "expected"),
    [
        ({"$jsonSchema": LISTED}, {"validationLevel": "off"}, []),
        ({"$jsonSchema": {**LISTED, "patternProperties": {"^p": {}}}}, {}, ["ok"]),
        ({"total": {"$gt": 0}}, {}, []),
    ],
)
def test_not_every_validator_forbids_the_field(validator: Document, options: Document, expected: list[str]) -> None:
    """`test_outbox_check` of the servers has those that do."""
    assert [each.severity for each in judge_validator({"validator": validator, **options})] == expected


def said(queue: str, *tasks: str) -> WorkerReplies:
    return WorkerReplies({"w@x": {queue}}, {"w@x": {*tasks}})


def test_a_worker_that_takes_sweeps_and_drops_them_is_found() -> None:
    """One that is busy does not answer, which is no finding."""
    assert list(judge_workers("celery", WorkerReplies({}, {}))) == []
    assert list(judge_workers("celery", said("celery", SWEEP_TASK))) == []
    (dropping,) = judge_workers("celery", said("celery", "mail"))
    assert (dropping.severity, dropping.code) == ("failing", "sweep_task")
    assert list(judge_workers("sweeps", said("celery", "mail"))) == []


PENDING = {"documents": 1, "pending": 1}


def judge(broker_answers: bool = True, unknown: Sequence[UnknownTask] = (), **changes: Any) -> list[str]:
    counts = {"documents": 0, "pending": 0, "oldest_seconds": None, "failing": 0, "dead_letters": 0}
    of_status = {name: value for name, value in changes.items() if name in OutboxStatus.__annotations__}
    rest = {name: value for name, value in changes.items() if name not in of_status}
    status: Any = OutboxStatus(**{"outbox": "o", "dispatched": 0, "failures": 0, **counts, **of_status})
    sweeping = Sweeping(**{"seconds": 1.0, **rest})
    found = judge_state(status, sweeping, ANY_APP, broker_answers=broker_answers, unknown=unknown)
    return [each.code for each in found if each.severity != "ok"]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"seconds": None}, ["sweep"]),
        ({"seconds": 181.0}, ["sweep"]),
        ({"seconds": None, "is_readable": False}, []),
        ({"oldest_seconds": 34.0, **PENDING}, []),
        ({"oldest_seconds": 99.0, **PENDING}, ["late"]),
        ({"oldest_seconds": 16.0, **PENDING, "every": None}, ["late"]),
        ({"documents": 2, "failing": 2, "stuck": 1}, ["stuck", "failing"]),
        ({"dead_letters": 1, "unsigned": 1}, ["unsigned", "dead_letters"]),
        ({"oldest_seconds": 999.0, **PENDING, "failing": 1}, ["failing"]),
        ({"oldest_seconds": 999.0, **PENDING, "seconds": 999.0}, ["sweep"]),
        ({"oldest_seconds": 999.0, **PENDING, "unknown": [UnknownTask("shop.new", 2, 5.0)]}, ["unknown_tasks"]),
        ({"oldest_seconds": 999.0, **PENDING, "broker_answers": False, "seconds": None}, []),
    ],
)
def test_each_trouble_is_a_finding(changes: Document, codes: list[str]) -> None:
    """A cause that is found explains entries that are late. The caller has that of the broker."""
    assert judge(**changes) == codes
