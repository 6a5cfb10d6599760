"""The parts that all servers share: a directory, a port, a start, and an end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from mongo_celery.embedded.binaries import BinaryName, explain_failed_start, find_binary
from mongo_celery.embedded.processes import ChildProcess, polls, start_tied
from mongo_celery.errors import EmbeddedServerError

HOST = "127.0.0.1"
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
PORTS_TRIED_MAX = 5
_PORT_TAKEN = "Address already in use"
_PORTS = range(20000, 32768)
_chance = random.SystemRandom()


def free_port() -> int:
    """
    Return a port of 127.0.0.1 on which nobody listens at this moment.

    Another process may take it before the caller does, so be ready to ask again. The port lies below the range from
    which Linux takes the ports of outgoing connections. A client that knocks on a stopped server's port within that
    range can be given that very port, connect to itself, and keep the server from coming back. The port is drawn from
    the machine's own chance: processes with one seed would all ask for the same ports.
    """
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port


class DataDirectory:
    """
    A directory that the caller gave and keeps, or a temporary one that is removed in the end.

    Args:
        given: The caller's directory; it is created when missing and never removed.
    """

    def __init__(self, given: str | os.PathLike[str] | None) -> None:
        self.own = given is None
        self._given = None if given is None else Path(given).absolute()
        self._path: Path | None = None
        self._removal: weakref.finalize[..., DataDirectory] | None = None

    @property
    def path(self) -> Path:
        """The directory; made when first asked for."""
        if self._path is None:
            if self._given is not None:
                self._given.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._path = self._given
            else:
                self._path = Path(tempfile.mkdtemp(prefix="mongo-celery-"))
                self._removal = weakref.finalize(self, _remove, self._path, os.getpid())
        return self._path

    def remove(self) -> None:
        """Remove a temporary directory; the next use makes another one."""
        self._path = None
        if self._removal is not None:
            self._removal()


class Server(ABC):
    """
    One server process on 127.0.0.1, and its data.

    A server object may be started and stopped any number of times, from any thread but from one at
    a time. The process ends at the latest with this one, and when the object is garbage: keep it.
    """

    binary_name: ClassVar[BinaryName]
    ready_words: ClassVar[str]
    """The words that the server logs, in whatever case, as soon as it accepts connections."""

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None,
        port: int | None,
        binary: str | os.PathLike[str] | None,
    ) -> None:
        self._binary = binary
        self._directory = DataDirectory(directory)
        self._wanted_port = self._port = port
        self._process: ChildProcess | None = None
        self._end: weakref.finalize[..., Server] | None = None

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
        return self._running_process().pid

    @property
    def running(self) -> bool:
        """True if the process exists, a paused one included."""
        return self._process is not None and self._process.running

    @property
    def directory(self) -> Path:
        """The directory of data and log; a temporary one is removed by `stop`."""
        return self._directory.path

    def start(self) -> Self:
        """
        Start the server and wait until it accepts connections; nothing happens if it runs already.

        The first start chooses a free port, unless one was given. Later ones keep port and data, in a given
        directory also those of other objects and processes.
        After an error nothing runs, and a temporary directory without earlier data is gone.

        Raises:
            EmbeddedServerError: There is no such program, or it did not become ready; the message
                quotes its log.
        """
        if self.running:
            return self
        fresh, port_path = self._process is None, self.directory / f"{self.binary_name}.port"
        if self._port is None:
            with contextlib.suppress(OSError, ValueError):
                self._port = int(port_path.read_text(encoding="ascii"))
        try:
            self._start_on_a_port(find_binary(self.binary_name, self._binary))
        except BaseException:
            self.kill()
            if fresh:
                self.stop()
            raise
        port_path.touch(mode=0o600)
        port_path.write_text(f"{self.port}", encoding="ascii")
        return self

    def stop(self) -> None:
        """
        End the server; harmless if it does not run.

        Data in a given directory is left as after a regular shutdown. A temporary directory is removed, and with it
        everything; so such a server is not asked but killed.
        """
        self._end_process(0.0 if self._directory.own else STOP_SECONDS_MAX)
        self._directory.remove()
        self._port = self._wanted_port
        self._process = None

    def restart(self) -> Self:
        """
        Start again on the same port and data, after a regular shutdown if the server still runs.

        To see what a crash leaves behind, call `kill` first.
        """
        self._end_process(STOP_SECONDS_MAX)
        return self.start()

    def kill(self) -> None:
        """End the process by SIGKILL, as a crash would; port and data stay for `restart`."""
        self._end_process(0.0)

    def pause(self) -> None:
        """Freeze the process by SIGSTOP: afterwards connections stay open and nothing is answered."""
        self._running_process().pause()

    def resume(self) -> None:
        """Let a paused process continue."""
        self._running_process().resume()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on_a_port(self, binary: Path) -> None:
        for _ in range(PORTS_TRIED_MAX):
            port = free_port() if self._port is None else self._port
            process = self._launch(binary, port)
            if self._becomes_ready(process):
                self._port = port
                return
            if _PORT_TAKEN not in process.text:
                message = explain_failed_start(self.binary_name, process.returncode, process.text)
                raise EmbeddedServerError(message, binary=str(binary))
            threading.Event().wait(0.0 if self._port is None else 0.5)  # a fixed port may become free again
        raise EmbeddedServerError(
            f"{self.binary_name} found port {port} in use, {PORTS_TRIED_MAX} times: end what listens "
            f"there, or give another port.",
            port=port,
        )

    def _launch(self, binary: Path, port: int) -> ChildProcess:
        log = self.directory / f"{self.binary_name}.log"
        log.touch(mode=0o600)
        with log.open("wb") as output:
            arguments = [str(binary), *self._arguments(self.directory, port)]
            # Its data are for this user alone.
            started = start_tied(arguments, output=output, directory=self.directory, umask=0o077)
        process = self._process = ChildProcess(self.binary_name, started, log)
        # Made after the directory's own finalizer, so that at exit it runs before it.
        self._end = weakref.finalize(self, _end, process, os.getpid())
        return process

    def _becomes_ready(self, process: ChildProcess) -> bool:
        # The log is the only witness that cannot be confused with another server on the same port.
        for _ in polls(START_SECONDS_MAX):
            ended = not process.running
            if self.ready_words in process.text.lower():
                return True
            if ended:
                return False
        return False

    def _end_process(self, grace: float) -> None:
        if self._process is not None:
            self._process.end(grace)
        if self._end is not None:
            self._end.detach()

    def _running_process(self) -> ChildProcess:
        if self._process is None or not self._process.running:
            raise EmbeddedServerError(f"{self.binary_name} is not running: call start() or restart().")
        return self._process


def _end(process: ChildProcess, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the finalizer, not the right to use it
        process.end(0.0)


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
