"""Changes that are larger than what the broker takes: they travel by reference, and nothing else waits for them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, Make, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

_MEGABYTE = 1 << 20


@pytest.fixture
def make_chain(deployment: MakeDeployment) -> Make:
    """Give bridges with two handlers, on a broker that takes no message above a megabyte, the least it can be told."""
    # A message that waits for a worker that starts slowly is not sent, and its changes not stored, once more.
    given: Document = {"options": {"dispatch_grace": 60}, "redis": ("--proto-max-bulk-len", "1mb")}
    return lambda **servers: deployment("plain", "together", **given, **servers)


@pytest.fixture
def chain(make_chain: Make) -> Deployment:
    """Give such a bridge on the session's MongoDB."""
    return make_chain()


def write(chain: Deployment, handler: str, megabytes: int, partition: int = 0) -> list[Due]:
    """Write a change of this size between two small ones of the same document."""
    key = next(chain.keys(handler, partition, f"{megabytes}mb"))
    blob = "x" * megabytes * _MEGABYTE
    return [chain.write(handler, key, 1), chain.write(handler, key, 2, blob=blob), chain.write(handler, key, 3)]


def is_out(chain: Deployment) -> bool:
    """Whether a message is in one of the queues."""
    with chain.broker as broker:
        return any(broker.llen(queue) for queue in broker.keys("chain.[0-9]*"))


def test_documents_above_the_brokers_limit_reach_their_handlers_in_order(chain: Deployment) -> None:
    """P12: of 2 and 12 MB, also in a transaction, on a broker that never holds them."""
    listener, _ = chain.both()
    write(chain, "plain", 2, partition=0)
    write(chain, "plain", 12, partition=1)
    write(chain, "together", 2)
    chain.wait_done()
    chain.judge()
    assert "rejects the message" not in listener.text
    with chain.broker as broker:
        assert broker.info("memory")["used_memory_peak"] < 10 * _MEGABYTE


def test_stored_bytes_that_somebody_removes_are_waited_for(
    make_chain: Make, make_replica_set: MakeReplicaSet, make_client: MakeClient
) -> None:
    """P13, P14: the worker names what is missing, counts nothing, and runs it once it is back; others continue."""
    own = make_replica_set()
    chain = make_chain(client=make_client(own.url), url=own.url)
    listener = chain.listener()
    key, other = next(chain.keys("plain", 0)), next(chain.keys("plain", 1))
    chain.write("plain", key, 1, blob=os.urandom(_MEGABYTE).hex())
    wait_for(lambda: is_out(chain), message="the large change is sent")
    saved = list(chain.state["backlog"].find())
    assert chain.state["backlog"].delete_many({}).deleted_count == len(saved) == 1
    chain.write("plain", key, 2)
    done = chain.write("plain", other, 1)

    worker = chain.worker()
    worker.wait_for_output(r"the stored bytes of change 1 of plain/0, token 82[0-9A-F]+, are missing")
    listener.wait_for_output("partition plain/0 is blocked: its stored changes")
    wait_for(lambda: chain.starts(done), message="others go on")
    chain.state["backlog"].insert_many(saved)
    chain.is_recorded = False
    chain.wait_done()
    chain.judge()
    assert [start.retries for start in chain.starts()] == [0, 0, 0]
