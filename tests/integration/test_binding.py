"""What an application factory has made, used on a real server, is gone with its app."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for

Document = dict[str, Any]


def test_apps_that_were_used_leave_no_thread_and_no_client(
    database: Database[Document], mongo_client: MongoClient[Document], mongo_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: each delivers to its own tasks; the thread that a write of the outbox starts ends when it is idle."""
    monkeypatch.setattr("mongo_celery.outbox.dispatcher._IDLE_SECONDS", 0.05)
    seen = list[tuple[str, object]]()
    bridge = Bridge(url=mongo_url, name="shop")
    orders = bridge.outbox(f"{database.name}.orders", watch=False)

    @bridge.on_change(f"{database.name}.orders", bind=True)
    def note(self: Any, change: Change) -> None:
        assert self.bridge.app is self.app is bridge.app
        assert (change.fence.key, change.fence.token) == ("shop/note", change.fencing_token)
        seen.append((self.app.conf.greeting, change.document_key["_id"]))

    def use(number: int) -> list[weakref.ref[Any]]:
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.greeting = f"from {number}"
        bridge.init_app(app)
        app.set_current()

        @app.task(shared=False)
        def greet() -> None: ...

        with BridgeRunner(bridge.of(app)) as runner:
            orders.insert_one({"_id": number}, tasks=[greet.s()])
            runner.deliver()
            wait_for(lambda: runner.sent(greet.name), message="the outbox has sent")
        wait_for(lambda: not any(database.orders.find({"pendingEvents": {"$exists": True}})), message="nothing pends")
        return [weakref.ref(each) for each in (app, bridge.of(app).wiring, bridge.of(app).client)]

    gone = [each for number in range(3) for each in use(number)]
    Celery("another", set_as_current=False).set_current()

    assert seen == [(f"from {number}", number) for number in range(3)]
    wait_for(
        lambda: gc.collect() >= 0 and all(each() is None for each in gone), message=lambda: str([e() for e in gone])
    )
    assert mongo_client.admin.command("ping")["ok"], "other clients stay open"
