"""What all servers share: starting, being ready, signals, and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from mongo_celery.embedded.binaries import BinaryName, explain_failed_start, find_binary
from mongo_celery.embedded.directory import DataDirectory
from mongo_celery.embedded.ports import free_port
from mongo_celery.embedded.processes import freeze, start_tied
from mongo_celery.errors import EmbeddedServerError

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
PORTS_TRIED_MAX = 5
_POLL_SECONDS = 0.02
_PORT_TAKEN = "Address already in use"


def polls(seconds: float) -> Iterator[None]:
    """Yield at once and then every few milliseconds, until *seconds* have passed."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        pause.wait(_POLL_SECONDS)
        yield


class Server(ABC):
    """
    One server process on 127.0.0.1, and its data.

    A server object may be started and stopped any number of times, from any thread but from one at
    a time. The process ends at the latest with this one, and when the object is garbage: keep it.
    """

    binary_name: ClassVar[BinaryName]
    ready_words: ClassVar[str]
    """What the server logs, in whatever case, as soon as it accepts connections."""

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None,
        port: int | None,
        environment: Mapping[str, str] | None,
        binary: str | os.PathLike[str] | None,
    ) -> None:
        self._binary = binary
        self._directory = DataDirectory(directory)
        self._wanted_port = port
        self._environment = None if environment is None else {**os.environ, **environment}
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Server] | None = None
        self._log_start = 0

    @abstractmethod
    def _arguments(self, directory: Path, port: int) -> list[str]: ...

    @property
    @abstractmethod
    def url(self) -> str:
        """The address for clients, from the first start until `stop`."""

    @property
    def port(self) -> int:
        """The TCP port, from the first start until `stop`."""
        if self._port is None:
            raise EmbeddedServerError(f"{self.binary_name} has no port before its first start: call start().")
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return self._alive().pid

    @property
    def running(self) -> bool:
        """Whether the process exists, a paused one included."""
        return self._process is not None and self._process.poll() is None

    @property
    def directory(self) -> Path:
        """Where data and log are; an own temporary directory is removed by `stop`."""
        return self._directory.path

    @property
    def log(self) -> str:
        """What the server has logged since its last start."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self) -> Self:
        """
        Start the server and wait until it accepts connections; nothing happens if it runs already.

        The first start chooses a free port, unless one was given. Later ones keep port and data, in a given
        directory also those of other objects and processes.
        After an error nothing runs, and a directory of our own that holds no earlier data is gone.

        Raises:
            EmbeddedServerError: There is no such program, or it did not become ready; the message
                says what is missing.
        """
        if self.running:
            return self
        fresh = self._port is None or self._process is None
        if self._port is None:
            with contextlib.suppress(OSError, ValueError):
                self._port = int(self._port_path.read_text(encoding="ascii"))
        try:
            self._start_on_a_port(find_binary(self.binary_name, self._binary))
            self._port_path.touch(mode=0o600)
            self._port_path.write_text(f"{self.port}", encoding="ascii")
        except BaseException:
            self.kill()
            if fresh:
                self.stop()
            raise
        return self

    def stop(self) -> None:
        """
        End the server; harmless if it does not run.

        Data in a given directory is left as after a regular shutdown. An own temporary directory
        is removed, and with it everything; so such a server is not asked but killed.
        """
        if self._directory.own:
            self.kill()
        else:
            self._shut_down()
        self._directory.remove()
        self._port = self._wanted_port
        self._process = None

    def restart(self) -> Self:
        """
        Start again on the same port and data, after a regular shutdown if the server still runs.

        To see what a crash leaves behind, call `kill` first.
        """
        self._shut_down()
        return self.start()

    def kill(self) -> None:
        """End the process by SIGKILL, as a crash would; port and data stay for `restart`."""
        self._signal(signal.SIGKILL)
        self._wait_for_end()

    def pause(self) -> None:
        """Freeze the process by SIGSTOP: afterwards connections stay open and nothing is answered."""
        freeze(self._alive())

    def resume(self) -> None:
        """Let a paused process go on."""
        self._alive().send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _log_path(self) -> Path:
        return self.directory / f"{self.binary_name}.log"

    @property
    def _port_path(self) -> Path:
        return self.directory / f"{self.binary_name}.port"

    def _start_on_a_port(self, binary: Path) -> None:
        for _ in range(PORTS_TRIED_MAX):
            port = free_port() if self._port is None else self._port
            process = self._launch(binary, port)
            if self._becomes_ready(process):
                self._port = port
                return
            if _PORT_TAKEN not in self.log:
                raise EmbeddedServerError(
                    explain_failed_start(self.binary_name, process.poll(), self.log), binary=str(binary)
                )
            threading.Event().wait(0.0 if self._port is None else 0.5)  # a fixed port may become free again
        raise EmbeddedServerError(
            f"{self.binary_name} found port {port} in use, {PORTS_TRIED_MAX} times: end what listens "
            f"there, or give another port.",
            port=port,
        )

    def _launch(self, binary: Path, port: int) -> subprocess.Popen[bytes]:
        self._log_path.touch(mode=0o600)
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            process = start_tied(
                [str(binary), *self._arguments(self.directory, port)],
                output=log,
                environment=self._environment,
                directory=self.directory,
                umask=0o077,  # its data are for this user alone
            )
        self._process = process
        # Made after the directory's own finalizer, so that at exit it runs before it.
        self._end = weakref.finalize(self, _end, process, os.getpid())
        return process

    def _becomes_ready(self, process: subprocess.Popen[bytes]) -> bool:
        # The log is the only witness that cannot be confused with another server on the same port.
        for _ in polls(START_SECONDS_MAX):
            ended = process.poll() is not None
            if self.ready_words in self.log.lower():
                return True
            if ended:
                return False
        return False

    def _shut_down(self) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a paused process would keep the first signal for later
        if not self._ends_within(STOP_SECONDS_MAX):
            self._signal(signal.SIGKILL)
        self._wait_for_end()

    def _ends_within(self, seconds: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_for_end(self) -> None:
        if self._process is not None:
            self._process.wait()
        if self._end is not None:
            self._end.detach()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # nothing is sent to a process that is known to have ended

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise EmbeddedServerError(f"{self.binary_name} is not running: call start() or restart().")
        return self._process


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
