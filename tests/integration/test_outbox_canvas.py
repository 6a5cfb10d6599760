"""What is stored of a canvas, and that each dispatch of it sends the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId
from celery import chain, chord, group
from celery._state import _task_stack  # type: ignore[attr-defined]
from celery.signals import task_prerun
from pymongo.database import Database

from mongo_celery.errors import OutboxRefusedError
from tests.rig.outbox import Document, Rig, opened, pending, ripen

Canvas = Callable[[Rig], Any]


CANVASES: dict[str, Canvas] = {
    "signature": lambda rig: rig.add.s(1, 2),
    "own id": lambda rig: rig.add.s(1, 2).set(task_id="mine"),
    "chain": lambda rig: chain(rig.add.s(1, 2), rig.add.s(3), rig.add.s(4)),
    "group": lambda rig: group(rig.add.s(each, each) for each in range(3)),
    "chain with a group": lambda rig: chain(rig.add.s(1, 2), group(rig.add.s(1), rig.add.s(2)), rig.total.s()),
    "chain that ends with a group": lambda rig: chain(rig.add.s(1, 2), group(rig.add.s(1), rig.add.s(2))),
    "chain with a group in a group": lambda rig: group(
        chain(rig.add.s(1, 2), group(rig.add.s(1), rig.add.s(2)), rig.total.s()), rig.add.s(1, 1)
    ),
    "chain of a group": lambda rig: chain(group(rig.add.s(1, 1), rig.add.s(2, 2))),
    "group of a chain of a group": lambda rig: group(chain(group(rig.add.s(1, 1), rig.add.s(2, 2))), rig.add.s(3, 3)),
    "group of chains": lambda rig: group(chain(rig.add.s(1, 1), rig.add.s(2)), rig.add.s(5, 5)),
    "links": lambda rig: rig.add.s(1, 2).set(link=[rig.add.s(9)], link_error=[rig.total.s()]),  # type: ignore[arg-type]
    "chain with a link": lambda rig: chain(rig.add.s(1, 2), rig.add.s(3)).set(link=[rig.add.s(9)]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CANVASES)
def test_every_dispatch_of_a_stored_canvas_sends_the_same_ids(
    database: Database[Document], redis_url: str, name: str
) -> None:
    """
    All ids of all messages and of what is embedded in them; else consumers could not tell duplicates.

    It is stored while the result backend is down: no write asks it for anything, as it is often also the broker.
    """
    with opened(database, redis_url, backend="redis://127.0.0.1:1/0") as rig:
        rig.app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
        rig.outbox(at_once=False).insert_one({"_id": 1}, tasks=[CANVASES[name](rig)])
        stored = rig.pending(1)
    sent = []
    with opened(database, redis_url) as rig:
        outbox = rig.outbox(at_once=False)
        for _ in range(2):
            assert outbox.runtime.relay.deliver(1).dispatched == stored["count"]
            sent.append([(message.id, message.headers["group"], message.body) for message in rig.drain()])
            rig.orders.update_one({"_id": 1}, {"$set": {"pendingEvents": stored}})

    assert len(sent[0]) > 0
    assert sorted(map(repr, sent[0])) == sorted(map(repr, sent[1]))


def test_what_could_not_be_sent_is_refused_and_nothing_is_written(rig: Rig) -> None:
    add, outbox, accepted = rig.add, rig.outbox(), []
    two = group(add.s(1, 1), add.s(1, 1))
    refused: dict[str, Callable[[], Any]] = {
        "no signature": object,
        "a task": lambda: add,
        "an empty group": group,
        "an empty chain": chain,
        "a chord": lambda: chord([add.s(1, 1)], rig.total.s()),
        "a chord at the beginning": lambda: chain(two, rig.total.s()),
        "what JSON has not": lambda: add.s(ObjectId(), 1),
        "what JSON has not, later": lambda: chain(add.s(1, 2), add.s(object())),
        "too few arguments": lambda: add.s(1),
    }
    for name, canvas in refused.items():
        with suppress(OutboxRefusedError):
            outbox.insert_one({"_id": 1}, tasks=[canvas()])
            accepted.append(name)
    assert accepted == []
    assert rig.orders.count_documents({}) == 0


@pytest.mark.parametrize("name", ["chain", "group", "links", "later"])
def test_no_task_runs_before_its_write_with_task_always_eager(
    database: Database[Document], redis_url: str, name: str
) -> None:
    """Celery would run it where its messages are made, and send none."""
    with opened(database, redis_url, task_always_eager=True) as rig:
        ran: list[Any] = []
        canvas = rig.add.s(1, 2).set(countdown=5) if name == "later" else CANVASES[name](rig)
        task_prerun.connect(lambda task_id, **_: ran.append(task_id), weak=False, dispatch_uid=name)
        try:
            with pytest.raises(OutboxRefusedError):
                rig.outbox(at_once=False).insert_one({"_id": 1}, tasks=[canvas])
            assert (ran, database["orders"].count_documents({})) == ([], 0)
            rig.outbox(name="plain", at_once=False).insert_one({"_id": 2}, tasks=[rig.add.s(1, 2)])
            assert (ran, pending(database, 2)["count"]) == ([], 1)
        finally:
            task_prerun.disconnect(dispatch_uid=name)


def test_what_is_sent_late_has_its_headers_and_the_times_of_its_call(rig: Rig) -> None:
    """A dispatch that comes late must not add its delay; later steps of a chain count from their own beginning."""
    outbox = rig.outbox(at_once=False)
    before = datetime.now(UTC)
    soon: Document = {"countdown": 60, "headers": {"tenant": "acme"}}
    later = chain(rig.add.s(1, 1).set(**soon), rig.add.s(2).set(countdown=30))
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1).set(expires=120, **soon), later])
    outbox.runtime.relay.deliver(1)

    single, first = rig.drain()
    for headers in (single.headers, first.headers):
        assert 59 < (datetime.fromisoformat(headers["eta"]) - before).total_seconds() < 70
        assert headers["tenant"] == "acme"
    assert 119 < (datetime.fromisoformat(single.headers["expires"]) - before).total_seconds() < 130
    assert first.body[2]["chain"][0]["options"]["countdown"] == 30


def test_a_running_sweep_is_no_parent_of_what_it_sends(rig: Rig) -> None:
    """Root, parent and priority are those of the write, in messages of a transaction, too."""
    add: Any = rig.add
    rig.app.conf.task_inherit_parent_priority = True
    outbox, messages, running = rig.outbox(at_once=False), rig.messages(every_transaction=True), rig.total
    outbox.insert_one({"_id": 1}, tasks=[add.s(1, 1), add.s(1, 2).set(parent_id="mine", headers={"tenant": "a"})])
    rig.run(lambda _: add.delay(1, 3))
    known = {"id": "sweep", "root_id": "sweep", "children": [], "delivery_info": {"priority": 9}}
    running.push_request(called_directly=False, **known)  # as a worker begins one
    _task_stack.push(running)
    try:
        assert [each.sweep(older_than=0).dispatched for each in (outbox, messages)] == [2, 1]
        assert running.request.children == []
        assert rig.app.current_worker_task is running
    finally:
        _task_stack.pop()
        running.pop_request()
    sent = rig.drain()
    assert [each.headers["root_id"] for each in sent] == [each.id for each in sent]
    assert [each.headers["parent_id"] for each in sent] == [None, "mine", None]
    assert sent[1].headers["tenant"] == "a"


def test_a_canvas_with_a_retry_policy_of_its_own_is_sent(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False)
    own: Any = {"retry": True, "retry_policy": {"max_retries": 3}}
    tasks = [rig.add.s(1, 1).set(**own), rig.add.s(1, 2).set(link=rig.add.s(1), **own)]
    outbox.insert_one({"_id": 1}, tasks=[*tasks, chain(rig.add.s(1, 3).set(**own), rig.add.s(2).set(**own))])
    outbox.runtime.relay.deliver(1)
    assert rig.sent() == [[1, 1], [1, 2], [1, 3]]


def test_a_serializer_that_the_app_does_not_accept_is_never_loaded(rig: Rig) -> None:
    """A task with pickle takes what JSON cannot hold. A pickle in a document is no way to run code."""
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.pickled.s({1, 2}), rig.add.s(1, 2)])
    assert outbox.runtime.relay.deliver(1).dispatched == 2
    assert len(rig.drain()) == 2
    outbox.insert_one({"_id": 2}, tasks=[rig.pickled.s(1)])
    ripen(rig.orders, 2)
    rig.app.conf.accept_content = ["json"]

    assert outbox.runtime.relay.deliver(2).dead == 1
    assert rig.drain() == []
    with pytest.raises(OutboxRefusedError):
        outbox.insert_one({"_id": 3}, tasks=[rig.pickled.s(1)])
    assert rig.orders.count_documents({"_id": 3}) == 0
