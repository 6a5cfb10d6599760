"""The routes of listeners, asked as probes and Prometheus ask them, and the dashboard and alerts on their answers."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from http.client import HTTPConnection
from types import MappingProxyType
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.monitoring import alerts, panels, unknown
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.rig.project import OPTIONS, Done, MakeProject, Project

Document = dict[str, Any]

APP = "tests.acceptance.cli_project"
_WORKER = ("worker", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat")


class Watched(Project):
    app = APP
    options = MappingProxyType({**OPTIONS, "partitions": 2, "lease_ttl": 20.0})

    def type(self, command: str) -> Done:
        program, *words = shlex.split(command)
        assert (program, words[:2]) == ("celery", ["-A", APP])
        return self.run(*words[2:])


def port_of(listener: ProjectProcess) -> int:
    return int(listener.wait_for_output(r"serving HTTP at http://127\.0\.0\.1:(\d+)/").group(1))


def ask(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def told(port: int, path: str) -> tuple[int, Document]:
    status, text = ask(port, path)
    found: Document = json.loads(text)
    return status, found


def wait_for_verdict(port: int, status: int) -> Document:
    answer: list[Any] = []

    def has_status() -> Document | None:
        answer[:] = told(port, "/verdict")
        return answer[1] if answer[0] == status else None

    return wait_for(has_status, message=lambda: f"/verdict: {answer}")


@pytest.fixture
def watched(make_project: MakeProject) -> Watched:
    made: Watched = make_project(Watched)
    return made


@pytest.fixture
def orders(watched: Watched) -> Any:
    return watched.data["orders"]


def test_probes_metrics_dashboard_and_alerts_agree(watched: Watched, orders: Any) -> None:
    """P16: a leader and a standby, before and after a partition is halted; then the command on the page fixes it."""
    leader = watched.start("listener", "--http", "0")
    port = port_of(leader)
    leader.wait_for_output("opening change stream|reading from")
    standby = watched.start("listener", "--http", ":0")
    worker = watched.start(*_WORKER)
    other = port_of(standby)
    worker.wait_for_output("ready")

    orders.insert_many([{"_id": number} for number in range(6)])
    wait_for(lambda: _value(port, "committed_total") == 6, message=lambda: ask(port, "/metrics")[1])
    # The first watermark behind all that the server's oplog had comes a moment after the commits.
    wait_for(lambda: told(port, "/verdict")[1]["verdict"] == "healthy", message=lambda: str(told(port, "/verdict")))
    assert told(port, "/healthz")[1]["bridges"] == [{"bridge": "shop", "alive": True, "role": "leading"}]
    wait_for(lambda: told(other, "/readyz")[0] == 200, message=lambda: str(told(other, "/readyz")))
    assert told(other, "/healthz")[1]["bridges"] == [{"bridge": "shop", "alive": True, "role": "standing by"}]
    assert told(other, "/verdict")[0] == 200
    assert (_value(port, "verdict"), _value(port, "partitions", 'state="halted"')) == (0, 0)
    for name in ("claim", "handler", "commit"):
        assert _value(port, f"{name}_seconds_count") >= 6
    assert _value(port, "dispatched_total") >= 6
    assert (_value(other, "led"), _value(other, "leading")) == (1, 0)

    orders.insert_one({"_id": "bad", "bad": "a [bad] order"})
    (bridge,) = wait_for_verdict(other, 503)["bridges"]
    (halted,) = (each for each in bridge["findings"] if each["code"] == "halted")
    wait_for_verdict(port, 503)
    assert told(port, "/readyz")[0] == 200  # a rollout goes on
    scraped = ask(port, "/metrics")[1]
    assert (_value(port, "verdict"), _value(port, "partitions", 'state="halted"')) == (2, 1)
    asked = [*(each.expression for each in alerts()), *itertools.chain(*panels().values())]
    assert len(asked) > 30
    assert [found for expression in asked for found in unknown(expression, scraped)] == []
    status, shown = told(port, "/status")
    assert (status, halted in shown["bridges"][0]["findings"]) == (200, True)
    wait_for(lambda: (told(port, "/status")[1]["bridges"][0]["workers"] or {}).get("serving") == 1)
    page = ask(port, "/")[1]
    assert "a [bad] order" in page
    fixed = watched.type(halted["commands"][0])
    assert fixed.returncode == 0, fixed.stderr
    assert leader.terminate() == standby.terminate() == 0


def _value(port: int, name: str, labels: str = "") -> float:
    """The sum over all handlers, of those with some labels."""
    shown = rf"\{{[^}}]*{labels}[^}}]*\}}" if labels else r"(?:\{.*\})?"
    found = re.findall(rf"^mongo_celery_bridge_{name}{shown} (\S+)$", ask(port, "/metrics")[1], re.MULTILINE)
    return sum(map(float, found))


def test_no_probe_and_no_scrape_hangs_with_mongodb(
    processes: Processes, make_replica_set: MakeReplicaSet, mongo_client: MongoClient[Document], redis_url: str
) -> None:
    """The process is alive and not ready, and its metrics have no state. All is back once MongoDB answers."""
    mongo = make_replica_set()
    watched = Watched(processes, mongo_client, mongo.url, redis_url)
    listener = watched.start("listener", "--http", "0")
    port = port_of(listener)
    listener.wait_for_output("opening change stream|reading from")
    wait_for_verdict(port, 200)
    mongo.pause()
    try:
        (bridge,) = wait_for_verdict(port, 503)["bridges"]
        assert [each["code"] for each in bridge["findings"]] == ["state_unreadable"]
        assert told(port, "/healthz")[0] == 200
        status, readiness = told(port, "/readyz")
        assert (status, readiness["ready"], bool(readiness["bridges"][0]["error"])) == (503, False, True)
        assert (_value(port, "up"), _value(port, "verdict")) == (0, 2)
        assert "mongo_celery_bridge_lag_seconds{" not in ask(port, "/metrics")[1]
        assert ask(port, "/")[0] == 200
    finally:
        mongo.resume()
    wait_for_verdict(port, 200)
    wait_for(lambda: told(port, "/readyz")[0] == 200, message=lambda: str(told(port, "/readyz")))
    assert listener.terminate() == 0


def test_a_listener_in_a_worker_serves_too(watched: Watched) -> None:
    """`worker --listener --listener-http`, as a process beside the pool."""
    worker = watched.start(*_WORKER, "--listener", "--listener-http", "0")
    port = port_of(worker)
    wait_for(lambda: told(port, "/healthz")[1]["bridges"][0]["role"] == "leading", message="it leads")
    assert worker.terminate() == 0
