"""The demo's processes: real ones, each with a log, none of which outlives the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from mongo_celery.embedded import start_tied

_GOODBYE_SECONDS_MAX = 15.0
_LAST_LINES = 15


class Member:
    """
    One process of the demo.

    Attributes:
        name: what messages call it.
        pid: its process id.
        killed: whether the demo has killed it on purpose.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.killed = False
        self._process = process
        self._log = log

    @property
    def returncode(self) -> int | None:
        """As `subprocess` has it; None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The end of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def kill(self) -> None:
        """SIGKILL on purpose."""
        self.killed = True
        self._process.kill()

    def owns(self, pid: int) -> bool:
        """Whether a process lives that is a child of this one: it is in the group that this one leads."""
        with suppress(ProcessLookupError, PermissionError):
            return pid != self.pid and self.returncode is None and os.getpgid(pid) == self.pid
        return False

    def ask_to_end(self) -> None:
        """SIGTERM, after waking what a fault has frozen."""
        if self.returncode is None:
            self._signal_group(signal.SIGCONT)
            self._process.terminate()

    def end_by(self, deadline: float) -> None:
        """Wait for the end until a monotonic time, then kill the process with its children."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        # Only while the leader lives: afterwards the number of its group might be somebody else's.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Crew:
    """
    All processes of a run: a context manager that ends them.

    Args:
        directory: for their logs, and their working directory, so that no local file takes a module's place.
        environment: the whole environment of each.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = environment
        self.members: list[Member] = []

    def python(self, name: str, *arguments: str) -> Member:
        """Start this Python with arguments."""
        path = self._directory / f"{name}.log"
        with path.open("wb") as log:
            process = start_tied(
                [sys.executable, *arguments],
                output=log,
                environment=self._environment,
                directory=self._directory,
            )
        member = Member(name, process, path)
        self.members.append(member)
        return member

    def celery(self, name: str, *arguments: str) -> Member:
        """Start `celery -A` the demo's app with a command."""
        return self.python(name, "-m", "celery", "-A", "mongo_celery.demo.app", *arguments)

    def failed(self) -> Member | None:
        """One that ended though nobody killed it, except with status 0."""
        return next((each for each in self.members if not each.killed and each.returncode), None)

    def stop(self) -> None:
        """End all of them, politely, all at once."""
        for member in self.members:
            member.ask_to_end()
        deadline = time.monotonic() + _GOODBYE_SECONDS_MAX
        for member in self.members:
            member.end_by(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
