"""One message that the broker rejects holds its own partition; the others flow, and it is named."""

from __future__ import annotations

from typing import Any

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

_MEGABYTE = 1 << 20


def make_chain(deployment: MakeDeployment, spill_after: float) -> Deployment:
    """Make a bridge with one handler, on a broker that takes no message above a megabyte, also after a restart."""
    # By reference only what was stored.
    options = {"lease_ttl": 20, "max_message_bytes": 64 * _MEGABYTE, "spill_after": spill_after}
    return deployment("plain", options=options, redis=("--proto-max-bulk-len", "1mb"))


def write_huge(chain: Deployment, partition: int, megabytes: int) -> tuple[Due, Due]:
    """Write a change whose message is too large, and a small one behind it in its partition."""
    key = next(chain.keys("plain", partition))
    return chain.write("plain", key, 1, text="x" * megabytes * _MEGABYTE), chain.write("plain", key, 2)


def write_small(chain: Deployment, n: int) -> set[Due]:
    return {chain.write("plain", next(chain.keys("plain", index)), n) for index in (2, 3)}


def wait_started(chain: Deployment, items: set[Due]) -> None:
    for item in items:
        chain.wait_started(item)


def wait_rejected(chain: Deployment, count: int) -> list[Document]:
    def found() -> list[Document] | None:
        rejected = (chain.lease.get("report") or {}).get("rejected", [])
        return [*rejected, {}] if len(rejected) == count else None

    return wait_for(found, message=lambda: str(chain.lease))[:-1]


def test_documents_above_the_brokers_limit_reach_their_handlers_in_order(deployment: MakeDeployment) -> None:
    """P12: by reference, of 2 and 12 MB, also in a transaction, and the broker never holds them."""
    # A message that waits for a worker that starts slowly is not sent, and its changes not stored, once more.
    options = {"dispatch_grace": 60, "transaction_seconds": 30}
    chain = deployment("plain", "together", options=options, redis=("--proto-max-bulk-len", "1mb"))
    listener, _ = chain.both()
    for handler, index, megabytes in (("plain", 0, 2), ("plain", 1, 12), ("together", 0, 2)):
        key = next(chain.keys(handler, index))
        for n, size in enumerate((0, megabytes, 0), 1):
            chain.write(handler, key, n, text="x" * size * _MEGABYTE)
    chain.wait_done()
    chain.judge()
    assert "rejects the message" not in listener.text
    with chain.broker as broker:
        assert broker.info("memory")["used_memory_peak"] < 10 * _MEGABYTE


def test_messages_that_the_broker_rejects_hold_their_own_partitions_only(deployment: MakeDeployment) -> None:
    """
    P12, P16: two changes of 2 and 12 MB among small ones; once the limit is lifted all is done, each key in order.

    A broker that goes away meanwhile rejects none of the small ones, which flow when it is back.
    """
    chain = make_chain(deployment, spill_after=600)
    listener, _ = chain.both()
    huge = [*write_huge(chain, 0, 2), *write_huge(chain, 1, 12)]
    wait_started(chain, write_small(chain, 1))
    rejected = wait_rejected(chain, 2)
    assert {each["partition"] for each in rejected} == {chain.of(item)["_id"] for item in huge}
    assert all(each["key"] and each["error"] and each["since"] for each in rejected)
    assert all(chain.of(item)["committed"] == 0 for item in huge)

    chain.redis.kill()
    small = write_small(chain, 2)
    listener.wait_for_output("could not send messages")
    chain.redis.restart()
    chain.worker(name="restarted")
    wait_started(chain, small)
    assert {each["partition"] for each in wait_rejected(chain, 2)} == {chain.of(item)["_id"] for item in huge}

    with chain.broker as broker:
        broker.config_set("proto-max-bulk-len", 512 * _MEGABYTE)
    chain.wait_done()
    chain.judge()
    assert wait_rejected(chain, 0) == []


def test_a_partition_that_is_rejected_for_long_is_stored_and_its_changes_travel_by_reference(
    deployment: MakeDeployment,
) -> None:
    """P12, P17: the limit stays, and after `spill_after` all is done in order, without anybody's help."""
    chain = make_chain(deployment, spill_after=1)
    listener, _ = chain.both()
    write_huge(chain, 0, 2)
    write_huge(chain, 1, 6)
    write_small(chain, 1)
    chain.wait_done()
    chain.judge()
    assert listener.text.count("broker rejects the message ") == 2
    assert wait_rejected(chain, 0) == []
