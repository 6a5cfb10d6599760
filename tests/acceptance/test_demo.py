"""`mongo-celery demo`, as users run it: real servers, real processes, real kills."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes, ProjectProcess, wait_for

SECONDS_MAX = 180.0
GOODBYE_SECONDS_MAX = 40.0
RUN = "from mongo_celery.cli.tools import main; main()"
FORGETFUL = """
from mongo_celery.demo import run
find = run.find_lost

def forget_one(keys, summaries):
    return find(keys, {key: seen for key, seen in summaries.items() if key != keys[0]})

run.find_lost = forget_one
"""


def demo(processes: Processes, directory: Path, *arguments: str, before: str = "") -> ProjectProcess:
    return processes.python("demo", "-c", before + RUN, "demo", *arguments, directory=directory)


def result_of(process: ProjectProcess) -> dict[str, Any]:
    """The one object that `--json` prints; anything else in the output fails."""
    found = json.loads(process.text)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def servers(mongo_url: str, redis_url: str) -> list[str]:
    return ["--mongo-url", mongo_url, "--redis-url", redis_url]


def test_the_demo_loses_nothing_while_listener_and_worker_process_are_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """P1, P2 and P7 on embedded servers, judged by what took effect."""
    require_server("mongod")
    require_server("redis-server")
    process = demo(processes, tmp_path, "--orders", "30", "--json")

    status = process.wait(SECONDS_MAX)

    assert status == 0, process.text
    result = result_of(process)
    assert result["written"] == result["handled"] == 150
    assert (result["lost"], result["out_of_order"], result["findings"]) == (0, 0, [])
    assert result["finished"]
    assert 0 < result["takeover_seconds"] <= 17  # lease_ttl of 5 s, 2 s (P7), and what a busy machine adds
    assert 0 < result["seconds"] < SECONDS_MAX
    assert result["changes_per_second"] > 0
    assert len(result["events"]) == 4, "the rate, a killed listener, its successor, a killed worker process"
    assert list(tmp_path.glob("[!0-9]*")) == []  # nothing is written to the current directory


def test_a_loss_makes_the_exit_status_non_zero(
    processes: Processes, tmp_path: Path, servers: list[str], mongo_client: Any, redis_client: Any
) -> None:
    """A verdict that cannot fail proves nothing: here one summary is forgotten. Given servers are left clean."""
    databases = set(mongo_client.list_database_names())
    arguments = ["--orders", "5", "--no-faults", "--json", *servers]
    process = demo(processes, tmp_path, *arguments, before=FORGETFUL)

    status = process.wait(SECONDS_MAX)

    result = result_of(process)
    assert status == 1
    assert result["lost"] == len(result["findings"]) == 5
    assert (result["finished"], result["duplicates"]) == (True, 0)
    assert set(mongo_client.list_database_names()) <= databases
    assert redis_client.keys() == []


def test_ctrl_c_ends_everything_that_the_demo_started(
    processes: Processes, tmp_path: Path, servers: list[str], mongo_client: Any
) -> None:
    """Also while processes are being killed; the fixture `leaks` would see what is left."""
    databases = set(mongo_client.list_database_names())
    process = demo(processes, tmp_path, "--orders", "30", *servers)
    wait_for(lambda: "killed" in process.text, SECONDS_MAX, lambda: process.text)
    wait_for(lambda: len(process.children()) >= 2, SECONDS_MAX, "the other listener and a worker")

    process.send(signal.SIGINT)

    assert process.wait(GOODBYE_SECONDS_MAX) == 128 + signal.SIGINT
    assert "Traceback" not in process.text
    assert set(mongo_client.list_database_names()) <= databases


def test_what_is_missing_is_said_in_one_sentence(processes: Processes, tmp_path: Path) -> None:
    """Status 1, the remedy, and no traceback."""
    arguments = ["--mongo-url", "mongodb://127.0.0.1", "--redis-url", "amqp://x"]
    process = demo(processes, tmp_path, *arguments)

    assert process.wait(SECONDS_MAX) == 1
    assert "redis://" in process.text
    assert "Traceback" not in process.text
