"""A bridge at module level, and the apps that an application factory makes."""

from __future__ import annotations

import doctest
import gc
import inspect
import threading
import unittest
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, cast

import pytest
from celery import Celery
from flask import Flask

from mongo_celery import Bridge, Change, Outbox
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.registry import OUTBOXES

URL = "mongodb://localhost:1/?replicaSet=rs0"
CHANGE = Change.build("insert", ns="shop.orders", full_document={"_id": 7})


def made_app(bridge: Bridge | None, name: str, **settings: Any) -> Celery:
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.update(settings)
    if bridge is not None:
        bridge.init_app(app)
    return app


def summarise(change: Change) -> Any:
    return change.document_key


def handle_later(change: Change) -> str:
    return change.namespace


@pytest.fixture(autouse=True)
def current() -> Iterator[Celery]:
    """A current app that has no bridge, as a process has that uses Celery for something else."""
    app = Celery("another", broker="memory://")
    yield app
    Celery("unbound", broker="memory://")


def test_each_app_of_a_factory_has_the_handlers_with_tasks_and_settings_of_its_own() -> None:
    bridge = Bridge(url=URL)
    bridge.on_change("shop.orders")(summarise)
    shops = made_app(bridge, "shop", mongo_celery_partitions=3), made_app(bridge, "store", mongo_celery_partitions=5)
    bridge.on_change("shop.carts", name="later")(handle_later)

    for app, partitions in zip(shops, (3, 5), strict=True):
        one = bridge.of(app)
        assert (one.app, one.name, one.options.partitions) == (app, app.main, partitions)
        assert [handler.name for handler in one.handlers] == ["later", "summarise"]
        tasks: list[Any] = [app.tasks[handler.task_name] for handler in one.handlers]
        assert [each.app for each in (*tasks, app.tasks[COMMIT_TASK])] == [app] * 3
        assert all(each.bridge is one and each.wiring is one.wiring for each in tasks)


def test_the_only_app_is_meant_whichever_is_current(current: Celery) -> None:
    """A factory may be called again for an app. A bridge made with an app keeps it alive, and takes no other."""
    bridge = Bridge(url=URL, name="shop")
    app = made_app(bridge, "shop")
    assert current.main == "another"
    assert bridge.app is app
    wiring = bridge.wiring
    bridge.init_app(app)
    assert bridge.wiring is wiring is bridge.of(app).wiring
    assert bridge.client is bridge.of(app).client
    bound = Bridge(made_app(None, "shop"), URL)
    gc.collect()
    assert bound.app.main == "shop"
    assert bound.of(bound.app) is bound
    with pytest.raises(ConfigurationError):
        bound.init_app(made_app(None, "store"))


def test_of_several_apps_the_current_one_is_meant() -> None:
    bridge = Bridge(url=URL, name="shop")
    task = bridge.on_change("shop.orders")(summarise)
    first, second = made_app(bridge, "first"), made_app(bridge, "second")
    for app in (first, second, first):
        app.set_current()
        assert bridge.app is app
        assert task.app is app
    found = list[Celery]()
    second.set_default()
    reading = threading.Thread(target=lambda: found.append(bridge.app))
    reading.start()
    reading.join()
    assert found == [second]


def test_where_it_is_not_clear_which_app_is_meant_that_is_said() -> None:
    bridge = Bridge(url=URL, name="shop")
    task, orders = bridge.on_change("shop.orders")(summarise), bridge.outbox("shop.orders")
    apps = [made_app(bridge, "first"), made_app(bridge, "second")]
    for ask in (lambda: bridge.app, lambda: bridge.client, lambda: bridge.handlers):
        with pytest.raises(ConfigurationError, match=r"bridge\.of\(app\)"):
            ask()
    for use in (lambda: task(CHANGE), lambda: cast("Any", task).delay, lambda: orders.name):
        with pytest.raises(ConfigurationError, match=r"bridge\.of\(app\)"):
            use()
    assert bridge.of(apps[1]).app is apps[1]
    with pytest.raises(ConfigurationError):
        bridge.of(Celery("another", set_as_current=False))
    del apps[0]
    assert bridge.app is apps[0], "the other one is gone"


@pytest.mark.parametrize("given", [Flask("shop"), URL, None])
def test_what_is_no_celery_app_is_refused(given: Any) -> None:
    """Flask's own extensions are given the Flask app; the URL is no first argument either."""
    bridge = Bridge(url=URL, name="shop")
    bridge.on_change("shop.orders")(summarise)
    url: Any = URL
    takers: list[Any] = [bridge.init_app, lambda app: Outbox(app, url), lambda app: Bridge(app or url, URL)]
    for take in takers:
        with pytest.raises(ConfigurationError, match="celery_init_app"):
            take(given)


