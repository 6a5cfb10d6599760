"""A bridge's name belongs to one app, and to one environment (I10)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.bridge.operations.lease_check import check_lease
from tests.acceptance.chain_rig import APP, Chain
from tests.fixtures.forked import run_celery
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]
OLD: Any = {"CHAIN_HANDLERS": "plain"}
NEW: Any = {"CHAIN_HANDLERS": "plain,other"}
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
        fits = lease["listenerId"] and sorted(lease["identity"]["handlers"]) == sorted(handlers)
        return lease if fits else None

    return wait_for(served, message=lambda: str(_lease(chain)))


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
    drops = chain.state["drops"]
    counted = wait_for(lambda: drops.find_one({"_id": "chain", "dropped.foreign": {"$gt": 0}}))
    assert "forged" not in counted["dropped"]
    for here, there in ((listener, theirs), (theirs, listener)):
        here.wait_for_output(f"another listener leads a bridge named chain on this broker.* process {there.pid} on")
    wait_for(lambda: drops.find_one({"_id": "chain", "foreignLeader": {"$exists": True}}))
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


def test_a_second_environment_is_refused_and_nothing_of_the_first_is_lost(chain: Chain) -> None:
    """P1, P9: the same code and app on one MongoDB, with another broker and database. Only `--take-over` is let in."""
    broker = f"redis://127.0.0.1:{chain.redis.port}/9"
    staging: Any = {**OLD, "CHAIN_BROKER": broker, "CHAIN_DATA": f"{chain.name}_staging"}
    first = chain.listener(**OLD)
    worker = chain.worker(**OLD)
    refused = chain.run("listener", name="staging", **staging)
    chain.write("plain", "key", 1)
    assert refused.wait() == 1
    for words in (f"process {first.pid} ", broker, "name=", "database=", "listener --take-over"):
        assert words in refused.text
    assert "Traceback" not in refused.text
    chain.wait_done()

    assert _codes(chain, "health")["failing"] == []
    assert "identity" in _codes(chain, "health", staging)["failing"]
    assert "identity" in _codes(chain, "check", staging)["error"]
    assert first.terminate() == 0
    assert chain.run("listener", name="staging-again", **staging).wait() == 1, "also while nobody leads"
    chain.write("plain", "key", 2)
    first = chain.listener(name="first-again", **OLD)
    chain.wait_done()
    chain.judge()

    moved = chain.run("listener", "--take-over", name="moved", CHAIN_APP="billing", **OLD)
    moved.wait_for_output("standing by")
    assert first.terminate() == 0
    moved.wait_for_output("reading from")
    chain.write("plain", "key", 3)
    assert chain.run("listener", name="former", **OLD).wait() == 1
    noted = chain.changes("history")["interventions"][-1]
    assert (noted["act"], "app billing" in noted["reason"]) == ("take-over", True)
    assert worker.running


def _codes(chain: Chain, command: str, environment: Document | None = None) -> dict[str, list[str]]:
    """Give what a command finds in an environment, by severity."""
    variables = {**chain._variables("command"), **OLD, **(environment or {})}
    done = run_celery("-A", APP, "changes", command, "--json", environment=variables)
    said = json.loads(done.stdout)
    found: dict[str, list[str]] = {"failing": [], "degraded": [], "error": []}
    for each in said.get("reasons", said.get("findings", ())):
        found.setdefault(each.get("severity", each.get("level")), []).append(each.get("code", each.get("name")))
    return found


def test_a_rolling_deploy_is_told_until_the_last_old_listener_ends(chain: Chain) -> None:
    """P7, P16: new code stands by, whoever started first; the verdict names the process that has to end."""
    old = chain.listener(name="old", **OLD)
    new = chain.run("listener", name="new", **NEW)
    said = new.wait_for_output("standing by: another listener leads .*")
    assert f"process {old.pid} " in said.group()
    assert "definitions" in _codes(chain, "health", NEW)["degraded"]
    assert old.terminate() == 0
    _wait_served(chain, "plain", "other")
    assert "definitions" not in _codes(chain, "health", NEW)["degraded"]
    assert "other" in new.text


def test_a_worker_says_that_nobody_leads_one_of_its_handlers(chain: Chain) -> None:
    """New code in the workers, old code in the listener, which listens elsewhere besides: not in silence."""
    data = f"{chain.name}_staging"
    chain.listener(**OLD, CHAIN_DATA=data)
    worker = chain.worker(**NEW)
    chain.client[data]["plain"].insert_one({"_id": "led", "n": 1})
    worker.wait_for_output("no listener leads other of bridge chain, which this worker has")
    said = worker.wait_for_output("is that of another app or environment: .*")
    assert f"database {data} for handler plain" in said.group()
    chain.client.drop_database(data)
