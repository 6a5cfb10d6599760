"""What stands costs its own partition and nothing else, for as long as it stands: it is stored with its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet
from tests.acceptance.isolation.rolling_rig import Rolling
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.rig.deployment import MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]
Make = Callable[..., Rolling]
HOUR = 3600
_ROUNDS_PER_SECOND_MIN = 5
"""A change of each partition, on a machine that is busy with much else."""


@pytest.fixture
def make(deployment: MakeDeployment) -> Make:
    """Give what makes a bridge with these handlers."""
    return lambda *handlers, **options: deployment(*handlers, kind=Rolling, options=options)


@pytest.fixture
def make_rolling(
    deployment: MakeDeployment, rolling_oplog: MongoReplicaSet, make_client: Callable[..., MongoClient[Document]]
) -> Make:
    """Give what makes a bridge on an oplog that rolls, with these handlers."""
    given: Document = {"kind": Rolling, "client": make_client(rolling_oplog.url), "url": rolling_oplog.url}
    return lambda *handlers, **options: deployment(*handlers, options=options, **given)


def wait_committed(chain: Rolling, *, but: Due | None = None, patience: float = PATIENCE_SECONDS) -> None:
    """Wait until all that was written is committed; of one partition nothing, if so."""
    owed = Counter((item.handler, chain.partition_of(item.handler, item.key)) for item in chain.written)
    if but is not None:
        del owed[but.handler, chain.partition_of(but.handler, but.key)]

    def found() -> dict[tuple[str, int], int]:
        return {place: int(chain.partition(*place)["committed"]) for place in owed}

    wait_for(lambda: found() == owed, patience, lambda: f"owed {owed}, committed {found()}, {chain.lease['report']}")


def write_around(chain: Rolling, handler: str, count: int, first: int = 1, **do: Any) -> None:
    """Write so many changes of a document in each partition, in turns."""
    keys = [next(chain.keys(handler, index)) for index in range(chain.partitions)]
    for n in range(first, first + count):
        for key in keys:
            chain.write(handler, key, n, **do)


def stored_reasons(chain: Rolling) -> dict[str, str]:
    """Why partitions are marked, by `_id`."""
    return {each["_id"]: each["stored"]["reason"] for each in chain.state["partitions"].find({"stored": {"$ne": None}})}


def a_halted_partition(chain: Rolling, rounds: int) -> None:
    """A partition halts, much is written, the oplog rolls over it, the listener is started anew: nothing is lost."""
    patience = max(PATIENCE_SECONDS, rounds / _ROUNDS_PER_SECOND_MIN)
    listener, _ = chain.both()
    bad = chain.allow(chain.write("halting", "bad", 1, act="raise"))
    chain.wait_state(bad, lambda state: state["state"] == "halted")

    write_around(chain, "halting", rounds)

    wait_committed(chain, but=bad, patience=patience)
    chain.wait_passed("halting")
    assert chain.of(bad)["state"] == "halted"
    assert list(stored_reasons(chain).values()) == ["halted"]
    chain.roll()
    chain.keep()
    wait_for(lambda: chain.watermark("halting") > chain.oldest, message="a watermark in the oplog")
    assert listener.terminate() == 0
    again = chain.listener("again")
    write_around(chain, "halting", 3, first=rounds + 1)
    wait_committed(chain, but=bad, patience=patience)
    assert chain.of(bad)["state"] == "halted"
    done = chain.command("retry", "halting", str(chain.partition_of("halting", "bad")))
    assert done.returncode == 0, done.stderr
    wait_committed(chain, patience=patience)
    chain.wait_removed()
    assert "is stopped: its position is" not in again.text
    chain.judge()


def test_a_halted_partition_holds_nobody_and_loses_nothing(make_rolling: Make) -> None:
    """P12, P13: others run, the watermark goes on, and a later retry finds all of it, in order."""
    a_halted_partition(make_rolling("halting", spill_after=1, run_size=10), 40)


@pytest.mark.slow
def test_a_halted_partition_under_ten_thousand_writes(make_rolling: Make) -> None:
    """P12, P13: as above, with more than memory holds."""
    a_halted_partition(make_rolling("halting", spill_after=1, run_size=100, buffer_bytes=300_000), 2500)


def test_a_retry_of_an_hour_waits_outside_of_memory(make: Make) -> None:
    """P12, P13: a parked change is what its partition waits for, also in the next listener."""
    chain = make("plain", spill_after=1, run_size=5)
    listener, _ = chain.both()
    parked = chain.allow(chain.write("plain", "parked", 1, act="retry", options={"countdown": HOUR}))
    chain.wait_state(parked, lambda state: state["retry"])

    write_around(chain, "plain", 10)

    wait_committed(chain, but=parked)
    chain.wait_passed("plain")
    # Other tests write to this server too: a quarter of its oplog may go by before the second is over.
    assert list(stored_reasons(chain).values()) in (["retrying"], ["oplog"])
    assert listener.terminate() == 0
    chain.listener("again")
    done = chain.command("retry", "plain", str(chain.partition_of("plain", "parked")))
    assert done.returncode == 0, done.stderr
    wait_committed(chain)
    chain.wait_removed()
    chain.judge()
