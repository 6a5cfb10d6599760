"""The measured processes: started, watched, ended; their processor time and memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mongo_celery.bench.errors import BenchError
from mongo_celery.embedded import start_tied

_END_SECONDS = 15.0
_QUOTED_CHARACTERS = 2000
_TICKS = os.sysconf("SC_CLK_TCK")


class Actor:
    """
    One started process with all that it starts, such as the pool of a worker: a session of its own.

    Args:
        name: what messages call it.
        arguments: of this Python.
        environment: added to our own.
        log: where its output goes.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as output:
            self._process: subprocess.Popen[bytes] = start_tied(
                [sys.executable, *arguments],
                output=output,
                environment={**os.environ, **environment},
                directory=log.parent,  # `python -m` imports from where it is started: nothing of the user's
            )

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._process.pid

    def check(self) -> None:
        """
        Nothing happens unless it has ended with a failure.

        Raises:
            BenchError: it has, and its log is quoted.
        """
        if self._process.poll() not in {None, 0}:
            raise BenchError(f"{self.name} ended with status {self._process.returncode}: {self.quotation()}")

    def quotation(self) -> str:
        """The end of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return text[-_QUOTED_CHARACTERS:] or "its log is empty"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it regularly, at last by SIGKILL, and all that it has started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # its session bears its number as long as a member lives
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def cpu_seconds(self) -> float:
        """Processor time of the process and its living children."""
        return cpu_seconds([self.pid, *_children(self.pid)])

    def sockets(self) -> int:
        """How many sockets the process has open."""
        count = 0
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                count += str(descriptor.readlink()).startswith("socket:")
        return count


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time, user and system, of processes of this host; those that have ended count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory of a process in MB (2^20): now, and at its highest."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM"}:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["VmHWM"]


def pause(seconds: float) -> None:
    """Let time pass between two looks."""
    time.sleep(seconds)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
        return [int(child) for child in text.split()]
    return []
