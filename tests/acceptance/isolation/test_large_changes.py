"""Changes that are larger than what the broker takes: they travel by reference, and nothing else waits for them."""

from __future__ import annotations

from typing import Any

import pytest

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
    return make_chain()


def write(chain: Deployment, handler: str, megabytes: int, partition: int = 0) -> list[Due]:
    """Write a change of this size between two small ones of the same document."""
    key = next(chain.keys(handler, partition, f"{megabytes}mb"))
    blob = "x" * megabytes * _MEGABYTE
    return [chain.write(handler, key, 1), chain.write(handler, key, 2, blob=blob), chain.write(handler, key, 3)]


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
