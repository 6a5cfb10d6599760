"""The Celery app of the outbox's suite: a task that does nothing, and an outbox for the orders."""

from __future__ import annotations

from functools import cache
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery import Outbox
from mongo_celery.bench.setting import BenchSetting, make_app
from mongo_celery.bench.stopwatch import Stopwatch

setting = BenchSetting.from_environment()
app = make_app(setting)
received = Stopwatch(setting.clock, "received")


@app.task(ignore_result=True)
def send_receipt(order: str) -> None:
    """What follows an order."""
    del order
    received.lap()


def orders(number: int = 0) -> Collection[dict[str, Any]]:
    """A collection, as an application opens it that wants to be sure of its writes."""
    name = f"orders_{number}" if number else "orders"
    return _client()[setting.database].get_collection(name, write_concern=WriteConcern("majority"))


def outbox(collection: Collection[dict[str, Any]], **options: Any) -> Outbox:
    """An outbox for it; the suite sweeps by itself."""
    given = {"database": setting.state_database, "sweep_every": None, **setting.bridge, **options}
    return Outbox(app, collection, **given)


@cache
def _client() -> MongoClient[dict[str, Any]]:
    """Return the client of this process, which all collections share."""
    return MongoClient(setting.mongo_url)
