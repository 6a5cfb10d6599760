"""Positions that a person moves, with real processes: everything again, in order, and never the older data last."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]

HANDLERS = "tests.acceptance.isolation.dead_letter_handlers"


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    return deployment("copied", include=HANDLERS, options={"partitions": 2})


def _copies(chain: Deployment) -> dict[str, int]:
    return {each["_id"].partition("/")[2]: each["n"] for each in chain.data["copies"].find()}


def _again(chain: Deployment, key: str, fence: int) -> list[Document]:
    """Return the ends of a key's changes with a newer fence. Only fences of one partition can be compared."""
    return list(chain.facts["end"].find({"key": key, "fence": {"$gt": fence}}).sort("at"))


@pytest.mark.slow
def test_everything_behind_a_place_runs_again_in_order_and_what_ran_before_is_refused(chain: Deployment) -> None:
    """P1, P2, P3: a handler that was running when its position went back writes nothing over what follows."""
    listener, worker = chain.both()
    keys = [next(chain.keys("copied", index)) for index in (0, 1)]
    for number in (1, 2, 3):
        for key in keys:
            chain.write("copied", key, number)
    chain.wait_done()
    late = chain.write("copied", keys[0], 4, gate="late")
    chain.wait_started(late)
    listener.terminate()
    listener.wait()

    fences = {key: max(each.fence for each in chain.starts() if each.key == key) for key in keys}
    token = chain.partition("copied", 0)["resumeToken"]["_data"]
    moved = chain.changes("reset", "copied", "--to", "oldest", "--reason", "a wrong sum", "--yes")
    assert (moved["moved"], [each["state"] == "running" for each in moved["partitions"]]) == ([0, 1], [True, False])
    assert chain.partition("copied", 0)["resumeToken"]["_data"] < token
    chain.listener("again")
    chain.wait_started(late, 2)
    chain.open_gate("late")
    wait_for(
        lambda: [len(_again(chain, key, fences[key])) for key in keys] == [4, 3],
        PATIENCE_SECONDS,
        lambda: str(chain.logs),
    )
    wait_for(lambda: "while its handler runs" in worker.text, PATIENCE_SECONDS, lambda: worker.text)
    for key, numbers in zip(keys, ([1, 2, 3, 4], [1, 2, 3]), strict=True):
        second = _again(chain, key, fences[key])
        assert [each["n"] for each in second] == numbers
        assert all(earlier["fence"] < later["fence"] for earlier, later in pairwise(second))
    assert _copies(chain) == {keys[0]: 4, keys[1]: 3}
    (act,) = chain.changes("history")["audit_records"]
    assert (act["act"], act["reason"]) == ("reset", "a wrong sum")
