"""The plugin for users' tests, as far as it needs no server: its cost, its refusals, and changes made by hand."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

import mongo_celery.testing
from mongo_celery import Bridge, Change, Fence
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from mongo_celery.testing import BridgeRunner, deleted, inserted, plugin, replaced, updated
from mongo_celery.testing.runner import place_url

ORDERS = "shop.orders"


def configured(url: str, worker: str | None = None) -> Any:
    """A pytest configuration with one option, in a process of xdist or in none."""
    found = SimpleNamespace(getini=lambda _name: url)
    if worker is not None:
        found.workerinput = {"workerid": worker}
    return found


# -- the plugin ------------------------------------------------------------------------------------


def test_loading_the_plugin_loads_neither_driver_nor_celery() -> None:
    """Whoever has the package loads it in every suite of the environment."""
    code = "import sys, mongo_celery.testing.plugin; "
    code += "print(sorted({'pymongo', 'bson', 'celery', 'kombu'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_fixture_is_on_by_itself() -> None:
    """A suite that asks for none is as it was."""
    tree = ast.parse(inspect.getsource(plugin))
    assert "autouse" not in {word.arg for word in ast.walk(tree) if isinstance(word, ast.keyword)}


def test_every_name_of_the_package_is_there_and_listed() -> None:
    """Names that are imported on first use exist, and tools see them."""
    for name in mongo_celery.testing.__all__:
        assert getattr(mongo_celery.testing, name).__name__ == name
    assert dir(mongo_celery.testing) == sorted(mongo_celery.testing.__all__, key=lambda name: (name.islower(), name))
    assert not hasattr(mongo_celery.testing, "Runner")


def test_a_url_is_the_processes_own_under_xdist() -> None:
    """Two processes that write the same collections would deliver each other's changes."""
    url = "mongodb://db/shop_{worker}"
    assert plugin.find_url(configured(url, "gw3"), plugin.MONGODB) == "mongodb://db/shop_gw3"
    assert plugin.find_url(configured(url), plugin.MONGODB) == "mongodb://db/shop_main"
    assert plugin.find_url(configured("", "gw3"), plugin.MONGODB) == ""
    with pytest.raises(pytest.UsageError, match="xdist"):
        plugin.find_url(configured("mongodb://db/shop", "gw3"), plugin.MONGODB)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mongo_celery", "Write module:name"),
        ("no_such_package.celery:bridge", r"no module no_such_package\. .*pythonpath = \."),
        ("mongo_celery.nowhere:bridge", r"no module mongo_celery\.nowhere"),
        ("mongo_celery.errors:bridge", "is not a Bridge"),
        ("mongo_celery:Fence", "is not a Bridge"),
    ],
)
def test_a_bridge_that_is_not_there_is_said_in_a_sentence(name: str, said: str) -> None:
    """Not by a traceback out of importlib."""
    with pytest.raises(pytest.UsageError, match=said):
        plugin._bridge_named(name)


def test_what_fails_inside_of_the_named_module_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing dependency of the project is not a wrong configuration."""
    (tmp_path / "needy_shop.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        plugin._bridge_named("needy_shop:bridge")


# -- the runner, before it begins ------------------------------------------------------------------


def test_a_runner_needs_a_bridge_with_handlers() -> None:
    """Without them every test of it would pass."""
    with pytest.raises(ConfigurationError, match="needs a bridge"):
        BridgeRunner()
    bridge = Bridge(Celery("shop", set_as_current=False), "mongodb://nowhere:1", name="shop", autodiscover=False)
    with pytest.raises(ConfigurationError, match="has no handlers"), BridgeRunner(bridge):
        pass
    with pytest.raises(ConfigurationError, match="has no handlers"), BridgeRunner(bridge):  # not "runs already"
        pass


def test_a_crash_point_that_there_is_not_is_refused() -> None:
    """One sentence, with those that there are."""
    runner = BridgeRunner(Bridge(Celery("shop", set_as_current=False), "mongodb://nowhere:1", name="shop"))
    with pytest.raises(HandlerUsageError, match="'claimed', 'called', 'handled'"):
        runner.crash("commited")  # type: ignore[arg-type]
    with pytest.raises(HandlerUsageError, match="has a handler 'bil'"):
        runner.stall("bil")


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ("mongodb://db/shop", "mongodb://h:1/?replicaSet=rs0", "mongodb://h:1/shop?replicaSet=rs0"),
        ("mongodb://db/shop", "mongodb://h:1", "mongodb://h:1/shop"),
        ("mongodb://db/shop", "mongodb://h:1/other", "mongodb://h:1/other"),
        ("mongodb://db", "mongodb://h:1/", "mongodb://h:1/"),
        ("mongodb://db/shop", None, "mongodb://db/shop"),
        (None, "mongodb://h:1/", "mongodb://h:1/"),
    ],
)
def test_another_server_keeps_the_database_of_the_url(own: str | None, given: str | None, expected: str) -> None:
    """Handlers of `"orders"` mean the one that the bridge's own URL names."""
    bridge = Bridge(Celery("shop", set_as_current=False), own, name="shop", autodiscover=False)
    assert place_url(given, bridge.wiring) == expected


