"""
Kills between any two writes of storing, running and moving what stands, and listeners that sleep there.

P2, order; P5, no watermark passes what is neither done nor stored; P6, nothing runs oftener than the faults allow; P13,
nothing that was read is lost, and nothing stays behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.acceptance.isolation.rolling_rig import Rolling
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.deployment import MakeDeployment
from tests.rig.history import Due, Kept

Document = dict[str, Any]
Make = Callable[..., "SpillRig"]

MARK, WATERMARK = "Partitions.mark_stored", "Subscriptions.advance_all"
STORING: dict[str, Document] = {
    "after the insert, before the mark": {"at": MARK},
    "after the mark, before the watermark": {"at": WATERMARK, "once": MARK},
    "after the watermark": {"at": WATERMARK, "once": MARK, "behind": True},
}
RUNNING: dict[str, Document] = {
    "with a message of what is stored": {"at": "RunPublisher.publish", "once": "Backlog.outline", "behind": True},
    "after the commit, before the removal": {"at": "Backlog.remove"},
    "in the middle of a removal": {"at": "Backlog._remove_some", "behind": True, "pieces": 3},
    "before the mark is cleared": {"at": "Partitions.clear_stored"},
}
SWITCHING: dict[str, Document] = {
    "before the new ones take their place": {"at": "Partitions.replace"},
    "after that": {"at": "Partitions.replace", "behind": True},
}
KILLED, ASLEEP = "SIGKILL", "SIGSTOP"
QUICK = {
    ("after the insert, before the mark", KILLED),
    ("in the middle of a removal", KILLED),
}
ROUNDS = 5


class SpillRig(Rolling):
    """
    A bridge whose processes end or stop themselves between two writes (`rig/scripted/points.py`).

    Whatever its layout: its changes are waited for by their effects.
    """

    def spread(self, partitions: int) -> None:
        """Let all processes that start from now on have so many partitions."""
        self.partitions = partitions
        self.options = {**self.options, "partitions": partitions}

    # -- processes that end, or stop ---------------------------------------------------------------

    def pointed(self, command: str, point: Mapping[str, Any]) -> ProjectProcess:
        """Start a listener or a worker that will come to a point, and wait until it has begun."""
        asked = json.dumps(point)
        if command == "worker":
            return self.worker(name="pointed", SCRIPTED_POINT=asked)
        return self.listener("pointed", SCRIPTED_POINT=asked)

    @property
    def is_at_point(self) -> bool:
        """Whether the process has come to its point."""
        return (self._gates / "point").exists()

    def wait_gone(self, process: ProjectProcess) -> None:
        """Wait until a process has come to its point, and has ended there if it is to end."""
        wait_for(lambda: self.is_at_point, message="it comes to its point")
        wait_for(lambda: not process.running or _is_stopped(process), message="it has ended, or stands still")

    # -- writing, and waiting ----------------------------------------------------------------------

    def write_around(self, handler: str, count: int, first: int = 1, **do: Any) -> None:
        """Write so many changes of some documents, in turns: two for each partition that there is at first."""
        for n in range(first, first + count):
            for number in range(2 * self.partitions):
                self.write(handler, f"around{number}", n, **do)

    def behind(self, item: Due) -> set[Due]:
        """What is written in the partition of a change."""
        where = self.partition_of(item.handler, item.key)
        return {each for each in self.written if self.partition_of(each.handler, each.key) == where}


def _is_stopped(process: ProjectProcess) -> bool:
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture
def make(deployment: MakeDeployment) -> Make:
    """Give what makes a bridge that stores what is blocked for a second."""
    options = {"spill_after": 1, "run_size": 5}
    return lambda *handlers, **more: deployment(*handlers, kind=SpillRig, options={**options, **more})


def points(table: dict[str, Document]) -> list[Any]:
    """Each point, to be killed or to fall asleep at; a few are tried in every run."""
    return [
        pytest.param(
            {**point, "signal": signal},
            id=f"{signal} {name}".replace(",", "").replace(" ", "-"),
            marks=[] if (name, signal) in QUICK else [pytest.mark.slow],
        )
        for name, point in table.items()
        for signal in (KILLED, ASLEEP)
    ]


class Standing:
    """
    A partition that has halted, with changes behind it, and others that go on.

    Attributes:
        bad: the change at which it has halted.
    """

    def __init__(self, chain: SpillRig) -> None:
        self.chain = chain
        self.bad = chain.allow(chain.write("halting", "around0", 1, act="raise"))
        chain.wait_state(self.bad, lambda state: state["state"] == "halted")
        chain.write_around("halting", ROUNDS, first=2)
        self.behind = chain.behind(self.bad)

    def wait_stored(self) -> None:
        """Wait until all others are done, and what stands is stored and passed by the watermark."""
        self.chain.wait_effects(but=self.behind)
        self.chain.wait_passed(self.bad.handler)

    def retry(self) -> None:
        """Let it go on, wherever it stands by now."""
        wait_for(lambda: self.chain.changes("retry", "halting")["done"], message="something stands")

    def finish(self, gone: ProjectProcess) -> None:
        """Wait until all is done and removed, and judge it; also what a listener does that wakes up then."""
        self.chain.wait_effects()
        self.chain.wait_removed()
        assert any(isinstance(fact, Kept) for fact in self.chain.judge_oplog()), "nothing was stored"
        if gone.running:
            gone.resume()
            gone.wait_for_output("is standing by")
            self.chain.write_around("halting", 1, first=20)
            self.chain.wait_effects()
            self.chain.wait_removed()
            self.chain.judge_oplog()


@pytest.mark.parametrize("point", points(STORING))
def test_a_listener_ends_or_sleeps_while_it_stores(make: Make, point: Document) -> None:
    """P5, P13: what it had not marked is read and stored again; what was passed is there."""
    chain = make("halting")
    chain.worker()
    gone = chain.pointed("listener", point)
    standing = Standing(chain)
    chain.wait_gone(gone)
    chain.listener()
    standing.wait_stored()
    standing.retry()
    standing.finish(gone)


@pytest.mark.parametrize("point", points(RUNNING))
def test_a_listener_ends_or_sleeps_while_what_it_has_stored_runs(make: Make, point: Document) -> None:
    """P2, P6, P13: the next one goes on where that was, and removes the rest."""
    chain = make("halting")
    chain.worker()
    old = chain.listener("old")
    standing = Standing(chain)
    standing.wait_stored()
    assert old.terminate() == 0
    standing.retry()
    gone = chain.pointed("listener", point)
    chain.wait_gone(gone)
    chain.listener()
    standing.finish(gone)


@pytest.mark.parametrize("point", points(SWITCHING))
def test_a_listener_ends_or_sleeps_while_it_repartitions(make: Make, point: Document) -> None:
    """P2, P6, P13: old or new partitions are in force; after the retry what was stored is handled, then they change."""
    chain = make("halting")
    chain.worker()
    old = chain.listener("old")
    standing = Standing(chain)
    standing.wait_stored()
    assert old.terminate() == 0
    chain.spread(3)
    standing.retry()
    gone = chain.pointed("listener", point)
    chain.wait_gone(gone)
    chain.listener()
    wait_for(lambda: layout(chain)["partitions"] == 3, message="the new partitions are in force")
    chain.write_around("halting", 2, first=2 + ROUNDS)
    standing.finish(gone)


def layout(chain: SpillRig) -> Document:
    """How many partitions are in force, and by which key."""
    found: Document = chain.subscription("halting")["partitioning"]
    return found
