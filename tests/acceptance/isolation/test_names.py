"""A bridge's name belongs to one app, and to one environment (I10)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]
OLD: Any = {"SCRIPTED_HANDLERS": "plain"}
NEW: Any = {"SCRIPTED_HANDLERS": "plain,other"}


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    """Give a bridge; which handlers a process has, the test says."""
    return deployment(options={"partitions": 1})


def _wait_served(chain: Deployment, *handlers: str) -> Document:
    def served() -> Document | None:
        lease = chain.lease
        fits = lease["listenerId"] and sorted(lease["identity"]["handlers"]) == sorted(handlers)
        return lease if fits else None

    return wait_for(served, message=lambda: str(chain.lease))


@pytest.fixture
def neighbour(chain: Deployment, deployment: MakeDeployment) -> Deployment:
    """Give a bridge of the same name on the same broker, with a state of its own."""
    shared = {"PROJECT_BROKER": chain.redis.url, "SCRIPTED_APP": "billing"}
    return deployment(options={"partitions": 1}, environment=shared)


def test_messages_of_another_installation_are_dropped_counted_and_named(
    chain: Deployment, neighbour: Deployment
) -> None:
    """P11, P16: two apps with one bridge name on one broker. Nothing of either is lost, and health is degraded."""
    chain.listener(**OLD)
    theirs = neighbour.listener(**OLD)
    worker = chain.worker(**OLD)
    item = neighbour.write("plain", "taken", 1)
    said = worker.wait_for_output(r"another installation or environment sent them \(process (\d+)@")
    assert int(said.group(1)) == theirs.pid
    counted = wait_for(lambda: chain.state["drops"].find_one({"_id": "chain", "dropped.foreign": {"$gt": 0}}))
    assert set(counted["dropped"]) == {"foreign"}
    assert "foreign_bridge" in _codes(chain, "status")["degraded"]
    assert worker.terminate() == 0
    neighbour.worker(name="theirs-worker", **OLD)
    neighbour.wait_done()
    neighbour.judge()
    assert len(neighbour.starts(item)) == 1


def test_a_task_that_a_worker_does_not_know_is_named_with_its_sender(chain: Deployment) -> None:
    """The usual case of two apps with one name on one broker: each has other tasks."""
    listener = chain.listener(**NEW)
    worker = chain.worker(**OLD)
    chain.stand(chain.write("other", "unknown", 1))
    said = worker.wait_for_output(r"does not have their task \(the last one: (\S+), from process (\d+)@")
    assert said.group(1).endswith(".other")
    assert int(said.group(2)) == listener.pid


def test_a_second_environment_is_refused_and_nothing_of_the_first_is_lost(chain: Deployment) -> None:
    """P1, P9: the same code and app on one MongoDB, with another broker and database. Only `--take-over` is let in."""
    broker = f"redis://127.0.0.1:{chain.redis.port}/9"
    staging: Any = {**OLD, "PROJECT_BROKER": broker, "SCRIPTED_DATA": f"{chain.names}_staging"}
    first = chain.listener(**OLD)
    worker = chain.worker(**OLD)
    refused = chain.listener("staging", awaited="", **staging)
    chain.write("plain", "key", 1)
    assert refused.wait() == 1
    for words in (f"process {first.pid} ", broker, "name=", "database=", "listener --take-over"):
        assert words in refused.text
    assert not [word for word in ("Traceback", "-A APP") if word in refused.text], refused.text
    chain.wait_done()

    wait_for(lambda: not _codes(chain, "status")["failing"], message="nothing fails, once the worker has answered")
    assert "identity" in _codes(chain, "status", staging)["failing"]
    assert "identity" in _codes(chain, "check", staging)["failing"]
    assert first.terminate() == 0
    assert chain.listener("staging-again", awaited="", **staging).wait() == 1, "also while nobody leads"
    chain.write("plain", "key", 2)
    first = chain.listener(name="first-again", **OLD)
    chain.wait_done()
    chain.judge()

    take_over = ("listener", "-l", "INFO", "--take-over", "--reason", "the broker moved")
    moved = chain.start(*take_over, name="moved", SCRIPTED_APP="billing", **OLD)
    moved.wait_for_output("standing by")
    assert first.terminate() == 0
    moved.wait_for_output("reading from")
    chain.write("plain", "key", 3)
    assert chain.listener("former", awaited="", **OLD).wait() == 1
    record = chain.changes("history")["audit_records"][-1]
    assert (record["command"], record["reason"]) == ("listener --take-over", "the broker moved")
    assert "app billing" in record["effect"]["difference"]
    assert worker.running


def test_a_worker_of_another_environment_drops_what_it_gets(chain: Deployment) -> None:
    """P1, P9, P16: the same code, app and broker with another database. The first one's worker gets it again."""
    chain.listener(**OLD)
    theirs = chain.worker(name="staging", **OLD, SCRIPTED_DATA=f"{chain.names}_staging")
    item = chain.write("plain", "key", 1)
    wait_for(lambda: chain.state["drops"].find_one({"_id": "chain", "dropped.foreign": {"$gt": 0}}))
    assert "another app or environment" in theirs.text
    theirs.wait_for_output("their handler plain watches other databases")
    assert "another installation or environment sent" not in theirs.text
    assert "foreign_bridge" in _codes(chain, "status")["degraded"]
    assert theirs.terminate() == 0
    assert chain.starts(item) == []
    chain.worker(**OLD)
    chain.wait_done()
    chain.judge()
    assert len(chain.starts(item)) == 1


def _codes(chain: Deployment, command: str, environment: Document | None = None) -> dict[str, list[str]]:
    """Give what a command finds in an environment, by severity."""
    said = chain.changes(command, **{**OLD, **(environment or {})})
    found: dict[str, list[str]] = {"failing": [], "degraded": [], "ok": []}
    for each in said["findings"]:
        found[each["severity"]].append(each["code"])
    return found


def test_a_rolling_deploy_is_told_until_the_last_old_listener_ends(chain: Deployment) -> None:
    """P7, P16: new code stands by, whoever started first; the verdict names the process that has to end."""
    old = chain.listener(name="old", **OLD)
    new = chain.listener("new", awaited="", **NEW)
    new.wait_for_output(rf"\b{old.pid}\b")
    assert "definitions" in _codes(chain, "status", NEW)["degraded"]
    assert old.terminate() == 0
    _wait_served(chain, "plain", "other")
    assert "definitions" not in _codes(chain, "status", NEW)["degraded"]
    assert "other" in new.text


def test_a_worker_says_that_nobody_leads_one_of_its_handlers(chain: Deployment) -> None:
    """New code in the workers, old code in the listener, which listens elsewhere besides: not in silence."""
    data = f"{chain.names}_staging"
    chain.listener(**OLD, SCRIPTED_DATA=data)
    worker = chain.worker(**NEW)
    chain.client[data]["plain"].insert_one({"_id": "led", "n": 1})
    worker.wait_for_output("the running listener does not have other of bridge chain")
    said = worker.wait_for_output("from another app or environment: .*")
    assert f"handler plain watches database {data}" in said.group()
    chain.client.drop_database(data)
