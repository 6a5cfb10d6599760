"""The processes of a run: what is signalled, what is left, and how all of it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mongo_celery.embedded.processes import ChildProcess, Supervisor
from tests.fixtures.process import wait_for

READY = "print('ready', flush=True); signal.pause()"
POLITE = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); {READY}"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
PARENT = f"""
import signal, subprocess, sys
child = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]
children = [subprocess.Popen(child).pid for _ in range(2)]
{READY}
"""


def supervisor(directory: Path, grace: float = 10.0) -> Supervisor[ChildProcess]:
    return Supervisor(directory, ChildProcess, grace=grace)


def ready(crew: Supervisor[ChildProcess], program: str) -> ChildProcess:
    """A process that has come so far that a signal meets its handlers."""
    process = crew.python("program", "-c", program)
    wait_for(lambda: "ready" in process.text, message=lambda: process.text)
    return process


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_the_polite_end_regularly_and_the_deaf_are_killed(tmp_path: Path) -> None:
    """All share one bound; a paused one is woken, so that it can answer."""
    with supervisor(tmp_path, grace=2.0) as crew:
        polite, deaf, paused = (ready(crew, program) for program in (POLITE, DEAF, POLITE))
        paused.pause()
    assert [polite.returncode, deaf.returncode, paused.returncode] == [3, -signal.SIGKILL, 3]
    with supervisor(tmp_path, grace=0.0) as crew:
        process = ready(crew, POLITE)
    assert process.returncode == -signal.SIGKILL


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    """Also what a killed process has left behind: its group is its own until it is taken notice of."""
    with supervisor(tmp_path) as crew:
        process = ready(crew, PARENT)
        children = process.children()
        assert len(children) == 2
        process.kill()
        assert not any(gone(child) for child in children)
    wait_for(lambda: all(gone(child) for child in children), message="the children have ended")
