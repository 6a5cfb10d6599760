"""
The core of the tests with every version that is promised: `python -m tests.versions`.

Each version is in a cell at least. A cell changes everything at once, from the oldest that is promised to the newest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import pytest

from tests.fixtures.process import Processes
from tests.fixtures.rabbitmq import MANAGEMENT, QUEUES, RabbitCluster
from tests.versions.servers import MissingError, run, unpack

PROJECT = Path(__file__).parents[2]
PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- python -m tests.versions writes from here -->", "<!-- to here -->"
COLUMNS = ("cell", "on", "Python", "MongoDB", "Celery", "kombu", "PyMongo", "broker", "passed", "skipped", "failed")
NEEDED = (
    "pytest", "pytest-randomly", "pytest-xdist", "hypothesis", "psutil", "trustme", "gevent", "opentelemetry-sdk",
    "opentelemetry-instrumentation-celery",
)  # fmt: skip
"""Of the extra `dev`, what the core imports: frameworks and object mappers have wishes about versions of their own."""

_BROKER = [f"tests/acceptance/test_{name}.py" for name in (
    "chain", "retries", "failure_policies", "pools", "inline", "runs",
)]  # fmt: skip
"""Whatever a broker has a part in."""
_SHORT = [
    *(f"tests/integration/test_{name}.py" for name in (
        "claims", "stream", "fenced_writes", "outbox_writes", "twophase", "locking", "old_servers",
    )),
    *(f"tests/acceptance/test_{name}.py" for name in ("chain", "retries")),
]  # fmt: skip
"""One file for each thing that a version could break: what `.ci/run` has for the oldest and the newest."""
_CORE = [
    *_SHORT,
    *(f"tests/integration/test_{name}.py" for name in (
        "outbox_dispatcher", "outbox_relay", "once", "twophase_across", "twophase_inside", "twophase_recovery",
    )),
    *(f"tests/acceptance/test_{name}.py" for name in ("failure_policies", "pools", "once_in_workers")),
]  # fmt: skip
"""Every kind of call to MongoDB, and the promises with real listeners, workers of every pool, retries and kills."""


class Cell(NamedTuple):
    """
    One setting.

    Args:
        python: the newest of these that this machine or Debian's archive has.
        mongod: a program of `servers`, as is `redis`.
        pins: for pip; all else is the newest.
        queues: of RabbitMQ, where that is the broker: `classic`, `quorum`.
        tests: files.
    """

    python: tuple[str, ...] = ("3.11",)
    mongod: str = "mongod-6.0.5"
    redis: str = "redis-6.2"
    pins: tuple[str, ...] = ()
    queues: str = ""
    tests: list[str] = _CORE


CELLS = {
    "oldest": Cell(
        mongod="mongod-4.4",
        pins=("celery==5.5.0", "kombu==5.5.*", "pymongo==4.9", "redis==4.5.2", "click==8.1.3"),
    ),
    "older": Cell(("3.12",), "mongod-5.0", "redis-7.0", ("celery==5.6.*", "kombu==5.6.*", "pymongo==4.13.*")),
    "newer": Cell(("3.13",), redis="valkey-9"),
    "newest": Cell(("3.14", "3.13", "3.12", "3.11"), "mongod-6.0.27", "redis-8.0"),
    **{f"rabbitmq-{each}": Cell(queues=each, tests=_BROKER) for each in ("classic", "quorum")},
}


@click.command()
@click.argument("cells", nargs=-1, type=click.Choice(list(CELLS)))
@click.option("--short", is_flag=True, help="A few files of tests. Without CELLS: of the oldest and the newest.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(tempfile.gettempdir()) / "mongo_celery_versions",
    show_default=True,
    help="For servers, environments and outputs; kept, so that a second run needs no network.",
)
@click.option("-n", "processes", default="2", show_default=True, help="Processes of pytest, or `auto`.")
@click.option("--record", "records", is_flag=True, help="Write the results into tests/versions/README.md.")
def versions(cells: tuple[str, ...], *, short: bool, folder: Path, processes: str, records: bool) -> None:
    """
    Run the core of the tests against every version that is promised, or the CELLS.

    Each cell has an environment and servers of its own, from the package index and from Debian's archive; nothing is
    installed on the machine. Exit status 1: a test failed, or a cell that you name could not run.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    is_red = False
    for name in cells or (("oldest", "newest") if short else CELLS):
        try:
            row = run_cell(name, _SHORT if short else CELLS[name].tests, folder, processes)
            is_red |= row[-1] != "0"
        except MissingError as error:
            row = [f"`{name}`", f"{datetime.now(UTC):%Y-%m-%d}", f"not run: {error}", *[""] * (len(COLUMNS) - 3)]
            is_red |= bool(cells)
        click.echo(" | ".join(row))
        if records:
            record(name, row, PAGE)
    raise SystemExit(is_red)


