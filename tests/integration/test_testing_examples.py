"""The examples in the docstrings of `mongo_celery.testing` and `mongo_celery.embedded` run as they are printed."""

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

from mongo_celery import embedded, testing

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


def example_of(name: str) -> str:
    """Return the code of the first block in a docstring."""
    text = f"{inspect.getdoc(PUBLIC[name])}\n"
    found = re.search(r"^::\n\n((?:(?:    .*)?\n)+)", text, re.MULTILINE)
    assert found, f"{name} has no example"
    return textwrap.dedent(found[1])


@pytest.fixture
def shop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Any, mongo_url: str, redis_url: str
) -> Iterator[dict[str, Any]]:
    """Give the names that examples use."""
    (tmp_path / "shop.py").write_text(f"DATABASE = {database.name!r}\n{SHOP}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MONGODB_URL", mongo_url)
    found = importlib.import_module("shop")
    try:
        yield {**vars(found), **PUBLIC, "url": mongo_url, "broker_url": redis_url, "directory": tmp_path}
        found.outbox.runtime.close()
        found.client.close()
        with MongoClient[dict[str, Any]](mongo_url) as client:
            client.drop_database(f"{database.name}_state")
    finally:
        del sys.modules["shop"]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_an_example_runs(name: str, shop: dict[str, Any]) -> None:
    """Every public name has one."""
    exec(compile(example_of(name), name, "exec"), shop)
