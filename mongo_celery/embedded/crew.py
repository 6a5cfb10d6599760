"""
The processes of a run: started, signalled and ended together, each with a log of its own.

Signals go only to what was started here. A process that has ended keeps its number, as a zombie, until `end`
takes notice of it; so neither its number nor that of the group it leads can meanwhile belong to somebody else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Generic, Self, TypeVar

from mongo_celery.embedded.processes import freeze, start_tied
from mongo_celery.embedded.server import polls

GRACE_SECONDS = 15.0
"""How long a process has for its regular shutdown before it is killed."""

_LAST_LINES = 15
_STATE, _START_TIME = 0, 19  # places in /proc/<pid>/stat, behind the name in brackets


class ChildProcess:
    """
    One started process, the leader of a session and of a group of its own.

    Attributes:
        name: what messages call it.
        pid: its process id.
        output: the file that has all it writes, standard error included.
        killed: whether it was killed on purpose.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.output = output
        self.killed = False
        self._asked = False
        self._process = process

    @property
    def running(self) -> bool:
        """Whether the process has not ended; a paused one has not."""
        return self.returncode is None

    @property
    def returncode(self) -> int | None:
        """As `subprocess` has it: negative for a signal, None while it runs."""
        if self._process.returncode is None:
            # WNOWAIT leaves the zombie in place: `end` still has a group to signal.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._process.returncode

    @property
    def text(self) -> str:
        """All output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def last_words(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.text.splitlines()[-_LAST_LINES:]) or "(no output)"

    def children(self) -> list[int]:
        """Return the pids of the living direct children, oldest first: a prefork worker's pool. On Linux only."""
        if not self.running:
            return []
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread, or the whole process, has just ended
                found += [int(pid) for pid in task.read_text(encoding="ascii").split()]
        started = {pid: fields[_START_TIME] for pid in found if (fields := _stat(pid)) and fields[_STATE] != "Z"}
        return sorted(started, key=lambda pid: (int(started[pid]), pid))

    def leads(self, pid: int) -> bool:
        """Whether another process lives that is in the group which this one, still running, leads."""
        with suppress(ProcessLookupError, PermissionError):
            return pid != self.pid and self.running and os.getpgid(pid) == self.pid
        return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; nothing happens when it has ended."""
        if self._process.returncode is None:
            os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it has started, unless they left its group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """End this process alone by SIGKILL, on purpose, and wait for its end."""
        self.killed = True
        self.send(signal.SIGKILL)
        self.ends_within(GRACE_SECONDS)

    def pause(self) -> None:
        """Freeze this process alone; afterwards none of its threads runs."""
        freeze(self._process)

    def resume(self) -> None:
        """Let a paused process go on."""
        self.send(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Ask for a regular shutdown by SIGTERM, once, and wake whatever is paused, so that it can answer."""
        if not self._asked:
            self._asked = True  # a second SIGTERM ends a worker without regard to its tasks
            self.send(signal.SIGTERM)
            self.send_group(signal.SIGCONT)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end, so many seconds at most; whether it came."""
        return any(not self.running for _ in polls(seconds))

    def end(self, grace: float = GRACE_SECONDS) -> None:
        """
        End the process: regularly if it does so within a time, else by SIGKILL. What it started is killed.

        Harmless if it has ended. Afterwards its number may be another process's, and it gets no signal any more.

        Args:
            grace: seconds; with 0 it is killed without being asked.
        """
        if grace > 0:
            self.ask_to_end()
            self.ends_within(grace)
        self.send_group(signal.SIGKILL)
        self._process.wait()


P = TypeVar("P", bound=ChildProcess)


class Supervisor(Generic[P]):
    """
    Starts processes and ends them all: a context manager.

    Each ends at the latest with this process, by whatever way this one ends.

    Args:
        directory: for their output, one file each, and their working directory, so that no file of the current
            one takes a module's place.
        kind: what represents a process: `ChildProcess`, or a class with more.
        environment: the whole environment of each; this process's own if left out.
        grace: seconds that all together have for a regular shutdown in the end; with 0 they are killed.

    Attributes:
        started: the processes, in the order of their start.
    """

    def __init__(
        self,
        directory: Path,
        kind: type[P],
        *,
        environment: Mapping[str, str] | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.started: list[P] = []
        self._directory = directory
        self._kind = kind
        self._environment = environment
        self._grace = grace
        self._count = 0

    def start(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> P:
        """
        Start a program.

        Args:
            name: what messages and the file with its output call it.
            arguments: the program and its arguments.
            environment: variables added to the environment of all.
            directory: the working directory.
        """
        common = os.environ if self._environment is None else self._environment
        self._count += 1
        output = self._directory / f"{self._count}-{name}.log"
        with output.open("wb") as file:
            process = self._launch(arguments, file, {**common, **(environment or {})}, directory or self._directory)
        started = self._kind(name, process, output)
        self.started.append(started)
        return started

    def _launch(
        self, program: Sequence[str], output: IO[bytes], environment: Mapping[str, str], directory: Path
    ) -> subprocess.Popen[bytes]:
        return start_tied(program, output=output, environment=environment, directory=directory)

    def python(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> P:
        """Start this Python with arguments, such as `"-m", "shop.writer"`."""
        return self.start(name, sys.executable, *arguments, environment=environment, directory=directory)

    def celery(
        self,
        app: str,
        *arguments: str,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> P:
        """Start `celery -A app` with arguments, such as `"worker", "-c", "2"` or `"listener"`."""
        called = arguments[0] if name is None else name
        return self.python(called, "-m", "celery", "-A", app, *arguments, environment=environment, directory=directory)

    def failed(self) -> P | None:
        """One that ended, though nobody killed it, with another status than 0."""
        return next((each for each in self.started if not each.killed and each.returncode), None)

    def release(self, process: P, grace: float = GRACE_SECONDS) -> None:
        """End one process; it is no longer looked after."""
        self.started.remove(process)
        process.end(grace)

    def end(self) -> None:
        """End all, the last started first: all are asked at once, and the grace is for all together."""
        deadline = time.monotonic() + self._grace
        with ExitStack() as stack:  # one failure stops no other end
            for process in self.started:
                stack.callback(lambda each: each.end(max(deadline - time.monotonic(), 0)), process)
            if self._grace > 0:
                for process in reversed(self.started):
                    process.ask_to_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, behind its name; nothing if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
