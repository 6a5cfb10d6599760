"""
Flask: a Celery app for each app that an application factory makes.

Every task of such a Celery app runs inside the Flask app's context: change handlers, each with each change that it is
given, what an outbox sends, and the tasks of this package. What Celery itself calls around a task (`before_start`,
`on_failure`, signals) runs outside of it, as in every Celery app of a Flask project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery import Celery, Task

from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from flask import Flask

EXTENSION = "celery"
"""The key of `app.extensions` that Flask's documentation gives to the Celery app."""

_SETTINGS = "CELERY"
_FLASK_PYMONGO_URL = "MONGO_URI"
_BRIDGE_URL = "mongo_celery_database_url"


def celery_init_app(app: Flask, *, base: type[Task[Any, Any]] = Task) -> Celery:
    """
    Make the Celery app of a Flask app, as the function of this name in Flask's documentation does.

    Its settings are the Flask config's `CELERY`. Bridges that are given no URL listen to `MONGO_URI`, Flask-PyMongo's
    setting, unless `CELERY` has a `mongo_celery_database_url`. Afterwards the Celery app is `app.extensions["celery"]`
    and Celery's default app. Bind the bridge to the returned app::

        bridge.init_app(celery_init_app(app))

    Celery's command line needs a module with the app, such as `shop/make_celery.py` for `celery -A shop.make_celery`::

        celery_app = create_app().extensions["celery"]

    Not promised: a context for what Celery calls around a task, such as `on_failure`, nor for a task or handler with a
    `base=` of its own, which takes the place of the app's class.

    Args:
        app: the Flask app.
        base: the class of its tasks; its `__call__` is called inside the context if it has one of its own.

    Raises:
        ConfigurationError: the config has no `CELERY`, or the Flask app has a Celery app already.
    """
    if EXTENSION in app.extensions:
        raise ConfigurationError(
            f"the Flask app {app.name!r} has a Celery app already; use app.extensions[{EXTENSION!r}].",
        )
    settings = app.config.get(_SETTINGS)
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"the config of the Flask app {app.name!r} has no {_SETTINGS}; give Celery's settings there, such as "
            f"app.config[{_SETTINGS!r}] = {{'broker_url': 'redis://localhost:6379/0'}}.",
        )
    url = app.config.get(_FLASK_PYMONGO_URL)
    celery = Celery(app.name, task_cls=_task_class(app, base))
    celery.config_from_object({**({} if url is None else {_BRIDGE_URL: url}), **settings})
    celery.set_default()
    app.extensions[EXTENSION] = celery
    return celery


def _task_class(app: Flask, base: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    """A task class that opens the context around each call."""
    calls_itself = base.__call__ is not Task.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with app.app_context():
            # Celery's own `__call__` would push another request, without id and retries.
            return base.__call__(self, *args, **kwargs) if calls_itself else self.run(*args, **kwargs)

    return type("FlaskTask", (base,), {"__call__": call, "abstract": True, "__doc__": "Runs inside the context."})
