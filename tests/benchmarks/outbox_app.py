"""The Celery app of the outbox's suite: a task that does nothing, and an outbox for the orders."""

from __future__ import annotations

from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery import Outbox
from mongo_celery.bench.setting import BenchSetting, make_app

setting = BenchSetting.from_environment()
app = make_app(setting)


@app.task(ignore_result=True)
def send_receipt(order: str) -> None:
    """What follows an order."""
    del order


def orders() -> Collection[dict[str, Any]]:
    """The collection, as an application opens it that wants to be sure of its writes."""
    client: MongoClient[dict[str, Any]] = MongoClient(setting.mongo_url)
    return client[setting.database].get_collection("orders", write_concern=WriteConcern("majority"))


def outbox(collection: Collection[dict[str, Any]], **options: Any) -> Outbox:
    """An outbox for it; the suite sweeps by itself."""
    given = {"database": setting.state_database, "sweep_every": None, **setting.bridge, **options}
    return Outbox(app, collection, name=f"{'at-once' if options.get('at_once', True) else 'later'}", **given)
