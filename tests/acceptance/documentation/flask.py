"""What `docs/flask.md` needs, which is nothing but servers, and what its factory, views and handlers must have done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from pymongo import MongoClient

from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """A second app beside that of the page, in these servers; and the page's own test."""
    namespace: dict[str, Any] = {}
    yield namespace

    config = {"MONGO_URI": mongo_url.replace("/?", "/another?"), "CELERY": {"broker_url": redis_url}}
    app, mongo = namespace["create_app"](config), namespace["mongo"]
    mongo.db.stock.insert_one({"_id": "lamp", "left": 9})
    with BridgeRunner(namespace["bridge"].of(app.extensions["celery"]), url=mongo_url) as runner:
        namespace["test_an_order_has_its_page"](app, runner)
        mongo.db.stock.update_one({"_id": "lamp"}, {"$inc": {"left": -2}})
        runner.deliver()
        assert list(mongo.db.refills.find({}, {"left": 1})) == [{"_id": "lamp", "left": 7}]
        for write, pages in ((mongo.db.orders.insert_one, 1), (mongo.db.orders.delete_one, 0)):
            write({"_id": 1})
            runner.deliver()
            assert mongo.db.pages.count_documents({"_id": 1}) == pages
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as broker:
        wait_for(lambda: set(client.another.orders.find_one() or ()) == {"_id", "customer", "status"}, message="sent")
        del broker