# -- changes made by hand --------------------------------------------------------------------------


def test_changes_made_by_hand_have_what_their_events_have() -> None:
    """As a server sends them."""
    order = {"_id": 1, "total": 5}
    assert inserted(ORDERS, order).full_document == replaced(ORDERS, order).full_document == order
    update = updated(ORDERS, order, {"total": 5}, removed=["note"])
    assert (update.operation_type, update.document_key) == ("update", {"_id": 1})
    assert update.update_description == {
        "updatedFields": {"total": 5},
        "removedFields": ["note"],
        "truncatedArrays": [],
    }
    gone = updated(ORDERS, None, {"total": 5}, key=1)
    assert (gone.full_document, gone.document_key) == (None, {"_id": 1})
    assert (deleted(ORDERS, 1).operation_type, deleted(ORDERS, 1).full_document) == ("delete", None)
    assert all(change.wall_time and change.cluster_time for change in (update, gone))


def test_a_change_made_by_hand_has_the_fence_that_it_is_given() -> None:
    """And none else: it compares with that of no live change."""
    change = inserted(ORDERS, {"_id": 1}, fence=Fence("shop/bill", 0, 3, 7))
    assert (change.partition, change.fencing_token) == (3, 7)
    with pytest.raises(HandlerUsageError, match="no fence"):
        inserted(ORDERS, {"_id": 1}).fenced("shop.bills")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: inserted("shop", {"_id": 1}), "is not a collection"),
        (lambda: deleted("shop.", 1), "is not a collection"),
        (lambda: inserted(".orders", {"_id": 1}), "is not a collection"),
        (lambda: inserted(ORDERS, {"total": 1}), "without _id"),
        (lambda: updated(ORDERS, {"_id": 1}), "changes nothing"),
        (lambda: inserted(ORDERS, {"_id": 1, "price": Decimal("1.5")}), "MongoDB cannot hold this insert: .*Decimal"),
        (lambda: inserted(ORDERS, {"_id": 1, "day": date(2026, 1, 1)}), "cannot hold"),
        (lambda: inserted(ORDERS, {"_id": 1, "n": 2**64}), "cannot hold"),
        (lambda: updated(ORDERS, {"_id": 1}, {"tags": {"a"}}), "cannot hold"),
    ],
)
def test_a_change_that_cannot_come_is_refused(make: Callable[[], Change], said: str) -> None:
    """A handler that is tried with what cannot come is not tried."""
    with pytest.raises(HandlerUsageError, match=said):
        make()


def test_what_a_server_may_send_is_not_refused() -> None:
    """Names with points, values of every kind, images before a change, and what a pipeline has added."""
    order = {"_id": uuid4(), "at": datetime.now(UTC), "lines": ({"n": 1},), "$odd": None}
    update = updated("shop.eu.orders", order, {"lines.0.n": 1}, fullDocumentBeforeChange=order, to_be=5)
    assert (update.ns["coll"], update["to_be"]) == ("eu.orders", 5)
    assert inserted(ORDERS, {"_id": None}).document_key == {"_id": None}
