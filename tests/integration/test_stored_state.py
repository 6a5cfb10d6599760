"""`docs/reference/state.md` shows of each collection what a running bridge leaves: its fields and their types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bson import ObjectId, Timestamp
from bson.int64 import Int64
from celery import Celery
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.beat import Scheduler
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for

Document = dict[str, Any]
Shape = dict[str, str]

PAGE = Path(__file__).parents[2] / "docs/reference/state.md"
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    str: "text",
    Int64: "Long",
    int: "number",
    float: "number",
    datetime: "ISODate",
    Timestamp: "Timestamp",
    ObjectId: "ObjectId",
    bytes: "Binary",
    type(None): "null",
}
_FREE = {"change", "report"}
"""Fields that hold what others have sent, or what `status` shows."""

_NAMES: Mapping[str, Any] = {
    "Long": Int64,
    "ISODate": datetime.fromisoformat,
    "Timestamp": Timestamp,
    "ObjectId": ObjectId,
    "Binary": SimpleNamespace(createFromBase64=lambda *_: b""),
    "true": True,
    "false": False,
    "null": None,
}
"""What the shell's values are in Python."""


def shape_of(value: Any, path: str = "") -> Shape:
    if isinstance(value, Mapping | list) and not value:
        return {path: "nothing"}
    if isinstance(value, Mapping):
        return {k: v for name, each in value.items() for k, v in shape_of(each, f"{path}.{name}").items()}
    if isinstance(value, list):
        return shape_of(value[0], f"{path}[]")
    return {path: _TYPES[type(value)]}


def shown() -> dict[str, Shape]:
    """Return the shapes of the page's documents, by their headings."""
    sections = re.findall(r"^## (.+?)\n.*?```js\n(\{\n.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = {}
    for heading, block in sections:
        quoted = re.sub(r"^(\s*)(\w+): ", r'\1"\2": ', re.sub(r"\s+//.*", "", block), flags=re.MULTILINE)
        found[heading] = shape_of(eval(re.sub(r"\{ t: (\d+), i: (\d+) \}", r"\1, \2", quoted), dict(_NAMES)))
    return found


@pytest.fixture
def state(database: Database[Document], mongo_url: str) -> Iterator[Database[Document]]:
    """Give the state of a bridge of which one handler has halted, one has parked a key, and one is done."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    bridge = Bridge(app, "mongodb://localhost:1/?replicaSet=none", autodiscover=False, partitions=1, spill_after=600)
    orders = database["orders"].full_name

    @bridge.on_change(orders)
    def ship(change: Change) -> None:
        """Succeed."""

    @bridge.on_change(orders)
    def bill(change: Change) -> None:
        if change.document_key["_id"] == 2:
            raise ValueError("no address")

    @bridge.on_change(orders, failure_policy="park_key")
    def report(change: Change) -> None:
        if change.document_key["_id"] == 2:
            raise ValueError("no customer")

    with BridgeRunner(bridge, url=mongo_url) as runner:
        database["orders"].insert_one({"_id": 1})
        runner.deliver()
        runner.snapshot("ship")
        runner.deliver()
        database["orders"].insert_one({"_id": 2, "customer": "Ann"})
        stored = bridge.client[bridge.options.database]

        def has_watermark() -> bool:
            runner.deliver(raises=False)
            return stored["handlers"].find_one({"handler": "ship", "resumeToken": {"$ne": None}}) is not None

        wait_for(has_watermark)
        beat = Scheduler(app)
        beat.tick()
        beat.close()
        yield stored


def test_the_page_shows_the_state_as_it_is(state: Database[Document]) -> None:
    chosen = {
        "handlers": state["handlers"].find_one({"handler": "ship"}),
        "partitions": state["partitions"].find_one({"handler": "ship"}),
        "partitions: halted": state["partitions"].find_one({"handler": "bill"}),
        "partitions: with a parked key": state["partitions"].find_one({"handler": "report"}),
        "beat": state["beat"].find_one({"entry": {"$exists": True}}),
    }
    others = sorted(set(state.list_collection_names()) - {"handlers", "partitions", "beat"})

    stored = chosen | {name: state[name].find_one() for name in others}

    page = shown()
    assert page.keys() == stored.keys()
    for name, document in stored.items():
        assert document is not None, name
        readable = {**document, **{field: [] for field in _FREE & document.keys()}}
        assert shape_of(readable) == page[name], name
