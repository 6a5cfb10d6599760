"""What the preflight of an outbox makes of the facts that it is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from pymongo.errors import AutoReconnect

from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.rights import Allowed
from mongo_celery.outbox.backing import OutboxStatus
from mongo_celery.outbox.check import (
    Kind,
    judge_apps,
    judge_indexes,
    judge_kind,
    judge_rights,
    judge_shard_key,
    judge_tasks,
    judge_validator,
    judge_workers,
    sweep_queue,
)
from mongo_celery.outbox.health import Health, judge_health
from mongo_celery.outbox.index import OutboxIndex
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.outbox.swept import LastSweep, patience, sweep_watch

Document = dict[str, Any]

FIELD = "pendingEvents"
COUNT = f"{FIELD}.count"
WANTED = OutboxIndex(None, FIELD, [(COUNT, 1)], "", {COUNT: {"$gt": 0}})  # type: ignore[arg-type]
PARTIAL = {"key": {COUNT: 1}, "name": "mine", "partialFilterExpression": {COUNT: {"$gt": 0}}}


# -- the collection --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "level", "words"),
    [
        (None, "degraded", "does not exist yet"),
        ({"type": "view"}, "failing", "a view"),
        ({"type": "collection", "options": {"capped": True}}, "failing", "capped"),
        ({"type": "collection", "options": {}}, "ok", "is there"),
    ],
)
def test_documents_must_be_able_to_grow_and_to_stay(about: Document | None, level: str, words: str) -> None:
    """A name with a slip of the pen is a collection that does not exist."""
    (finding,) = judge_kind("shop.orders", about)
    assert (finding.severity, finding.code) == (level, "collection")
    assert words in finding.sentence


def test_the_index_may_have_any_name_but_no_other_extent() -> None:
    """Its name is whoever's who made it; one without the condition holds every document."""
    everything: Document = {"key": {COUNT: 1}, "name": "whole"}
    assert [each.severity for each in judge_indexes("orders", WANTED, [everything, PARTIAL])] == ["ok"]
    for found in ([everything], []):
        (finding,) = judge_indexes("orders", WANTED, found)
        assert finding.severity == "degraded"
        assert finding.command == (
            'db.orders.createIndex({"pendingEvents.count": 1}, '
            '{"name": "pendingEvents", "partialFilterExpression": {"pendingEvents.count": {"$gt": 0}}})'
        )


def test_a_schema_that_lists_its_properties_forbids_the_field_unless_it_lists_it_too() -> None:
    listed: Document = {"additionalProperties": False, "properties": {"_id": {}}}

    def judge(validator: Document, **options: str) -> list[str]:
        return [each.severity for each in judge_validator({"validator": validator, **options}, FIELD)]

    assert judge({"$jsonSchema": listed}) == ["failing"]
    assert judge({"$jsonSchema": listed}, validationAction="warn") == ["degraded"]
    assert judge({"$jsonSchema": listed}, validationLevel="off") == []
    assert judge({"$jsonSchema": {**listed, "properties": {FIELD: {}}}}) == ["ok"]
    assert judge({"$jsonSchema": {**listed, "patternProperties": {"^p": {}}}}) == ["ok"]
    assert judge({"total": {"$gt": 0}}) == []


def test_documents_that_expire_take_their_entries_along() -> None:
    """A time to live is the user's own; but it has to be longer than an outage."""
    found = list(
        judge_indexes("orders", WANTED, [PARTIAL, {"key": {"at": 1}, "name": "old", "expireAfterSeconds": 60}])
    )
    assert [(each.severity, each.code) for each in found] == [("ok", "index"), ("degraded", "expiry")]


@pytest.mark.parametrize(
    ("key", "level", "words"),
    [(None, "ok", "not sharded"), ({"_id": "hashed"}, "ok", "_id"), ({"customer": 1}, "degraded", "by customer")],
)
def test_another_shard_key_than_the_id_is_told(key: Document | None, level: str, words: str) -> None:
    """Relays know the `_id` alone."""
    finding = judge_shard_key(key)
    assert finding.severity == level
    assert words in finding.sentence


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

    (lacking,) = judge_rights(of(["find"], everything), ("shop", "orders"), [("state", "letters")])
    (unindexed,) = judge_rights(of(everything, everything), ("shop", "orders"), [("state", "letters")])
    (well,) = judge_rights(of([*everything, "createIndex"], everything), ("shop", "orders"), [("state", "letters")])
    (free,) = judge_rights(Allowed(None), ("shop", "orders"), [("state", "letters")])
    assert lacking.severity == "failing"
    assert "lacks insert, update, remove on shop.orders." in lacking.sentence
    assert (unindexed.severity, well.severity, free.severity) == ("degraded", "ok", "ok")


# -- what is pending -------------------------------------------------------------------------------


def test_entries_of_other_apps_are_an_error_when_they_are_late() -> None:
    """A relay of this app stops in front of them, so what stands behind them waits, too."""
    web = [Kind("web", "mail", 2, 3.0), Kind("web", "", 1, 5.0)]
    (young,) = judge_apps(web, 15.0)
    (late,) = judge_apps([*web, Kind("web", "pay", 1, 16.0)], 15.0)
    (well,) = judge_apps([], 15.0)
    assert (young.severity, late.severity, well.severity) == ("degraded", "failing", "ok")
    assert "3 entries wait for the app 'web', the oldest for 5 s" in young.sentence
    assert "delivers=['web']" in young.sentence


