"""Messages that the broker gets by one command: the same as one by one, and what follows when they cannot go so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery, chain, signals
from pymongo.database import Database
from pymongo.errors import AutoReconnect

from mongo_celery import Outbox
from mongo_celery.embedded import RedisServer
from mongo_celery.outbox.entries import Entry, make_task_entries
from mongo_celery.outbox.publisher import BatchAbandonedError, Publisher
from tests.fixtures.messages import listening_for_events
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.rig.outbox import Document, Rig, held_up, opened, settled

ROUTES = {"routed": {"queue": "fast", "priority": 3}}


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url, task_routes=ROUTES, task_send_sent_event=True) as made:
        yield made


@pytest.fixture
def broker(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def taken(broker: Any) -> dict[str, list[Document]]:
    """All messages of all queues, without random tags and what is left of their time; the queues are empty then."""
    found: dict[str, list[Document]] = {}
    for key in broker.scan_iter(_type="list"):
        found[key.decode()] = [json.loads(each) for each in reversed(broker.lrange(key, 0, -1))]
        broker.delete(key)
    for messages in found.values():
        for message in messages:
            del message["properties"]["delivery_tag"]
            message["properties"].pop("expiration", None)
    return found


def _note(text: Any, *_more: Any) -> Any:
    return text


def together(publisher: Publisher, given: Sequence[Entry]) -> None:
    with publisher.together() as send:
        one_by_one(publisher, given)
        send()


def one_by_one(publisher: Publisher, given: Sequence[Entry]) -> None:
    for entry in given:
        publisher.publish(entry, 1, "events")


@pytest.fixture
def publisher(rig: Rig) -> Iterator[Publisher]:
    made = Publisher(rig.app)
    yield made
    made.close()


def test_what_goes_together_is_what_celery_sends(rig: Rig, broker: Any, redis_url: str) -> None:
    routed = rig.app.task(name="routed", shared=False, ignore_result=True, time_limit=9)(_note)
    more: Any = {"shadow": "shown", "time_limit": 5, "argsrepr": "(hidden)"}
    at = datetime.now(UTC) + timedelta(days=1)
    tasks = [
        rig.add.s(1, b=2).set(task_id="mine", priority=7, headers={"tenant": "é"}, **more),
        rig.add.s(3, 4).set(task_id="later", queue="slow", eta=at, expires=at, compression="zlib"),
        rig.pickled.s({1, 2}).set(task_id="pickled"),
        routed.s("x").set(task_id="routed"),
        chain(rig.add.s(1, 2).set(task_id="first"), rig.add.s(3).set(task_id="second")),
    ]
    outbox = rig.outbox(at_once=False)
    for number, task in enumerate(tasks):
        outbox.insert_one({"_id": number}, tasks=[task])
    sent = commands(outbox)
    with listening_for_events(redis_url) as take:
        assert outbox.sweep(older_than=0).dispatched == len(tasks)
        assert {each["uuid"] for each in take(5)} == {"mine", "later", "pickled", "routed", "first"}
    assert sent == [True]
    together = taken(broker)
    for task in tasks:
        task.apply_async()
    assert together == taken(broker)


def test_who_listens_to_what_was_published_is_told_of_what_the_broker_has(
    rig: Rig, publisher: Publisher, broker: Any
) -> None:
    """So with a listener messages go one by one, and so they do where the transport cannot send several."""

    def hear(**_: Any) -> None: ...

    signals.after_task_publish.connect(hear)
    try:
        with pytest.raises(BatchAbandonedError):
            together(publisher, [])
    finally:
        signals.after_task_publish.disconnect(hear)
    tasks, now = (rig.pickled.s(1), rig.add.s(1, 2)), datetime.now(UTC)
    heard, unheard = (entry for task in tasks for entry in make_task_entries(rig.app, task, now, 1))
    signals.after_task_publish.connect(hear, sender=heard.name)
    try:
        with publisher.together() as send:
            publisher.publish(unheard)
            with pytest.raises(BatchAbandonedError):
                publisher.publish(heard)
            send()
    finally:
        signals.after_task_publish.disconnect(hear, sender=heard.name)
    assert len(taken(broker)["celery"]) == 1
    with Celery("other", broker="memory://", set_as_current=False) as app, pytest.raises(BatchAbandonedError):
        together(Publisher(app), [])


def commands(outbox: Outbox) -> list[bool]:
    """One for each command from now on: whether it was answered."""
    publisher, sent = outbox.runtime.publisher, list[bool]()
    send = publisher._send

    def noted(batch: Any, producer: Any) -> None:
        sent.append(False)
        send(batch, producer)
        sent[-1] = True

    publisher._send = noted  # type: ignore[method-assign]
    return sent


@contextmanager
def gathered(outbox: Outbox, first: Any) -> Iterator[list[bool]]:
    """What the block writes is there when the dispatcher takes its next turn; filled with one for each command."""
    sent = commands(outbox)
    with held_up(outbox) as (_, begun):
        outbox.insert_one({"_id": "first"}, tasks=[first])
        assert begun.wait(60)
        yield sent


def test_what_has_gathered_or_is_swept_goes_together(rig: Rig) -> None:
    outbox = rig.outbox(at_once=True)
    with gathered(outbox, rig.add.s(0, 0)) as sent:
        for number in range(20):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, each) for each in (1, 2)[: number % 2 + 1]])
    wait_for(lambda: settled(outbox))
    twos = [[number, 2] for number in range(1, 20, 2)]
    assert rig.sent() == [[0, 0], *([number, 1] for number in range(20)), *twos]
    assert sent == [True, True]

    left = rig.outbox("others", at_once=False)
    for number, count in enumerate((1, 3, 1)):
        left.insert_one({"_id": number}, tasks=[rig.add.s(number, each) for each in range(count)])
    sent = commands(left)
    assert left.sweep(older_than=0).dispatched == 5
    found = rig.sent()
    assert (sorted(found[:3]), found[3:]) == ([[0, 0], [1, 0], [2, 0]], [[1, 1], [1, 2]])
    assert sent == [True] * 3


def test_a_message_that_the_broker_refuses_is_charged_alone_and_overtaken_by_none(rig: Rig, broker: Any) -> None:
    """Those beside it are sent again, once: from then on messages go one by one for a while."""
    outbox = rig.outbox(at_once=True)
    outbox.insert_one({"_id": "before"}, tasks=[rig.add.s(0, 0).set(queue="taken")])
    wait_for(lambda: settled(outbox))
    broker.delete("taken")
    broker.set("taken", "not a list")
    with gathered(outbox, rig.add.s(0, 1)) as sent:
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
        outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2).set(queue="taken"), rig.add.s(2, 3)])
        outbox.insert_one({"_id": 3}, tasks=[rig.add.s(3, 3)])
    wait_for(lambda: outbox.status().pending == 2)
    assert rig.pending(2)["count"] == 2
    assert sent == [False]
    assert rig.sent() == [[0, 1], [1, 1], [3, 3], [1, 1], [3, 3]]
    with pytest.raises(BatchAbandonedError):
        together(outbox.runtime.publisher, [])


def test_what_the_broker_has_is_known_though_mongodb_fails_in_the_middle(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal cannot be made: nothing is forgotten, and nothing is sent twice by this process."""
    outbox = rig.outbox(at_once=False)
    for number, count in enumerate((1, 3, 1)):
        outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, each) for each in range(count)])
    relay, failures = outbox.runtime.relay, [AutoReconnect("the primary has stepped down")] * 2
    settle = relay.removals.settle

    def settle_later(*given: Any) -> None:
        if failures:
            raise failures.pop()
        settle(*given)

    monkeypatch.setattr(relay.removals, "settle", settle_later)
    with pytest.raises(AutoReconnect):
        relay.deliver_all([0, 1, 2])
    assert outbox.status().pending == 5
    assert relay.deliver_all([0, 1, 2]).dispatched == 0
    assert outbox.status().pending == 0
    assert sorted(rig.sent()) == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0]]


