"""A forked `celery` process is what a started one would have been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.forked import WITHOUT, run_celery
from tests.fixtures.process import Processes

_APP = """
import os, sys
from celery import Celery

app = Celery("small", broker="memory://")
print("app", sys.argv[1:], os.getcwd(), os.environ.get("SMALL"), os.getppid(), os.getsid(0) == os.getpid(), flush=True)
"""


@pytest.fixture
def small(tmp_path: Path) -> dict[str, str]:
    """Give the environment in which the app `small` can be imported."""
    (tmp_path / "small.py").write_text(_APP, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path), "SMALL": "yes"}


@pytest.mark.parametrize("arguments", [("--version",), ("no-such-command",), ("-A", "small", "report")], ids=str)
def test_a_command_ends_and_says_as_if_it_had_been_started(small: dict[str, str], arguments: tuple[str, ...]) -> None:
    """Status, output and errors; but for what the app says of its process."""
    forked = run_celery(*arguments, environment=small)
    environment = {**os.environ, **small}
    started = subprocess.run(
        [sys.executable, "-m", "celery", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert forked.returncode == started.returncode
    assert forked.stderr == started.stderr
    assert _without_app(forked.stdout) == _without_app(started.stdout)


def _without_app(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("app ")]


@pytest.mark.parametrize("without", [False, True])
def test_a_process_is_a_child_with_a_session_and_surroundings_of_its_own(
    processes: Processes, small: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, without: bool
) -> None:
    """It ends by signals, and its status says so."""
    if without:
        monkeypatch.setenv(WITHOUT, "1")
    process = processes.celery("small", "worker", "-P", "solo", environment=small, directory=tmp_path)
    told = process.wait_for_output(r"app (\[.*\]) (\S+) (\S+) (\d+) (\w+)")
    expected = (str(["-A", "small", "worker", "-P", "solo"]), str(tmp_path), "yes", str(os.getpid()), "True")
    assert told.groups() == expected
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
