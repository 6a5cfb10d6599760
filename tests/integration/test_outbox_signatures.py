"""Entries that the outbox has not signed: never published, loud, and in nobody's way."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import PyMongoError, ServerSelectionTimeoutError

from mongo_celery import Outbox
from mongo_celery.errors import AccessError, CommandRefusedError, ServerUnavailableError
from mongo_celery.mongo.keys import new_key
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.failures import FAILURE_POLICIES
from mongo_celery.outbox.health import read_health
from mongo_celery.outbox.replay import replay
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.testing.processes import empty
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.rig.commands import CommandRecorder
from tests.rig.outbox import Document, Rig

Forge = Callable[[Document], Document]

NEVER_REACHED = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300"


@pytest.fixture
def outbox(rig: Rig) -> Outbox:
    return rig.outbox(at_once=False, sweep_after=0.001)


def keys(database: Database[Document]) -> Collection[Document]:
    return database["keys"]


def json_of_a_request() -> Any:
    """A task that the app has, as any user of an HTTP API can write it."""
    task = {"task": "add", "args": [6, 7], "kwargs": {}, "options": {"queue": "admin"}, "subtask_type": None}
    entry = {"id": "j1", "kind": "task", "at": "2020-01-01", "name": "harmless", "argsrepr": "()", "app": "rig"}
    content = {"contentType": "application/json", "contentEncoding": "utf-8", "payload": json.dumps(task)}
    return {"pendingEvents": {"count": 1, "events": [{**entry, **content}]}}


FORGERIES: dict[str, Forge] = {
    "args": lambda entry: {**entry, "payload": entry["payload"].replace("1, 1", "9, 9")},
    "options": lambda entry: {**entry, "payload": entry["payload"].replace('"task_id"', '"queue": "x", "task_id"')},
    "name": lambda entry: {**entry, "name": "harmless"},
    "argsrepr": lambda entry: {**entry, "argsrepr": "()"},
    "kind": lambda entry: {**entry, "kind": "event"},
    "id": lambda entry: {**entry, "id": "another"},
    "content type": lambda entry: {**entry, "contentType": "application/x-python-serialize"},
    "trace": lambda entry: {**entry, "trace": {"baggage": "admin=1"}},
    "late binding": lambda entry: {**entry, "bind": "1"},
    "no signature": lambda entry: {name: value for name, value in entry.items() if name != "signature"},
    "a text as signature": lambda entry: {**entry, "signature": "0" * 32},
    "no entry": lambda entry: {"signature": entry["signature"]},
    "endless attempts": lambda entry: {**entry, "attempts": float("inf")},
    "a document as id": lambda entry: {**entry, "id": {"$gt": ""}},
}


def test_an_entry_is_published_if_a_process_does_not_know_that_its_task_is_elsewhere(rig: Rig, outbox: Outbox) -> None:
    """During a deploy an older process drops the field, or has written the entry without it."""
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    written, signer = Entry.from_document(rig.pending(1)["events"][0]), outbox.runtime.signer
    assert signer.is_signed(replace(written, elsewhere=True))
    assert signer.is_signed(replace(signer.sign(replace(written, elsewhere=True)), elsewhere=False))


@pytest.mark.parametrize("policy", FAILURE_POLICIES)
def test_a_changed_entry_is_a_dead_letter_at_once_and_those_behind_it_go_on(rig: Rig, policy: Any) -> None:
    outbox = rig.outbox(at_once=False, sweep_after=0.001, failure_policy=policy)
    for name, forge in FORGERIES.items():
        outbox.insert_one({"_id": name}, tasks=[rig.add.s(name, 0), rig.add.s(1, 1), rig.add.s(name, 2)])
        forged = forge(rig.pending(name)["events"][1])
        rig.orders.update_one({"_id": name}, {"$set": {"pendingEvents.events.1": forged}})

    rig.app.tasks[SWEEP_TASK]()

    sent = rig.sent()
    assert {name: [n for each, n in sent if each == name] for name in FORGERIES} == {name: [0, 2] for name in FORGERIES}
    assert len(sent) == 2 * len(FORGERIES)
    assert list(rig.orders.find().sort("_id", 1)) == [{"_id": name} for name in sorted(FORGERIES)]
    letters = outbox.runtime.dead_letters.find()
    assert {each.document for each in letters} == set(FORGERIES)
    assert all(str(each.entry.get("id")) not in each.id for each in letters), "it goes into commands that people type"
    status = outbox.status()
    assert (status.dead_letters, status.unsigned, outbox.runtime.counters.unsigned) == (len(FORGERIES),) * 3


def test_fields_of_a_request_start_no_task_and_somebody_learns_of_it(
    rig: Rig, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    identity = "1\r\nERROR all is well \x1b]52;c;b3V0Ym94\x07"
    rig.orders.insert_one({"_id": identity})
    rig.orders.update_one({"_id": identity}, {"$set": json_of_a_request()})

    with caplog.at_level(logging.ERROR, "mongo_celery.outbox"):
        rig.app.tasks[SWEEP_TASK]()

    assert rig.drain() == []
    assert [each.__dict__["event"] for each in caplog.records] == ["entry_unsigned"]
    assert caplog.records[0].getMessage().isprintable(), "neither a line of its own, nor anything for a terminal"
    assert rig.orders.find_one() == {"_id": identity}
    (health,) = read_health(rig.app, [outbox])
    found = {each.code: each.severity for each in health.findings}
    assert (found["unsigned"], found["late"]) == ("failing", "ok")


def test_an_entry_of_another_outbox_is_not_believed(rig: Rig) -> None:
    outbox, *others = (rig.outbox(each, at_once=False) for each in ("orders", "others", "more"))
    others[0].insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    others[1].insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    entries = [rig.database["others"].find_one(), rig.database["more"].find_one()]
    events = [entries[0]["pendingEvents"]["events"][0], entries[1]["pendingEvents"]["events"][0]]  # type: ignore[index]
    rig.orders.insert_one({"_id": 2, "pendingEvents": {"count": 2, "events": events}})

    assert outbox.sweep(older_than=0).dead == 2
    assert [each.sweep(older_than=0).dispatched for each in others] == [1, 1]
    assert len({document["keys"][0] for document in keys(rig.database).find()}) == 3


def test_processes_that_begin_at_the_same_time_agree_on_a_key_that_no_log_has(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    outboxes = [rig.outbox(name=str(each), at_once=False) for each in range(8)]
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(8) as threads:
        written = threads.map(lambda each: each.insert_one({}, tasks=[rig.add.s(1, 1)]), outboxes)
        assert len(list(written)) == 8
    assert outboxes[0].sweep(older_than=0).dispatched == 8
    (stored,) = keys(rig.database).find()
    assert stored["keys"][0].hex() not in caplog.text
    assert "$binary" not in caplog.text


def test_a_process_without_the_key_writes_nothing(rig: Rig, make_client: MakeClient, failpoint: Failpoint) -> None:
    """The error names the right. A process that has read the key needs it no more."""
    sent = CommandRecorder()
    client = make_client(appName="unkeyed", event_listeners=[sent])
    outbox = rig.outbox(client[rig.database.name]["orders"], name="o", at_once=False)
    leaving = rig.messages(client[rig.database.name]["leaving"])
    writes: list[Callable[[], object]] = [
        lambda: outbox.insert_one({}, tasks=[rig.add.s(1, 1)]),
        lambda: outbox.with_tasks({}, tasks=[rig.add.s(1, 1)]),
        lambda: leaving.add([rig.add.s(1, 1)]),
    ]
    for write in writes:
        with failpoint(failCommands=["find"], appName="unkeyed", errorCode=13), pytest.raises(AccessError):
            write()
    assert (rig.orders.count_documents({}), rig.database["leaving"].count_documents({})) == (0, 0)
    for write in writes:
        write()
    outbox.runtime.signer._read_at = -math.inf
    sent.sent.clear()
    with failpoint(failCommands=["find", "findAndModify"], appName="unkeyed", errorCode=13, mode="alwaysOn"):
        for _ in range(3):
            outbox.with_tasks({}, [rig.add.s(1, 1)])
        leaving.add([rig.add.s(1, 1)])
    assert "maxTimeMS" in sent.named("find")[0], "P17: no write waits for the key"


def test_an_unreachable_state_database_is_the_error_of_the_write(rig: Rig, make_client: MakeClient) -> None:
    away = make_client(NEVER_REACHED)["shop"]["orders"]
    outbox = rig.outbox(away, name="away", at_once=False, database="shop")
    with pytest.raises(ServerSelectionTimeoutError):
        outbox.insert_one({}, tasks=[rig.add.s(1, 1)])

    async def write() -> object:
        return outbox.with_tasks({}, [rig.add.s(1, 1)])

    with pytest.raises(ServerUnavailableError):
        asyncio.run(write())


def test_a_new_key_signs_and_the_old_one_counts_until_it_is_removed(
    rig: Rig, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = rig.outbox(name="late", at_once=False)
    late.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)])
    keys(rig.database).update_one({}, {"$push": {"keys": {"$each": [new_key()], "$position": 0}}})
    fresh = rig.outbox(name="fresh", at_once=False)
    fresh.insert_one({"_id": 3}, tasks=[rig.add.s(3, 3)])

    assert late.sweep(older_than=0).dispatched == 3
    outbox.insert_one({"_id": 4}, tasks=[rig.add.s(4, 4)])
    assert fresh.sweep(older_than=0).dispatched == 1
    outbox.insert_one({"_id": 5}, tasks=[rig.add.s(5, 5)])
    fresh.insert_one({"_id": 6}, tasks=[rig.add.s(6, 6)])
    keys(rig.database).update_one({}, {"$pop": {"keys": 1}})
    monkeypatch.setattr("mongo_celery.outbox.signing._REREAD_SECONDS", 0.0)
    swept = fresh.sweep(older_than=0)
    assert (swept.dead, swept.dispatched) == (1, 1), "a process that only delivers reads the keys again"
    outbox.insert_one({"_id": 7}, tasks=[rig.add.s(7, 7)])  # as does one that only writes
    assert fresh.sweep(older_than=0).dispatched == 1


def test_entries_of_a_lost_key_are_dead_letters_until_somebody_vouches_for_them(rig: Rig, outbox: Outbox) -> None:
    """
    A replay refuses them. With `sign` it says again what they are, and they are sent.

    As long as a process has the key, it stores it again.
    """
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)])
    keys(rig.database).drop()
    outbox.runtime.signer.read()
    assert rig.outbox(name="next", at_once=False).runtime.relay.deliver(2).dispatched == 1
    assert rig.sent() == [[2, 2]]
    forged = {"pendingEvents.events.0.name": "harmless", "pendingEvents.events.0.argsrepr": "()"}
    rig.orders.update_one({"_id": 1}, {"$set": forged})
    keys(rig.database).drop()
    fresh = rig.outbox(name="fresh", at_once=False)
    assert fresh.sweep(older_than=0).dead == 1
    (letter,) = fresh.runtime.dead_letters.find()
    for options in ({}, {"without_document": True}):
        with pytest.raises(CommandRefusedError):
            replay(fresh, letter.id, **options)

    assert replay(fresh, letter.id, sign=True) == f"{letter.id}~1"
    (again,) = rig.pending(1)["events"]
    assert (again["name"], again["argsrepr"]) == ("add", "add(1, 1)")
    assert fresh.sweep(older_than=0).dispatched == 1
    assert rig.sent() == [[1, 1]]
    assert fresh.status().unsigned == 0


def test_a_document_without_a_usable_key_stops_the_outbox_and_says_so(rig: Rig, outbox: Outbox) -> None:
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    keys(rig.database).update_one({}, {"$set": {"keys": ["text", b""]}})
    fresh = rig.outbox(name="fresh", at_once=False)
    with pytest.raises(PyMongoError):
        fresh.insert_one({}, tasks=[rig.add.s(1, 1)])
    with pytest.raises(PyMongoError):
        fresh.runtime.relay.deliver(1)
    assert (rig.pending(1)["count"], fresh.runtime.dead_letters.count()) == (1, 0)


def test_the_plugin_empties_all_collections_but_the_keys(rig: Rig, outbox: Outbox, make_client: MakeClient) -> None:
    """Processes that are started later have to verify what this one signs."""
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    empty(make_client())
    assert rig.orders.count_documents({}) == 0
    assert keys(rig.database).count_documents({}) == 1
