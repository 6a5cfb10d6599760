"""Workers as users start them: every pool, `--listener`, `-Q`, and apps with a `__call__` of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import celery
import psutil  # type: ignore[import-untyped]
import pytest
from pymongo import MongoClient

from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]


def _flow(chain: Deployment) -> None:
    """Plain changes and a retry, through whatever runs."""
    chain.write_many("plain", ["a", "b", "c"], 3, seconds=0.05)
    chain.allow(chain.write("auto", "again", 1, act="raise", times=2), 2)
    chain.wait_done()
    chain.judge()


@pytest.mark.parametrize(
    "pool", ["threads", *(pytest.param(each, marks=pytest.mark.slow) for each in ("solo", "gevent"))]
)
def test_other_pools_keep_the_same_promises(deployment: MakeDeployment, pool: str) -> None:
    """P1, P2, P6: a plain worker consumes the queues of the partitions; a long handler keeps its claim."""
    chain = deployment("plain", "auto")
    chain.listener()
    chain.worker("-P", pool, concurrency=2)
    long = chain.write("plain", "long", 1, seconds=4)
    _flow(chain)
    assert len(chain.starts(long)) == 1
    if pool != "solo":
        _survive_exits(chain)


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="earlier versions let the handler end")
def test_a_cold_shutdown_of_a_solo_worker_is_counted_for_no_change(deployment: MakeDeployment) -> None:
    """P14: Celery's signal handler then raises an error inside the handler, before it announces the shutdown."""
    chain = deployment("plain")
    chain.listener()
    worker = chain.worker("-P", "solo")
    item = chain.write("plain", "running", 1, gate="open")
    chain.wait_started(item)
    worker.send(signal.SIGQUIT)
    worker.wait()
    state = chain.wait_state(item, lambda state: not state.get("claim"))
    assert (state["state"], state["retry"]["crashes"], state["retry"]["count"]) == ("flowing", 0, 0)
    chain.open_gate("open")
    chain.allow(item, 1)
    chain.worker(name="next")
    chain.wait_done()
    chain.judge()


def _survive_exits(chain: Deployment) -> None:
    """P12: a thread that ends by SystemExit, as by CancelledError, is no slot less for the handlers of others."""
    keys = [next(chain.keys("plain", partition, "leaves")) for partition in range(chain.partitions)]
    for item in [chain.write("plain", key, 1, act="leave", times=9) for key in keys]:
        chain.wait_state(item, lambda state: state["state"] == "halted")
    chain.wait_started(chain.write("auto", "afterwards", 1))


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_embeds_a_listener_and_ends_it(deployment: MakeDeployment, pool: str) -> None:
    """
    One command does it all; SIGTERM ends the worker with status 0, and the lease is free.

    A worker that shuts down does not start its listener again, which may end while a handler is finished.
    """
    chain = deployment("plain", "auto")
    worker = chain.worker("-P", pool, "--listener", awaited="reading from")
    _flow(chain)
    item = chain.write("plain", "running", 1, gate="open")
    chain.wait_started(item)
    descendants = psutil.Process(worker.pid).children(recursive=True)
    worker.send(signal.SIGTERM)
    worker.wait_for_output("Warm shutdown")
    if pool == "prefork":
        listener = psutil.Process(wait_for(lambda: chain.lease["pid"]))
        listener.kill()
        wait_for(lambda: not listener.is_running(), message="the worker has seen that its listener has ended")
    chain.open_gate("open")
    assert worker.wait() == 0
    assert not any(_runs(child) for child in descendants)
    assert pool == "prefork" or chain.lease["listenerId"] is None
    assert len(chain.starts(item)) == 1
    assert "the embedded listener has ended" not in worker.text
    assert "Traceback" not in worker.text


