"""The sweep's turns: what stands keeps nothing else waiting, in one outbox and between several."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import ConnectionFailure, OperationFailure

from mongo_celery import Outbox
from mongo_celery.outbox import claims, pending_documents
from mongo_celery.outbox import sweep as sweep_module
from mongo_celery.outbox.pending import NOBODY
from mongo_celery.outbox.sweep import OutboxSweep, sweep_all, take_turns
from tests.rig.outbox import Publish, Rig, hold, leave_strange_ids, publishing


def sweep_now(outbox: Outbox) -> dict[str, Any]:
    object.__setattr__(outbox.runtime.options, "sweep_after", 0.0)
    return sweep_all([outbox.runtime])


def leave(rig: Rig, collection: str, count: int, task: Any = None, **fields: Any) -> None:
    """Leave some documents to the sweep, in front of what comes later."""
    first = rig.database[collection].count_documents({})
    outbox = rig.outbox(collection, name=f"writer of {collection} from {first}", at_once=False)
    documents = [{"_id": number, **fields} for number in range(first, first + count)]
    tasks = [task or rig.add.s(0, number) for number in range(count)]
    whole = [outbox.with_tasks(document, [each]) for document, each in zip(documents, tasks, strict=True)]
    rig.database[collection].insert_many(whole)


def test_more_refused_documents_than_a_sweep_tries_keep_no_other_waiting(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    leave(rig, "orders", 260, stands=True)
    leave(rig, "orders", 5)
    outbox = rig.outbox(at_once=False)
    rig.database.command("collMod", "orders", validator={"stands": {"$exists": False}})
    with caplog.at_level(logging.CRITICAL, "mongo_celery.outbox"):
        sweep_now(outbox)
    assert sorted(rig.sent()) == [[0, number] for number in range(5)]


@pytest.mark.needs_mongodb(5, 0)
def test_a_look_reads_what_is_due_and_no_document_that_is_held_back(rig: Rig) -> None:
    """However many wait for a broker, or for a task that no process knows."""
    outbox, orders = rig.outbox(at_once=False), rig.orders
    assert outbox.sweep().dispatched == 0  # it makes the index
    leave(rig, "orders", 60)
    for identity in range(50):
        hold(orders, identity, owner=NOBODY)
    rig.database.command({"profile": 2})
    assert len([*outbox.runtime.pending.find_due(0.0, 5)]) == 5
    assert len([*outbox.runtime.pending.find_due(0.0, 100)]) == 10
    rig.database.command({"profile": 0})
    looks = rig.database["system.profile"].find({"ns": orders.full_name})
    assert sum(each["docsExamined"] for each in looks) == 15


def test_outboxes_have_their_turns_one_after_the_other(rig: Rig) -> None:
    rig.database.create_collection("view", viewOn="orders", pipeline=[{"$match": {"$expr": {"$divide": [1, "$_id"]}}}])
    leave(rig, "orders", 120)
    leave(rig, "parcels", 1, rig.add.s(1, 0))
    names = ("view", "orders", "parcels")
    sweeps = [OutboxSweep(rig.outbox(name, name=name, at_once=False).runtime, 0.0) for name in names]
    take_turns(sweeps)
    assert [sweep.total.dispatched for sweep in sweeps] == [0, 120, 1]
    assert [type(sweep.failure) for sweep in sweeps] == [OperationFailure, type(None), type(None)]
    assert rig.sent().index([1, 0]) == 50


@pytest.mark.parametrize("is_ended", [False, True], ids=["whole", "ended by a time limit"])
def test_a_sweep_that_mongodb_refuses_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture, *, is_ended: bool) -> None:
    """P9: also if the next outbox uses up the time of the task, each time."""
    rig.database.create_collection("view", viewOn="orders", pipeline=[{"$match": {"$expr": {"$divide": [1, "$_id"]}}}])
    leave(rig, "orders", 1)
    refused, other = (rig.outbox(name, name=name, at_once=False, sweep_after=0.001) for name in ("view", "orders"))

    def interrupt(publish: Publish, _entry: object) -> None:
        if is_ended:
            raise SoftTimeLimitExceeded
        publish()

    ended = pytest.raises(SoftTimeLimitExceeded) if is_ended else nullcontext()
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"), publishing(other, interrupt), ended:
        sweep_all([refused.runtime, other.runtime])
    assert "sweep_failed" in [each.__dict__["event"] for each in caplog.records]
    assert refused.runtime.sweeps.read_age() is None, "a note would say that it is swept"


@pytest.mark.parametrize("error", [ValueError, ConnectionFailure])
def test_an_outbox_that_cannot_be_opened_keeps_no_other_waiting(
    rig: Rig, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    """P12, P9: the callable is the user's code, and may raise anything."""

    def open_collection() -> Any:
        raise error("no settings in this process")

    closed = Outbox(rig.app, open_collection, sweep_every=None, database=rig.database.name)
    leave(rig, "orders", 1)
    outbox = rig.outbox(at_once=False, sweep_after=0.001)
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        results = sweep_all([closed.runtime, outbox.runtime])
    assert results[outbox.name]["dispatched"] == 1
    assert [bool(each["error"]) for each in results.values()] == [True, False]
    assert "sweep_failed" in [each.__dict__["event"] for each in caplog.records]
    with pytest.raises(error):
        closed.sweep()


