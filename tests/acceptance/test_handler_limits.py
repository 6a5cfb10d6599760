"""Limits of a handler over three workers, while workers and listeners are killed and replaced."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.conformance import LARGE, document_after
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.oplog import follow

Document = dict[str, Any]

MOST, PER_SECOND = 3, 5.0
"""As `few` and `rated` have them in `rig/scripted/handlers.py`."""

PARTITIONS, WORKERS = 16, 3
BURST = 1 + PER_SECOND


class Shop(Deployment):
    """Three workers, each with more slots than may run."""

    def start_all(self) -> None:
        self.listener("leader")
        self.listener("standby", awaited="")
        for number in range(WORKERS):
            self.worker(name=f"worker{number}", concurrency=MOST)

    def fill(self, handler: str, count: int, **do: Any) -> None:
        for number in range(count):
            self.write(handler, f"k{number}", 1, **do)

    def wait_starts(self, count: int) -> None:
        wait_for(lambda: self.facts["start"].estimated_document_count() >= count)

    def find_most_running(self) -> tuple[int, int]:
        """
        Return the largest numbers of claims, and of started executions whose claim is valid, in the oplog's order.

        A claim counts until it ends or is replaced, even if it has lapsed.
        """
        documents: dict[str, Document] = {}
        running, most = set[tuple[str, int]](), (0, 0)
        for event in follow(self.client, self._since, self.state.name, self.facts.name, without=LARGE):
            name, key = event["ns"]["coll"], str(event.get("documentKey", {}).get("_id"))
            if name == "partitions":
                documents[key] = document_after(documents.get(key, {}), event) or {}
            elif name in {"start", "end"}:
                fact = event["fullDocument"]
                place = f"chain/{fact['handler']}/{fact['partitioning']}/{fact['partition']}", int(fact["fence"])
                (running.add if name == "start" else running.discard)(place)
            valid = {(id_, int(each["fencingToken"])) for id_, each in documents.items() if each.get("claim")}
            running &= valid
            most = max(most[0], len(valid)), max(most[1], len(running))
        return most


def test_never_more_executions_than_may_run(deployment: MakeDeployment) -> None:
    """P1, P2, P17: a worker, a listener and a process of a pool die, and a listener is replaced in between."""
    shop = deployment("few", kind=Shop, options={"partitions": PARTITIONS})
    shop.start_all()
    shop.fill("few", 20, seconds=0.1)
    processes = {each.name: each for each in shop._processes.started}
    shop.wait_starts(10)
    processes["worker0"].end()
    shop.fill("few", 20, seconds=0.1)
    shop.wait_starts(15)
    processes["leader"].end()
    shop.wait_starts(25)
    processes["worker1"].end()
    shop.worker(name="again", concurrency=MOST)
    shop.listener("next", awaited="")
    processes["standby"].terminate()
    shop.wait_done()
    shop.judge(spare=2)
    assert shop.find_most_running() == (MOST, MOST)


@pytest.mark.slow
def test_a_handler_reaches_its_rate_and_never_passes_it(deployment: MakeDeployment, capsys: Any) -> None:
    """A minute with a deploy of listeners and the death of a worker; the figures are printed."""
    shop = deployment("rated", kind=Shop, options={"partitions": PARTITIONS})
    shop.start_all()
    shop.fill("rated", int(80 * PER_SECOND))
    processes = {each.name: each for each in shop._processes.started}
    shop.wait_starts(int(15 * PER_SECOND))
    processes["leader"].terminate()
    shop.wait_starts(int(30 * PER_SECOND))
    processes["worker0"].end()
    shop.wait_starts(int(61 * PER_SECOND))
    times = sorted(each.at / 1e9 for each in shop.starts())
    seconds = 60.0
    count = sum(each - times[0] <= seconds for each in times)
    spans = ((later - first, number + 1) for place, first in enumerate(times)
             for number, later in enumerate(times[place:]))  # fmt: skip
    excess = max(number - span * PER_SECOND for span, number in spans)
    with capsys.disabled():
        sys.stdout.write(f"\n{count} starts in {seconds:.0f} s at {PER_SECOND}/s, {excess:.1f} above it at most\n")
    assert count >= 0.8 * seconds * PER_SECOND
    assert excess <= 2 * BURST + PARTITIONS, "and what was on its way, if the workers stalled"
