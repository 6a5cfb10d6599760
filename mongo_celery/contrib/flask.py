"""
Flask support: one Celery app for each app of an application factory.

Every task of the Celery app runs inside the Flask app's context: change handlers (once for each change), tasks from an
outbox, and this package's tasks. Celery's calls around a task (`before_start`, `on_failure`, signals) run outside the
context, as in every Flask project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery import Celery, Task

from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from flask import Flask

EXTENSION = "celery"
"""The key of `app.extensions` for the Celery app, as in Flask's documentation."""

_SETTINGS = "CELERY"
_FLASK_PYMONGO_URL = "MONGO_URI"
_BRIDGE_URL = "mongo_celery_database_url"


def celery_init_app(app: Flask, *, base: type[Task[Any, Any]] = Task) -> Celery:
    """
    Make the Celery app of a Flask app, like the function of this name in Flask's documentation.

    Its settings are the Flask config's `CELERY`. Bridges without a URL use `MONGO_URI`, the setting of Flask-PyMongo,
    unless `CELERY` has a `mongo_celery_database_url`. Afterwards the Celery app is `app.extensions["celery"]` and
    Celery's default app. Bind the bridge to the returned app::

        bridge.init_app(celery_init_app(app))

    Celery's command line needs a module with the app, such as `shop/make_celery.py` for `celery -A shop.make_celery`::

        celery_app = create_app().extensions["celery"]

    Not promised: a context for Celery's calls around a task, such as `on_failure`, or for a task or handler with its
    own `base=`, which replaces the app's class.

    Args:
        app: the Flask app.
        base: the class of its tasks. If it has its own `__call__`, this runs inside the context.

    Raises:
        ConfigurationError: the config has no `CELERY`, or the Flask app already has a Celery app.
    """
    if EXTENSION in app.extensions:
        raise ConfigurationError(
            f"The Flask app {app.name!r} already has a Celery app. Use app.extensions[{EXTENSION!r}].",
        )
    settings = app.config.get(_SETTINGS)
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"The config of the Flask app {app.name!r} has no {_SETTINGS}. Put Celery's settings there, such as "
            f"app.config[{_SETTINGS!r}] = {{'broker_url': 'redis://localhost:6379/0'}}.",
        )
    url = app.config.get(_FLASK_PYMONGO_URL)
    celery = Celery(app.name, task_cls=_task_class(app, base))
    celery.config_from_object({**({} if url is None else {_BRIDGE_URL: url}), **settings})
    celery.set_default()
    app.extensions[EXTENSION] = celery
    return celery


def _task_class(app: Flask, base: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    """Return a task class that opens the context around each call."""
    calls_itself = base.__call__ is not Task.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with app.app_context():
            # Celery's `__call__` would push another request, without id and retries.
            return base.__call__(self, *args, **kwargs) if calls_itself else self.run(*args, **kwargs)

    return type("FlaskTask", (base,), {"__call__": call, "abstract": True, "__doc__": "Runs inside the context."})
