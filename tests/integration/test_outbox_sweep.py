"""The sweep's turns: what stands keeps nothing else waiting, in one outbox and between several."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.outbox.pending import NOBODY
from mongo_celery.outbox.sweep import OutboxSweep, sweep_all, take_turns
from tests.integration.outbox_rig import Rig, hold, opened, pending

Document = dict[str, Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


def leave(rig: Rig, collection: str, count: int, task: Any = None, **fields: Any) -> None:
    """Leave some documents to the sweep, in front of what comes later."""
    first = rig.database[collection].count_documents({})
    outbox = rig.outbox(collection, name=f"writer of {collection} from {first}", at_once=False)
    documents = [{"_id": number, **fields} for number in range(first, first + count)]
    tasks = [task or rig.add.s(0, number) for number in range(count)]
    whole = [outbox.with_tasks(document, [each]) for document, each in zip(documents, tasks, strict=True)]
    rig.database[collection].insert_many(whole)


def test_documents_that_mongodb_refuses_keep_no_other_waiting(
    rig: Rig, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them is due as soon as it has had its turn, and stands in front; one that can be delivered is found."""
    leave(rig, "orders", 120, stands=True)
    leave(rig, "orders", 1)
    outbox = rig.outbox(at_once=False)
    database.command("collMod", "orders", validator={"stands": {"$exists": False}})
    with caplog.at_level(logging.CRITICAL, "mongo_celery.outbox"):
        done = outbox.sweep(older_than=0, limit=1)
    assert (done.dispatched, rig.sent()) == (1, [[0, 0]])
    assert pending(database, 0)["count"] == 1


