"""What the limits of a handler make of a message that may carry several changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from celery.worker.request import Request
from kombu.message import Message

from mongo_celery import Bridge
from mongo_celery.bridge.worker import limits, tasks
from mongo_celery.bridge.worker.limits import RUN_SECONDS, RunLimits
from mongo_celery.bridge.worker.runtime import UNEXPECTED
from tests.rig.changes import make_run


class Handlers:
    def __init__(self, **options: Any) -> None:
        self.app = Celery("limits", broker="memory://", set_as_current=False)
        given = {"run_size": 100, "run_seconds": 2.0, **options}
        self.bridge = Bridge(self.app, "mongodb://localhost/?replicaSet=none", name="shop", autodiscover=False, **given)

    def task(self, *, lists: bool = False, **options: Any) -> Any:
        def handle(_given: object) -> None:
            """Do nothing."""

        register = self.bridge.on_changes if lists else self.bridge.on_change
        register("shop.orders", name="handle", **options)(handle)
        self.app.finalize()
        (handler,) = self.bridge.handlers
        return self.app.tasks[handler.task_name]

    def of(self, **options: Any) -> RunLimits:
        found: RunLimits = limits.run_limits(self.task(**options))
        return found


@pytest.mark.parametrize(
    ("bridges", "options", "seconds", "of_message"),
    [
        ({}, {}, 2.0, (None, None)),
        ({}, {"time_limit": 10}, 1.0, (11.0, None)),
        ({}, {"soft_time_limit": 5, "time_limit": 10}, 0.5, (10.5, 5.5)),
        ({}, {"soft_time_limit": 60}, 2.0, (None, 62.0)),
        ({}, {"time_limit": 10, "rate_limit": "1/s", "lists": True}, 2.0, (None, None)),
        ({}, {"time_limit": 10, "rate_limit": "1/s", "transactional": True}, 2.0, (None, None)),
        ({"run_size": 1}, {"time_limit": 10}, 0.0, (None, None)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_each_change_has_all_of_its_time(
    bridges: dict[str, Any],
    options: dict[str, Any],
    seconds: float,
    of_message: tuple[float | None, float | None],
) -> None:
    """Whatever is begun before `seconds` are over ends before the message does. One call has Celery's own limits."""
    assert Handlers(**bridges).of(**options) == RunLimits(seconds, of_message)


@pytest.mark.parametrize("where", ["handler", "annotation", "default", "control"])
def test_under_a_rate_limit_no_second_change_is_begun(where: str) -> None:
    """Wherever it was set, and whenever: Celery counts messages."""
    handlers = Handlers()
    if where == "annotation":
        handlers.app.conf.task_annotations = {"*": {"rate_limit": "10/m"}}
    if where == "default":
        handlers.app.conf.task_default_rate_limit = "10/m"
    options: dict[str, Any] = {"rate_limit": "10/m"} if where == "handler" else {}
    task = handlers.task(**options)
    if where == "control":
        task.rate_limit = "10/m"
    assert limits.run_limits(task) == RunLimits(0.0)
    task.rate_limit = "0"
    assert limits.run_limits(task) == RunLimits(2.0), "Celery takes that for none"


def test_limits_of_the_whole_worker_are_those_of_a_change_too() -> None:
    """By its command line, or by configuration; a handler's own come before them."""
    handlers = Handlers()
    task = handlers.task()
    limits.worker_limits[handlers.app] = (5, 4)
    assert limits.run_limits(task) == RunLimits(0.4, (5.4, 4.4))
    task.time_limit = 8
    assert limits.run_limits(task) == RunLimits(0.4, (8.4, 4.4))
    others = Handlers()
    others.app.conf.task_time_limit = 10
    assert others.of() == RunLimits(1.0, (11.0, None))


def test_a_message_has_the_limits_of_its_handler_and_none_of_its_own() -> None:
    """P10: what is written beside an envelope has no power; who tries is dropped."""
    handlers = Handlers()
    task = handlers.task(soft_time_limit=5)
    headers = {"id": "a", "task": task.name, "timelimit": [1, 1], RUN_SECONDS: 3600.0}
    body = json.dumps([["envelope"], {}, {}])
    message = Message(body=body, headers=headers, content_type="application/json", content_encoding="utf-8")
    request = task.Request
    assert issubclass(request, Request)
    made = request(message, app=handlers.app, task=task)
    assert made.time_limits == (None, 5.5)
    assert made.request_dict[RUN_SECONDS] == 0.5
    assert sorted(made.request_dict[UNEXPECTED]) == [RUN_SECONDS, "timelimit"]


@pytest.mark.parametrize(("conf", "seconds"), [({}, 30.0), ({"task_time_limit": 8}, 2.0)], ids=["none", "of the app"])
def test_a_commit_waits_for_mongodb_well_within_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, conf: dict[str, Any], seconds: float
) -> None:
    """P14: a hard limit kills the process, with whatever else it runs."""
    waits = list[float]()

    def persist(*given: Any) -> bool:
        waits.append(given[-1])
        return True

    monkeypatch.setattr(tasks, "persist", persist)
    handlers = Handlers()
    handlers.app.conf.update(conf)
    handlers.task()
    run = make_run(1, 1)
    tasks._commit(handlers.app.tasks[tasks.COMMIT_TASK], handlers.bridge.wiring, run)
    assert waits == [seconds]
    handlers.bridge.client.close()