def test_a_module_that_was_imported_by_two_names_is_no_second_handler() -> None:
    """Another name, the cure of two handlers of one name, would have each change handled twice."""
    again = FunctionType(summarise.__code__, {"__name__": "binding_rig"}, summarise.__name__)
    bridge = Bridge(url=URL, name="shop")
    bridge.on_change("shop.orders")(summarise)
    for each in (bridge, bridge.of(made_app(bridge, "shop"))):
        with pytest.raises(ConfigurationError):
            each.on_change("shop.orders")(again)


def test_an_app_that_refuses_one_handler_has_none_of_them_and_all_when_it_is_mended() -> None:
    """Celery keeps the first task of a name, so a task of the bridge that was refused would go on being called."""
    bridge = Bridge(url=URL, name="shop", autodiscover=False)
    bridge.on_change("shop.orders")(summarise)
    bridge.outbox("shop.carts")
    bridge.on_change("shop.orders", name="later", partition_by="customer")(handle_later)
    app = made_app(None, "shop")
    before = {*app.tasks}
    with pytest.raises(ConfigurationError):
        bridge.init_app(app)
    assert ({*app.tasks}, BRIDGES.of(app), OUTBOXES.of(app)) == (before, [], [])

    app.conf.mongo_celery_full_document = "required"
    bridge.init_app(app)
    tasks: list[Any] = [app.tasks[handler.task_name] for handler in bridge.handlers]
    assert [each.wiring for each in tasks] == [bridge.of(app).wiring] * 3


def test_a_handler_inside_the_factory_belongs_to_one_app() -> None:
    """Celery keeps the first task of a name: the first app's function would run for the second."""
    bridge = Bridge(url=URL, name="shop")

    def create(name: str, *, for_all: bool) -> tuple[Celery, Any]:
        app = made_app(bridge, name)

        def report(change: Change) -> str:  # noqa: ARG001 - a handler
            return name

        task = (bridge if for_all else bridge.of(app)).on_change("shop.orders")(report)
        return app, task

    made = [create(name, for_all=False) for name in ("first", "second")]
    assert [task(CHANGE) for _, task in made] == ["first", "second"]
    assert [task.app for _, task in made] == [app for app, _ in made]
    made.clear()
    gc.collect()
    third, _ = create("third", for_all=True)
    with pytest.raises(ConfigurationError, match=r"'report'.*@bridge\.of\(app\)"):
        create("fourth", for_all=True)
    (handler,) = bridge.of(third).handlers
    assert third.tasks[handler.task_name](CHANGE) == "third"


def test_an_outbox_may_be_declared_before_there_is_an_app() -> None:
    """Each app has one; the name at module level stands for that of the app that is meant."""
    bridge = Bridge(url=URL, name="shop")
    orders = bridge.outbox("shop.orders", max_attempts=5)
    with pytest.raises(ConfigurationError):
        orders.insert_one({})
    with pytest.raises(ConfigurationError, match=r"'shop.orders'.*bridge\.of\(app\)"):
        bridge.outbox("shop.orders")
    first, second = made_app(bridge, "first"), made_app(bridge, "second")
    carts = bridge.outbox("shop.carts", watch=False)
    for app in (first, second):
        app.set_current()
        assert [each.name for each in OUTBOXES.of(app)] == ["shop.orders", "shop.carts"]
        assert (orders.app, carts.app) == (app, app)
        assert [each.name for each in bridge.handlers] == ["outbox-shop-orders"]
        assert orders.collection.database.client is bridge.client


def test_what_goes_through_the_names_of_a_module_needs_no_app() -> None:
    """Test runners, `celery -A` and pydoc ask everything that they find in it whether it is one of theirs."""
    bridge = Bridge(url=URL, name="shop")
    orders, task = bridge.outbox("shop.orders"), bridge.on_change("shop.orders")(summarise)
    module = ModuleType("extensions")
    vars(module).update(bridge=bridge, orders=orders, summarise=task)
    assert inspect.getmembers(module, inspect.isclass) == []
    assert doctest.DocTestFinder().find(module, module=module) == []
    assert unittest.defaultTestLoader.loadTestsFromModule(module).countTestCases() == 0
    assert not any(hasattr(each, name) for each in (orders, task) for name in ("__wrapped__", "_name"))
    app = made_app(bridge, "shop")
    assert isinstance(orders, Outbox)
    assert isinstance(cast("Any", task), app.Task)
