"""Brokers that outlive a machine: RabbitMQ's quorum queues, Redis with sentinels, and a node of a Redis cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from kombu import Connection, Queue
from pymongo import MongoClient
from redis.exceptions import ResponseError

from tests.acceptance.chain_rig import Chain
from tests.chaos.history import Due
from tests.fixtures.process import wait_for
from tests.fixtures.rabbitmq import RabbitCluster
from tests.fixtures.redis import MakeRedis
from tests.fixtures.sentinel import WatchedRedis

Document = dict[str, Any]
KEYS = [f"key-{number}" for number in range(12)]
QUORUM = {"task_create_missing_queue_type": "quorum", "task_default_queue_type": "quorum"}
CONFIRMED = {"confirm_publish": True, "read_timeout": 5, "write_timeout": 5}
_SLOTS = 16384
_SLOTS_AT_ONCE = 4096


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Give a place for a bridge, beside that of its broker."""
    made = tmp_path / "bridge"
    made.mkdir()
    return made


@contextmanager
def _bridge(
    client: MongoClient[Document],
    mongo_url: str,
    directory: Path,
    broker_url: str,
    *,
    transport: Mapping[str, Any] | None = None,
    conf: Mapping[str, Any] | None = None,
) -> Iterator[Chain]:
    """A bridge with two handlers on that broker, whose listener and worker are started."""
    options = {"partitions": 4, "max_crashes": 9}
    with Chain(
        client,
        mongo_url,
        directory,
        handlers=["plain", "other"],
        options=options,
        transport=transport,
        conf=conf,
        environment={"CHAIN_BROKER": broker_url},
    ) as chain:
        chain.both()
        yield chain


class _Writing:
    """Changes that are written in rounds: each is one more of every key of both handlers."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._rounds = 0

    def go_on(self, rounds: int) -> Due:
        """Write so many rounds, and return the last change."""
        for _ in range(rounds):
            self._rounds += 1
            for key in KEYS:
                self._chain.write("other", key, self._rounds)
                last = self._chain.write("plain", key, self._rounds, seconds=0.01)
        return last


@pytest.mark.slow
def test_quorum_queues_lose_their_leaders_under_load_and_the_bridge_nothing(
    mongo_client: MongoClient[Document], mongo_url: str, directory: Path, rabbit_cluster: RabbitCluster
) -> None:
    """P1, P2, P6: each node in turn is killed while changes flow; all are handled in order, and none starts twice."""
    with _bridge(mongo_client, mongo_url, directory, rabbit_cluster.url, transport=CONFIRMED, conf=QUORUM) as chain:
        writing = _Writing(chain)
        chain.wait_started(writing.go_on(1))
        assert _is_quorum(rabbit_cluster.nodes[1].url, "chain.0")
        for node in rabbit_cluster.nodes[:2]:
            writing.go_on(6)
            node.kill()
            writing.go_on(6)
            chain.wait_done()
            node.start()
        writing.go_on(2)
        chain.wait_done()
        assert _check(chain)["broker_confirms"] == "ok"
        chain.judge()


@pytest.mark.slow
def test_sentinels_fail_over_under_load_and_the_bridge_loses_nothing(
    mongo_client: MongoClient[Document], mongo_url: str, directory: Path, watched_redis: WatchedRedis
) -> None:
    """P1, P2, P6: what the dead master had and its replica not is sent again; each server is the master once more."""
    with _bridge(mongo_client, mongo_url, directory, watched_redis.url, transport=watched_redis.transport) as chain:
        writing = _Writing(chain)
        chain.wait_started(writing.go_on(1))
        for _ in range(2):
            writing.go_on(6)
            killed = watched_redis.kill_master()
            writing.go_on(6)
            watched_redis.await_successor(killed)
            chain.wait_done()
        assert _check(chain)["redis_eviction"] == "ok"
        chain.judge()


@pytest.mark.slow
def test_a_node_of_a_redis_cluster_serves_where_all_keys_have_one_slot(
    mongo_client: MongoClient[Document], mongo_url: str, directory: Path, make_redis: MakeRedis
) -> None:
    """Celery's Redis transport reads several keys at once: without a hash tag in its prefix a cluster refuses that."""
    server = make_redis(options=["--cluster-enabled", "yes"])
    with Connection(server.url) as connection:
        client: Any = connection.default_channel.client  # type: ignore[attr-defined]
        for first in range(0, _SLOTS, _SLOTS_AT_ONCE):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + _SLOTS_AT_ONCE))
        wait_for(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        with pytest.raises(ResponseError, match="hash to the same slot"):
            client.brpop(["chain.0", "chain.1"], timeout=1)
    with _bridge(mongo_client, mongo_url, directory, server.url, transport={"global_keyprefix": "{bridge}"}) as chain:
        _Writing(chain).go_on(4)
        chain.wait_done()
        chain.judge()


def _check(chain: Chain) -> dict[str, str]:
    """The findings of the preflight: level by name."""
    return {each["code"]: each["severity"] for each in chain.changes("check")["findings"]}


def _is_quorum(url: str, name: str) -> bool:
    """What RabbitMQ says when the queue is to be a classic one."""
    with Connection(url) as connection:
        queue: Any = Queue(name, queue_arguments={"x-queue-type": "classic"})
        try:
            queue(connection.default_channel).queue_declare()
        except PreconditionFailed as error:
            return "quorum" in str(error)
    return False
