"""A bridge's name belongs to one app, and its lease serves the newest definitions (I10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.bridge.operations.lease_check import check_lease
from mongo_celery.bridge.operations.lease_commands import adopt
from mongo_celery.errors import CommandRefusedError
from tests.acceptance.chain_rig import Chain
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]
OLD: Any = {"CHAIN_HANDLERS": "plain"}
NEW: Any = {"CHAIN_HANDLERS": "plain,other"}
BROKEN: Any = {"CHAIN_HANDLERS": "plain,other,skipping"}
MARK = "chain.leader"


@pytest.fixture
def chain(mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path) -> Iterator[Chain]:
    """Give a bridge; which handlers a process has, the test says."""
    with Chain(mongo_client, mongo_url, tmp_path, options={"partitions": 1}) as made:
        yield made


def _lease(chain: Chain) -> Document:
    found = chain.state["leases"].find_one({"_id": "chain"})
    assert found is not None
    return found


def _wait_served(chain: Chain, *handlers: str) -> Document:
    """Wait until somebody leads who serves exactly these handlers."""

    def served() -> Document | None:
        lease = _lease(chain)
        fits = lease["listenerId"] and sorted(lease.get("definitions") or {}) == sorted(handlers)
        return lease if fits else None

    return wait_for(served, message=lambda: str(_lease(chain)))


def _wait_announced(chain: Chain, process: ProjectProcess, times: int = 3) -> None:
    """Wait until a process that stands by has said so that often."""
    seen: set[Any] = set()

    def announced() -> bool:
        candidates = _lease(chain).get("candidates") or {}
        seen.update(each["seenAt"] for each in candidates.values() if each["pid"] == process.pid)
        return len(seen) >= times

    wait_for(announced)


@pytest.mark.slow
def test_another_app_on_the_same_cluster_is_refused_whether_anybody_leads_or_not(chain: Chain, mongo_url: str) -> None:
    """One sentence says whose bridge it is, and what to do; nothing of the bridge moves meanwhile."""
    first = chain.listener(**OLD)
    version = _lease(chain)["version"]
    stranger = chain.run("listener", name="stranger", CHAIN_APP="billing", **NEW)
    assert stranger.wait() == 1
    assert "belongs to the bridge of another app" in stranger.text
    assert f"app chain, handlers plain, led by process {first.pid}" in stranger.text
    assert "Traceback" not in stranger.text
    assert _lease(chain)["version"] == version
    assert first.terminate() == 0
    assert chain.run("listener", name="again", CHAIN_APP="billing", **NEW).wait() == 1
    assert _lease(chain)["version"] == version

    renamed = Bridge(Celery("billing"), mongo_url, name="chain", database=chain.state.name, autodiscover=False)
    renamed.on_change("shop.orders", name="plain")(lambda_handler)
    assert [each.name for each in check_lease(renamed.wiring)] == ["app"]
    adopt(renamed.wiring)
    chain.listener(name="adopted", CHAIN_APP="billing", **NEW)
    assert chain.run("listener", name="former", **OLD).wait() == 1
    with pytest.raises(CommandRefusedError, match="is led by process"):
        adopt(renamed.wiring)
    renamed.client.close()


def lambda_handler(_change: object) -> None:
    """A handler in this process, where none runs."""


@pytest.fixture
def neighbour(chain: Chain, mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path) -> Iterator[Chain]:
    """Give a bridge of the same name on the same broker, with a state of its own."""
    shared = {"CHAIN_BROKER": chain.redis.url, "CHAIN_APP": "billing"}
    with Chain(mongo_client, mongo_url, tmp_path, options={"partitions": 1}, environment=shared) as made:
        yield made


def _has_begun_without_mark(chain: Chain, process: ProjectProcess) -> bool:
    """Whether a process reads; until then nobody's mark is left at the broker."""
    with chain.broker as broker:
        broker.delete(MARK)
    return "reading from" in process.text


def test_another_app_on_the_same_broker_is_refused_while_somebody_leads(chain: Chain, neighbour: Chain) -> None:
    """One sentence says who leads there; where Redis was emptied meanwhile, too. The first goes on undisturbed."""
    first = chain.listener(**OLD)
    chain.worker(**OLD)
    with chain.broker as broker:
        wait_for(lambda: broker.exists(MARK))
        broker.flushall()
        wait_for(lambda: broker.exists(MARK))
    stranger = neighbour.run("listener", name="stranger", **OLD)
    item = chain.write("plain", "mine", 1)
    assert stranger.wait() == 1
    said = stranger.wait_for_output(r"the bridge name 'chain' is taken on the broker redis:.*: (.*) leads a bridge")
    assert said.group(1).startswith(f"app chain, process {first.pid} on ")
    assert "Traceback" not in stranger.text
    assert "reading from" not in stranger.text
    standby = chain.run("listener", name="standby", **OLD)
    standby.wait_for_output("standing by")
    chain.wait_done()
    chain.judge()
    assert len(chain.starts(item)) == 1
    assert first.running
    assert "bridge named" not in first.text + standby.text, "who does not lead, leaves no mark"


@pytest.mark.slow
def test_a_mark_that_was_left_behind_stops_no_start(chain: Chain, neighbour: Chain) -> None:
    """A listener was killed, and the state database is another one now. In good order nothing is left behind."""
    first = chain.listener(**OLD)
    with chain.broker as broker:
        wait_for(lambda: broker.exists(MARK))
        first.kill()
        first.wait()
        assert broker.exists(MARK)
        second = neighbour.listener(**OLD)
        assert "looking whether it lives" in second.text
        wait_for(lambda: broker.exists(MARK))
        assert second.terminate() == 0
        assert not broker.exists(MARK)


