"""What the preflight of an outbox makes of the facts that it is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from pymongo.errors import AutoReconnect

from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.mongo.rights import Allowed
from mongo_celery.outbox.check.contents import Kind, judge_apps, judge_tasks
from mongo_celery.outbox.check.storage import (
    WantedIndex,
    forbids,
    judge_indexes,
    judge_kind,
    judge_rights,
    judge_shard_key,
    judge_values,
)
from mongo_celery.outbox.check.sweeping import Sweeping, judge_sweeping, sweep_queue
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.outbox.swept import LastSweep, patience, sweep_watch

Document = dict[str, Any]

FIELD = "pendingEvents"
COUNT = f"{FIELD}.count"
WANTED = WantedIndex(FIELD, [(COUNT, 1)], {COUNT: {"$gt": 0}})
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
    for found, words in (([everything], "whole is on"), ([], "is missing")):
        (finding,) = judge_indexes("orders", WANTED, found)
        assert finding.severity == "degraded"
        assert words in finding.sentence
        assert finding.command == (
            'db.orders.createIndex({"pendingEvents.count": 1}, '
            '{"name": "pendingEvents", "partialFilterExpression": {"pendingEvents.count": {"$gt": 0}}})'
        )


def test_documents_that_expire_take_their_entries_along() -> None:
    """A time to live is the user's own; but it has to be longer than an outage."""
    found = list(
        judge_indexes("orders", WANTED, [PARTIAL, {"key": {"at": 1}, "name": "old", "expireAfterSeconds": 60}])
    )
    assert [(each.severity, each.code) for each in found] == [("ok", "index"), ("degraded", "expiry")]


def test_a_schema_that_lists_its_properties_forbids_the_field_unless_it_lists_it_too() -> None:
    """What holds of a collection without documents, where nothing can be tried."""
    listed: Document = {"additionalProperties": False, "properties": {"_id": {}}}
    assert forbids({"$jsonSchema": listed}, FIELD)
    assert not forbids({"$jsonSchema": {**listed, "properties": {FIELD: {}}}}, FIELD)
    assert not forbids({"$jsonSchema": {**listed, "patternProperties": {"^p": {}}}}, FIELD)
    assert not forbids({"$jsonSchema": {"properties": {"_id": {}}}}, FIELD)
    assert not forbids({"total": {"$gt": 0}}, FIELD)


@pytest.mark.parametrize(
    ("key", "level", "words"),
    [(None, "ok", "not sharded"), ({"_id": "hashed"}, "ok", "_id"), ({"customer": 1}, "degraded", "by customer")],
)
def test_another_shard_key_than_the_id_is_told(key: Document | None, level: str, words: str) -> None:
    """Relays know the `_id` alone."""
    finding = judge_shard_key(key)
    assert finding.severity == level
    assert words in finding.sentence


def test_what_cannot_be_pushed_to_is_an_error() -> None:
    """With the command that fixes it. A count that could not read everything reports that."""
    (nulls,) = judge_values("orders", FIELD, 1)
    assert nulls.severity == "failing"
    assert "in 1 document," in nulls.sentence
    assert nulls.command == 'db.orders.updateMany({"pendingEvents": null}, {$unset: {"pendingEvents": 1}})'
    (many,) = judge_values("orders", FIELD, 1000)
    assert "in at least 1000 documents" in many.sentence
    (well,) = judge_values("orders", FIELD, None)
    assert (well.severity, "as far as could be read" in well.sentence) == ("ok", True)


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


def sweeping(seconds: float | None = None, **changes: Any) -> Sweeping:
    last = None if seconds is None else LastSweep(seconds, "shop", "host:1")
    return Sweeping(**{"last": last, "patience": 60.0, "is_scheduled": True, "queue": "celery", **changes})


def said(queue: str, *tasks: str) -> WorkerReplies:
    return WorkerReplies({"w@x": {queue}}, {"w@x": {*tasks}})


SWEEPS = said("celery", SWEEP_TASK)


@pytest.mark.parametrize(
    ("known", "answer", "words"),
    [
        (sweeping(), None, "Nobody has swept this outbox yet"),
        (sweeping(300.0), SWEEPS, "for 5 min"),
        (sweeping(is_scheduled=False), SWEEPS, "no beat entry"),
        (sweeping(), "no remote control", "Run `celery -A APP beat`, or the listener of a bridge"),
        (sweeping(), WorkerReplies({}, {}), "No worker has answered"),
        (sweeping(), said("other", "mail"), "include=[...]"),
        (sweeping(queue="sweeps"), SWEEPS, "add it to a worker's -Q"),
        (sweeping(), SWEEPS, "A worker would."),
    ],
)
def test_an_outbox_that_nobody_sweeps_is_an_error_with_what_is_missing(
    known: Sweeping, answer: WorkerReplies | str | None, words: str
) -> None:
    """One cause, one cure."""
    finding = next(iter(judge_sweeping(known, answer)))
    assert (finding.severity, finding.code) == ("failing", "sweep")
    assert words in finding.sentence
    assert "is never sent" in finding.sentence


def test_a_sweep_that_was_noted_is_well_whatever_workers_say() -> None:
    """One that is busy does not answer; one that takes sweeps and drops them is told all the same."""
    assert [each.severity for each in judge_sweeping(sweeping(2.0), WorkerReplies({}, {}))] == ["ok"]
    swept, dropping = judge_sweeping(sweeping(2.0), said("celery", "mail"))
    assert (swept.severity, dropping.severity, dropping.code) == ("ok", "failing", "sweep_task")
    assert "Worker w@x consumes the queue celery and lacks" in dropping.sentence
    assert [each.severity for each in judge_sweeping(sweeping(2.0), "refused")] == ["ok", "degraded"]


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
