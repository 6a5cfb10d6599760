"""`mongo-celery services`: servers to develop with."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import redis
from pymongo import MongoClient

from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes, ProjectProcess, wait_for

READY_SECONDS_MAX = 90.0
GOODBYE_SECONDS_MAX = 40.0
RUN = "from mongo_celery.cli.tools import main; main()"


@pytest.fixture(autouse=True)
def servers_are_here() -> None:
    require_server("mongod")
    require_server("redis-server")


def services(processes: Processes, *arguments: str) -> ProjectProcess:
    process = processes.python("services", "-c", RUN, "services", *arguments)
    wait_for(lambda: "Ctrl-C" in process.text, READY_SECONDS_MAX, lambda: process.text)
    return process


def urls(process: ProjectProcess) -> tuple[str, str]:
    found = re.search(r"^MongoDB +(\S+)\nRedis +(\S+)$", process.text, re.MULTILINE)
    assert found, process.text
    return found[1], found[2]


def connect(url: str) -> MongoClient[dict[str, Any]]:
    return MongoClient(url, serverSelectionTimeoutMS=10_000)


def test_one_server_alone_says_its_url_as_json(processes: Processes) -> None:
    """What is started by itself can be ended by itself; a script reads one line."""
    process = processes.python("services", "-c", RUN, "services", "--only", "redis", "--json")
    found = json.loads(process.wait_for_output(r"\{.*\}", READY_SECONDS_MAX)[0])
    assert list(found) == ["redis"]
    with redis.Redis.from_url(found["redis"]) as broker:
        assert broker.ping()
    process.send(signal.SIGINT)
    assert process.wait(GOODBYE_SECONDS_MAX) == 0


def test_services_answer_keep_what_they_have_and_end_with_a_signal(processes: Processes, tmp_path: Path) -> None:
    """Both URLs answer; ended, no process is left; started again in a given directory, they have the same data."""
    first = services(processes, "--directory", str(tmp_path / "data"))
    url, broker = urls(first)
    with connect(url) as client, redis.Redis.from_url(broker) as found:
        assert client.admin.command("hello")["setName"]
        assert found.ping()
        client.shop.orders.insert_one({"_id": 1})
    assert "celery -A shop listener" in first.text
    assert "celery -A shop worker" in first.text
    kept = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert not [each for each in kept if each.exists() and each.stat().st_mode & 0o077], "for this user alone"
    servers = [psutil.Process(pid) for pid in first.children()]
    assert len(servers) == 2
    _end(first, signal.SIGINT)
    assert not any(server.is_running() for server in servers)

    second = services(processes, "--directory", str(tmp_path / "data"))

    assert urls(second) == (url, broker)
    with connect(url) as client:
        assert client.shop.orders.find_one() == {"_id": 1}
    _end(second, signal.SIGTERM)


def _end(process: ProjectProcess, number: signal.Signals) -> None:
    process.send(number)
    assert process.wait(GOODBYE_SECONDS_MAX) == 0
    assert "Traceback" not in process.text
