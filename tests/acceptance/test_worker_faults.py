"""Workers that die or freeze at each point of a chain, and handlers that wake after they were replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.deployment import Deployment, MakeDeployment, frozen
from tests.rig.history import Due

Document = dict[str, Any]


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    """Give a bridge of one partition, so that each fault hits all that follows."""
    conf = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    return deployment("plain", options={"partitions": 1, "max_crashes": 9}, conf=conf)


def _before_and_after(chain: Deployment, **do: Any) -> tuple[Due, Due]:
    return chain.write("plain", "hit", 1, **do), chain.write("plain", "hit", 2)


def _kill_child(worker: ProjectProcess, pid: int) -> None:
    assert pid in worker.children()
    os.kill(pid, signal.SIGKILL)


def test_sigkill_of_a_child_in_the_handler_repeats_the_change_before_its_successor(chain: Deployment) -> None:
    """P1, P2, P6: first before, then after its effect; each costs one start more."""
    _, worker = chain.both()
    item, _ = _before_and_after(chain, gate="before", late_gate="after")
    _kill_child(worker, chain.wait_started(item).pid)
    chain.open_gate("before")
    second = chain.wait_started(item, 2)
    wait_for(lambda: len(chain.effects()) == 1)
    _kill_child(worker, second.pid)
    chain.open_gate("after")
    chain.wait_done()
    chain.allow(item, 2)
    chain.judge()
    assert chain.of(item)["committed"] == 2


def test_sigkill_of_the_whole_worker_in_the_handler_loses_nothing(chain: Deployment) -> None:
    """P1, P6, P8: with messages prefetched; another worker goes on long before the visibility timeout."""
    _, worker = chain.both()
    item, _ = _before_and_after(chain, gate="open")
    chain.wait_started(item)
    worker.send_group(signal.SIGKILL)
    chain.open_gate("open")
    chain.worker(name="second")
    chain.wait_started(item, 2)
    chain.wait_done()
    chain.allow(item)
    chain.judge()


def test_sigkill_of_the_whole_worker_is_overcome_while_changes_keep_coming(deployment: MakeDeployment) -> None:
    """P8, P12: they are stored meanwhile, and each write of the listener's own must not restart the wait."""
    options = {"partitions": 1, "max_crashes": 9, "spill_after": 1, "dispatch_grace": 6}
    chain = deployment("plain", options=options, transport={"visibility_timeout": 3600})
    _, worker = chain.both()
    item = chain.write("plain", "hit", 1, gate="open")
    chain.wait_started(item)
    more = count(1)

    def write_until(condition: Callable[[], object]) -> None:
        wait_for(lambda: chain.write("plain", "more", next(more)) and condition())

    write_until(lambda: chain.of(item).get("stored"))
    worker.send_group(signal.SIGKILL)
    chain.worker(name="second")
    write_until(lambda: len(chain.starts(item)) == 2)
    chain.open_gate("open")
    chain.wait_done()
    chain.allow(item)
    chain.judge()


@pytest.mark.parametrize("how", ["cold shutdown", "cut connections"])
def test_a_child_that_celery_ends_is_no_crash_of_its_handler(chain: Deployment, how: str) -> None:
    """P14: a cold shutdown is known to nobody when it ends a child, nor that the broker's connections are lost."""
    _, worker = chain.both()
    item, _ = _before_and_after(chain, gate="open")
    chain.wait_started(item)
    if how == "cold shutdown":
        worker.send(signal.SIGQUIT)
        worker.wait()
        chain.worker(name="second")
    else:
        with chain.broker as broker:
            broker.execute_command("CLIENT", "KILL", "TYPE", "normal")
    chain.wait_started(item, 2)
    assert not (chain.of(item)["retry"] or {}).get("crashes")
    chain.open_gate("open")
    chain.wait_done()
    chain.allow(item)
    chain.judge()


def test_sigkill_before_the_claim_costs_no_start(chain: Deployment, failpoint: Failpoint) -> None:
    """P6: the claim's call is held by the server while the whole worker dies."""
    listener, worker = chain.both()
    worker_name = chain.app_name("worker")
    held = {"failCommands": ["findAndModify"], "appName": worker_name, "blockConnection": True, "blockTimeMS": 3000}
    with failpoint(**held) as before:
        item, _ = _before_and_after(chain)
        _wait_for_failpoint(chain, before + 1)
        worker.send_group(signal.SIGKILL)
    chain.worker(name="second")
    chain.wait_done()
    assert len(chain.starts(item)) == 1
    chain.judge()
    assert listener.running


