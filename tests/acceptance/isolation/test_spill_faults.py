"""
Kills between any two writes of storing, running and moving what stands, and listeners that sleep there.

P2, order; P5, no watermark passes what is neither done nor stored; P6, nothing runs oftener than the faults allow; P13,
nothing that was read is lost, and nothing stays behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.isolation.spill_rig import SpillRig, spill_rigs
from tests.chaos.history import Kept
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]
Make = Callable[..., SpillRig]

MARK, WATERMARK = "Partitions.mark_spilled", "Subscriptions.advance_all"
STORING: dict[str, Document] = {
    "after the insert, before the mark": {"at": MARK},
    "after the mark, before the watermark": {"at": WATERMARK, "once": MARK},
    "after the watermark": {"at": WATERMARK, "once": MARK, "behind": True},
}
RUNNING: dict[str, Document] = {
    "with a message of what is stored": {"at": "Publishing.publish", "once": "Backlog.outline", "behind": True},
    "after the commit, before the removal": {"at": "Backlog.remove"},
    "in the middle of a removal": {"at": "Backlog._remove_some", "behind": True, "pieces": 3},
    "before the mark is cleared": {"at": "Partitions.clear_spilled"},
}
SWITCHING: dict[str, Document] = {
    "before the old ones are removed": {"at": "Partitions.retire"},
    "before the new ones are put in force": {"at": "Subscriptions.activate_layout"},
    "before the new ones are made": {"at": "Subscriptions.activate_layout", "behind": True},
}
KILLED, ASLEEP = "SIGKILL", "SIGSTOP"
QUICK = {
    ("after the insert, before the mark", KILLED),
    ("in the middle of a removal", KILLED),
}
ROUNDS = 5


@pytest.fixture
def make(mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path) -> Iterator[Make]:
    """Give what makes a bridge that stores what has stood for a second."""
    yield from spill_rigs(mongo_client, mongo_url, tmp_path)


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
        self.chain.wait_stored(self.bad)

    def retry(self) -> None:
        """Let it go on, wherever it stands by now."""
        wait_for(lambda: self.chain.changes("retry", "halting")["retried"], message="something stands")

    def finish(self, gone: ProjectProcess) -> None:
        """Wait until all is done and removed, and judge it; also what a listener does that wakes up then."""
        self.chain.wait_effects()
        self.chain.wait_removed()
        assert any(isinstance(fact, Kept) for fact in self.chain.judge_all()), "nothing was stored"
        if gone.running:
            gone.resume()
            gone.wait_for_output("(the lease is lost|leading ended.*); standing by")
            self.chain.write_around("halting", 1, first=20)
            self.chain.wait_effects()
            self.chain.wait_removed()
            self.chain.judge_all()


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


@pytest.mark.slow
def test_a_listener_is_killed_between_storing_a_large_change_and_its_mark(make: Make) -> None:
    """P6, P13: the next one finds the bytes that nothing has marked, and nobody has asked for."""
    chain = make("plain", max_message_bytes=4096, run_size=1)
    chain.worker()
    killed = chain.pointed("listener", {"at": MARK})
    for n in (1, 2, 3):
        chain.write("plain", "large", n, padding="x" * 20_000 * (n % 2))
    chain.wait_gone(killed)
    assert (chain.state["backlog"].count_documents({}), chain.starts()) == (1, [])
    chain.listener()
    chain.wait_effects()
    chain.wait_removed()
    chain.judge_all()


@pytest.mark.slow
def test_a_worker_is_killed_between_storing_a_change_and_its_halt(make: Make) -> None:
    """P6, P13, P14: the change runs again and halts, with its bytes; its crash is charged to nobody else."""
    chain = make("halting")
    chain.listener()
    chain.pointed("worker", {"at": "Claims.halt"})
    bad = chain.allow(chain.write("halting", "around0", 1, act="raise", times=2), 2)
    chain.wait_state(bad, lambda state: state["state"] == "halted")
    assert chain.is_at_point
    assert len(chain.starts(bad)) == 2
    chain.write_around("halting", ROUNDS, first=2)
    chain.wait_effects(but=chain.behind(bad))
    chain.wait_stored(bad)
    assert chain.changes("retry", "halting")["retried"] == 1
    chain.wait_effects()
    chain.wait_removed()
    chain.judge_all()
