"""
Child processes that do not outlive this one, even after SIGKILL: servers, and the processes of a run.

On Linux a child can request a signal for its parent's death (`PR_SET_PDEATHSIG`). Two traps determine this module's
form:

- "Parent" means the *thread* that forked. When a short-lived thread returns, its child would be killed. So one thread,
  which lives as long as the process, forks all children.
- The child must make the request between fork and exec. `preexec_fn` would run Python there, in a process with other
  threads, and can deadlock. So the child is first a tiny Python program, which makes the request and then becomes the
  real one with the same pid. The request survives `execve`.

Only processes that were started here get signals. An ended process keeps its pid, as a zombie, until `end` waits for
it. Until then no other process can have its pid or group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, Self, TypeVar

GRACE_SECONDS = 15.0
"""Seconds for a regular shutdown before a process is killed."""

_POLL_SECONDS = 0.02
_LAST_LINES = 15
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_TIME = 18  # field in /proc/<pid>/stat, after the name in brackets and the state

CANNOT_EXECUTE = 126
"""Exit status of a child whose program could not be executed, like a shell's."""

_BECOME = f"""
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the parent ended before the request: no signal would come any more
# Python ignores the first two, and a shell the others for what it starts in the background; exec would hand that on.
for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGQUIT"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(sys.argv[2] + ": " + str(error.strerror) + chr(10))
    sys.stderr.flush()
    os._exit({CANNOT_EXECUTE})
"""


def start_tied(
    arguments: Sequence[str],
    *,
    output: IO[bytes] | int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    umask: int = -1,
) -> subprocess.Popen[bytes]:
    """
    Start a child process. It is killed at the latest when this process ends.

    The child leads a new session, so Ctrl-C in the terminal reaches only this process, which can stop its children in
    order. The child's standard input is empty. You can call this from any thread: the child does not end with it. The
    child's own children may survive. Outside Linux, the child may survive this process.

    Args:
        arguments: the program, which is searched in `PATH`, and its arguments. If it cannot be executed, the child ends
            with status 126 and a message in its output.
        output: takes standard output and standard error.
        environment: the whole environment. By default this process's.
        directory: the working directory.
        umask: the child's umask. By default this process's.
    """
    command = list(arguments)
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - the caller's own arguments, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=directory,
            start_new_session=True,
            umask=umask,
        )

    return _forker.submit(start).result()