@pytest.mark.parametrize("turn", [0, 1])
def test_a_broker_that_freezes_in_the_middle_of_a_command_loses_nothing(
    database: Database[Document], redis_server: RedisServer, broker: Any, make_proxy: Callable[[int], Proxy], turn: int
) -> None:
    """It has taken some; which, nobody knows, so none of them is removed, and none overtakes its predecessor."""
    proxy, documents = make_proxy(redis_server.port), range(20)
    large = "x" * 20_000  # several chunks of what a proxy passes on at once

    def ids() -> list[str]:
        return [message["headers"]["id"] for message in taken(broker).get("celery", ())]

    with opened(database, proxy.redis_url, broker_transport_options={"socket_timeout": 1.0}) as rig:
        outbox = rig.outbox(at_once=True)
        same = rig.app.task(name="same", shared=False)(_note)
        turns = [[f"no {number} in turn {each}" for number in documents] for each in range(2)]
        try:
            with gathered(outbox, rig.add.s("first", 0).set(task_id="first")) as sent:
                for number in documents:
                    tasks = [same.s(large).set(task_id=each[number]) for each in turns]
                    outbox.insert_one({"_id": number}, tasks=tasks)
                proxy.hold(turns[turn][15].encode())
            proxy.wait_until_held()
            proxy.black_hole()
            wait_for(lambda: outbox.status().dispatcher.broker_down)
            there, known = ids(), ["first", *turns[0][: 20 * turn]]
            if sent == [True] * turn + [False]:  # a turn that lasts too long is cut, and sends by more commands
                wait_for(lambda: outbox.status().pending == len(documents) * (2 - turn))
                assert there[: len(known)] == known
                assert there[len(known) :] == turns[turn][: len(there) - len(known)]
                assert 0 < len(there) - len(known) < len(documents)
        finally:
            proxy.pass_through()
        wait_for(lambda: settled(outbox))
        there += ids()
    first = {each: there.index(each) for each in there}
    assert all(first[turns[0][number]] < first[turns[1][number]] for number in documents)
