"""
A listener that is killed, or sleeps, between two writes of storing and running what stands.

`integration/test_storing.py` does this at every step, in one process. P2, order;
P5, no watermark passes what is neither done nor stored; P6, nothing runs oftener than the faults allow; P13, nothing
that was read is lost, and nothing stays behind.
"""

from __future__ import annotations

import json
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.acceptance.isolation.rolling_rig import Rolling
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.deployment import MakeDeployment
from tests.rig.history import Kept

Document = dict[str, Any]


STORING: Document = {"at": "Partitions.mark_stored"}
RUNNING: Document = {"at": "Backlog._remove_some", "behind": True, "pieces": 3}
SWITCHING: Document = {"at": "Partitions.replace"}
ROUNDS = 5

signals = pytest.mark.parametrize("signal", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])


class Standing(Rolling):
    """A bridge with a partition that has halted, with changes behind it, and others that go on."""

    def pointed(self, point: Document, signal: str) -> ProjectProcess:
        """Start a listener that will come to a point, and gets a signal there (`rig/scripted/points.py`)."""
        return self.listener("pointed", SCRIPTED_POINT=json.dumps({**point, "signal": signal}))

    def wait_gone(self, process: ProjectProcess) -> None:
        """Wait until a listener has ended at its point, or stands still there."""

        def is_gone() -> bool:
            return not process.running or psutil.Process(process.pid).status() == psutil.STATUS_STOPPED

        wait_for(lambda: (self._gates / "point").exists() and is_gone(), message="it comes to its point")

    def write_around(self, count: int, first: int) -> None:
        """Write so many changes of some documents, in turns: two for each partition that there is at first."""
        for n in range(first, first + count):
            for number in range(2 * self.partitions):
                self.write("halting", f"around{number}", n)

    def halt_first(self) -> None:
        """Halt one partition, and write to all."""
        bad = self.allow(self.write("halting", "around0", 1, act="raise"))
        self.wait_state(bad, lambda state: state["state"] == "halted")
        self.write_around(ROUNDS, first=2)
        where = self.partition_of("halting", bad.key)
        self.behind = {each for each in self.written if self.partition_of("halting", each.key) == where}

    def wait_stored(self) -> None:
        """Wait until all others are done, and what stands is stored and passed by the watermark."""
        self.wait_effects(but=self.behind)
        self.wait_passed("halting")

    def retry(self) -> None:
        """Let it go on, wherever it stands by now."""
        wait_for(lambda: self.changes("retry", "halting")["done"], message="something stands")

    def finish(self, gone: ProjectProcess) -> None:
        """Wait until all is done and removed, and judge it; also what a listener does that wakes up then."""
        self.wait_effects()
        self.wait_removed()
        assert any(isinstance(fact, Kept) for fact in self.judge_oplog()), "nothing was stored"
        if gone.running:
            gone.resume()
            gone.wait_for_output("is standing by")
            self.write_around(1, first=20)
            self.wait_effects()
            self.wait_removed()
            self.judge_oplog()


@pytest.fixture
def chain(deployment: MakeDeployment) -> Standing:
    """Give a bridge that stores what is blocked for a second, with a worker."""
    made = deployment("halting", kind=Standing, options={"spill_after": 1, "run_size": 5})
    made.worker()
    return made


@signals
def test_a_listener_ends_or_sleeps_while_it_stores(chain: Standing, signal: str) -> None:
    """P5, P13: what it had not marked is read and stored again; what was passed is there."""
    gone = chain.pointed(STORING, signal)
    chain.halt_first()
    chain.wait_gone(gone)
    chain.listener()
    chain.wait_stored()
    chain.retry()
    chain.finish(gone)


@signals
def test_a_listener_ends_or_sleeps_while_what_it_has_stored_runs(chain: Standing, signal: str) -> None:
    """P2, P6, P13: the next one goes on where that was, and removes the rest."""
    old = chain.listener("old")
    chain.halt_first()
    chain.wait_stored()
    assert old.terminate() == 0
    chain.retry()
    gone = chain.pointed(RUNNING, signal)
    chain.wait_gone(gone)
    chain.listener()
    chain.finish(gone)


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "after"])
def test_a_listener_ends_or_sleeps_while_it_repartitions(chain: Standing, signal: str, behind: bool) -> None:
    """P2, P6, P13: old or new partitions are in force; after the retry what was stored is handled, then they change."""
    old = chain.listener("old")
    chain.halt_first()
    chain.wait_stored()
    assert old.terminate() == 0
    chain.partitions, chain.options = 3, {**chain.options, "partitions": 3}
    chain.retry()
    gone = chain.pointed({**SWITCHING, "behind": behind}, signal)
    chain.wait_gone(gone)
    chain.listener()
    wait_for(lambda: chain.subscription("halting")["partitioning"]["partitions"] == 3)
    chain.write_around(2, first=2 + ROUNDS)
    chain.finish(gone)