def test_more_refused_documents_than_a_sweep_tries_keep_no_other_waiting(
    rig: Rig, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """A later validator refuses all old ones, and they stand in front of the new ones in each sweep."""
    leave(rig, "orders", 260, stands=True)
    leave(rig, "orders", 5)
    outbox = rig.outbox(at_once=False)
    database.command("collMod", "orders", validator={"stands": {"$exists": False}})
    with caplog.at_level(logging.CRITICAL, "mongo_celery.outbox"):
        sweep_all([replace(outbox.sweep_target, age=0.0)])
    assert sorted(rig.sent()) == [[0, number] for number in range(5)]


def test_documents_that_have_failed_come_last_and_those_that_were_tried_long_ago_first(
    rig: Rig, database: Database[Document]
) -> None:
    """More of them than a sweep gives a turn in vain, with their pauses over."""
    outbox, orders = rig.outbox(at_once=False), database["orders"]
    leave(rig, "orders", 160, rig.app.signature("shop.new", args=(1, 1)))
    leave(rig, "orders", 1)
    sweep_all([replace(outbox.sweep_target, age=0.0)])
    assert rig.sent() == [[0, 0]]

    orders.update_many({"_id": {"$lt": 160}}, {"$set": {"pendingEvents.claim.until": datetime(2020, 1, 1, tzinfo=UTC)}})
    orders.update_one({"_id": 9}, {"$set": {"pendingEvents.claim.until": datetime(2019, 1, 1, tzinfo=UTC)}})
    leave(rig, "orders", 1)
    assert len(outbox.backing.due(0.0, 3)) == 3
    assert not {0, 161} & set(outbox.backing.due(0.0, 200, passing_over=[0, 161]))
    assert outbox.backing.due(0.0, 2) == [161, 9]
    orders.update_many({}, {"$set": {"pendingEvents.claim.until": "nonsense"}})
    assert len(outbox.backing.due(0.0, 200)) == 161


@pytest.mark.needs_mongodb(5, 0)
def test_a_look_reads_what_is_due_and_no_document_that_is_held_back(rig: Rig, database: Database[Document]) -> None:
    """However many wait for a broker, or for a task that no process knows."""
    outbox, orders = rig.outbox(at_once=False), database["orders"]
    assert outbox.sweep().dispatched == 0  # it makes the index
    leave(rig, "orders", 60)
    for identity in range(50):
        hold(orders, identity, owner=NOBODY)
    database.command({"profile": 2})
    assert len(outbox.backing.due(0.0, 5)) == 5
    assert len(outbox.backing.due(0.0, 100)) == 10
    database.command({"profile": 0})
    looks = list(database["system.profile"].find({"ns": orders.full_name}).sort("ts", 1))
    assert [(each["docsExamined"], each["keysExamined"] <= 12) for each in looks] == [(5, True), (10, True)]


def test_documents_that_go_one_by_one_are_left_when_the_time_of_a_sweep_is_over(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take seconds; and the next outboxes have no turn."""
    leave(rig, "orders", 3)
    outbox, asked, now = rig.outbox(at_once=False), list[int](), time.monotonic()

    def refuse(document_ids: list[Any], **_: Any) -> Any:
        asked.append(len(document_ids))
        raise OperationFailure("all of them")

    monkeypatch.setattr(outbox.backing.relay, "deliver_all", refuse)
    sweep = OutboxSweep(outbox.sweep_target, 0.0)
    sweep.turn(now)
    assert (asked, sweep.total.left) == ([3], 3)
    take_turns([sweep], lambda _sweep, error: pytest.fail(str(error)), 0.0)
    assert asked == [3]


def test_outboxes_have_their_turns_one_after_the_other(rig: Rig) -> None:
    """A long backlog in one, and a single document in the next."""
    leave(rig, "orders", 120)
    leave(rig, "parcels", 1, rig.add.s(1, 0))
    sweeps = [
        OutboxSweep(rig.outbox(name, name=name, at_once=False).sweep_target, 0.0, 100) for name in ("orders", "parcels")
    ]
    take_turns(sweeps, lambda _sweep, error: pytest.fail(str(error)))
    assert [sweep.total.dispatched for sweep in sweeps] == [100, 1]
    assert rig.sent().index([1, 0]) == 50


def test_an_outbox_that_mongodb_refuses_keeps_no_other_waiting(rig: Rig, database: Database[Document]) -> None:
    database.create_collection("view", viewOn="orders", pipeline=[{"$match": {"$expr": {"$divide": [1, "$_id"]}}}])
    leave(rig, "orders", 3)
    sweeps = [OutboxSweep(rig.outbox(name, name=name, at_once=False).sweep_target, 0.0) for name in ("view", "orders")]
    failures: list[tuple[OutboxSweep, PyMongoError]] = []
    take_turns(sweeps, lambda *failure: failures.append(failure))
    assert [sweep.total.dispatched for sweep in sweeps] == [0, 3]
    ((failed, error),) = failures
    assert failed is sweeps[0]
    assert isinstance(error, OperationFailure)


def test_a_document_with_more_than_its_share_goes_on_when_the_others_have_had_theirs(rig: Rig) -> None:
    """It is still due after its turn, and yet the sweep of beat ends only when it is empty."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": "much"}, tasks=[rig.add.s(9, number) for number in range(1100)])
    leave(rig, "orders", 60)
    assert sweep_all([replace(outbox.sweep_target, age=0.0)])[outbox.name]["dispatched"] == 1160
    sent = rig.sent()
    assert [number for a, number in sent if a == 9] == list(range(1100))
    assert sent.index([9, 1099]) > max(sent.index([0, number]) for number in range(60))


def test_sweeps_of_one_outbox_do_not_overlap_and_one_that_died_keeps_nobody_away(
    rig: Rig, database: Database[Document]
) -> None:
    """Beat asks every few seconds, and a long backlog takes longer: the next sweep leaves it to the first."""
    leave(rig, "orders", 2)
    outbox, other = rig.outbox(name="first", at_once=False), rig.outbox(name="second", at_once=False)
    publish, results = outbox.publisher.publish, list[Any]()

    def publish_during(entry: Any, *given: Any) -> None:
        results.append(sweep_all([replace(other.sweep_target, age=0.0)])["second"]["dispatched"])
        publish(entry, *given)

    outbox.publisher.publish = publish_during  # type: ignore[method-assign]
    outbox.publisher._alone_until = float("inf")
    assert sweep_all([replace(outbox.sweep_target, age=0.0)])["first"]["dispatched"] == 2
    assert results == [0, 0]

    leave(rig, "orders", 1)
    notes, dead = outbox.backing.sweeps, ObjectId()
    assert notes.note(0.0, dead)
    assert sweep_all([replace(other.sweep_target, age=0.0)])["second"]["dispatched"] == 0
    own = database.client[other.backing.options.database]["outbox_sweeps"]
    assert own.update_one({"sweep": dead}, [{"$set": {"until": "$$NOW"}}]).matched_count
    assert sweep_all([replace(other.sweep_target, age=0.0)])["second"]["dispatched"] == 1
    assert len(rig.sent()) == 3
