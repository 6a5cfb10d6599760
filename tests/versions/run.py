"""One cell: its servers, its environment, pytest in it, and what came out."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree as ET

import pytest

from tests.fixtures.process import Processes
from tests.fixtures.rabbitmq import MANAGEMENT, QUEUES, RabbitCluster
from tests.versions.environment import PROJECT, find_python, make_environment, versions_in
from tests.versions.matrix import Cell
from tests.versions.servers import MissingError, Servers

_SAID_VERSION = re.compile(r"v=?(\d+\.\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    What came of a cell.

    Attributes:
        cell: which.
        on: the day, in UTC.
        versions: what really ran, by name.
        passed: tests that passed.
        failed: names of tests that failed, or had an error.
        skipped: reasons, by test.
        seconds: of pytest.
        missing: why it could not be run; "" if it was.
    """

    cell: Cell
    on: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    missing: str = ""

    @property
    def good(self) -> bool:
        """Whether tests ran, and none of them failed."""
        return self.passed > 0 and not self.failed


def run_cell(cell: Cell, folder: Path, arguments: tuple[str, ...] = ()) -> Outcome:
    """
    Run a cell's tests, with the output of pytest in `FOLDER/NAME.txt`.

    Args:
        cell: which.
        folder: for servers and environments, kept from run to run.
        arguments: more of them for pytest.
    """
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    try:
        return _run_here(cell, folder, arguments, today)
    except MissingError as error:
        return Outcome(cell, today, missing=str(error))


def _run_here(cell: Cell, folder: Path, arguments: tuple[str, ...], today: str) -> Outcome:
    servers = Servers(folder)
    mongod, redis_server = servers.mongod(cell.mongodb), servers.redis_server(cell.redis)
    python = find_python(cell.python, servers)
    environment = folder / f"venv-{cell.name}"
    interpreter = make_environment(environment, python, cell.packages)
    versions = {**versions_in(interpreter), "mongod": _said(mongod), "redis-server": _said(redis_server)}
    variables = {
        **{name: value for name, value in os.environ.items() if name not in {"CI", "PYTHONHOME", "PYTHONPATH"}},
        "MONGO_CELERY_MONGOD": str(mongod),
        "MONGO_CELERY_REDIS_SERVER": str(redis_server),
        "PATH": f"{interpreter.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(environment),
    }
    report = folder / f"{cell.name}.xml"
    report.unlink(missing_ok=True)
    # Warnings of versions that are no longer developed, or not yet looked at, are the concern of the daily suite.
    command: list[str | Path] = [
        interpreter,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
        "-m",
        "",  # slow ones too: there are few, and other pools are among them
    ]
    started = time.monotonic()
    with (folder / f"{cell.name}.txt").open("wb") as output, _broker(cell, folder) as (broker, its_version):
        subprocess.run(
            [*command, f"--junitxml={report}", *cell.tests, *arguments],
            cwd=PROJECT,
            env={**variables, **broker},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = time.monotonic() - started
    versions |= its_version
    if not report.exists():
        return Outcome(cell, today, versions, failed=("pytest itself",), seconds=seconds)
    passed, failed, skipped = _read(report)
    return Outcome(cell, today, versions, passed, failed, skipped, seconds)


@contextmanager
def _broker(cell: Cell, folder: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """The variables by which the acceptance tests have RabbitMQ as their broker, while a node runs, and its version."""
    if cell.broker == "redis":
        yield {}, {}
        return
    with TemporaryDirectory(prefix="rabbitmq-", dir=folder) as made, Processes(Path(made)) as processes:
        try:
            node = RabbitCluster(processes, Path(made), 1, management=True).nodes[0]
        except pytest.skip.Exception as error:
            raise MissingError(str(error)) from error
        yield {MANAGEMENT: node.management_url, QUEUES: cell.broker}, {"rabbitmq": node.version}


def _read(report: Path) -> tuple[int, tuple[str, ...], dict[str, str]]:
    passed = 0
    failed: list[str] = []
    skipped: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped[name] = skip.get("message", "")
        else:
            passed += 1
    return passed, tuple(failed), skipped


def _said(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = _SAID_VERSION.search(done.stdout)
    if found is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise MissingError(f"{program.name} does not run here: {' '.join(last)}")
    return found[1]
