"""What an application factory does, and a handler at module level."""

from __future__ import annotations

from typing import Any

from celery import Celery

from mongo_celery import Bridge, Change

URL = "mongodb://localhost:1/?replicaSet=rs0"


def made_app(bridge: Bridge | None, name: str, **settings: Any) -> Celery:
    """A new app with the bridge; not the current one."""
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.update(settings)
    if bridge is not None:
        bridge.init_app(app)
    return app


def summarise(change: Change) -> Any:
    """A handler."""
    return change.document_key
