"""The ground a server stands on: a port on the loopback interface and a directory for its data."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import tempfile
import weakref
from pathlib import Path
from typing import IO

from mongo_celery.errors import EmbeddedServerError

HOST = "127.0.0.1"

_PREFIX = "mongo-celery-"
_OWNER = ".owner"
_LOWEST_PORT = 20000
_EPHEMERAL_PORTS_FROM = 32768  # Linux's default
_PROBES_MAX = 100
_chance = random.SystemRandom()


def free_port() -> int:
    """
    Name a port of 127.0.0.1 on which nobody listens at this moment.

    Another process may take it before the caller does: whoever uses it has to be ready to ask
    again. The port lies below the range from which the kernel takes the ports of outgoing
    connections. Above, a client that knocks on a stopped server's port can be given that very port
    as its own, connect to itself, and keep the server from coming back. It is drawn from the
    machine's own chance: processes that were given one seed would all ask for the same ports.
    """
    for _ in range(_PROBES_MAX):
        port = _chance.randrange(_LOWEST_PORT, _lowest_ephemeral_port())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise EmbeddedServerError(f"No free port was found on {HOST} in {_PROBES_MAX} probes: is the network up?")


def _lowest_ephemeral_port() -> int:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        lowest = _EPHEMERAL_PORTS_FROM
    return lowest if lowest > _LOWEST_PORT + _PROBES_MAX else 65536


class DataDirectory:
    """
    A directory that the caller gave and keeps, or one of our own that is removed in the end.

    Our own is marked by a lock file which the kernel unlocks when this process ends. So what a
    SIGKILLed process left behind is recognised, and removed, by the next one that makes a
    directory; a directory in use never is.

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
            self._path = self._make()
        return self._path

    def remove(self) -> None:
        """Remove the directory if it is our own; the next use makes another one."""
        self._path = None
        if self._removal is not None:
            self._removal()
            self._removal = None

    def _make(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            return self._given
        _sweep()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._removal = weakref.finalize(self, _remove, path, _mark(path), os.getpid())
        return path


def _mark(path: Path) -> IO[bytes]:
    # Locked first and named afterwards: under its final name the file is never seen unlocked.
    unnamed = path / f"{_OWNER}-{os.getpid()}"
    mark = unnamed.open("wb")
    fcntl.flock(mark, fcntl.LOCK_EX)
    unnamed.rename(path / _OWNER)
    return mark


def _remove(path: Path, mark: IO[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the finalizer, not the right to use it
        shutil.rmtree(path, ignore_errors=True)
    mark.close()


def _sweep() -> None:
    for mark_path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            if mark_path.stat().st_uid != os.getuid():
                continue
            with mark_path.open("rb") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark_path.parent, ignore_errors=True)
        except OSError:  # in use, or just removed by somebody else
            continue
