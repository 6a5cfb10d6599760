"""A handler's delay in real processes: changes wait in memory and stored, and a take-over loses none."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

SECONDS = 4
"""As `delay_handlers` has it; longer than a busy machine needs to write a burst."""
HANDLERS = "tests.acceptance.delay_handlers"


def read_seconds(moment: datetime) -> float:
    return moment.replace(tzinfo=UTC).timestamp()


def assert_waited(chain: Deployment, handler: str, count: int) -> None:
    """P10: no change ran sooner than its delay after its change, by the clock of the server."""
    found = [each for each in chain.data["times"].find() if f".{handler}/" in each["_id"]]
    assert len(found) == count
    early = [each for each in found if read_seconds(each["handled"]) - each["changed"].time < SECONDS]
    assert early == []


def test_delayed_changes_survive_a_take_over_in_memory_and_stored(deployment: MakeDeployment) -> None:
    """P1, P2, P13: what waits is stored after `spill_after`, is shown, blocks nothing, and runs in its order."""
    chain = deployment("delayed", include=HANDLERS, options={"spill_after": 0.5, "partitions": 2})
    listener, _ = chain.both()
    chain.write_many("delayed", ["a", "b", "c"], 2)
    wait_for(lambda: chain.state["partitions"].find_one({"stored.reason": "delayed"}), message="changes are stored")

    def find_delayed() -> list[dict[str, Any]]:
        chain.write("delayed", f"shown{len(chain.written)}", 1)  # the others may be handled before a slow command
        return [each for each in chain.changes("status")["handlers"] if each["delayed"]]

    (handler,) = wait_for(find_delayed)
    assert (handler["state"], handler["delay_seconds"]) == ("flowing", SECONDS)
    chain.write_many("delayed", ["d", "e"], 2)
    listener.kill()
    chain.listener("second")
    chain.wait_done()
    chain.judge()
    assert_waited(chain, "delayed", len(chain.written))


def test_the_last_state_of_a_burst_is_handled_once(deployment: MakeDeployment) -> None:
    """P1: also if the listener changes in its middle; a document beside it is handled once as well."""
    chain = deployment("settled", include=HANDLERS, options={"spill_after": 0.5, "partitions": 1})
    listener, _ = chain.both()
    for n in range(1, 11):
        chain.give_up(chain.write("settled", "busy", n))
    chain.write("settled", "calm", 1)
    listener.kill()
    for n in range(11, 21):
        chain.give_up(chain.write("settled", "busy", n))
    chain.listener("second")
    chain.wait_done()
    calls = [(each["key"], each["n"]) for each in chain.data["calls"].find()]
    assert sorted(calls) == [("busy", 20), ("calm", 1)]
    assert_waited(chain, "settled", 2)
