"""One message that the broker rejects holds its own partition; the others flow, and it is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

_MEGABYTE = 1 << 20
_SMALL = 20


def make_chain(deployment: MakeDeployment, spill_after: float) -> Deployment:
    """Make a bridge with one handler, on a broker that takes no message above a megabyte, also after a restart."""
    options = {"max_message_bytes": 64 * _MEGABYTE, "spill_after": spill_after}  # by reference only what was stored
    return deployment("plain", options=options, redis=("--proto-max-bulk-len", "1mb"))


def lift_the_limit(chain: Deployment) -> None:
    """Let the broker take messages of any size."""
    with chain.broker as broker:
        broker.config_set("proto-max-bulk-len", 512 * _MEGABYTE)


def write_huge(chain: Deployment, partition: int, megabytes: int) -> tuple[Due, Due]:
    """Write a change whose message is too large, and a small one behind it in its partition."""
    key = next(chain.keys("plain", partition))
    return chain.write("plain", key, 1, text="x" * megabytes * _MEGABYTE), chain.write("plain", key, 2)


def write_small(chain: Deployment, *partitions: int, prefix: str = "small") -> list[Due]:
    """Write small changes of these partitions, one a key."""
    keys = {partition: chain.keys("plain", partition, prefix) for partition in partitions}
    return [chain.write("plain", next(keys[partition]), 1) for _ in range(_SMALL // len(keys)) for partition in keys]


def wait_started(chain: Deployment, items: list[Due]) -> None:
    """Wait until the handler has started for each of these changes."""
    wanted = {(item.key, item.n) for item in items}

    def missing() -> set[tuple[str, int]]:
        return wanted - {(start.key, start.n) for start in chain.starts()}

    wait_for(lambda: not missing(), message=lambda: f"not started: {missing()}")


def reported(chain: Deployment, condition: Callable[[list[Document]], object]) -> list[Document]:
    """Wait until what the lease says of rejected messages fulfils a condition, and return it."""

    def found() -> list[Document] | None:
        lease = chain.state["leases"].find_one({"_id": "chain"}) or {}
        rejected = (lease.get("report") or {}).get("rejected", [])
        return [*rejected, {}] if condition(rejected) else None

    return wait_for(found, message=lambda: f"lease: {chain.state['leases'].find_one()}")[:-1]


def rejections(listener: ProjectProcess) -> list[str]:
    """What the listener has said of rejected messages."""
    return re.findall(r"broker rejects the message .*", listener.text)


def test_messages_that_the_broker_rejects_hold_their_own_partitions_only(deployment: MakeDeployment) -> None:
    """
    P12, P16: two changes of 2 and 12 MB among small ones; once the limit is lifted all is done, each key in order.

    A broker that goes away meanwhile rejects none of the small ones, which flow when it is back.
    """
    chain = make_chain(deployment, spill_after=600)
    listener, _ = chain.both()
    huge = [*write_huge(chain, 0, 2), *write_huge(chain, 1, 12)]
    wait_started(chain, write_small(chain, 2, 3))

    rejected = reported(chain, lambda found: len(found) == 2)
    assert {each["partition"] for each in rejected} == {chain.of(item)["_id"] for item in huge}
    assert all(each["key"] and each["error"] and each["since"] for each in rejected)
    assert all(chain.of(item)["committed"] == 0 for item in huge)
    wait_started(chain, write_small(chain, 2, 3, prefix="later"))

    chain.redis.kill()
    small = write_small(chain, 2, 3, prefix="away")
    listener.wait_for_output("could not send messages")
    chain.redis.restart()
    chain.worker(name="restarted")
    wait_started(chain, small)
    assert {each["partition"] for each in reported(chain, lambda found: len(found) == 2)} == {
        chain.of(item)["_id"] for item in huge
    }
    for line in rejections(listener):
        assert any(f"'{item.key}'" in line for item in huge), "nothing small was taken for rejected"

    lift_the_limit(chain)
    chain.wait_done()
    chain.judge()
    assert reported(chain, lambda found: not found) == []


def test_a_partition_that_is_rejected_for_long_is_stored_and_its_changes_travel_by_reference(
    deployment: MakeDeployment,
) -> None:
    """P12, P17: the limit stays, and after `spill_after` all is done in order, without anybody's help."""
    chain = make_chain(deployment, spill_after=1)
    listener, _ = chain.both()
    write_huge(chain, 0, 2)
    write_huge(chain, 1, 6)
    write_small(chain, 2, 3)
    chain.wait_done()
    chain.judge()
    assert len(rejections(listener)) == 2
    assert reported(chain, lambda found: not found) == []
