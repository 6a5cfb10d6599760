"""
Collections that are sharded by another key than `_id`: no command of an outbox needs what a mongos has not.

There is no sharded cluster here. What is looked at is every write that reaches the server, against the rules by which a
mongos refuses one: a change of one document names its `_id` or the shard key, an upsert and a findAndModify name the
shard key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pymongo import ReplaceOne
from pymongo.database import Database

from mongo_celery.outbox.replay import replay
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.outbox import Document, Rig, damage, due_again, opened, ripen

KEY = "region"
CHANGES = ("update", "delete", "findAndModify")


def refused_by_a_mongos(sent: CommandRecorder) -> list[Document]:
    """Return the changes of orders that a mongos would refuse, if these are sharded by the key."""
    found = []
    for name, command in ((each, command) for each in CHANGES for command in sent.named(each)):
        changes = command.get("updates") or command.get("deletes") or [{"q": command.get("query"), "upsert": True}]
        for each in changes if command[name] == "orders" else ():
            is_many = each.get("multi") or each.get("limit") == 0
            enough = [KEY] if each.get("upsert") else [KEY, "_id"]
            if (each.get("upsert") or not is_many) and not any(has_value(each["q"], field) for field in enough):
                found.append(each)
    return found


def has_value(condition: Mapping[str, Any], field: str) -> bool:
    """Return True if a filter has one value for a field, at its top."""
    value = condition.get(field, {"$in": []})
    return not isinstance(value, Mapping) or set(value) == {"$eq"} or not any(each.startswith("$") for each in value)


@pytest.fixture
def writes() -> CommandRecorder:
    return CommandRecorder()


@pytest.fixture
def rig(
    database: Database[Document], redis_url: str, make_client: MakeClient, writes: CommandRecorder
) -> Iterator[Rig]:
    client = make_client(event_listeners=[writes])
    with opened(client[database.name], redis_url) as made:
        yield made


def test_an_outbox_writes_and_delivers_whatever_the_shard_key_is(rig: Rig, writes: CommandRecorder) -> None:
    rig.orders.update_one({"n": 1}, {"$set": {"n": 2}})
    rig.orders.find_one_and_update({"_id": 1}, {"$set": {"n": 2}})
    assert len(refused_by_a_mongos(writes)) == 2, "a checker that has never failed has not been tested"
    writes.sent.clear()
    outbox, task = rig.outbox(failure_policy="dead_letter", max_attempts=1), rig.add.s(1, 1)
    eu: Document = {KEY: "eu"}
    for number in range(4):
        outbox.insert_one({"_id": number, **eu}, tasks=[task])
    for _ in range(2):
        outbox.update_one({"_id": 1}, {"$inc": {"n": 1}}, tasks=[task])
        outbox.update_one({**eu, "n": 1}, {"$inc": {"n": 1}}, tasks=[task])
        outbox.update_one({**eu, "new": 1}, {"$inc": {"n": 1}}, upsert=True, tasks=[task])
        outbox.find_one_and_update({**eu, "_id": 1}, {"$inc": {"n": 1}}, tasks=[task])
        replaced = outbox.with_tasks(ReplaceOne({**eu, "_id": 2}, {**eu, "n": 3}), [task])
        outbox.collection.bulk_write([replaced])
    outbox.update_many({"n": {"$gt": 0}}, {"$inc": {"n": 1}}, tasks=[task])

    later = rig.outbox(name="later", at_once=False)
    later.insert_one({"_id": "many", **eu}, tasks=[rig.add.s(2, each) for each in range(60)])
    later.insert_one({"_id": "unreadable", **eu}, tasks=[rig.add.s(3, 3)])
    damage(later, {"_id": "unreadable"}, payload="{")
    wait_for(lambda: outbox.sweep(older_than=0) and outbox.status().documents == 1)  # a turn ends by time, too
    ripen(rig.orders, "unreadable")
    due_again(rig.orders)
    outbox.sweep(older_than=0)  # or the dispatcher, whichever comes first
    (letter,) = wait_for(lambda: list(outbox.runtime.dead_letters.find()))
    replay(outbox, letter.id)
    outbox.delete_one({"_id": 0})
    assert outbox.status().documents == 1
    assert refused_by_a_mongos(writes) == []
