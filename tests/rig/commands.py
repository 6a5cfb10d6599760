"""The commands that a client sends, and code of the test before one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

_OF_THE_DRIVER = {"hello", "endSessions"}


class CommandRecorder(CommandListener):
    """
    Records a client's commands, and runs something before some of them.

    Attributes:
        sent: each command with its database, in order.
        meanwhile: what is run before the n-th command, by its number.
        failures: set once a command has failed.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self.meanwhile: dict[int, Callable[[], Any]] = {}
        self.failures = threading.Event()
        self._awaited: tuple[str, object] | None = None
        self._passing = 0
        self._act: Callable[[], Any] = bool

    @property
    def names(self) -> list[str]:
        """The names of the commands, in order, without those by which the driver keeps its connections."""
        return [name for name in (next(iter(command)) for _, command in self.sent) if name not in _OF_THE_DRIVER]

    def of(self, name: str) -> list[tuple[str, Mapping[str, Any]]]:
        return [(database, command) for database, command in self.sent if next(iter(command)) == name]

    def before(self, command: str, value: object, act: Callable[[], Any], *, after: int = 0) -> None:
        """Run something before the next command of this name and first value, a collection, after so many of them."""
        self._awaited, self._act, self._passing = (command, value), act, after

    def named(self, name: str) -> list[Mapping[str, Any]]:
        return [command for _, command in self.of(name)]

    def started(self, event: CommandStartedEvent) -> None:
        """Record it; then run what is to come in between."""
        self.sent.append((event.database_name, event.command))
        self.meanwhile.pop(len(self.sent), bool)()
        if self._awaited == (event.command_name, event.command.get(event.command_name)):
            self._passing -= 1
            if self._passing < 0:
                self._awaited = None
                self._act()

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: CommandFailedEvent) -> None:  # noqa: ARG002 - the listener's signature
        self.failures.set()
