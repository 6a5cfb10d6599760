"""Commands as a person types them: what messages, reasons and pages print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True, slots=True)
class CommandLine:
    """
    The beginning of every command that a message prints.

    Attributes:
        app: what they gave to `celery -A`.
        bridge: its name, where the app has several.
    """

    app: str = "APP"
    bridge: str | None = None

    @classmethod
    def of(cls, app: Celery | None, bridge: str | None = None) -> CommandLine:
        """Return the line for a process that only knows its app: by the app's own name."""
        name = app.main if app is not None else None
        return cls(name if name and name != "__main__" else "APP", bridge)

    def celery(self, *words: str) -> str:
        """`celery -A APP ...`; of all bridges of the app."""
        return f"{shlex.join(['celery', '-A', self.app])} {shlex.join(words)}"

    def changes(self, command: str, *words: str) -> str:
        """`celery -A APP changes ...`, of this bridge."""
        which = ["--bridge", self.bridge] if self.bridge is not None else []
        return self.celery("changes", command, *words, *which)

    def on(self, command: str, handler: str, indexes: Sequence[int]) -> str:
        """The same on the partition of a handler, or on all of them where several are concerned."""
        return self.changes(command, handler, *([str(indexes[0])] if len(indexes) == 1 else []))


ANY_APP = CommandLine()
"""For messages of parts that know no app: the reader puts its name in the place of `APP`."""
