"""Redis for development and tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mongo_celery.embedded.server import HOST, Server


class RedisServer(Server):
    """
    A Redis on 127.0.0.1. Use it as a context manager, or call `start` and `stop`.

    Without `appendonly` the server writes nothing to disk, and a restart loses all data. With it, a regular restart
    loses nothing, and a kill at most the last second.

    ::

        with RedisServer(options=["--maxmemory", "50mb"]) as server:
            app = Celery("shop", broker=server.url)

    Args:
        appendonly: True to write an append-only file.
        directory: keeps data and port after `stop`. By default the server has a temporary directory.
        port: by default the port stored in the directory, otherwise a free one.
        options: further options of redis-server, such as `["--maxmemory", "50mb"]`.
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
    ) -> None:
        super().__init__(directory=directory, port=port)
        self._appendonly = appendonly
        self._options = tuple(options)

    @property
    def url(self) -> str:
        """The URL of database 0, for Celery's `broker`."""
        return f"redis://{HOST}:{self.port}/0"

    def _arguments(self, directory: Path, port: int) -> list[str]:
        return [
            *("--bind", HOST, "--port", str(port), "--dir", str(directory), "--daemonize", "no"),
            *("--save", "", "--appendonly", "yes" if self._appendonly else "no"),
            *self._options,
        ]