def test_an_embedded_listener_does_not_outlive_its_worker(deployment: MakeDeployment) -> None:
    """
    P7: SIGKILL of the worker alone; a listener that nobody can end would lead on for ever.

    Ctrl-C reaches the whole group, as from a terminal: it ends both without a trace, and a running handler is finished.
    """
    chain = deployment("plain", "auto")
    worker = chain.worker("--listener", awaited="reading from")
    descendants = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    wait_for(lambda: not any(_runs(child) for child in descendants), message=lambda: f"{descendants}")
    assert chain.lease["listenerId"] is None

    worker = chain.worker("--listener", name="second", awaited="reading from")
    item = chain.write("plain", "running", 1, seconds=1.5)
    chain.wait_started(item)
    worker.send_group(signal.SIGINT)
    worker.wait()  # the status is Celery's own matter, which differs between versions
    chain.wait_state(item, lambda state: state["handled"] or state["committed"])
    wait_for(lambda: chain.lease["listenerId"] is None, message="the lease is free")
    assert "Traceback" not in worker.text
    assert len(chain.starts(item)) == 1


@pytest.mark.slow
def test_an_embedded_listener_that_is_killed_is_started_again(deployment: MakeDeployment) -> None:
    """P1: as by the kernel when memory runs out; the worker lives on, and nobody else watches the listener."""
    chain = deployment("plain", "auto")
    worker = chain.worker("--listener", awaited="reading from")
    killed = chain.lease["pid"]
    os.kill(killed, signal.SIGKILL)
    worker.wait_for_output("CRITICAL.*embedded listener has ended with exit status -9")
    _flow(chain)
    assert killed != chain.lease["pid"]
    descendants = psutil.Process(worker.pid).children(recursive=True)
    assert worker.terminate() == 0
    assert all(not _runs(child) for child in descendants)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_embedded_listener_that_gave_up_on_mongodb_is_started_again(
    deployment: MakeDeployment, mongo_client: MongoClient[Document], make_proxy: Callable[[int], Proxy], pool: str
) -> None:
    """P1: MongoDB comes up after `start_timeout`; a final error is final for one attempt only."""
    assert mongo_client.address is not None
    proxy = make_proxy(mongo_client.address[1])
    proxy.refuse()
    chain = deployment("plain", "auto", options={"start_timeout": 1})
    worker = chain.worker("-P", pool, "--listener", PROJECT_MONGO=proxy.mongo_url)
    worker.wait_for_output("CRITICAL.*starts.* again in 5 s")
    proxy.pass_through()
    worker.wait_for_output("reading from")
    _flow(chain)
    assert worker.terminate() == 0


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def test_an_app_with_a_call_of_its_own_wraps_each_change(deployment: MakeDeployment) -> None:
    """Flask's application context, and one that calls on to Celery's `__call__`; with several changes in a run."""
    chain = deployment("plain", "auto", options={"partitions": 1, "run_size": 10})
    chain.listener()
    for kind in ("context", "super"):
        worker = chain.worker(name=kind, SCRIPTED_TASK_CLASS=kind)
        chain.wait_started(chain.write("plain", f"first {kind}", 1, gate=kind))
        items = [chain.write("plain", f"run {kind}", n) for n in range(1, 6)]
        chain.open_gate(kind)
        failing = chain.allow(chain.write("auto", f"again {kind}", 1, act="raise", times=2), 2)
        chain.wait_done()
        assert [start.retries for start in chain.starts(failing)] == [0, 1, 2]
        assert len({start.fence for start in chain.starts(*items)}) < len(items)
        assert worker.terminate() == 0
    chain.judge()
    contexts = list(chain.facts["context"].find({"task": {"$ne": "mongo_celery.commit"}}).sort("at"))
    assert len(contexts) == len(chain.starts())
    assert [each["retries"] for each in contexts if each["task"].endswith(".auto")] == [0, 1, 2] * 2


def test_a_warm_shutdown_finishes_what_runs_and_repeats_nothing(deployment: MakeDeployment) -> None:
    """P6: SIGTERM with a handler running and messages prefetched; the next worker takes the rest."""
    chain = deployment("plain", "auto", options={"partitions": 2})
    _, worker = chain.both()
    item = chain.write("plain", "running", 1, seconds=1.5)
    chain.wait_started(item)
    chain.write_many("plain", ["x", "y"], 3)
    assert worker.terminate() == 0
    chain.worker(name="next")
    chain.wait_done()
    chain.judge()
