"""What brokers say of their queues: a real Redis, and a transport that tells little."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from kombu.asynchronous.timer import Timer

from mongo_celery.broker import late_notes
from mongo_celery.broker.connection import reach_broker
from mongo_celery.broker.occupancy import Occupancy, read_occupancy
from mongo_celery.embedded.server import free_port
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.entries import make_task_entries
from mongo_celery.outbox.publisher import Publisher

TASK = "shop.handle"


def an_app(url: str, **transport: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.broker_transport_options = transport

    @app.task(name=TASK, shared=False)
    def handle(_body: str) -> None: ...

    return app


def send(app: Celery, queue: str, count: int = 1, size: int = 10, **options: Any) -> None:
    for _ in range(count):
        app.tasks[TASK].apply_async(("x" * size,), queue=queue, **options)


def take(connection: Connection, queue: str, count: int = 1) -> None:
    """Take messages as a worker does that does not acknowledge them."""
    channel: Any = connection.default_channel
    for _ in range(count):
        assert channel.basic_get(queue) is not None


@pytest.mark.parametrize("url", ["redis://localhost:1/0?protocol=3", "socket:///tmp/redis.sock"])
def test_a_url_that_kombu_refuses_is_a_mistake_of_the_configuration(url: str) -> None:
    """P9: by one sentence, and no traceback."""
    with pytest.raises(ConfigurationError):
        reach_broker(an_app(url), 1)


def test_a_broker_behind_servers_that_are_away_is_reached(redis_url: str) -> None:
    """Celery tries each URL of `broker_url` in turn; so do the listener, the outbox and the commands."""
    away = [f"redis://127.0.0.1:{free_port()}/0" for _ in range(4)]
    app = an_app("x")
    app.conf.update(broker_url=[*away, redis_url])
    reach_broker(app, 3)
    publisher = Publisher(app)
    try:
        (entry,) = make_task_entries(app, app.tasks[TASK].s("x"), datetime.now(UTC))
        publisher.publish(entry, "order")
    finally:
        publisher.close()


def test_redis_shows_what_waits_and_what_workers_have(redis_url: str) -> None:
    """By queue and by task; messages of others do not count as ours. Megabytes that workers have are not looked at."""
    app = an_app(redis_url)
    send(app, "shop.0", 5)
    send(app, "shop.1", 1)
    send(app, "else", 1)
    send(app, "large", 2, size=5 << 20)
    with app.connection_for_write() as worker, app.connection_for_write() as asking:
        take(worker, "shop.0", 2)
        take(worker, "else", 1)
        found = read_occupancy(asking, ["shop.0", "shop.1", "shop.2"])
        assert found == {
            "shop.0": Occupancy(3, unacknowledged={TASK}),
            "shop.1": Occupancy(1, unacknowledged=frozenset()),
            "shop.2": Occupancy(0, unacknowledged=frozenset()),
        }
        take(worker, "large", 2)
        assert read_occupancy(asking, ["large"]) == {"large": Occupancy(0, unacknowledged=None)}


def test_redis_has_a_note_of_a_message_that_a_worker_holds_for_longer(
    redis_url: str, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8: until then of messages of other queues only. At the end of the worker all that it holds waits again."""
    app, timer = an_app(redis_url), Timer()
    monkeypatch.setattr(late_notes, "HELD_SECONDS", 60.0)

    def count_notes() -> int:
        return int(redis_client.hlen("unacked"))

    send(app, "shop.0", 4)
    send(app, "else", 1)
    with app.connection_for_write() as worker, app.connection_for_write() as asking:
        channel: Any = worker.default_channel
        late_notes.note_late(channel, timer, lambda message: message.delivery_info["routing_key"] != "else")
        take(worker, "else")
        quick, slow, put_back = (channel.basic_get("shop.0") for _ in range(3))
        quick.ack()
        assert count_notes() == 1
        monkeypatch.setattr(late_notes, "HELD_SECONDS", 0.0)
        timer.apply_entry(timer.queue[0].entry)  # as if the minute were over
        assert count_notes() == 3
        slow.ack()
        put_back.reject(requeue=True)
        assert count_notes() == 1
        take(worker, "shop.0", 2)
        channel.close()
        found = read_occupancy(asking, ["shop.0", "else"])
        assert found == dict.fromkeys(found, Occupancy(1, unacknowledged=frozenset())) | {
            "shop.0": Occupancy(2, unacknowledged=frozenset())
        }


def test_redis_counts_all_priorities_under_a_prefix_of_its_own(redis_url: str) -> None:
    """Queues of other priorities are other lists; a prefix stands before every key."""
    app = an_app(redis_url, global_keyprefix="mine:")
    send(app, "shop.0", 2, priority=9)
    send(app, "shop.0", 1, priority=0)
    with app.connection_for_write() as worker, app.connection_for_write() as asking:
        take(worker, "shop.0")
        assert read_occupancy(asking, ["shop.0"]) == {"shop.0": Occupancy(2, unacknowledged={TASK})}


def test_a_redis_that_refuses_scripts_still_says_what_waits(redis_url: str, redis_client: Any) -> None:
    """A restricted user; what is not known is None."""
    rights: Any = {"keys": ["*"], "channels": ["*"], "commands": ["+@all", "-eval"]}
    redis_client.acl_setuser("restricted", enabled=True, nopass=True, **rights)
    try:
        app = an_app(redis_url.replace("redis://", "redis://restricted:any@"))
        send(app, "shop.0")
        with app.connection_for_write() as asking:
            assert read_occupancy(asking, ["shop.0"]) == {"shop.0": Occupancy(1, unacknowledged=None)}
    finally:
        redis_client.acl_deluser("restricted")


def test_a_redis_that_is_not_there_is_an_error(make_redis: Any) -> None:
    server = make_redis()
    with an_app(server.url).connection_for_write() as asking:
        assert read_occupancy(asking, ["shop.0"])
        server.kill()
        with pytest.raises(asking.connection_errors):
            read_occupancy(asking, ["shop.0"])


def test_another_transport_says_what_waits_and_nothing_else() -> None:
    app = an_app("memory://")
    send(app, "occupancy.0", 3)  # this transport is shared by the whole process
    with app.connection_for_write() as asking:
        found = read_occupancy(asking, ["occupancy.0", "occupancy.1"])
        assert found["occupancy.0"] == Occupancy(3)
        assert found["occupancy.1"].waiting == 0
