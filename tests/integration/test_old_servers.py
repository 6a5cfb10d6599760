"""Servers of MongoDB 4.4, the oldest that is supported."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from mongo_celery import OutboxCollection, transactional

Document = dict[str, Any]


@pytest.mark.needs_mongodb_before(5, 0)
def test_an_outbox_collection_delivers_what_transactions_commit(database: Database[Document]) -> None:
    app = Celery("shop", broker="memory://")
    outbox = OutboxCollection(app, database["outbox"], at_once=False)

    @app.task(name="shop.send")
    def send(number: int) -> None: ...

    @transactional(lambda: database.client, outbox=outbox)
    def book(number: int, *, session: Any) -> None:
        database["seats"].insert_one({"_id": number}, session=session)
        send.delay(number)

    for number in range(3):
        book(number)

    assert outbox.sweep(older_than=0).dispatched == 3
    assert database["seats"].count_documents({}) == 3
    assert outbox.sweep(older_than=0).dispatched == 0
