"""Flask with real changes: the application's context around each, and sources of Flask-PyMongo and MongoEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mongoengine
import pytest
from celery import _state
from celery._state import set_default_app
from flask import Flask, current_app, g
from flask_pymongo import PyMongo
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.contrib.flask import celery_init_app
from mongo_celery.testing import BridgeRunner

Document = dict[str, Any]
ALIAS = "flask"
STATE: Any = _state


class Wish(mongoengine.Document):  # type: ignore[misc]
    customer = mongoengine.StringField()
    meta = {"collection": "wishes", "db_alias": ALIAS, "strict": False}  # noqa: RUF012 - as MongoEngine wants it


class FlaskShop:
    def __init__(self, **options: Any) -> None:
        self.mongo: Any = PyMongo()
        self.bridge = Bridge(name="shop", autodiscover=False, **options)
        self.seen: list[Any] = []

    def create_app(self, url: str) -> Flask:
        app = Flask("shop")
        app.config.from_mapping(MONGO_URI=url, CELERY={"broker_url": "redis://localhost:1/0"})
        self.mongo.init_app(app)
        mongoengine.connect(host=url, alias=ALIAS, connect=False, uuidRepresentation="standard")
        app.teardown_appcontext(lambda error: self.seen.append(("torn down", type(error).__name__)))
        self.bridge.init_app(celery_init_app(app))
        return app

    def note(self, change: Change) -> None:
        fresh, g.mark = "mark" not in g, 1
        self.seen.append((current_app.name, change.ns["coll"], change.document_key["_id"], fresh))


@pytest.fixture
def serve(mongo_url: str, database: Database[Document]) -> Iterator[Callable[[FlaskShop], BridgeRunner]]:
    """Make the app of a shop in the test's own database, and what delivers its changes."""
    made: list[Any] = []
    before = STATE.default_app

    def start(shop: FlaskShop) -> BridgeRunner:
        app = shop.create_app(mongo_url.replace("/?", f"/{database.name}?"))
        made.append((app, shop))
        return BridgeRunner(shop.bridge.of(app.extensions["celery"]), url=mongo_url)

    yield start
    set_default_app(before)
    mongoengine.disconnect(ALIAS)
    for app, shop in made:
        app.extensions["celery"].close()
        shop.mongo.cx.close()


def test_sources_of_flask_pymongo_and_of_mongoengine(serve: Callable[[FlaskShop], BridgeRunner]) -> None:
    """Documents are asked for late; a name alone is in the database of `MONGO_URI`."""
    shop = FlaskShop()

    @shop.bridge.on_change("orders", Wish, "parcels")
    def note(change: Change) -> None:
        shop.note(change)

    with serve(shop) as runner:
        shop.mongo.db.orders.insert_one({"_id": 1})
        wish = Wish(customer="Ann").save()
        shop.mongo.db.parcels.insert_one({"_id": 3})
        shop.mongo.db.others.insert_one({"_id": 4})
        runner.deliver()
    seen = sorted(each[1:3] for each in shop.seen if each[0] == "shop")
    assert seen == [("orders", 1), ("parcels", 3), ("wishes", wish.pk)]


def test_each_change_and_each_attempt_has_a_context_of_its_own(serve: Callable[[FlaskShop], BridgeRunner]) -> None:
    """Also in runs of several changes and in a transaction; what is torn down with it is told of what was raised."""
    shop = FlaskShop(run_size=10, partitions=1)
    failing = [ConnectionError("away")]

    @shop.bridge.on_change("orders", autoretry_for=(OSError,))
    def note(change: Change) -> None:
        shop.note(change)
        if failing and change.document_key["_id"] == 2:
            raise failing.pop()

    @shop.bridge.on_change("orders", name="in_transaction", transactional=True)
    def store(change: Change) -> None:
        noted = shop.bridge.collection(f"{shop.mongo.db.name}.noted")
        noted.insert_one({"by": current_app.name, **change.document_key}, session=change.session)

    with serve(shop) as runner:
        shop.mongo.db.orders.insert_many([{"_id": number} for number in (1, 2, 3)])
        shop.mongo.db.create_collection("noted")
        runner.deliver()
        assert all(each["by"] == "shop" for each in shop.mongo.db.noted.find())
        assert shop.mongo.db.noted.count_documents({}) == 3
    calls = [each for each in shop.seen if each[0] == "shop"]
    assert [(key, fresh) for _, _, key, fresh in calls] == [(1, True), (2, True), (2, True), (3, True)]
    assert ("torn down", "ConnectionError") in shop.seen or ("torn down", "Retry") in shop.seen
