"""
Children that do not outlive this process, even if it is SIGKILLed.

On Linux a child can ask the kernel for a signal on its parent's death (`PR_SET_PDEATHSIG`). Two
traps decide the form of this module:

- "Parent" means the *thread* that forked. A child started from a short-lived thread would be
  killed when that thread returns. So all children are forked by one daemon thread that lives as
  long as the process.
- The request must be made in the child, between fork and exec. `preexec_fn` runs Python there,
  in a process with other threads: it can deadlock, and from Python 3.12 on it warns. So the
  child is first a tiny Python program that makes the request and then becomes the real one
  under the same pid; the request survives `execve`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import IO

_Start = Callable[[], subprocess.Popen[bytes]]
_Answer = Future[subprocess.Popen[bytes]]

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

    return _the_forker().start(start)


def freeze(process: subprocess.Popen[bytes]) -> None:
    """
    Stop a child by SIGSTOP and wait until none of its threads runs any more.

    The signal alone takes effect a little later: a child on another processor may still answer a
    request that was sent after it. Harmless if the child is stopped already, or has ended.
    """
    process.send_signal(signal.SIGSTOP)
    if process.returncode is None:
        # WNOWAIT leaves the news of stop or end in place, for the next caller and for `wait`.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class _Forker:
    """A daemon thread that starts children for all other threads."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._requests: queue.SimpleQueue[tuple[_Start, _Answer]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="mongo_celery-forker", daemon=True).start()

    def start(self, start: _Start) -> subprocess.Popen[bytes]:
        answer: _Answer = Future()
        self._requests.put((start, answer))
        return answer.result()

    def _work(self) -> None:
        while True:
            start, answer = self._requests.get()
            try:
                answer.set_result(start())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
                answer.set_exception(error)


_forker: _Forker | None = None
_forker_guard = threading.Lock()


def _the_forker() -> _Forker:
    global _forker  # noqa: PLW0603 - one thread a process is the point
    with _forker_guard:
        if _forker is None or _forker.pid != os.getpid():  # threads do not survive a fork
            _forker = _Forker()
        return _forker


def _new_guard() -> None:
    global _forker_guard  # noqa: PLW0603
    _forker_guard = threading.Lock()  # it may have been held by a thread that the fork left behind


os.register_at_fork(after_in_child=_new_guard)
