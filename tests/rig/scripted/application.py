"""The Celery app and its bridge, as the environment describes them."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, Task

from mongo_celery import Bridge
from tests.rig.scripted.points import arm
from tests.rig.scripted.recording import record

NAME = os.environ["PROJECT_NAMES"]
DATA = os.environ.get("SCRIPTED_DATA", f"{NAME}_data")

arm()


def _from_environment(variable: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get(variable, "{}"))
    return found


class ContextTask(Task):  # type: ignore[type-arg] # generic for type checkers only
    """Opens a context around each task, as Flask's documentation shows it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record("context", task=self.name, retries=self.request.retries)
        return self.run(*args, **kwargs)


class SuperTask(Task):  # type: ignore[type-arg] # generic for type checkers only
    """The same, and calls on to Celery's own `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record("context", task=self.name, retries=self.request.retries)
        return super().__call__(*args, **kwargs)


_TASK_CLASSES: dict[str, Any] = {"": Task, "context": ContextTask, "super": SuperTask}

app = Celery(
    os.environ.get("SCRIPTED_APP", "chain"),
    broker=os.environ["PROJECT_BROKER"],
    include=["tests.rig.scripted.handlers"],
    task_cls=_TASK_CLASSES[os.environ.get("SCRIPTED_TASK_CLASS", "")],
)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=_from_environment("SCRIPTED_TRANSPORT"),
    worker_hijack_root_logger=True,
    **_from_environment("SCRIPTED_CONF"),
)
bridge = Bridge(
    app,
    os.environ["PROJECT_MONGO"],
    name="chain",
    database=os.environ.get("SCRIPTED_STATE", f"{NAME}_state"),
    autodiscover=False,
    **_from_environment("PROJECT_OPTIONS"),
)
