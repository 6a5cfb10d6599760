"""
Three members, and primaries that go away while what stands is stored, run or moved.

P1 and P13, nothing lost; P2, order; P5, no watermark passes what is neither done nor stored.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.embedded import MongoReplicaSet
from tests.acceptance.isolation.spill_rig import SpillRig, spill_rigs
from tests.chaos.history import Due, Kept
from tests.fixtures.election import Elections
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]

PATIENT: Document = {"lease_ttl": 4, "claim_ttl": 4, "dispatch_grace": 3, "max_crashes": 9, "run_size": 1}
_PACE_SECONDS = 0.3
REPEATED = 3
"""How often a change may start again: while there is no primary, its claim lapses."""
STORING = {"at": "Partitions.mark_spilled", "signal": "SIGSTOP"}
RUNNING = {"at": "Backlog.read", "behind": True, "signal": "SIGSTOP"}
SWITCHING = {"at": "Subscriptions.activate_layout", "signal": "SIGSTOP"}
Election = Callable[[MongoReplicaSet, str], None]


@pytest.fixture
def chain(
    three_members: MongoReplicaSet,
    make_client: MakeClient,
    mongo_client: MongoClient[Document],
    mongo_url: str,
    tmp_path: Path,
) -> Iterator[SpillRig]:
    """Give a bridge on three members, whose facts are noted on a set that has no elections."""
    for make in spill_rigs(make_client(three_members.url), three_members.url, tmp_path):
        made = make("halting", environment={"CHAIN_FACTS": mongo_url}, **PATIENT)
        made.facts = mongo_client[made.facts.name]
        yield made
        mongo_client.drop_database(made.facts)


def step_down(members: MongoReplicaSet, _written: str) -> None:
    """The primary gives way to another one, with all that it has."""
    with MongoClient[Document](members.primary.url) as client, suppress(PyMongoError):
        client.admin.command("replSetStepDown", 10, force=True)
    members.wait_until_ready()


def die(members: MongoReplicaSet, written: str) -> None:
    """The primary dies with writes that nobody else has, and takes them back when it returns."""
    Elections(members).under_load(written)


@contextmanager
def writing(chain: SpillRig, first: int) -> Iterator[None]:
    """Meanwhile, write to the documents of all partitions."""
    stop = threading.Event()

    def write() -> None:
        for n in itertools.count(first):
            for number in range(8):
                chain.write_surely("halting", f"around{number}", n)
            if stop.wait(_PACE_SECONDS):
                return

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            yield
        finally:
            stop.set()
        writer.result()


def elect(chain: SpillRig, members: MongoReplicaSet, election: Election, stopped: ProjectProcess) -> None:
    """While a listener stands still between two writes, there is an election; then it goes on."""
    chain.wait_gone(stopped)
    election(members, chain.data.name)
    stopped.resume()


def finish(chain: SpillRig) -> None:
    """Retry what has halted, wait until all is done, and judge it."""
    wait_for(lambda: chain.changes("retry", "halting")["retried"], message="something has halted")
    settle(chain)


def settle(chain: SpillRig) -> None:
    """Wait until all is done, and judge it."""
    chain.wait_effects()
    chain.wait_removed()
    history = chain.judge_all(spare=REPEATED)
    assert any(isinstance(fact, Kept) for fact in history), "nothing was stored"


def halt(chain: SpillRig) -> Due:
    """A change at which a partition halts, behind a place that all members have in their oplogs."""
    chain.wait_stored(chain.write("halting", "before", 1))
    bad = chain.write("halting", "around0", 1, act="raise")
    chain.wait_state(bad, lambda state: state["state"] == "halted")
    return bad


@pytest.mark.slow
@pytest.mark.parametrize("election", [step_down, die])
def test_an_election_between_storing_and_marking(
    chain: SpillRig, three_members: MongoReplicaSet, election: Election
) -> None:
    """P5, P13: what was acknowledged is there, and what was not is stored again."""
    chain.worker()
    listener = chain.pointed("listener", STORING)
    bad = halt(chain)
    with writing(chain, 2):
        elect(chain, three_members, election, listener)
        chain.wait_stored(bad)
    finish(chain)


@pytest.mark.slow
@pytest.mark.parametrize("election", [step_down, die])
def test_an_election_while_what_is_stored_is_read_back(
    chain: SpillRig, three_members: MongoReplicaSet, election: Election
) -> None:
    """P2, P13: whoever answers has what was stored."""
    chain.worker()
    old = chain.listener("old")
    bad = halt(chain)
    with writing(chain, 2):
        chain.wait_stored(bad)
        wait_for(lambda: chain.state["backlog"].count_documents({}) > 20, message="more is stored")
        assert old.terminate() == 0
        assert chain.changes("retry", "halting")["retried"] == 1
        elect(chain, three_members, election, chain.pointed("listener", RUNNING))
    settle(chain)


@pytest.mark.slow
@pytest.mark.parametrize("election", [step_down, die])
def test_an_election_before_new_partitions_are_put_in_force(
    chain: SpillRig, three_members: MongoReplicaSet, election: Election
) -> None:
    """P1, P2, P13: the old ones are empty before; then one of both is in force, whole."""
    chain.worker()
    old = chain.listener("old")
    bad = halt(chain)
    with writing(chain, 2):
        chain.wait_stored(bad)
        assert old.terminate() == 0
        assert chain.changes("retry", "halting")["retried"] == 1
        chain.spread(3)
        elect(chain, three_members, election, chain.pointed("listener", SWITCHING))
        wait_for(lambda: chain.subscription("halting")["partitioning"]["partitions"] == 3, message="new partitions")
    settle(chain)
