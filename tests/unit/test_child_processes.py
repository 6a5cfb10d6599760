"""The processes of a run, and what they have started, end with it."""

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
subprocess.Popen(child)
{READY}
"""


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_the_polite_end_regularly_and_the_deaf_are_killed_with_what_they_have_started(tmp_path: Path) -> None:
    """All share one bound. A paused one is woken, so that it can answer. A killed one has left its group behind."""
    with Supervisor(tmp_path, ChildProcess, grace=2.0) as crew:
        processes = [crew.python("program", "-c", program) for program in (POLITE, DEAF, POLITE, PARENT)]
        wait_for(lambda: all("ready" in each.text for each in processes))
        processes[2].pause()
        (child,) = processes[3].children()
        processes[3].kill()
        assert not gone(child)
    assert [each.returncode for each in processes] == [3, -signal.SIGKILL, 3, -signal.SIGKILL]
    wait_for(lambda: gone(child))
