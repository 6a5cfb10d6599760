"""Signals of real processes: a child that ends after its task, and a listener whose receiver never returns."""

from __future__ import annotations

import pytest

from tests.fixtures.process import wait_for
from tests.rig.deployment import MakeDeployment


@pytest.mark.slow
def test_a_child_sends_its_signal_before_it_ends_and_a_blocked_receiver_costs_no_lease(
    deployment: MakeDeployment,
) -> None:
    options = {"partitions": 1, "lease_ttl": 20}
    chain = deployment("halting", include="tests.acceptance.signal_receivers", options=options)
    listener = chain.listener()
    chain.worker("--max-tasks-per-child", "1", concurrency=1)
    chain.write("halting", "bad", 1, act="raise", times=9)
    signal = wait_for(chain.facts["signal"].find_one)
    assert signal["handler"] == "halting"
    term = chain.lease["term"]
    assert listener.terminate() == 0
    assert chain.lease["term"] == term, "it led until the end"