def run_cell(name: str, tests: list[str], folder: Path, processes: str) -> list[str]:
    """Run a cell's tests, with the output of pytest in `FOLDER/NAME.txt`, and return its row of the table."""
    cell, venv = CELLS[name], folder / f"venv-{name}"
    mongod, redis = unpack(cell.mongod, folder), unpack(cell.redis, folder)
    found = make_environment(venv, find_python(cell.python, folder), cell.pins)
    broker = f"{'Valkey' if 'valkey' in cell.redis else 'Redis'} {find_version(redis)}"
    variables = {
        **{name: value for name, value in os.environ.items() if name not in {"CI", "PYTHONHOME", "PYTHONPATH"}},
        "MONGO_CELERY_MONGOD": str(mongod),
        "MONGO_CELERY_REDIS_SERVER": str(redis),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
    }
    # Warnings of versions that are no longer developed, or not yet looked at, are the concern of the daily suite.
    # Slow tests run as well: there are few, and other pools are among them.
    options = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-m", "", "-n", processes)
    log = folder / f"{name}.txt"
    with log.open("wb") as output, rabbitmq(cell.queues, folder) as (more, node):
        done = subprocess.run(
            [venv / "bin" / "python", "-m", "pytest", *options, *tests],
            cwd=PROJECT, env={**variables, **more}, stdout=output, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped|failed|error)", " ".join(last))}
    failed = max(counts.get("failed", 0) + counts.get("error", 0), int(done.returncode != 0))
    ran = (f"`{name}`", f"{datetime.now(UTC):%Y-%m-%d}", found["python"], find_version(mongod), found["celery"])
    numbers = (counts.get("passed", 0), counts.get("skipped", 0), failed)
    return [*ran, found["kombu"], found["pymongo"], node or broker, *map(str, numbers)]


def find_python(versions: tuple[str, ...], folder: Path) -> Path:
    """Return an interpreter of the first of these versions that this machine or Debian's archive has."""
    for version in versions:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
        for found in (shutil.which(f"python{version}"), *kept):
            # A version manager's stand-in is found and yet may not run: only running it tells.
            if found and not subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode:
                return Path(found)
        try:
            return unpack(f"python-{version}", folder)
        except MissingError:
            if version == versions[-1]:
                raise
    raise AssertionError(versions)


def make_environment(folder: Path, python: Path, pins: tuple[str, ...]) -> Mapping[str, str]:
    interpreter, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        # Debian has what brings pip into an environment in a package of its own.
        run(python, "-m", "venv", "--without-pip", folder)
        pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--disable-pip-version-check")
        run(*pip, "-e", f"{PROJECT}[metrics,otel]", *list_requirements(), *pins)
        done.touch()
    code = "import platform; print('python', platform.python_version()); from importlib.metadata import version; "
    code += "[print(name, version(name)) for name in ('celery', 'kombu', 'pymongo')]"
    return dict(line.split() for line in run(interpreter, "-c", code).splitlines())


def list_requirements() -> list[str]:
    """Return `NEEDED`, with the bounds that the extra `dev` has for them."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {re.split(r"[^\w.-]", line)[0]: line for line in project["optional-dependencies"]["dev"]}
    return [found[name] for name in NEEDED]


def find_version(program: Path) -> str:
    found = re.search(r"v=?(\d+\.\d+\.\d+)", run(program, "--version"))
    assert found, program
    return found[1]


@contextmanager
def rabbitmq(queues: str, folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the variables by which tests have RabbitMQ as their broker, while a node runs, and its name."""
    if not queues:
        yield {}, ""
        return
    with TemporaryDirectory(prefix="rabbitmq-", dir=folder) as made, Processes(Path(made)) as processes:
        try:
            node = RabbitCluster(processes, Path(made), 1, management=True).nodes[0]
        except pytest.skip.Exception as error:
            raise MissingError(str(error)) from error
        yield {MANAGEMENT: node.management_url, QUEUES: queues}, f"RabbitMQ {node.version}, {queues} queues"


def record(name: str, row: list[str], page: Path) -> None:
    """Write a row into the table of a page, between its two marks; the other cells keep theirs."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")}
    known[name] = f"| {' | '.join(row)} |"
    table = "\n".join(
        [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(known[n] for n in CELLS if n in known)]
    )
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    versions()
