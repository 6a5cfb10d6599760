"""Brokers that outlive a machine: RabbitMQ's quorum queues, Redis with sentinels, and a node of a Redis cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from kombu import Connection, Queue
from redis.exceptions import ResponseError

from tests.fixtures.process import wait_for
from tests.fixtures.rabbitmq import RabbitCluster
from tests.fixtures.redis import MakeRedis
from tests.fixtures.sentinel import WatchedRedis
from tests.rig.deployment import Deployment, Make, MakeDeployment
from tests.rig.history import Due

KEYS = [f"key-{number}" for number in range(12)]
QUORUM = {"task_create_missing_queue_type": "quorum", "task_default_queue_type": "quorum"}
CONFIRMED = {"confirm_publish": True, "read_timeout": 5, "write_timeout": 5}
_SLOTS = 16384
_SLOTS_AT_ONCE = 4096


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "bridge"
    made.mkdir()
    return made


@pytest.fixture
def make_chain(deployment: MakeDeployment, directory: Path) -> Make:
    """Give bridges with two handlers on a broker, whose listener and worker are started."""
    options = {"partitions": 4, "max_crashes": 9}
    return lambda broker_url, **given: deployment(
        "plain",
        "other",
        directory=directory,
        options=options,
        environment={"PROJECT_BROKER": broker_url},
        **{"start": "both", **given},
    )


class _Writing:
    """Changes that are written in rounds: each is one more of every key of both handlers."""

    def __init__(self, chain: Deployment) -> None:
        self._chain = chain
        self._rounds = 0

    def go_on(self, rounds: int) -> Due:
        for _ in range(rounds):
            self._rounds += 1
            for key in KEYS:
                self._chain.write("other", key, self._rounds)
                last = self._chain.write("plain", key, self._rounds, seconds=0.01)
        return last


@pytest.mark.slow
def test_quorum_queues_lose_their_leaders_under_load_and_the_bridge_nothing(
    make_chain: Make, rabbit_cluster: RabbitCluster
) -> None:
    """P1, P2, P6: each node in turn is killed while changes flow; all are handled in order, and none starts twice."""
    chain = make_chain(rabbit_cluster.url, transport=CONFIRMED, conf=QUORUM)
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
    make_chain: Make, watched_redis: WatchedRedis
) -> None:
    """
    P1, P2, P6: what the dead master had and its replica not is sent again; each server is the master once more.

    Kombu's transport can fail while no master answers, which ends the worker. What it ran then may start once more.
    """
    chain = make_chain(watched_redis.url, transport=watched_redis.transport, start="listener")
    writing = _Writing(chain)
    with chain.kept_worker() as worker:
        chain.wait_started(writing.go_on(1))
        for _ in range(2):
            writing.go_on(6)
            killed = watched_redis.kill_master()
            writing.go_on(6)
            watched_redis.await_successor(killed)
            chain.wait_done()
    assert _check(chain)["redis_eviction"] == "ok"
    chain.judge(spare=len(worker.ends))


@pytest.mark.slow
def test_a_node_of_a_redis_cluster_serves_where_all_keys_have_one_slot(make_chain: Make, make_redis: MakeRedis) -> None:
    """Celery's Redis transport reads several keys at once: without a hash tag in its prefix a cluster refuses that."""
    server = make_redis(options=["--cluster-enabled", "yes"])
    with Connection(server.url) as connection:
        client: Any = connection.default_channel.client  # type: ignore[attr-defined]
        for first in range(0, _SLOTS, _SLOTS_AT_ONCE):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + _SLOTS_AT_ONCE))
        wait_for(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        with pytest.raises(ResponseError, match="hash to the same slot"):
            client.brpop(["chain.0", "chain.1"], timeout=1)
    chain = make_chain(server.url, transport={"global_keyprefix": "{bridge}"})
    _Writing(chain).go_on(4)
    chain.wait_done()
    chain.judge()


def _check(chain: Deployment) -> dict[str, str]:
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
