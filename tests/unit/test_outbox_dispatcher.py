"""What the dispatcher of an app plans, without MongoDB and a broker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.dispatcher import TURN, AppDispatcher, OutboxDispatcher
from tests.fixtures.process import wait_for


def made(thread: AppDispatcher, name: str = "orders", **given: Any) -> OutboxDispatcher:
    answers = given.pop("answers", lambda: True)
    parts = {"deliver_queued": lambda _: Delivery(), "find_due": lambda _: [], **given}
    outbox: Any = SimpleNamespace(
        collection=SimpleNamespace(full_name=name, codec_options=None),
        publisher=SimpleNamespace(answers=lambda _seconds: answers()),
        options=SimpleNamespace(claim_ttl=600),
        **parts,
    )
    return OutboxDispatcher(thread, outbox)


def test_one_thread_takes_the_turns_of_all_outboxes_and_survives_one_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P12: one cannot be named nor delivered; the others are delivered, in turns."""

    def fail(*_: Any) -> Any:
        raise OSError("no such host")

    thread, delivered, threads = AppDispatcher(), list[Any](), set[int]()

    def deliver(number: int, ids: Any) -> Delivery:
        delivered.extend((number, each) for each in ids)
        threads.add(threading.get_ident())
        return Delivery(dispatched=len(ids))

    broken = made(thread, deliver_queued=fail, find_due=fail)
    del broken._outbox.collection
    outboxes = [made(thread, deliver_queued=lambda ids, number=number: deliver(number, ids)) for number in range(20)]
    broken.hint()
    for outbox in outboxes:
        outbox.hint(*range(TURN + 1))
    for outbox in outboxes:
        outbox.hint("last")
    wait_for(lambda: sum(each == "last" for _, each in delivered) == len(outboxes), 60)
    wait_for(lambda: "dispatcher_failed" in {record.__dict__.get("event") for record in caplog.records})
    thread.close()
    assert len(threads) == 1
    assert sorted(delivered, key=str) == sorted(
        ((number, each) for number in range(20) for each in (*range(TURN + 1), "last")), key=str
    )
    assert {number for number, _ in delivered[: 20 * TURN]} == set(range(20)), "no outbox waits for the end of another"


def test_the_thread_outlives_whatever_a_turn_raises(caplog: pytest.LogCaptureFixture) -> None:
    """P17: also what is no `Exception`, and what comes from the question whether the broker is back."""
    thread, delivered, raised = AppDispatcher(), list[Any](), list[Any]()

    def deliver(ids: Any) -> Delivery:
        if "exit" in ids:
            raise SystemExit
        delivered.extend(ids)
        return Delivery(broker_down="down" in ids)

    def answers() -> bool:
        if not raised:
            raised.append(1)
            raise SystemExit
        return True

    outbox = made(thread, deliver_queued=deliver, answers=answers)

    def failed() -> int:
        return [record.__dict__.get("event") for record in caplog.records].count("dispatcher_failed")

    outbox.hint("exit")
    wait_for(lambda: failed() == 1)
    outbox.hint("down")
    wait_for(lambda: "down" in delivered)
    running = thread._thread
    wait_for(lambda: bool(raised) and thread.down_until is None)
    assert thread._thread is running
    outbox.hint("last")
    wait_for(lambda: "last" in delivered, 60)
    thread.close()
    assert delivered[-1] == "last"
    assert failed() == 2
