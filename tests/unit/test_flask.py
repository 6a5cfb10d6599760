"""Flask: tasks and handlers inside the application's context, and Celery's commands under `flask`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Task, _state
from celery._state import set_default_app
from flask import Flask, current_app, g, has_app_context

from mongo_celery import Bridge, Change, Outbox
from mongo_celery.contrib.flask import celery_init_app
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.sweep import SWEEP_TASK

NOWHERE = "mongodb://localhost:1/shop?replicaSet=nowhere"
CHANGE = Change.build("insert", ns="shop.orders", full_document={"_id": 1})
Factory = Callable[..., Flask]
STATE: Any = _state


def name_of_app(_change: Change) -> str:
    """A handler that needs the context."""
    return current_app.name


def ran() -> str:
    return "ran"


@pytest.fixture
def make_app() -> Iterator[Factory]:
    """An application factory without modules of its own; Celery's default app is as it was afterwards."""
    made = []
    before = STATE.default_app

    def make(name: str = "shop", **config: Any) -> Flask:
        app = Flask(name)
        app.config.from_mapping({"MONGO_URI": NOWHERE, "CELERY": {"broker_url": "memory://"}, **config})
        made.append(celery_init_app(app))
        return app

    yield make
    for celery in made:
        celery.close()
    set_default_app(before)


@contextmanager
def bound(bridge: Bridge, app: Flask) -> Iterator[Bridge]:
    celery = app.extensions["celery"]
    bridge.init_app(celery)
    yield bridge.of(celery)


def test_a_handler_runs_inside_the_context_of_its_own_app(make_app: Factory) -> None:
    """Of several that a factory has made: `current_app` is the one whose bridge has the change."""
    bridge = Bridge(name="shop", autodiscover=False)
    task: Any = bridge.on_change("shop.orders", name="note")(name_of_app)
    for name in ("first", "second"):
        app = make_app(name)
        with bound(bridge, app) as of_app:
            handler: Any = app.extensions["celery"].tasks[of_app.handlers[0].task_name]
            assert handler(CHANGE) == name
    assert not has_app_context()
    assert task(CHANGE) == "second"  # Celery's default app is the one that was made last


def test_a_task_runs_inside_the_context_with_its_own_request(make_app: Factory) -> None:
    """Celery's own `__call__` would push another request, without id; each call has a context to itself."""
    app = make_app()
    seen: list[Any] = []

    @app.extensions["celery"].task(shared=False, bind=True)  # type: ignore[untyped-decorator]
    def note(self: Any) -> str:
        seen.append((self.request.id, self.request.retries, "number" in g, current_app.name))
        g.number = 1
        return "done"

    assert note.apply(task_id="7", retries=2).get() == "done"
    assert note.apply(task_id="8").get() == "done"
    assert seen == [("7", 2, False, "shop"), ("8", 0, False, "shop")]


def test_what_is_torn_down_with_a_context_is_told_of_the_error(make_app: Factory) -> None:
    app = make_app()
    told: list[Any] = []
    app.teardown_appcontext(told.append)

    @app.extensions["celery"].task(shared=False)  # type: ignore[untyped-decorator]
    def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        fail.apply(throw=True)
    assert [type(each) for each in told] == [LookupError]


def test_a_base_class_with_a_call_of_its_own_is_called_inside(make_app: Factory) -> None:
    class Counting(Task):  # type: ignore[type-arg]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return current_app.name, self.run(*args, **kwargs)

    app = Flask("counting")
    app.config["CELERY"] = {"broker_url": "memory://"}
    celery = celery_init_app(app, base=Counting)
    task: Any = celery.task(shared=False, name="run")(ran)
    assert task() == ("counting", "ran")
    set_default_app(make_app().extensions["celery"])


def test_the_tasks_of_an_outbox_run_inside_the_context_too(make_app: Factory) -> None:
    """So the function that gives its collection may ask for what belongs to the app."""
    app = make_app()
    celery = app.extensions["celery"]
    seen: list[str] = []

    def collection() -> Any:
        seen.append(current_app.name)
        raise LookupError("seen")

    Outbox(celery, collection, name="orders")
    with pytest.raises(LookupError):
        celery.tasks[SWEEP_TASK]()
    assert seen == ["shop"]


@pytest.mark.parametrize(
    ("settings", "url"), [({}, NOWHERE), ({"mongo_celery_database_url": "mongodb://elsewhere"}, "mongodb://elsewhere")]
)
def test_the_bridge_listens_to_the_database_of_flask_pymongo(
    make_app: Factory, settings: dict[str, str], url: str
) -> None:
    """One URL in one place, unless Celery's settings have another; what names no database is in that of the URL."""
    app = make_app(CELERY={"broker_url": "memory://", **settings})
    with bound(Bridge(autodiscover=False), app) as bridge:
        assert (bridge.name, bridge.url) == ("shop", url)
        assert bridge.wiring.default_database == ("shop" if url == NOWHERE else None)


@pytest.mark.parametrize("config", [{}, {"CELERY": "redis://localhost"}])
def test_a_config_without_settings_of_celery_is_refused(config: dict[str, Any]) -> None:
    app = Flask("shop")
    app.config.from_mapping(config)
    with pytest.raises(ConfigurationError, match=r"has no CELERY. Put Celery's settings there, such as app\.config"):
        celery_init_app(app)
    assert "celery" not in app.extensions


def test_an_app_that_has_a_celery_app_gets_no_second_one(make_app: Factory) -> None:
    app = make_app()
    with pytest.raises(ConfigurationError, match=r"'shop' already has a Celery app. Use app.extensions\['celery'\]"):
        celery_init_app(app)


def test_apps_that_nobody_has_any_more_leave_nothing_behind(make_app: Factory) -> None:
    """A factory for each test is right; the last one stays as Celery's default app."""
    bridge = Bridge(name="shop", autodiscover=False)
    bridge.on_change("shop.orders", name="note")(name_of_app)

    def made() -> weakref.ref[Flask]:
        app = Flask("gone")
        app.config["CELERY"] = {"broker_url": "memory://"}
        bridge.init_app(celery_init_app(app))
        app.extensions["celery"].finalize()
        return weakref.ref(app)

    apps = [made() for _ in range(10)]
    make_app()
    gc.collect()
    assert [app() for app in apps] == [None] * 10
