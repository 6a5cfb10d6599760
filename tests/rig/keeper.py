"""A keeper of processes: it starts again what has ended, as `Restart=always` of the documented units does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from tests.fixtures.process import Processes, ProjectProcess

_AGAIN_SECONDS = 1.0


class Role:
    """
    A place for one process: it runs, or is started again.

    Attributes:
        process: the latest one.
        asked: whether it was asked, or made, to end.
        ends: how processes of this role have ended that the test had not ended.
    """

    def __init__(self, name: str, start: Callable[[str], ProjectProcess]) -> None:
        self.name = name
        self.asked = False
        self.ends: list[int] = []
        self._start = start
        self.process = start(name)

    def look(self, processes: Processes) -> None:
        ended = self.process.returncode
        if ended is None:
            return
        if not self.asked:
            self.ends.append(ended)
        processes.release(self.process, grace=0)
        self.asked = False
        self.process = self._start(self.name)


class Keeper:
    """
    A thread that looks after roles: a context manager, within that of their processes.

    Attributes:
        roles: all of them, by name.
    """

    def __init__(self, processes: Processes) -> None:
        self.roles: dict[str, Role] = {}
        self._processes = processes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def keep(self, name: str, start: Callable[[str], ProjectProcess]) -> Role:
        """Start a process, and from now on start it again whenever it has ended."""
        self.roles[name] = Role(name, start)
        return self.roles[name]

    def stop(self) -> None:
        """Start no process again. Running ones continue."""
        self._stopping.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stopping.wait(_AGAIN_SECONDS):
            for role in list(self.roles.values()):
                role.look(self._processes)
