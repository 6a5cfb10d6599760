"""What happens to runs whose messages a real broker takes, rejects, or is not there for."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import redis
from celery import Celery

from mongo_celery.bridge.listener.publishing import RunPublisher
from mongo_celery.bridge.listener.subscription import Dispatch
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.embedded import RedisServer
from tests.fixtures.messages import listening_for_events
from tests.fixtures.publishing import make_dispatch, make_publisher
from tests.fixtures.redis import MakeRedis
from tests.fixtures.samples import verify_run

_MEGABYTE = 1 << 20
_SMALL = 100


def dispatch(number: int, size: int = _SMALL, label: str = "") -> Dispatch:
    run = Run("shop", "record", 0, number, 1, 1, 1, [b"x" * size])
    return make_dispatch(run, "shop.record", "shop.0", label=label or f"({number})")


def publisher_on(server: RedisServer, **settings: Any) -> RunPublisher:
    options = BridgeOptions(name="shop", partitions=4, queues=1)
    app = Celery("shop", broker=server.url)
    app.conf.update(settings)
    return make_publisher(app, options, ["shop.0"], b"k" * 32)


def sent(dispatches: list[Dispatch]) -> list[int]:
    return [each.run.index for each in dispatches if each.partition.in_flight is not None]


def rejected(dispatches: list[Dispatch]) -> list[int]:
    return [each.run.index for each in dispatches if each.partition.rejection is not None]


def ask(server: RedisServer, command: str, *arguments: Any, **options: Any) -> Any:
    with redis.Redis.from_url(server.url) as client:
        return getattr(client, command)(*arguments, **options)


@pytest.mark.parametrize(
    ("settings", "encoding"),
    [
        ({}, None),
        ({"task_compression": "zlib"}, "base64"),
        ({"broker_transport_options": {"body_encoding": "base64"}}, "base64"),
    ],
    ids=["as text", "compressed", "as the app says"],
)
def test_bodies_go_to_redis_as_text_and_every_consumer_reads_them(
    make_redis: MakeRedis, settings: dict[str, Any], encoding: str | None
) -> None:
    """P11: a message says how its body is written, so that versions of listener and worker may differ."""
    server = make_redis()
    sender = publisher_on(server, **settings)
    assert sender.publish([dispatch(0)])
    assert sender.publish([dispatch(1, 2 * _MEGABYTE)]), "alone, on a connection of its own"
    sender.close()
    for raw in ask(server, "lrange", "shop.0", 0, -1):
        assert json.loads(raw)["properties"]["body_encoding"] == encoding
    with Celery("shop", broker=server.url).connection_for_read() as connection:
        queue = connection.SimpleQueue("shop.0")
        for number in range(2):
            message = queue.get(timeout=30)
            (envelope,), _, _ = message.payload
            size = 2 * _MEGABYTE if number else _SMALL
            assert verify_run("run", envelope, b"k" * 32).changes == (b"x" * size,), number
            message.requeue() if number == 0 else message.ack()
        assert queue.get(timeout=30).payload[0]
        queue.close()


def test_each_run_that_is_sent_has_celerys_event_if_the_app_asks_for_it(make_redis: MakeRedis) -> None:
    server = make_redis()
    sender = publisher_on(server, task_send_sent_event=True)
    with listening_for_events(server.url) as take:
        assert sender.publish([dispatch(number) for number in range(3)])
        assert sender.publish([dispatch(3, 2 * _MEGABYTE)]), "alone"
        events = take(4)
    sender.close()
    assert [(each["type"], each["queue"], each["args"]) for each in events] == [
        ("task-sent", "shop.0", f"({number})") for number in range(4)
    ]


@pytest.mark.parametrize("large", [2 * _MEGABYTE, 12 * _MEGABYTE])
def test_messages_that_are_too_large_are_rejected_and_no_other(make_redis: MakeRedis, large: int) -> None:
    """P12: wherever they stand among others, and however often; and so is one that cannot be serialised."""
    server = make_redis(options=("--proto-max-bulk-len", "1mb"))
    sender = publisher_on(server)
    sizes = [_SMALL, large, _SMALL, large, _SMALL]
    together = [dispatch(number, size) for number, size in enumerate(sizes)]
    assert sender.publish(together)
    assert (sent(together), rejected(together)) == ([0, 2, 4], [1, 3])
    again = [dispatch(5), together[1]]
    assert sender.publish(again)
    assert (sent(again), rejected(again), sender.is_down) == ([5], [1], False)
    assert together[1].partition.rejection is not None
    assert together[1].partition.rejection.count == 2
    broken = [dispatch(6), dispatch(7, 1, label=cast("str", object()))]
    assert sender.publish(broken)
    assert (sent(broken), rejected(broken), sender.is_down) == ([6], [7], False)
    assert ask(server, "llen", "shop.0") == 5, "nothing was sent twice"
    sender.close()


def test_a_broker_that_takes_nothing_is_asked_a_few_times_only(make_redis: MakeRedis) -> None:
    """P12: its memory is full; no storm of single attempts, and when there is room again all goes out."""
    server = make_redis(options=("--maxmemory", "1kb"))
    sender = publisher_on(server)
    together = [dispatch(number) for number in range(50)]
    assert not sender.publish(together)
    assert sender.is_down
    assert sent(together) == []
    assert len(rejected(together)) < 5
    ask(server, "config_set", "maxmemory", 0)
    assert sender.publish(together)
    assert (len(sent(together)), sender.is_down) == (50, False)
    sender.close()


def test_a_broker_that_is_away_rejects_nothing(make_redis: MakeRedis) -> None:
    """P16: neither before the first connection nor after; what was cut while it was idle is simply opened again."""
    server = make_redis()
    sender = publisher_on(server)
    assert sender.publish([dispatch(0)])
    ask(server, "client_kill_filter", skipme=True)
    after_the_cut = [dispatch(0), dispatch(1, _MEGABYTE)]
    assert sender.publish(after_the_cut)
    assert (sent(after_the_cut), rejected(after_the_cut), sender.is_down) == ([0, 1], [], False)
    server.kill()
    for _ in range(2):
        away = [dispatch(2), dispatch(3, _MEGABYTE)]
        assert not sender.publish(away)
        assert sender.is_down
        assert (sent(away), rejected(away)) == ([], [])