def _wait_for_failpoint(chain: Deployment, times: int) -> None:
    chain.client.admin.command("waitForFailPoint", "failCommand", timesEntered=times, maxTimeMS=60_000)


def _handled_but_not_linked(chain: Deployment, item: Due) -> None:
    """Bring a change to the point where `handled` is written and its link cannot be published."""
    chain.wait_started(item)
    chain.redis.pause()
    chain.open_gate("open")
    chain.wait_state(item, lambda state: state["handled"] or state["committed"])


def test_sigkill_between_handled_and_the_link_starts_no_handler_again(chain: Deployment) -> None:
    """P6: the mark is durable; the listener commits after its grace, without any message."""
    _, worker = chain.both()
    item, successor = _before_and_after(chain, gate="open")
    _handled_but_not_linked(chain, item)
    worker.send_group(signal.SIGKILL)
    chain.redis.resume()
    chain.wait_state(item, lambda state: state["committed"] == 1)
    assert chain.starts(successor) == []
    chain.worker(name="second")
    chain.wait_done()
    chain.judge()


def test_sigkill_before_the_commit_write_starts_no_handler_again(chain: Deployment, failpoint: Failpoint) -> None:
    """P6: the commit task is held by the server while the whole worker dies."""
    _, worker = chain.both()
    item, successor = _before_and_after(chain, gate="open")
    chain.allow(successor)  # the listener may have committed, and begun it
    _handled_but_not_linked(chain, item)
    held = {"failCommands": ["update"], "appName": chain.app_name("worker"), "blockConnection": True}
    with failpoint(**held, blockTimeMS=3000) as before:
        chain.redis.resume()
        _wait_for_failpoint(chain, before + 1)
        worker.send_group(signal.SIGKILL)
    chain.worker(name="second")
    chain.wait_done()
    chain.judge()


def test_a_frozen_handler_that_wakes_can_neither_write_nor_record(chain: Deployment) -> None:
    """
    P3: its write, its success, its retry and its halt are refused. The newer effect stays, in any of these.

    In the end the whole worker stops, with messages prefetched. Another one replaces it, and it wakes much later.
    """
    _, worker = chain.both()
    rounds: dict[str, Document] = {
        "write": {"gate": "write"},
        "handled": {"late_gate": "handled"},
        "retry": {"gate": "retry", "act": "retry", "options": {"countdown": 60}},
        "halt": {"gate": "halt", "act": "raise"},
        "group": {"gate": "group"},
    }
    for number, (outcome, do) in enumerate(rounds.items()):
        item = chain.allow(chain.write("plain", "hit", 2 * number + 1, **do))
        successor = chain.write("plain", "hit", 2 * number + 2)
        zombie = chain.wait_started(item)
        if outcome == "handled":
            wait_for(lambda item=item: item in {effect.due for effect in chain.effects()})  # type: ignore[misc]
        with frozen(worker, None if outcome == "group" else zombie.pid):
            if outcome == "group":
                chain.worker(name="second")
            chain.wait_started(item, 2)
            chain.open_gate(outcome)
            chain.wait_started(successor)
            chain.wait_done()
        if outcome in {"write", "group"}:
            wait_for(lambda fence=zombie.fence: chain.facts["refused"].find_one({"fence": fence}))  # type: ignore[misc]
        else:
            worker.wait_for_output(rf"'{outcome}' of partition plain/0 \(fencing token {zombie.fence}\) was refused")
    chain.write("plain", "hit", 99)
    chain.wait_done()
    chain.judge()
    assert chain.partition("plain", 0)["state"] == "flowing"
    assert "failed permanently" not in worker.text


def test_an_answer_of_a_claim_that_is_lost_costs_no_attempt(chain: Deployment, failpoint: Failpoint) -> None:
    """The claim is applied, its answer is cut off; the driver's repetition or the listener brings the change again."""
    chain.both()
    with failpoint(
        mode={"times": 1}, failCommands=["findAndModify"], appName=chain.app_name("worker"), closeConnection=True
    ):
        item, _ = _before_and_after(chain)
        chain.wait_done()
    assert len(chain.starts(item)) == 1
    chain.judge()
