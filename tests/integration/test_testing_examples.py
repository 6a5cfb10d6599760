"""The examples in docstrings run as they are printed: of `testing`, of `embedded` and of transactions."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit, embedded, testing, transactional
from mongo_celery.errors import TransactionTimeoutError

PUBLIC = {name: getattr(module, name) for module in (testing, embedded) for name in module.__all__}

SHOP = """
import os
from celery import Celery
from pymongo import MongoClient
from mongo_celery import Bridge, Outbox, once, transactional

url = os.environ.get("MONGODB_URL", "mongodb://127.0.0.1/?replicaSet=rs0")
app = Celery("shop", broker="memory://", set_as_current=False)
bridge = Bridge(app, url, name="shop", database=f"{DATABASE}_state", start_from="now")
client = MongoClient(url, connect=False)
orders, summaries, records = (client[DATABASE][name] for name in ("orders", "summaries", "records"))
outbox = Outbox(app, lambda: client[DATABASE]["receipts"], name="receipts", sweep_every=None)

@bridge.on_change(f"{DATABASE}.orders")
def summarise(change):
    if change.full_document is not None:
        key = {"_id": change.document_key["_id"]}
        total = {"total": change.full_document.get("total", 0)}
        change.fenced(f"{DATABASE}.summaries").replace_one(key, total, upsert=True)

@app.task(name="shop.send_receipt", shared=False)
def send_receipt(order): ...

@app.task(name="shop.pay", shared=False)
@once(records, key=lambda order: order)
def pay(order): ...

@transactional(client)
def move(session, *, order, status):
    orders.update_one({"_id": order}, {"$set": {"status": status}}, session=session)
"""


def run_example(documented: object, shop: dict[str, Any]) -> None:
    text = f"{inspect.getdoc(documented)}\n"
    found = re.search(r"::\n\n((?:(?:    .*)?\n)+)", text)
    assert found, f"{documented} has no example"
    code = re.sub(r"client\.(bank|shop)\b", "client[DATABASE]", textwrap.dedent(found[1]))
    exec(compile(code, str(documented), "exec"), shop)


@pytest.fixture
def shop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Any, mongo_url: str, redis_url: str
) -> Iterator[dict[str, Any]]:
    (tmp_path / "shop.py").write_text(f"DATABASE = {database.name!r}\n{SHOP}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MONGODB_URL", mongo_url)
    found = importlib.import_module("shop")
    try:
        given = {"TwoPhaseCommit": TwoPhaseCommit, "TransactionTimeoutError": TransactionTimeoutError}
        yield {**vars(found), **PUBLIC, **given, "url": mongo_url, "broker_url": redis_url, "directory": tmp_path}
        found.outbox.runtime.close()
        found.client.close()
        with MongoClient[dict[str, Any]](mongo_url) as client:
            client.drop_database(f"{database.name}_state")
    finally:
        del sys.modules["shop"]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_an_example_runs(name: str, shop: dict[str, Any]) -> None:
    run_example(PUBLIC[name], shop)


def test_the_example_of_two_phase_commit_moves_an_amount_once(shop: dict[str, Any], database: Any) -> None:
    database["accounts"].insert_many([{"_id": "A", "balance": 500}, {"_id": "B", "balance": 0}])
    run_example(TwoPhaseCommit, shop)
    shop["bank"].transfer("A", "B", 100, id="payment 7")
    assert [each["balance"] for each in database["accounts"].find().sort("_id")] == [400, 100]


def test_the_example_of_transactional_books_a_seat(shop: dict[str, Any], database: Any) -> None:
    database["seats"].insert_many([{"_id": each} for each in ("A1", "A2")])
    run_example(transactional, shop)
    assert list(database["seats"].find().sort("_id")) == [{"_id": "A1", "taken": True}, {"_id": "A2"}]
