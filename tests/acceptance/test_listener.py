"""
The listener as a process, with real workers, a real broker and a load: what it survives, and how soon.

Each test ends in `settle`: it waits until everything is done and judges the whole history (no loss, order
per key, no stale write, monotone numbers and tokens, watermarks over a prefix only, bounded duplicates).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.history import longest_gap
from tests.acceptance.scene import LEASE_TTL, TAKE_OVER_SECONDS_MAX, Scene, now
from tests.fixtures.process import Processes, wait_for

Document = dict[str, Any]
HANDOVER_SECONDS_MAX = 1.5


@pytest.fixture
def scene(processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str) -> Iterator[Scene]:
    with Scene(processes, mongo_client, mongo_url, redis_url) as scene:
        yield scene


def test_a_standby_takes_over_when_the_leader_is_killed_under_load(scene: Scene) -> None:
    """P7, P1, P2, P5: SIGKILL of the leader; within the ttl + 2 s the standby dispatches, and nothing is lost."""
    leader, _ = scene.pair()
    with scene.load():
        scene.flows()
        at = now()
        leader.kill()
        seconds = scene.resumed_after(at, 10)
        scene.flows()
    print(f"take-over after SIGKILL: {seconds:.2f} s")
    assert seconds < TAKE_OVER_SECONDS_MAX
    scene.settle(faults=1)


def test_a_regular_stop_hands_over_at_once_and_repeats_no_running_handler(scene: Scene) -> None:
    """P7, P6: SIGTERM while a long handler runs; the gap is short, and the handler is adopted, not repeated."""
    leader, _ = scene.pair(workers=2)
    with scene.load():
        scene.write("slow")
        wait_for(lambda: any(start.key == "slow" for start in scene.starts))
        scene.flows()
        at = now()
        status = leader.terminate()
        seconds = scene.resumed_after(at, 10)
        scene.flows()
        gap = longest_gap(scene.watcher.history, at - 1, now())
        scene.open_gate("slow")
    print(f"hand-over after SIGTERM: {seconds:.2f} s, gap {gap:.2f} s")
    assert status == 0
    assert gap < HANDOVER_SECONDS_MAX
    scene.settle(faults=0)


def test_a_frozen_leader_stands_by_when_it_wakes_and_can_lead_again(scene: Scene) -> None:
    """P3, P7: SIGSTOP beyond the ttl, then SIGCONT: the old leader steps down, lives, and later leads anew."""
    first, second = scene.pair()
    with scene.load():
        scene.flows()
        at = now()
        first.pause()
        assert scene.resumed_after(at, 10) < TAKE_OVER_SECONDS_MAX
        scene.flows()
        first.resume()
        first.wait_for_output("the lease is lost; standing by")
        scene.flows()
        at = now()
        second.kill()
        assert scene.resumed_after(at, 10) < TAKE_OVER_SECONDS_MAX
        scene.flows()
    assert first.running
    assert first.text.count("leading bridge") == 2
    scene.settle(faults=2)
