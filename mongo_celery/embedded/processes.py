"""
Child processes that do not outlive this one, even if it is SIGKILLed: servers, and the processes of a run.

On Linux a child can ask the kernel for a signal on its parent's death (`PR_SET_PDEATHSIG`). Two traps decide the form
of this module:

- "Parent" means the *thread* that forked. A child of a short-lived thread would be killed when that thread returns. So
  one thread, which lives as long as the process, forks all children.
- The request must be made in the child, between fork and exec. `preexec_fn` runs Python there, in a process with other
  threads, and can deadlock. So the child is first a tiny Python program that makes the request, and then becomes the
  real one under the same pid. The request survives `execve`.

Signals go only to what was started here. A process that has ended keeps its number, as a zombie, until `end` takes
notice of it. So neither its number nor that of the group it leads can meanwhile belong to somebody else.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Generic, Self, TypedDict, TypeVar, Unpack

GRACE_SECONDS = 15.0
"""How long a process has for its regular shutdown before it is killed."""

_POLL_SECONDS = 0.02
_LAST_LINES = 15
_STATE, _START_TIME = 0, 19  # places in /proc/<pid>/stat, behind the name in brackets

CANNOT_EXECUTE = 126
"""Exit status of a child whose program could not be executed, as in a shell."""

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
    Start a child process that ends, by SIGKILL, at the latest when this process ends.

    The child leads a session of its own, so that Ctrl-C in the terminal reaches only this process,
    which can then stop its children in the right order. Its standard input is empty. Callable from
    any thread; the child is not tied to the calling thread. Not promised: the same for the child's
    own children, nor, outside Linux, the end by SIGKILL at all.

    Args:
        arguments: The program, looked up in `PATH`, and its arguments. One that cannot be executed
            ends with status 126 and a sentence in the output.

        output: Where standard output and standard error go.

        environment: The whole environment; this process's own if left out.

        directory: The working directory.

        umask: Of the child; this process's own if left out.
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
    """Yield immediately and then every few milliseconds, until *seconds* have passed."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        pause.wait(_POLL_SECONDS)
        yield


class ChildProcess:
    """
    One started process, the leader of a session and of a group of its own.

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
        """True if the process has not ended; a paused one has not."""
        return self.returncode is None

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal, None while it runs."""
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
        """
        Stop this process alone by SIGSTOP, and wait until none of its threads runs any more.

        The signal alone takes effect a little later: a process on another processor may still answer a request that
        was sent after it. Harmless if the process is paused already, or has ended.
        """
        self.send(signal.SIGSTOP)
        if self._process.returncode is None:
            # WNOWAIT leaves the news of stop or end in place, for the next caller and for `end`.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process continue."""
        self.send(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Ask for a regular shutdown by SIGTERM, once, and wake whatever is paused, so that it can answer."""
        if not self._asked:
            self._asked = True  # a second SIGTERM ends a worker without regard to its tasks
            self.send(signal.SIGTERM)
            self.send_group(signal.SIGCONT)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end, so many seconds at most. Return True if it came."""
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


class StartOptions(TypedDict, total=False):
    """
    The options of a start.

    Attributes:
        environment: variables added to the environment of all.
        directory: the working directory.
    """

    environment: Mapping[str, str]
    directory: Path


class Supervisor(Generic[P]):
    """
    Starts processes and ends them all: a context manager.

    Each ends at the latest with this process, by whatever way this one ends.

    Args:
        directory: for their output, one file each, and their working directory, so that no file of the current
            one takes a module's place.
        kind: the class of a process: `ChildProcess`, or one with more.
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

    def start(self, name: str, *arguments: str, **options: Unpack[StartOptions]) -> P:
        """
        Start a program.

        Args:
            name: its name in messages, and that of the file with its output.
            arguments: the program and its arguments.
            options: as of `StartOptions`.
        """
        common = os.environ if self._environment is None else self._environment
        environment = {**common, **options.get("environment", {})}
        self._count += 1
        output = self._directory / f"{self._count}-{name}.log"
        with output.open("wb") as file:
            process = self._launch(arguments, file, environment, options.get("directory", self._directory))
        started = self._kind(name, process, output)
        self.started.append(started)
        return started

    def _launch(
        self, program: Sequence[str], output: IO[bytes], environment: Mapping[str, str], directory: Path
    ) -> subprocess.Popen[bytes]:
        return start_tied(program, output=output, environment=environment, directory=directory)

    def python(self, name: str, *arguments: str, **options: Unpack[StartOptions]) -> P:
        """Start this Python with arguments, such as `"-m", "shop.writer"`."""
        return self.start(name, sys.executable, *arguments, **options)

    def celery(self, app: str, *arguments: str, name: str | None = None, **options: Unpack[StartOptions]) -> P:
        """Start `celery -A app` with arguments, such as `"worker", "-c", "2"` or `"listener"`."""
        return self.python(name or arguments[0], "-m", "celery", "-A", app, *arguments, **options)

    def failed(self) -> P | None:
        """Return a process that ended with another status than 0, though nobody killed it."""
        return next((each for each in self.started if not each.killed and each.returncode), None)

    def release(self, process: P, grace: float = GRACE_SECONDS) -> None:
        """End one process, and look after it no longer."""
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
    """Return the fields of a process in /proc, behind its name, and nothing if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _make_forker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "mongo_celery-forker")


def _renew_forker() -> None:
    global _forker  # noqa: PLW0603 - threads do not survive a fork
    _forker = _make_forker()


_forker = _make_forker()
os.register_at_fork(after_in_child=_renew_forker)
