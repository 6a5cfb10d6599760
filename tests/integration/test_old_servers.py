"""What older servers cannot do is refused by a sentence, before anything is stored that would wait for ever."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from mongo_celery import OutboxCollection, transactional
from mongo_celery.errors import DeploymentError

Document = dict[str, Any]


@pytest.mark.needs_mongodb_before(5, 0)
def test_an_outbox_collection_is_refused_before_the_transaction_writes(database: Database[Document]) -> None:
    """Its entries could not be delivered: the server does not read at a time of one's choice."""
    app = Celery("shop", broker="memory://")
    outbox = OutboxCollection(app, database["outbox"])

    @app.task(name="shop.send")
    def send() -> None: ...

    @transactional(lambda: database.client, outbox=outbox)
    def book(*, session: Any) -> None:
        database["seats"].insert_one({"_id": 1}, session=session)
        send.delay()

    with pytest.raises(DeploymentError, match=r"needs MongoDB 5\.0 or newer, and this is 4\.4"):
        book()

    assert database["seats"].find_one() is None
    assert database["outbox"].find_one() is None
