"""Assertions of `mongo_celery.testing` on what nobody has dispatched yet, and on what has run under `once`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, group
from pymongo import InsertOne
from pymongo.database import Database

from mongo_celery import STORED_ID, Bridge, Change, Event, Outbox, OutboxCollection, once, transactional
from mongo_celery.testing import BridgeRunner, assert_once, assert_pending, pending_entries, undispatched

Document = dict[str, Any]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setattr("mongo_celery.testing.runner._SENT_SECONDS", 60.0)
    with Celery("shop", broker="memory://", set_as_current=False) as made:

        @made.task(name="shop.mail", shared=False)
        def mail(order: Any, subject: str = "") -> None:
            """Of no effect."""

        yield made


@pytest.fixture
def outbox(app: Celery, database: Database[Document]) -> Iterator[Outbox]:
    made = Outbox(app, database["orders"], sweep_every=None)
    with undispatched(made):
        yield made


def test_what_documents_hold_is_as_their_tasks_will_have_it(app: Celery, outbox: Outbox) -> None:
    """The `_id` stands where `STORED_ID` was put, in tasks, in events, and by whatever write."""
    mail = app.tasks["shop.mail"]
    outbox.insert_one(
        {"_id": 1}, tasks=[mail.si(1, subject="hi")], events=[Event("order.placed", {"order": STORED_ID})]
    )
    outbox.collection.bulk_write([outbox.with_tasks(InsertOne({"_id": 2}), tasks=[mail.si(STORED_ID)])])
    outbox.update_many({}, {"$set": {"seen": True}}, tasks=[mail.si(STORED_ID, subject="seen")])

    assert_pending(outbox, "shop.mail", args=(1,), kwargs={"subject": "hi"})
    assert_pending(outbox, "shop.mail", args=(2,), kwargs={}, place=2)
    assert_pending(outbox, "shop.mail", kwargs={"subject": "seen"}, times=2)
    assert_pending(outbox, "shop.mail", place=1, times=2)
    assert_pending(outbox, "shop.other", times=0)
    (event,) = [each for each in pending_entries(outbox) if each.kind == "event"]
    assert (event.name, event.body, event.place) == ("order.placed", {"order": 1}, 1)
    with pytest.raises(AssertionError):
        assert_pending(outbox, "shop.mail")


def test_a_canvas_is_each_of_its_tasks(app: Celery, outbox: Outbox) -> None:
    mail = app.tasks["shop.mail"]
    outbox.insert_one({"_id": 1}, tasks=[chain(mail.si(1), mail.si(2), mail.si(3)), group(mail.si(4), mail.si(5))])
    assert sorted(each.args[0] for each in pending_entries(outbox)) == [1, 2, 3, 4, 5]


def test_what_was_written_over_is_said(outbox: Outbox) -> None:
    outbox.collection.insert_one({"_id": 1, "pendingEvents": {"events": [{"id": 5}]}})
    with pytest.raises(ValueError):  # noqa: PT011
        assert_pending(outbox, "shop.mail")


@pytest.mark.needs_mongodb(5, 0)
def test_what_goes_with_a_transaction_is_looked_at_by_its_key(app: Celery, database: Database[Document]) -> None:
    outbox, mail = OutboxCollection(app, database["outbox"], sweep_every=None), app.tasks["shop.mail"]
    run = transactional(database.client, outbox=outbox).run

    with undispatched(outbox):
        run(lambda session: (database["seats"].insert_one({}, session=session), mail.delay(1)))
        with pytest.raises(ZeroDivisionError):
            run(lambda _session: (mail.delay(2), 1 // 0))
        outbox.add([mail.si(3)], key=7)

        assert_pending(outbox, "shop.mail", args=[1], place=None)
        assert_pending(outbox, "shop.mail", args=[2], times=0)
        assert_pending(outbox, "shop.mail", args=[3], place=7)
        assert [each.place for each in pending_entries(outbox)] == ["7", None]


def test_what_was_held_back_goes_out_by_a_sweep(app: Celery, database: Database[Document], mongo_url: str) -> None:
    """Stored, then sent: the two assertions one after the other, and the outbox is as it was."""
    bridge = Bridge(app, mongo_url, name="shop", autodiscover=False)

    @bridge.on_change(database["orders"].full_name)
    def note(change: Change) -> None:
        """Of no effect."""

    outbox, mail = Outbox(app, database["parcels"], sweep_every=None), app.tasks["shop.mail"]

    with BridgeRunner(bridge) as runner:
        with undispatched(outbox):
            outbox.insert_one({"_id": 1}, tasks=[mail.si(1)])
            assert_pending(outbox, "shop.mail", args=(1,))
            runner.assert_enqueued("shop.mail", times=0)
        outbox.sweep(older_than=0)
        assert_pending(outbox, "shop.mail", times=0)
        runner.assert_enqueued("shop.mail", args=(1,))
        outbox.insert_one({"_id": 2}, tasks=[mail.si(2)])
        runner.assert_enqueued("shop.mail", args=(2,))
    outbox.runtime.close()
    bridge.client.close()


def test_a_body_that_has_failed_has_no_record(app: Celery, database: Database[Document]) -> None:
    failures = [ValueError("no")]

    @app.task(name="shop.pay", shared=False)
    @once(lambda: database["done"], key=lambda order, line: (order, line))
    def pay(*_place: int) -> None:
        if failures:
            raise failures.pop()

    with pytest.raises(ValueError):  # noqa: PT011
        pay.apply(args=(2, 1), throw=True)
    assert_once(database["done"], (2, 1), task="shop.pay", ran=False)
    with pytest.raises(AssertionError):
        assert_once(lambda: database["done"], (2, 1), task="shop.pay")
    pay.apply(args=(2, 1), throw=True)
    assert_once(database["done"], [2, 1], task="shop.pay")


def test_a_task_is_known_by_its_id(app: Celery, database: Database[Document]) -> None:
    @app.task(name="shop.pay", shared=False)
    @once(database["done"])
    def pay() -> None:
        with pytest.raises(AssertionError):
            assert_once(database["done"], "t1")
        with pytest.raises(AssertionError):
            assert_once(database["done"], "t1", ran=False)

    pay.apply(task_id="t1", throw=True)
    assert_once(database["done"], "t1")
    with pytest.raises(AssertionError):
        assert_once(database["done"], "t1", ran=False)