def polls(seconds: float) -> Iterator[None]:
    """Yield immediately, then every few milliseconds until *seconds* have passed."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        pause.wait(_POLL_SECONDS)
        yield


class ChildProcess:
    """
    A started process, which leads its own session and group.

    Attributes:
        name: its name in messages.
        pid: its process id.
        output: the file with its output, standard error included.
        killed: True if it was killed on purpose.
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
        """True if the process has not ended. It may be paused."""
        return self.returncode is None

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal. None while the process runs."""
        if self._process.returncode is None:
            # WNOWAIT keeps the zombie, so `end` can still signal its group.
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
        """Return the pids of living direct children, oldest first, such as a prefork pool. Linux only."""
        found: list[tuple[int, int]] = []
        for children in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread, the child or the process has just ended
                for pid in children.read_text(encoding="ascii").split():
                    state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                    if state != "Z":
                        found.append((int(fields[_START_TIME]), int(pid)))
        return [pid for _, pid in sorted(found)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone. It does nothing after its end."""
        if self._process.returncode is None:
            os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its descendants, except those outside its group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill only this process with SIGKILL, on purpose, and wait for its end."""
        self.killed = True
        self.send(signal.SIGKILL)
        self.ends_within(GRACE_SECONDS)

    def pause(self) -> None:
        """
        Stop only this process with SIGSTOP, and wait until all its threads have stopped.

        Without the wait, a process on another CPU may still answer a request sent after the signal. It does nothing if
        the process is paused or has ended.
        """
        self.send(signal.SIGSTOP)
        if self._process.returncode is None:
            # WNOWAIT keeps the status of stop or end for the next caller and for `end`.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Resume a paused process with SIGCONT."""
        self.send(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Request a regular shutdown with SIGTERM, once. Wake paused processes, so that they can answer."""
        if not self._asked:
            self._asked = True  # a second SIGTERM ends a worker without waiting for its tasks
            self.send(signal.SIGTERM)
            self.send_group(signal.SIGCONT)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most this many seconds. Return True if the process has ended."""
        return any(not self.running for _ in polls(seconds))

    def end(self, grace: float = GRACE_SECONDS) -> None:
        """
        End the process: with SIGTERM within the grace period, then with SIGKILL. Kill its descendants.

        Afterwards another process may get its pid, so send no more signals.

        Args:
            grace: seconds. With 0 it is killed immediately.
        """
        if grace > 0:
            self.ask_to_end()
            self.ends_within(grace)
        self.send_group(signal.SIGKILL)
        self._process.wait()


P = TypeVar("P", bound=ChildProcess)


class Supervisor(Generic[P]):
    """
    A context manager that starts processes and ends them all.

    Each process ends at the latest when this process ends, even if this one is killed.

    Args:
        directory: the directory for their output, one file each. It is also their working directory, so no file of the
            current directory can hide a module.
        kind: the class of a process: `ChildProcess` or a subclass.
        environment: the whole environment of each process. By default this process's.
        grace: seconds that they share for a regular shutdown. With 0 they are killed.

    Attributes:
        started: the processes, in starting order.
    """

    launch = staticmethod(start_tied)

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
        self._numbers = count(1)

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
            name: its name in messages and for the output file.
            arguments: the program and its arguments.
            environment: variables that are added to the common environment.
            directory: the working directory. By default the common one.
        """
        whole = {**(os.environ if self._environment is None else self._environment), **(environment or {})}
        output = self._directory / f"{next(self._numbers)}-{name}.log"
        with output.open("wb") as file:
            process = self.launch(arguments, output=file, environment=whole, directory=directory or self._directory)
        started = self._kind(name, process, output)
        self.started.append(started)
        return started

    def python(self, name: str, *arguments: str, **options: Any) -> P:
        """Start this Python with arguments, such as `"-m", "shop.writer"`, and options of `start`."""
        return self.start(name, sys.executable, *arguments, **options)

    def celery(self, app: str, *arguments: str, name: str | None = None, **options: Any) -> P:
        """Start `celery -A app` with arguments, such as `"listener"`, and options of `start`."""
        return self.python(name or arguments[0], "-m", "celery", "-A", app, *arguments, **options)

    def failed(self) -> P | None:
        """Return a process that ended with another status than 0 and was not killed on purpose."""
        return next((each for each in self.started if not each.killed and each.returncode), None)

    def release(self, process: P, grace: float = GRACE_SECONDS) -> None:
        """End one process and forget it."""
        self.started.remove(process)
        process.end(grace)

    def end(self) -> None:
        """End all processes, the last started first. All get SIGTERM together, and share the grace period."""
        deadline = time.monotonic() + self._grace
        with ExitStack() as stack:  # one failure prevents no other end
            for process in self.started:
                stack.callback(lambda each: each.end(max(deadline - time.monotonic(), 0)), process)
            if self._grace > 0:
                for process in reversed(self.started):
                    process.ask_to_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


_forker = ThreadPoolExecutor(1, "mongo_celery-forker")


def _renew_forker() -> None:
    global _forker  # noqa: PLW0603 - threads do not survive a fork
    _forker = ThreadPoolExecutor(1, "mongo_celery-forker")


os.register_at_fork(after_in_child=_renew_forker)


@contextmanager
def end_by_signals() -> Iterator[None]:
    """
    On SIGINT, SIGTERM or SIGHUP, end the block by SystemExit, so its context managers clean up.

    The exit status is 128 plus the signal's number, like a shell's. Further signals are ignored until the block has
    ended. Then the old handlers are restored. Use it in the main thread only.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for each in _ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
