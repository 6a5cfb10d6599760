"""What stands costs its own partition and nothing else, for as long as it stands: it is stored with its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet
from tests.acceptance.isolation.rolling_rig import Rolling
from tests.fixtures.process import wait_for
from tests.rig.deployment import MakeDeployment
from tests.rig.history import Due

ROUNDS = 40


def write_around(chain: Rolling, first: int, count: int) -> set[Due]:
    """Write so many changes of a document in each partition, in turns; those of the first partition."""
    keys = [next(chain.keys("halting", index)) for index in range(chain.partitions)]
    written = [chain.write("halting", key, n) for n in range(first, first + count) for key in keys]
    return {item for item in written if item.key == keys[0]}


def test_a_halted_partition_holds_nobody_and_loses_nothing(
    deployment: MakeDeployment, rolling_oplog: MongoReplicaSet, make_client: Callable[..., MongoClient[Any]]
) -> None:
    """P12, P13: others run, the oplog rolls, a listener starts anew, and a later retry finds all of it, in order."""
    chain = deployment(
        "halting",
        kind=Rolling,
        client=make_client(rolling_oplog.url),
        url=rolling_oplog.url,
        options={"spill_after": 1, "run_size": 10},
    )
    listener, _ = chain.both()
    bad = chain.allow(chain.write("halting", next(chain.keys("halting", 0, "bad")), 1, act="raise"))
    chain.wait_state(bad, lambda state: state["state"] == "halted")

    behind = {bad, *write_around(chain, 1, ROUNDS)}

    chain.wait_effects(but=behind)
    chain.wait_passed("halting")
    stored = chain.state["partitions"].find({"stored": {"$ne": None}})
    wait_for(lambda: [each["stored"]["reason"] for each in stored.clone()] == ["halted"])
    assert chain.of(bad)["state"] == "halted"
    chain.roll()
    chain.keep()
    wait_for(lambda: chain.watermark("halting") > chain.oldest, message="a watermark in the oplog")
    assert listener.terminate() == 0
    again = chain.listener("again")
    chain.wait_effects(but=behind | write_around(chain, ROUNDS + 1, 3))
    assert chain.of(bad)["state"] == "halted"
    assert chain.command("retry", "halting", "0").returncode == 0
    chain.wait_done()
    chain.wait_removed()
    assert "is stopped: its position is" not in again.text
    chain.judge()
