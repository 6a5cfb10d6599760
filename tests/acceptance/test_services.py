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
    """Start the servers and wait until they are announced."""
    process = processes.python("services", "-c", RUN, "services", *arguments)
    wait_for(lambda: "Ctrl-C" in process.text, READY_SECONDS_MAX, lambda: process.text)
    return process


def urls(process: ProjectProcess) -> tuple[str, str]:
    """The printed URLs of MongoDB and Redis."""
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_services_answer_and_a_signal_ends_them(processes: Processes, number: signal.Signals) -> None:
    """Both URLs answer; afterwards the status is 0 and no process is left."""
    process = services(processes)
    mongo_url, redis_url = urls(process)
    with connect(mongo_url) as mongo, redis.Redis.from_url(redis_url) as broker:
        assert mongo.admin.command("hello")["setName"]
        assert broker.ping()
    assert "celery -A shop listener" in process.text
    assert "celery -A shop worker" in process.text
    servers = [psutil.Process(pid) for pid in process.children()]
    assert len(servers) == 2

    process.send(number)

    assert process.wait(GOODBYE_SECONDS_MAX) == 0
    assert not any(server.is_running() for server in servers)
    assert "Traceback" not in process.text


def test_a_given_directory_keeps_data_and_ports(processes: Processes, tmp_path: Path) -> None:
    """Ended and started again, the same URLs have the same data."""
    first = services(processes, "--directory", str(tmp_path / "data"))
    url, broker = urls(first)
    with connect(url) as client:
        client.shop.orders.insert_one({"_id": 1})
    kept = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert not [each for each in kept if each.exists() and each.stat().st_mode & 0o077], "for this user alone"
    first.send(signal.SIGINT)
    assert first.wait(GOODBYE_SECONDS_MAX) == 0

    second = services(processes, "--directory", str(tmp_path / "data"))

    assert urls(second) == (url, broker)
    with connect(url) as client:
        assert client.shop.orders.find_one() == {"_id": 1}
    second.send(signal.SIGTERM)
    assert second.wait(GOODBYE_SECONDS_MAX) == 0