def test_a_strange_id_keeps_no_document_waiting(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """P12: dates of any year are delivered. No Python can name text that is not UTF-8."""
    leave(rig, "orders", 1)
    leave_strange_ids(rig)
    outbox = rig.outbox(at_once=False)
    with caplog.at_level(logging.ERROR, "mongo_celery.outbox"):
        assert sweep_now(outbox)[outbox.name]["dispatched"] == 2
    assert sorted(rig.sent()) == [[0, 0], [1, 1]]
    assert [each.__dict__["event"] for each in caplog.records] == ["document_undeliverable"]


def test_a_document_with_more_than_its_share_goes_on_when_the_others_have_had_theirs(rig: Rig) -> None:
    """Beat's sweep ends only when it is empty. One by hand ends after its rounds, and says what is left."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": "much"}, tasks=[rig.add.s(9, number) for number in range(300)])
    leave(rig, "orders", 60)
    assert sweep_now(outbox)[outbox.name]["dispatched"] == 360
    sent = rig.sent()
    assert [number for a, number in sent if a == 9] == list(range(300))
    assert sent.index([9, 299]) > max(sent.index([0, number]) for number in range(60))

    outbox.insert_one({"_id": "more"}, tasks=[rig.add.s(9, number) for number in range(120)])
    sweep = OutboxSweep(outbox.runtime, 0.0, rounds=2)
    take_turns([sweep])
    assert (sweep.total.dispatched, sweep.total.left) == (100, 1)


def test_a_sweep_does_not_go_on_with_what_is_written_meanwhile(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it has no end while others write. An entry of a clock that is far ahead is found all the same."""
    for module in (claims, pending_documents):
        monkeypatch.setattr(module, "SKEW_SECONDS", 0.0)
    leave(rig, "orders", 150)
    due = rig.outbox(at_once=False).runtime.pending.find_due(0.0)
    found = [next(due)]
    leave(rig, "orders", 100)
    ahead = {"$set": {"pendingEvents.events.0.at": datetime.now(UTC) + timedelta(hours=1)}}
    rig.orders.update_one({"_id": 249}, ahead)
    found += due
    assert len(found) <= 151
    assert 249 in found


def test_sweeps_of_one_outbox_do_not_overlap_and_one_that_died_keeps_nobody_away(rig: Rig) -> None:
    """Beat asks every few seconds, and a long backlog takes longer: the next sweep leaves it to the first."""
    leave(rig, "orders", 2)
    outbox, other = rig.outbox(name="first", at_once=False), rig.outbox(name="second", at_once=False)
    results = list[int]()

    def sweep_and_publish(publish: Publish, _entry: Any) -> None:
        results.append(sweep_now(other)["second"]["dispatched"])
        publish()

    outbox.runtime.publisher._alone_until = float("inf")
    with publishing(outbox, sweep_and_publish):
        assert sweep_now(outbox)["first"]["dispatched"] == 2
    assert results == [0, 0]

    leave(rig, "orders", 1)
    notes, dead = outbox.runtime.sweeps, ObjectId()
    assert notes.note(0.0, dead)
    assert sweep_now(other)["second"]["dispatched"] == 0
    own = rig.database.client[other.runtime.options.database]["outbox_sweeps"]
    assert own.update_one({"sweep": dead}, [{"$set": {"until": "$$NOW"}}]).matched_count
    assert sweep_now(other)["second"]["dispatched"] == 1
    assert len(rig.sent()) == 3

    leave(rig, "orders", 1)
    assert notes.note(0.0, dead)
    ahead = {"$set": {"until": {"$add": ["$until", 3_600_000]}}}
    assert own.update_one({"sweep": dead}, [ahead]).matched_count
    assert sweep_now(other)["second"]["dispatched"] == 1, "the clock was ahead"


def test_a_sweep_whose_hold_another_one_has_taken_counts(rig: Rig) -> None:
    """P16: two long sweeps replace each other's hold, and `nobody_sweeps` would be reported while both deliver."""
    leave(rig, "orders", 1)
    notes, long, other = rig.outbox(at_once=False).runtime.sweeps, ObjectId(), ObjectId()
    for sweep in (long, other):
        assert notes.note(0.0, sweep, has_run=False)
        notes.collection.update_one({}, [{"$set": {"until": "$$NOW"}}])
    assert notes.note(0.0, other, has_run=False)
    held = notes.read() or {}
    assert notes.read_age() is None, "none has delivered"
    notes.end(long)
    assert notes.read_age() is not None
    notes.collection.update_one({}, {"$unset": {"at": ""}})
    assert not notes.note(0.0, long)
    assert notes.read_age() is not None
    found = notes.read() or {}
    assert [found[name] for name in ("sweep", "until")] == [held[name] for name in ("sweep", "until")]


def test_an_outbox_that_had_no_turn_was_not_swept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P16: others may use up the time of each sweep."""
    monkeypatch.setattr(sweep_module, "_SWEEP_SECONDS", 0.0)
    outbox = rig.outbox(at_once=False)
    sweep_now(outbox)
    assert outbox.runtime.sweeps.read_age() is None
