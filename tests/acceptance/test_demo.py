"""`mongo-celery demo`, as users run it: real servers, real processes, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mongo_celery.demo.faults import Faults
from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes, ProjectProcess, wait_for

SECONDS_MAX = 180.0
GOODBYE_SECONDS_MAX = 40.0
RUN = "from mongo_celery.cli.tools import main; main()"
FORGETFUL = """
from dataclasses import replace
from mongo_celery.demo import run
read = run.read_evidence

def forget_one(*arguments):
    evidence = read(*arguments)
    return replace(evidence, final=evidence.final[1:])

run.read_evidence = forget_one
"""


UNFENCED = """
from mongo_celery.bridge.change import Change

def unfenced(change, collection, fenced=Change.fenced):
    return fenced(change, collection)._documents.collection

Change.fenced = unfenced
"""


def demo(processes: Processes, directory: Path, *arguments: str, before: str = "") -> ProjectProcess:
    """Start the demo in a directory that has nothing to do with the project."""
    return processes.python("demo", "-c", before + RUN, "demo", *arguments, directory=directory)


def result_of(process: ProjectProcess) -> dict[str, Any]:
    """The one object that `--json` prints; anything else in the output fails."""
    found = json.loads(process.text)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def servers(mongo_url: str, redis_url: str) -> list[str]:
    """The session's servers as options."""
    return ["--mongo-url", mongo_url, "--redis-url", redis_url]


def test_the_demo_loses_nothing_while_listener_and_worker_process_are_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """P1, P2, P3 and P7 on embedded servers, judged from the writer's record and the oplog."""
    require_server("mongod")
    require_server("redis-server")
    process = demo(processes, tmp_path, "--orders", "30", "--json")

    status = process.wait(SECONDS_MAX)

    assert status == 0, process.text
    result = result_of(process)
    assert result["written"] == result["committed"] > 30
    assert (result["lost"], result["out_of_order"], result["unexpected"]) == (0, 0, 0)
    assert result["stale_writes_refused"] >= 1  # the handler that froze before its write
    assert result["duplicates"] >= 1  # its change, handled again
    assert 0 < result["takeover_seconds"] <= 7  # lease_ttl of 5 s, and 2 s (P7)
    assert 0 < result["seconds"] < SECONDS_MAX
    assert result["changes_per_second"] > 0
    assert "changes a second without faults" in result["events"][0]  # said before anything is broken
    assert "killed the leading listener" in result["events"][1]
    assert list(tmp_path.glob("[!0-9]*")) == []  # nothing is written to the current directory


def test_without_faults_each_handler_starts_once_and_given_servers_are_left_clean(
    processes: Processes, tmp_path: Path, servers: list[str], mongo_client: Any, redis_client: Any
) -> None:
    """P6; and the plain lines that are printed when standard output is no terminal."""
    databases = set(mongo_client.list_database_names())
    process = demo(processes, tmp_path, "--orders", "10", "--no-faults", *servers)

    status = process.wait(SECONDS_MAX)

    assert status == 0, process.text
    assert "PASSED" in process.text
    assert "killed" not in process.text
    assert "changes a second without faults" in process.text
    assert re.search(r"^changes per second without faults +[0-9.]+", process.text.split("done")[-1], re.MULTILINE)
    assert [line.split() for line in process.text.splitlines() if line.startswith("duplicates")] == [
        ["duplicates", "0"]
    ]
    assert set(mongo_client.list_database_names()) <= databases
    assert redis_client.keys() == []


def test_a_loss_makes_the_exit_status_non_zero(processes: Processes, tmp_path: Path, servers: list[str]) -> None:
    """A verdict that cannot fail proves nothing: here one summary is lost while it is read back."""
    arguments = ["--orders", "5", "--no-faults", "--json", *servers]
    process = demo(processes, tmp_path, *arguments, before=FORGETFUL)

    status = process.wait(SECONDS_MAX)

    result = result_of(process)
    assert status == 1
    assert result["lost"] == len(result["findings"]) == 1
    assert result["finished"]


@pytest.mark.slow
def test_a_build_without_fences_is_found_out(processes: Processes, tmp_path: Path, servers: list[str]) -> None:
    """The broken build: the handler that froze overwrites what newer executions have written, and is seen (P3)."""
    (tmp_path / "sitecustomize.py").write_text(UNFENCED, encoding="utf-8")
    arguments = ["-c", RUN, "demo", "--orders", "10", "--json", *servers]
    process = processes.python("demo", *arguments, environment={"PYTHONPATH": str(tmp_path)})

    status = process.wait(SECONDS_MAX)

    result = result_of(process)
    assert status == 1
    assert result["out_of_order"] >= 1
    assert result["stale_writes_refused"] == 0


def test_a_handler_that_froze_while_it_was_killed_leaves_its_part_to_the_next(database: Any) -> None:
    """Nobody could wake it; else the demo would end without having shown a stale write."""
    worker: Any = SimpleNamespace(leads=lambda _pid: True)
    faults = Faults(database, [], worker, first_commits=1, frozen_order="order")
    victim = subprocess.Popen(["sleep", "60"])
    database["journal"].insert_one({"pid": victim.pid})

    assert faults._kill_pool_process()
    assert victim.wait(10) == -signal.SIGKILL
    database["frozen"].insert_one({"_id": "place", "pid": victim.pid})
    assert faults._frozen_handler() is None

    database["frozen"].insert_one({"_id": "place", "pid": os.getpid()})
    assert (faults._frozen_handler() or {})["pid"] == os.getpid()


def test_ctrl_c_ends_everything_that_the_demo_started(
    processes: Processes, tmp_path: Path, servers: list[str], mongo_client: Any
) -> None:
    """Also while processes are being killed; the fixture `leaks` would see what is left."""
    databases = set(mongo_client.list_database_names())
    process = demo(processes, tmp_path, "--orders", "30", *servers)
    wait_for(lambda: "committed" in process.text, SECONDS_MAX, lambda: process.text)
    wait_for(lambda: len(process.children()) >= 3, SECONDS_MAX, "two listeners and a worker")

    process.send(signal.SIGINT)

    assert process.wait(GOODBYE_SECONDS_MAX) == 128 + signal.SIGINT
    assert "Traceback" not in process.text
    assert set(mongo_client.list_database_names()) <= databases


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--mongo-url", "mongodb://127.0.0.1:1"], {}, "both --mongo-url and --redis-url"),
        ([], {"MONGO_CELERY_REDIS_SERVER": "/nowhere/redis-server"}, "MONGO_CELERY_REDIS_SERVER"),
        (["--mongo-url", "mongodb://127.0.0.1", "--redis-url", "amqp://x"], {}, "redis://"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    processes: Processes, tmp_path: Path, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    """Status 1, the remedy, and no traceback."""
    process = processes.python("demo", "-c", RUN, "demo", *arguments, directory=tmp_path, environment=environment)

    assert process.wait(SECONDS_MAX) == 1
    assert words in process.text
    assert "Traceback" not in process.text
