"""Commands as a person types them, for messages, reasons and pages."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True, slots=True)
class CommandLine:
    """
    The beginning of every command in a message.

    Attributes:
        app: the argument of `celery -A`.
        bridge: name of the bridge, if the app has several.
    """

    app: str = "APP"
    bridge: str | None = None

    @classmethod
    def of(cls, app: Celery | None, bridge: str | None = None) -> CommandLine:
        """Return the line for any process: with the typed argument of `-A`, otherwise with the app's name."""
        name = read_typed_app() or (app.main if app is not None else None)
        return cls(name if name and name != "__main__" else "APP", bridge)

    def celery(self, *words: str) -> str:
        """Return `celery -A APP ...`, for all bridges of the app."""
        return f"{shlex.join(['celery', '-A', self.app])} {shlex.join(words)}"

    def changes(self, command: str, *words: str) -> str:
        """Return `celery -A APP changes ...`, for this bridge."""
        which = ["--bridge", self.bridge] if self.bridge is not None else []
        return self.celery("changes", command, *words, *which)

    def on(self, command: str, handler: str, indexes: Sequence[int]) -> str:
        """Return a command for partitions of a handler. It includes the index only if there is one partition."""
        return self.changes(command, handler, *([str(indexes[0])] if len(indexes) == 1 else []))


def read_typed_app() -> str | None:
    """Return the argument of `-A` with which this process was started. None if it is not Celery's command."""
    program, *words = sys.argv or [""]
    if Path(program).stem != "celery" and Path(program).parent.name != "celery":  # `python -m celery` is a file in it
        return None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-A", "--app"):
            return following
        if word.startswith(("-A", "--app=")):
            return word.removeprefix("--app=").removeprefix("-A")
    return os.environ.get("APP")


ANY_APP = CommandLine()
"""For messages of parts without an app. The reader replaces `APP` by its name."""
