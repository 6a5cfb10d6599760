"""The plugin for users' tests, as far as it needs no server: its cost, its refusals, and changes made by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from mongo_celery import Bridge, Change, Fence
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from mongo_celery.testing import BridgeRunner, deleted, inserted, plugin, replaced, updated

ORDERS = "shop.orders"


def configured(url: str, worker: str | None = None) -> Any:
    found = SimpleNamespace(getini=lambda _name: url)
    if worker is not None:
        found.workerinput = {"workerid": worker}
    return found


def test_a_url_is_the_processes_own_under_xdist() -> None:
    """Two processes that write the same collections would deliver each other's changes."""
    url = "mongodb://db/shop_{worker}"
    assert plugin.find_url(configured(url, "gw3"), plugin.MONGODB) == "mongodb://db/shop_gw3"
    assert plugin.find_url(configured(url), plugin.MONGODB) == "mongodb://db/shop_main"
    with pytest.raises(pytest.UsageError):
        plugin.find_url(configured("mongodb://db/shop", "gw3"), plugin.MONGODB)


@pytest.mark.parametrize(
    "name", ["mongo_celery", "no_such_package.celery:bridge", "mongo_celery.nowhere:bridge", "mongo_celery:Fence"]
)
def test_a_bridge_that_is_not_there_is_said_in_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a traceback out of importlib. A missing dependency of the project is its own error."""
    with pytest.raises(pytest.UsageError):
        plugin._bridge_named(name)
    (tmp_path / "needy_shop.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        plugin._bridge_named("needy_shop:bridge")


def test_a_runner_needs_a_bridge_with_handlers() -> None:
    with pytest.raises(ConfigurationError):
        BridgeRunner()
    bridge = Bridge(Celery("shop", set_as_current=False), "mongodb://nowhere:1", name="shop", autodiscover=False)
    for _ in range(2):  # not "runs already"
        with pytest.raises(ConfigurationError, match="handlers"), BridgeRunner(bridge):
            pass
    with pytest.raises(HandlerUsageError, match="'claimed', 'called', 'handled'"):
        BridgeRunner(bridge).crash("commited")  # type: ignore[arg-type]
    with pytest.raises(HandlerUsageError, match="'bil'"):
        BridgeRunner(bridge).stall("bil")


def test_changes_made_by_hand_have_what_their_events_have() -> None:
    """As a server sends them, with values of every kind and the fence that is given."""
    order = {"_id": uuid4(), "at": datetime.now(UTC), "lines": ({"n": 1},), "$odd": None}
    assert inserted(ORDERS, order).full_document == replaced(ORDERS, order).full_document == order
    update = updated("shop.eu.orders", order, {"total": 5}, removed=["note"], fullDocumentBeforeChange=order, to_be=5)
    assert (update.operation_type, update.document_key) == ("update", {"_id": order["_id"]})
    whole = {"updatedFields": {"total": 5}, "removedFields": ["note"], "truncatedArrays": []}
    assert (update.update_description, update.ns["coll"], update["to_be"]) == (whole, "eu.orders", 5)
    gone = updated(ORDERS, None, {"total": 5}, key=1)
    assert (gone.full_document, gone.document_key) == (None, {"_id": 1})
    assert (deleted(ORDERS, 1).operation_type, deleted(ORDERS, 1).full_document) == ("delete", None)
    assert all(change.wall_time and change.cluster_time for change in (update, gone))
    fenced = inserted(ORDERS, {"_id": None}, fence=Fence("shop/bill", 0, 3, 7))
    assert (fenced.partition, fenced.fencing_token, fenced.document_key) == (3, 7, {"_id": None})
    with pytest.raises(HandlerUsageError):
        inserted(ORDERS, {"_id": 1}).fenced("shop.bills")


@pytest.mark.parametrize(
    "make",
    [
        lambda: inserted("shop", {"_id": 1}),
        lambda: deleted("shop.", 1),
        lambda: inserted(".orders", {"_id": 1}),
        lambda: inserted(ORDERS, {"total": 1}),
        lambda: updated(ORDERS, {"_id": 1}),
        lambda: inserted(ORDERS, {"_id": 1, "price": Decimal("1.5")}),
        lambda: inserted(ORDERS, {"_id": 1, "n": 2**64}),
        lambda: updated(ORDERS, {"_id": 1}, {"tags": {"a"}}),
    ],
)
def test_a_change_that_cannot_come_is_refused(make: Callable[[], Change]) -> None:
    """A handler that is tried with what cannot come is not tried."""
    with pytest.raises(HandlerUsageError):
        make()