@pytest.mark.slow
def test_two_apps_that_began_on_one_broker_at_the_same_time_are_named_and_counted(
    chain: Chain, neighbour: Chain, mongo_url: str
) -> None:
    """Nobody who leads steps down for the other; its messages are no forgeries, and its listener is named."""
    listener = chain.listener(**OLD)
    theirs = neighbour.run("listener", name="theirs", **OLD)
    wait_for(lambda: _has_begun_without_mark(chain, theirs))
    worker = chain.worker(**OLD)
    wait_for(lambda: _lease(chain)["renewedAt"] > _lease(chain)["acquiredAt"])
    item = neighbour.write("plain", "taken", 1)
    listener.wait_for_output("another app uses this bridge's name on this broker")
    worker.wait_for_output("another app uses the bridge name chain on this broker")
    assert f".{theirs.pid}@" in worker.text, "the listener that sent it"
    lease = wait_for(lambda: _lease(chain) if (_lease(chain).get("dropped") or {}).get("foreign") else None)
    assert "forged" not in lease["dropped"]
    for here, there in ((listener, theirs), (theirs, listener)):
        here.wait_for_output(f"another listener leads a bridge named chain on this broker.* process {there.pid} on")
    wait_for(lambda: _lease(chain).get("foreignLeader"))
    bridge = Bridge(Celery("chain"), mongo_url, name="chain", database=chain.state.name, autodiscover=False)
    bridge.on_change("shop.orders", name="plain")(lambda_handler)
    found = [each.name for each in check_lease(bridge.wiring) if each.level == "error"]
    assert found == ["foreign_leader", "foreign_bridge"]
    bridge.client.close()
    assert worker.terminate() == 0
    neighbour.worker(name="theirs-worker", **OLD)
    neighbour.wait_done()
    neighbour.judge()
    assert len(neighbour.starts(item)) == 1


def test_a_task_that_a_worker_does_not_know_is_named_with_its_sender(chain: Chain) -> None:
    """The usual case of two apps with one name on one broker: each has other tasks."""
    listener = chain.listener(**NEW)
    worker = chain.worker(**OLD)
    chain.stand(chain.write("other", "unknown", 1))
    said = worker.wait_for_output(r"is for task (\S+), which this worker does not know.*\(listener\.chain\.(\d+)@")
    assert said.group(1).endswith(".other")
    assert int(said.group(2)) == listener.pid


@pytest.mark.slow
def test_newer_definitions_take_over_and_older_ones_stand_by_however_often_they_start(chain: Chain) -> None:
    """A rolling deploy in either order: a handler that is only in the new code is led while old processes live."""
    old = chain.listener(name="old", **OLD)
    new = chain.run("listener", name="new", **NEW)
    new.wait_for_output("reading from")
    old.wait_for_output("stepping down for a listener with newer definitions")
    lease = _wait_served(chain, "plain", "other")
    restarted = chain.run("listener", name="old-again", **OLD)
    restarted.wait_for_output("standing by: another listener leads .*newer definitions")
    _wait_announced(chain, restarted)
    assert restarted.terminate() == 0
    assert _lease(chain)["version"] == lease["version"], "nobody else has led meanwhile"
    chain.worker(**NEW)
    chain.write("other", "new", 1)
    chain.wait_done(handlers=["other"])
    assert new.terminate() == 0
    _wait_served(chain, "plain")
    assert old.running


def test_new_definitions_that_fail_leave_the_old_ones_leading(chain: Chain) -> None:
    """Tried once; a supervisor may start them again and again, and the old ones are not disturbed."""
    old = chain.listener(name="old", **OLD)
    options = chain._environment["CHAIN_OPTIONS"][:-1] + ', "pipeline": [{"$match": {"$expr": {"$noSuch": 1}}}]}'
    assert chain.run("listener", name="broken", CHAIN_OPTIONS=options, **BROKEN).wait() == 1
    lease = _wait_served(chain, "plain")
    again = chain.run("listener", name="broken-again", CHAIN_OPTIONS=options, **BROKEN)
    again.wait_for_output("a listener with them has failed")
    _wait_announced(chain, again)
    assert _lease(chain)["version"] == lease["version"]
    assert old.running


@pytest.mark.slow
def test_new_definitions_that_are_killed_leave_the_old_ones_leading(chain: Chain) -> None:
    """Out of memory, say: one death interrupts the old code once, however often its supervisor starts the new one."""
    old = chain.listener(name="old", **OLD)
    new = chain.run("listener", name="new", **NEW)
    _wait_served(chain, "plain", "other")
    new.kill()
    again = chain.run("listener", name="new-again", **NEW)
    lease = _wait_served(chain, "plain")
    again.wait_for_output("a listener with them has failed")
    _wait_announced(chain, again)
    assert _lease(chain)["version"] == lease["version"]
    assert old.running


def test_a_worker_says_that_nobody_leads_one_of_its_handlers(chain: Chain) -> None:
    """New code in the workers, old code in the listener: not in silence."""
    chain.listener(**OLD)
    worker = chain.worker(**NEW)
    chain.write("plain", "led", 1)
    chain.wait_done()
    assert "no listener leads other of bridge chain, which this worker has" in worker.text
