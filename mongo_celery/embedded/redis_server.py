"""Redis for development and tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mongo_celery.embedded.server import HOST, Server


class RedisServer(Server):
    """
    A Redis on 127.0.0.1: a context manager, or `start` and `stop`.

    Without *appendonly* nothing is written to disk: a restart loses everything, as a crash of a
    cache does. With it a regular restart loses nothing, and a kill at most the last second.

    Args:
        appendonly: Keep an append-only file.

        directory: Where to keep data and port, beyond `stop`; a temporary directory if left out.

        port: The port; that of the directory, or a free one, if left out.

        options: More of redis-server's options, such as `["--maxmemory", "50mb"]`.

        binary: The program; found by `find_binary` if left out.
    """

    binary_name = "redis-server"
    ready_words = "ready to accept connections"

    def __init__(
        self,
        *,
        appendonly: bool = False,
        directory: str | os.PathLike[str] | None = None,
        port: int | None = None,
        options: Sequence[str] = (),
        binary: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(directory=directory, port=port, binary=binary)
        self._appendonly = appendonly
        self._options = tuple(options)

    @property
    def url(self) -> str:
        """The address of database 0, as Celery takes it for a broker."""
        return f"redis://{HOST}:{self.port}/0"

    def _arguments(self, directory: Path, port: int) -> list[str]:
        return [
            *("--bind", HOST, "--port", str(port), "--dir", str(directory), "--daemonize", "no"),
            *("--save", "", "--appendonly", "yes" if self._appendonly else "no"),
            *self._options,
        ]
