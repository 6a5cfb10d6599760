"""Signals of real processes: a child that ends after its task, and a listener whose receiver never returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.project import OPTIONS, MakeProject, Project


class Signalling(Project):
    app = "tests.acceptance.signals_project"
    options: Mapping[str, Any] = {**OPTIONS, "partitions": 1, "queues": 1}


@pytest.mark.slow
def test_a_child_sends_its_signal_before_it_ends_and_a_blocked_receiver_costs_no_lease(
    make_project: MakeProject,
) -> None:
    project = make_project(Signalling)
    listener = project.listener()
    project.worker("--max-tasks-per-child", "1", concurrency=1)
    orders, signals = project.data["orders"], project.facts["signals"]
    orders.insert_one({"_id": 1})
    wait_for(lambda: signals.find_one() is not None)
    lease = project.state["leases"].find_one({}) or {}
    assert listener.terminate() == 0
    assert (project.state["leases"].find_one({}) or {})["term"] == lease["term"], "it led until the end"
