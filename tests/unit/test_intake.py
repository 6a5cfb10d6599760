"""What the intake of a worker takes from Celery, and what it leaves to it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from kombu.transport.virtual import Message

from mongo_celery import Bridge, Change
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.intake import Intake
from mongo_celery.bridge.worker.tasks import COMMIT_TASK

NOWHERE = "mongodb://127.0.0.1:1/shop?serverSelectionTimeoutMS=1"
BODY = "[[1], {}, {}]"


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give an app with a bridge of one partition."""
    app = Celery("shop", broker="memory://")
    bridge = Bridge(app, NOWHERE, name="shop", partitions=1, autodiscover=False)
    yield app
    bridge.client.close()


def message(channel: Any, queue: str, body: str | None, task: object = "known") -> Message:
    info = {"exchange": "", "routing_key": queue}
    properties = {"delivery_tag": "t", "delivery_info": info}
    kinds = {"content-type": "application/json", "content-encoding": "utf-8"}
    return Message({"body": body, "headers": {"task": task}, "properties": properties, **kinds}, channel)


@pytest.mark.parametrize(
    ("consumed", "queue", "body", "task", "is_celerys"),
    [
        ("shop.0", "shop.0", BODY, "known", True),
        ("shop.0", "shop.0", "null", "known", False),
        ("shop.0", "shop.0", BODY, "unknown", False),
        ("shop.0", "elsewhere", "null", "known", False),
        ("shop.0,celery", "shop.0", BODY, ["known"], False),
        ("shop.0,celery", "celery", BODY, "unknown", True),
        ("shop.0,celery", "celery", "null", "known", True),
        ("celery", "celery", "null", ["known"], True),
    ],
)
def test_messages_of_other_queues_are_celerys(
    app: Celery, consumed: str, queue: str, body: str, task: object, is_celerys: bool
) -> None:
    """P11: of a bridge's own queues nothing gets through that ends the consumer, or that it logs whole."""
    app.amqp.queues.select(consumed.split(","))
    taken: list[Message] = []
    consumer = SimpleNamespace(app=app, strategies={"known": None}, connection_errors=())
    with Connection("memory://") as connection:
        found = message(connection.default_channel, queue, body, task)
        Intake(consumer).take(taken.append, found)
    assert taken == [found] * is_celerys
    assert found.acknowledged != is_celerys


@pytest.mark.parametrize(
    ("queue", "task", "is_from_bridge"),
    [
        ("shop.0", COMMIT_TASK, True),
        ("shop.0", "handle", True),
        ("shop.0", "of a user", False),
        ("shop.0", ["handle"], False),
        ("celery", "handle", False),
    ],
)
def test_only_messages_that_a_listener_can_repeat_are_from_a_bridge(
    app: Celery, queue: str, task: object, is_from_bridge: bool
) -> None:
    """P8: a user's task exists only in its message, also in the queue of a bridge."""
    (wiring,) = BRIDGES.of(app)
    wiring.public.on_change("shop.orders", name="handle")(_handle)
    task = wiring.task_name("handle") if task == "handle" else task
    app.amqp.queues.select(["shop.0", "celery"])
    with Connection("memory://") as connection:
        intake = Intake(SimpleNamespace(app=app, strategies={}, connection_errors=()))
        assert intake.is_from_bridge(message(connection.default_channel, queue, BODY, task)) is is_from_bridge


def _handle(_: Change) -> None:
    """Do nothing."""
