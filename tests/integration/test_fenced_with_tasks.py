"""A handler's fenced writes that carry tasks: the document changes and the tasks wait, or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import ReplaceOne, UpdateOne
from pymongo.database import Database

from mongo_celery import STORED_ID, FencedCollection, Outbox, StaleFencingTokenError
from tests.integration.fenced_rig import FENCE, stamp, view
from tests.integration.outbox_rig import Rig, opened, pending

Document = dict[str, Any]
Write = Callable[[FencedCollection, Outbox, Any], Any]


@pytest.fixture(name="rig")
def a_rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as rig:
        yield rig


WRITES: dict[str, Write] = {
    "update": lambda orders, outbox, task: orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task])),
    "update by another filter": lambda orders, outbox, task: orders.update_one(
        {"k": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task])
    ),
    "pipeline": lambda orders, outbox, task: orders.update_one(
        {"_id": 1}, outbox.with_tasks([{"$set": {"a": 1}}], [task])
    ),
    "replacement": lambda orders, outbox, task: orders.update_one({"_id": 1}, outbox.replacement({"a": 1}, [task])),
    "find and update": lambda orders, outbox, task: orders.find_one_and_update(
        {"_id": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task], id=1)
    ),
    "many": lambda orders, outbox, task: orders.update_many(
        {"k": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task], many=True)
    ),
    "bulk": lambda orders, outbox, task: orders.bulk_write(
        [outbox.with_tasks(UpdateOne({"_id": 1}, {"$set": {"a": 1}}), [task])]
    ),
    "bulk replacement": lambda orders, outbox, task: orders.bulk_write(
        [outbox.with_tasks(ReplaceOne({"_id": 1}, {"a": 1}), [task])]
    ),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


@every_write
def test_a_fenced_write_carries_its_tasks(rig: Rig, database: Database[Document], write: Write) -> None:
    """Stamp, change and entry by one write; the stamp and what was pending before stay, in a new generation too."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1, "k": 1}, tasks=[rig.add.s(0, 0)])
    write(view(database["orders"], 5), outbox, rig.add.s(STORED_ID, 5))
    [document] = database["orders"].find()
    assert (document["a"], document[FENCE], pending(database, 1)["count"]) == (1, stamp(5), 2)
    database["orders"].update_one({"_id": 1}, {"$set": {"k": 1}})
    write(view(database["orders"], 2, generation=2), outbox, rig.add.s(STORED_ID, 6))
    assert outbox.sweep(older_than=0).dispatched == 3
    sent = rig.drain()
    assert [message.args for message in sent] == [[0, 0], [1, 5], [1, 6]]
    assert len({message.id for message in sent}) == 3


@every_write
def test_a_stale_execution_enqueues_nothing(rig: Rig, database: Database[Document], write: Write) -> None:
    """Both or neither: the write is refused, and with it the task."""
    outbox = rig.outbox(at_once=False)
    database["orders"].insert_one({"_id": 1, "k": 1, FENCE: stamp(9)})
    with pytest.raises(StaleFencingTokenError):
        write(view(database["orders"], 5), outbox, rig.add.s(STORED_ID, 5))
    assert list(database["orders"].find()) == [{"_id": 1, "k": 1, FENCE: stamp(9)}]


@pytest.mark.parametrize("kind", ["operators", "a pipeline", "a replacement"])
def test_a_fenced_upsert_creates_the_document_with_its_tasks(rig: Rig, database: Database[Document], kind: str) -> None:
    """In the transaction in which the stamp's tombstone is looked at."""
    outbox = rig.outbox(at_once=False)
    task = [rig.add.s(STORED_ID, 5)]
    values: dict[str, Any] = {
        "operators": outbox.with_tasks({"$set": {"a": 1}}, task),
        "a pipeline": outbox.with_tasks([{"$set": {"a": 1}}], task),
        "a replacement": outbox.replacement({"a": 1}, task),
    }
    view(database["orders"], 5).update_one({"_id": 1}, values[kind], upsert=True)
    [document] = database["orders"].find()
    assert (document["a"], document[FENCE], pending(database, 1)["count"]) == (1, stamp(5), 1)
    assert outbox.sweep(older_than=0).dispatched == 1
    view(database["orders"], 6).delete_one({"_id": 1})
    with pytest.raises(StaleFencingTokenError):
        view(database["orders"], 5).update_one({"_id": 1}, values[kind], upsert=True)
    assert database["orders"].count_documents({}) == 0
