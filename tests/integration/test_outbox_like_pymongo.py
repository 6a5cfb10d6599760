"""Where a write of the outbox could differ from PyMongo's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import UpdateOne
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from mongo_celery.errors import OutboxRefusedError
from tests.integration.outbox_rig import Rig, opened

Document = dict[str, Any]
Operation = Callable[[Any, Document], Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


def test_an_upsert_that_meets_its_id_fails_at_once_in_a_transaction_too(rig: Rig, database: Database[Document]) -> None:
    """As PyMongo's: no repetition of the body can help."""
    database["orders"].insert_one({"_id": 1, "status": "old"})
    outbox, bodies = rig.outbox(), []

    def body(session: Any) -> None:
        bodies.append(1)
        outbox.update_one(
            {"_id": 1, "status": "new"}, {"$set": {"a": 1}}, upsert=True, tasks=[rig.add.s(1, 1)], session=session
        )

    with database.client.start_session() as session, pytest.raises(DuplicateKeyError):
        session.with_transaction(body)
    assert len(bodies) <= 2
    assert rig.sent() == []


@pytest.mark.parametrize(
    "condition",
    [{"_id": 1, "pendingEvents.count": 5}, {"$and": [{"_id": 1}, {"pendingEvents": {"count": 5}}]}],
    ids=["path", "in $and"],
)
def test_an_upsert_cannot_bring_the_outboxs_field_by_its_filter(
    rig: Rig, database: Database[Document], condition: Document
) -> None:
    """The server copies what a filter demands into the new document."""
    outbox = rig.outbox()
    change = {"$set": {"a": 1}}
    for tasks in ([], [rig.add.s(1, 1)]):
        with pytest.raises(OutboxRefusedError, match="pendingEvents"):
            outbox.update_one(condition, change, upsert=True, tasks=tasks)
        with pytest.raises(OutboxRefusedError, match="pendingEvents"):
            outbox.with_tasks(UpdateOne(condition, change, upsert=True), tasks)
    with pytest.raises(OutboxRefusedError, match="pendingEvents"):
        outbox.insert_one({"_id": 1, "$a": 1, "pendingEvents": {"count": 9}})
    assert database["orders"].count_documents({}) == 0


def test_many_writers_that_take_the_next_document_each_get_one(rig: Rig, database: Database[Document]) -> None:
    """A queue in a collection, popped by sort: losing a race is no reason to refuse."""
    database["orders"].insert_many([{"_id": number, "s": "new"} for number in range(120)])
    outbox = rig.outbox(at_once=False)
    taken: list[int] = []
    errors: list[Exception] = []

    def take() -> None:
        try:
            while True:
                found = outbox.find_one_and_update(
                    {"s": "new"}, {"$set": {"s": "taken"}}, sort=[("_id", 1)], tasks=[rig.add.s(1, 1)]
                )
                if found is None:
                    return
                taken.append(found["_id"])
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(taken) == list(range(120))
    assert database["orders"].count_documents({"pendingEvents.count": 1}) == 120
