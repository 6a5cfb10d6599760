"""The directory of a server's data."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

_PREFIX = "mongo-celery-"
_OWNER = ".owner"


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
            self._given.mkdir(mode=0o700, parents=True, exist_ok=True)
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
