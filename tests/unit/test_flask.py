"""Flask: tasks and handlers inside the application's context, and Celery's commands under `flask`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import _state
from celery._state import set_default_app
from flask import Flask, current_app, g, has_app_context

from mongo_celery import Bridge, Change
from mongo_celery.contrib.flask import celery_init_app
from mongo_celery.errors import ConfigurationError

NOWHERE = "mongodb://localhost:1/shop?replicaSet=nowhere"
CHANGE = Change.build("insert", ns="shop.orders", full_document={"_id": 1})
Factory = Callable[..., Flask]
STATE: Any = _state


def name_of_app(_change: Change) -> str:
    return current_app.name


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


def bind(bridge: Bridge, app: Flask) -> Bridge:
    celery = app.extensions["celery"]
    bridge.init_app(celery)
    return bridge.of(celery)


def test_a_handler_runs_inside_the_context_of_its_own_app(make_app: Factory) -> None:
    """Of several that a factory has made: `current_app` is the one whose bridge has the change."""
    bridge = Bridge(name="shop", autodiscover=False)
    task: Any = bridge.on_change("shop.orders", name="note")(name_of_app)
    for name in ("first", "second"):
        app = make_app(name)
        handler: Any = app.extensions["celery"].tasks[bind(bridge, app).handlers[0].task_name]
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


@pytest.mark.parametrize(
    ("settings", "url"), [({}, NOWHERE), ({"mongo_celery_database_url": "mongodb://elsewhere"}, "mongodb://elsewhere")]
)
def test_the_bridge_listens_to_the_database_of_flask_pymongo(
    make_app: Factory, settings: dict[str, str], url: str
) -> None:
    """One URL in one place, unless Celery's settings have another; what names no database is in that of the URL."""
    app = make_app(CELERY={"broker_url": "memory://", **settings})
    bridge = bind(Bridge(autodiscover=False), app)
    assert (bridge.name, bridge.url) == ("shop", url)
    assert bridge.wiring.default_database == ("shop" if url == NOWHERE else None)


@pytest.mark.parametrize("config", [{}, {"CELERY": "redis://localhost"}])
def test_a_config_without_settings_of_celery_is_refused(make_app: Factory, config: dict[str, Any]) -> None:
    app = Flask("shop")
    app.config.from_mapping(config)
    with pytest.raises(ConfigurationError):
        celery_init_app(app)
    assert "celery" not in app.extensions
    with pytest.raises(ConfigurationError):
        celery_init_app(make_app())