def test_pending_tasks_that_this_app_does_not_know_are_named() -> None:
    """Some of them; each once."""
    (finding,) = judge_tasks([Kind("", name, 1, 0.0) for name in "fedcbaa"])
    assert finding.severity == "failing"
    assert "does not know a, b, c, d and 2 more" in finding.sentence
    assert list(judge_tasks([])) == []


# -- the sweep -------------------------------------------------------------------------------------


def said(queue: str, *tasks: str) -> WorkerReplies:
    return WorkerReplies({"w@x": {queue}}, {"w@x": {*tasks}})


SWEEPS = said("celery", SWEEP_TASK)


def test_a_worker_that_takes_sweeps_and_drops_them_is_found() -> None:
    """One that is busy does not answer, which is no finding."""
    assert list(judge_workers("celery", WorkerReplies({}, {}))) == []
    assert list(judge_workers("celery", None)) == list(judge_workers("celery", SWEEPS)) == []
    (dropping,) = judge_workers("celery", said("celery", "mail"))
    assert (dropping.severity, dropping.code) == ("failing", "sweep_task")
    assert list(judge_workers("sweeps", said("celery", "mail"))) == []
    assert [each.code for each in judge_workers("celery", "refused")] == ["workers"]


def health(**changes: Any) -> Health:
    """Give an outbox that is well, but for these."""
    counts = {"documents": 0, "pending": 0, "oldest_seconds": None, "failing": 0, "dead_letters": 0}
    of_status = {name: value for name, value in changes.items() if name in OutboxStatus.__annotations__}
    rest = {name: value for name, value in changes.items() if name not in of_status}
    status: Any = OutboxStatus(**{"outbox": "o", "dispatched": 0, "failures": 0, **counts, **of_status})
    given: Any = {"scheduled": True, "swept_seconds": 1.0, "patience": 60.0, "indexed": True, "broker_error": None}
    return Health(**{"name": "o", "status": status, "sweep_after": 5.0, **given, **rest})


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"swept_seconds": None}, ["sweep"]),
        ({"swept_seconds": 61.0}, ["sweep"]),
        ({"swept_seconds": None, "sweeps_known": False}, []),
        ({"oldest_seconds": 99.0, "documents": 1, "pending": 1}, ["late"]),
        ({"oldest_seconds": 99.0, "documents": 1, "failing": 1}, ["late", "failing"]),
        ({"oldest_seconds": 99.0, "documents": 1, "swept_seconds": 99.0}, ["late", "sweep"]),
        ({"documents": 2, "failing": 2, "stuck": 1}, ["stuck", "failing"]),
        ({"documents": 1, "other_apps": 1}, ["other_apps"]),
        ({"dead_letters": 1, "unsigned": 1}, ["unsigned", "dead_letters"]),
        ({"indexed": False, "documents": 1, "pending": 1}, ["index"]),
    ],
)
def test_status_and_check_find_the_same(changes: Document, codes: list[str]) -> None:
    """P16: `outbox status` gives as advice what `outbox check` finds."""
    found = [each for each in judge_health(health(**changes), ANY_APP) if each.severity != "ok"]
    assert [each.code for each in found] == codes
    one_cause = 1 if "late" in codes else len(codes)
    assert len(health(**changes).advice()) == one_cause


def test_a_broker_that_is_away_explains_what_is_late() -> None:
    """And is the first thing to look at."""
    (advice,) = health(oldest_seconds=99.0, documents=1, swept_seconds=None, broker_error="no answer").advice()
    assert "no answer" in advice


def test_the_sweep_is_looked_for_on_the_queue_that_it_is_routed_to() -> None:
    """As `task_routes` says, or the default queue."""
    app = Celery("shop", broker="memory://")
    assert sweep_queue(app) == "celery"
    routed = Celery("shop", broker="memory://", task_routes={SWEEP_TASK: {"queue": "sweeps"}})
    assert sweep_queue(routed) == "sweeps"


def test_patience_is_some_periods_and_never_too_short() -> None:
    """Nobody knows how often others sweep."""
    assert (patience(1.0), patience(10.0), patience(None)) == (60.0, 120.0, 900.0)


class Notes:
    """The notes of an outbox, with an answer of its own."""

    def __init__(self, answer: LastSweep | Exception | None) -> None:
        self._answer = answer

    def last(self) -> LastSweep | None:
        """As the notes of an outbox."""
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "swept"),
    [
        (None, False),
        (LastSweep(61.0, "", "host:1"), False),
        (LastSweep(59.0, "", "host:1"), True),
        (AutoReconnect("away"), None),
    ],
)
def test_a_writer_says_that_nobody_sweeps_and_is_silent_where_it_cannot_tell(
    answer: LastSweep | Exception | None, swept: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As an error, with what to do."""
    watch = sweep_watch(lambda: "shop.orders", lambda: Notes(answer), 60.0, lambda: False)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.INFO):
        assert watch.look() is swept
    records = [(each.levelname, getattr(each, "event", "")) for each in caplog.records]
    assert records == ([("ERROR", "nobody_sweeps")] if swept is False else [])
    assert all("run `celery -A APP beat`, or" in each.getMessage() for each in caplog.records)


def test_a_writer_that_knows_of_an_outage_blames_no_sweep(caplog: pytest.LogCaptureFixture) -> None:
    """Beat can send none while the broker is down."""
    watch = sweep_watch(lambda: "shop.orders", lambda: Notes(None), 60.0, lambda: True)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.INFO):
        assert watch.look() is None
    assert not caplog.records
