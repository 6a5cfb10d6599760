"""A new listener leads all that it can win, at once: however many handlers there are, and whatever is locked."""

from __future__ import annotations

import signal

from tests.fixtures.process import wait_for
from tests.rig.deployment import MakeDeployment


def test_a_partition_that_a_dead_client_has_locked_keeps_no_other_from_being_led(deployment: MakeDeployment) -> None:
    """P12: its open transaction never ends by itself; when it has ended, that partition is taken over too."""
    chain = deployment("plain")
    first, _ = chain.both()
    done = chain.write("plain", next(chain.keys("plain", 0)), 1)
    chain.wait_done()
    where = {"_id": chain.of(done)["_id"]}
    with chain.client.start_session() as session:
        session.start_transaction()
        chain.state["partitions"].update_one(where, {"$set": {"note": 1}}, session=session)
        first.send(signal.SIGKILL)
        second = chain.listener("second")
        locked = chain.write("plain", done.key, 2)
        free = [chain.write("plain", next(chain.keys("plain", index)), 1) for index in (1, 2, 3)]
        for item in free:
            chain.wait_started(item)
        lease = wait_for(lambda: chain.state["leases"].find_one({"report.locked": [where["_id"]]}))
        assert lease["term"] > chain.of(locked)["term"], "it is not won"
        # The server has not ended the transaction: nobody has waited for that.
        chain.state["partitions"].update_one(where, {"$set": {"note": 2}}, session=session)
        assert chain.starts(locked) == []
        session.abort_transaction()
    chain.wait_done()
    second.wait_for_output("1 partitions are no longer locked")
    chain.judge()
