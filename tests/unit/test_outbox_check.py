"""What the preflight of an outbox makes of the facts that it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from pymongo.errors import AutoReconnect

from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.rights import Allowed
from mongo_celery.outbox.health import (
    Sweeping,
    find_sweep_queue,
    judge_indexes,
    judge_state,
    judge_workers,
)
from mongo_celery.outbox.pending_documents import UnknownTask
from mongo_celery.outbox.requirements import judge_kind, judge_rights, judge_validator
from mongo_celery.outbox.runtime import OutboxStatus
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.outbox.sweep_records import make_sweep_watch, patience

Document = dict[str, Any]

FIELD = "pendingEvents"
COUNT = f"{FIELD}.count"
KEYS = {COUNT: 1, f"{FIELD}.claim.until": 1}
PARTIAL = {"key": KEYS, "name": "mine", "partialFilterExpression": {COUNT: {"$gt": 0}}}


# -- the collection --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "level", "words"),
    [
        (None, "degraded", "does not exist yet"),
        ({"type": "view"}, "failing", "of type view"),
        ({"type": "collection", "options": {"capped": True}}, "failing", "capped"),
        ({"type": "collection", "options": {}}, "ok", "exists"),
    ],
)
def test_documents_must_be_able_to_grow_and_to_stay(about: Document | None, level: str, words: str) -> None:
    """A name with a slip of the pen is a collection that does not exist."""
    finding = judge_kind("shop.orders", about)
    assert (finding.severity, finding.code) == (level, "collection")
    assert words in finding.sentence


EVERYTHING: Document = {"key": KEYS, "name": "whole"}
EXPIRING: Document = {"key": {"at": 1}, "name": "old", "expireAfterSeconds": 60}


@pytest.mark.parametrize(
    ("found", "pending", "expected"),
    [
        ([EVERYTHING, PARTIAL], 1, [("ok", "index")]),
        ([], 0, [("ok", "index")]),
        ([EVERYTHING], 1, [("degraded", "index")]),
        ([], 1, [("degraded", "index")]),
        ([PARTIAL, EXPIRING], 1, [("ok", "index"), ("degraded", "expiry")]),
    ],
)
def test_the_index_may_have_any_name_but_no_other_extent(found: Any, pending: int, expected: Any) -> None:
    """One without the condition holds every document. One with a time to live takes entries along."""
    assert [(each.severity, each.code) for each in judge_indexes("orders", found, pending)] == expected


LISTED: Document = {"additionalProperties": False, "properties": {"_id": {}}}


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


def test_missing_rights_are_named_with_their_collections() -> None:
    """Who lacks only the right to create the index can have it created by hand."""
    everything = ["find", "insert", "update", "remove"]

    def of(orders: list[str], letters: list[str]) -> Allowed:
        return Allowed(
            [
                {"resource": {"db": "shop", "collection": "orders"}, "actions": orders},
                {"resource": {"db": "state", "collection": ""}, "actions": letters},
            ]
        )

    needed = {"shop.orders": everything, "state.letters": everything}
    lacking = judge_rights(of(["find"], everything), needed)
    unindexed = judge_rights(of(everything, everything), needed)
    well = judge_rights(of([*everything, "createIndex"], everything), needed)
    free = judge_rights(Allowed(None), needed)
    assert lacking.severity == "failing"
    assert "lacks insert, update, remove on shop.orders." in lacking.sentence
    assert (unindexed.severity, well.severity, free.severity) == ("degraded", "ok", "ok")


# -- the sweep -------------------------------------------------------------------------------------


def said(queue: str, *tasks: str) -> WorkerReplies:
    return WorkerReplies({"w@x": {queue}}, {"w@x": {*tasks}})


SWEEPS = said("celery", SWEEP_TASK)


def test_a_worker_that_takes_sweeps_and_drops_them_is_found() -> None:
    """One that is busy does not answer, which is no finding."""
    assert list(judge_workers("celery", WorkerReplies({}, {}))) == []
    assert list(judge_workers("celery", SWEEPS)) == []
    (dropping,) = judge_workers("celery", said("celery", "mail"))
    assert (dropping.severity, dropping.code) == ("failing", "sweep_task")
    assert list(judge_workers("sweeps", said("celery", "mail"))) == []


def judge(broker_answers: bool = True, **changes: Any) -> list[str]:
    """Return the problems of an outbox that is well, but for these."""
    counts = {"documents": 0, "pending": 0, "oldest_seconds": None, "failing": 0, "dead_letters": 0}
    of_status = {name: value for name, value in changes.items() if name in OutboxStatus.__annotations__}
    rest = {name: value for name, value in changes.items() if name not in of_status}
    status: Any = OutboxStatus(**{"outbox": "o", "dispatched": 0, "failures": 0, **counts, **of_status})
    found = judge_state(status, Sweeping(**{"seconds": 1.0, **rest}), ANY_APP, broker_answers=broker_answers)
    return [each.code for each in found if each.severity != "ok"]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"seconds": None}, ["sweep"]),
        ({"seconds": 181.0}, ["sweep"]),
        ({"seconds": None, "is_readable": False}, []),
        ({"oldest_seconds": 34.0, "documents": 1, "pending": 1}, []),
        ({"oldest_seconds": 99.0, "documents": 1, "pending": 1}, ["late"]),
        ({"oldest_seconds": 16.0, "documents": 1, "pending": 1, "every": None}, ["late"]),
        ({"documents": 2, "failing": 2, "stuck": 1}, ["stuck", "failing"]),
        ({"dead_letters": 1, "unsigned": 1}, ["unsigned", "dead_letters"]),
    ],
)
def test_each_trouble_is_a_finding(changes: Document, codes: list[str]) -> None:
    assert judge(**changes) == codes


@pytest.mark.parametrize(
    ("changes", "codes"),
    [({"failing": 1}, ["failing"]), ({"seconds": 999.0}, ["sweep"]), ({"broker_answers": False, "seconds": None}, [])],
)
def test_a_cause_that_is_found_explains_entries_that_are_late(changes: Document, codes: list[str]) -> None:
    """One finding for one cause. The caller has that of the broker."""
    assert judge(**{"oldest_seconds": 999.0, "documents": 1, "pending": 1, **changes}) == codes


@pytest.mark.parametrize(("seconds", "severity"), [(5.0, "degraded"), (999.0, "failing")])
def test_a_task_that_the_app_does_not_know_is_named_and_explains_what_is_late(seconds: float, severity: str) -> None:
    """During a deploy that ends by itself."""
    counts: Any = {"documents": 2, "pending": 2, "oldest_seconds": seconds, "failing": 0, "dead_letters": 0}
    status = OutboxStatus(outbox="o", dispatched=0, failures=0, **counts)
    unknown = [UnknownTask("shop.new", 2, seconds)]
    found = judge_state(status, Sweeping(1.0), ANY_APP, broker_answers=True, unknown=unknown)
    (finding,) = [each for each in found if each.severity != "ok"]
    assert (finding.code, finding.severity) == ("unknown_tasks", severity)
    assert "shop.new" in finding.sentence


def test_the_sweep_is_looked_for_on_the_queue_that_it_is_routed_to() -> None:
    """As `task_routes` says, or the default queue."""
    routes = {SWEEP_TASK: {"queue": "sweeps"}}
    apps = Celery("shop", broker="memory://"), Celery("shop", broker="memory://", task_routes=routes)
    assert [find_sweep_queue(app) for app in apps] == ["celery", "sweeps"]


def test_patience_is_some_periods_and_never_too_short() -> None:
    """Nobody knows how often others sweep."""
    assert (patience(1.0), patience(10.0), patience(None)) == (60.0, 120.0, 900.0)


@pytest.mark.parametrize(
    ("age", "is_down", "swept"),
    [
        (None, False, False),
        (61.0, False, False),
        (59.0, False, True),
        (AutoReconnect("away"), False, None),
        (None, True, None),
    ],
)
def test_a_writer_says_that_nobody_sweeps_and_is_silent_where_it_cannot_tell(
    age: float | Exception | None, is_down: bool, swept: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As an error, with what to do. Beat can send no sweep while the broker is down."""

    def read_age() -> float | None:
        if isinstance(age, Exception):
            raise age
        return age

    records: Any = SimpleNamespace(read_age=read_age)
    watch = make_sweep_watch(lambda: "shop.orders", lambda: records, 5.0, lambda: is_down)
    assert watch.look() is swept
    found = [(each.levelname, getattr(each, "event", "")) for each in caplog.records]
    assert found == ([("ERROR", "nobody_sweeps")] if swept is False else [])
    assert all("Run `celery -A APP beat` or" in each.getMessage() for each in caplog.records)
