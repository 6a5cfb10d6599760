"""`changes top` and `status --watch` on a terminal, as people see them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from subprocess import Popen
from termios import TIOCSWINSZ
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.test_cli import APP, Shop, run
from tests.fixtures.mongo import empty
from tests.fixtures.process import PATIENCE_SECONDS, ROOT, Processes

Document = dict[str, Any]

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_COLUMNS, _ROWS = 44, 60


class Terminal:
    """A command on a terminal of this size, what it has written, and its keys."""

    def __init__(self, descriptor: int, process: Popen[bytes]) -> None:
        self._descriptor = descriptor
        self.process = process
        self.text = ""

    def wait_for(self, text: str, count: int = 1) -> None:
        """Read until it has been written so often."""
        until = time.monotonic() + PATIENCE_SECONDS
        while _ESCAPES.sub("", self.text).count(text) < count:
            assert time.monotonic() < until, self.text
            assert self._read(), self.text

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())

    def end(self) -> int:
        """Read to the end; the exit status."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_SECONDS)

    def _read(self) -> bool:
        if not select.select([self._descriptor], [], [], PATIENCE_SECONDS)[0]:
            return False
        with suppress(OSError):  # the other end is closed
            found = os.read(self._descriptor, 65_536)
            self.text += found.decode(errors="replace")
            return bool(found)
        return False


@contextmanager
def terminal(shop: Shop, *arguments: str) -> Iterator[Terminal]:
    """Run `celery -A APP changes` with arguments on a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    environment = {**os.environ, **shop._environment, "TERM": "xterm", "COLUMNS": str(_COLUMNS), "LINES": str(_ROWS)}
    # What starts the tests in the background may have them ignore Ctrl-C, and exec would hand that on.
    run = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('celery', run_name='__main__')"
    )
    command = [sys.executable, "-c", run, "-A", APP, "changes", *arguments]
    process = Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture
def shop(processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str) -> Iterator[Shop]:
    """Give the project on the session's servers, with nothing started."""
    project = Shop(processes, mongo_client, mongo_url, redis_url)
    yield project
    for suffix in ("data", "state"):
        empty(mongo_client, f"{project.names}_{suffix}")


def test_a_terminal_shows_a_bridge_until_somebody_has_seen_enough(shop: Shop) -> None:
    """`top` ends with q, and leaves the terminal as it was; `--watch` with Ctrl-C, and no line is too long."""
    with terminal(shop, "top", "--every", "0.2") as shown:
        shown.wait_for("never_started", count=2)
        shown.wait_for(f"celery -A {APP}"[:30])
        shown.press("q")
        assert shown.end() == 0
        assert "\x1b[?1049h" in shown.text
        assert shown.text.rindex("\x1b[?1049l") > shown.text.rindex("never_started")

    with terminal(shop, "status", "--watch", "0.1") as watched:
        watched.wait_for("never_started", count=4)
        watched.process.send_signal(signal.SIGINT)
        assert watched.end() == 0
    lines = [_ESCAPES.sub("", line).rstrip("\r") for line in re.split(r"\r?\n|\r", watched.text)]
    assert max(map(len, lines)) <= _COLUMNS
    assert any("listener" in line for line in lines)


def test_what_is_no_terminal_is_told_what_to_use(shop: Shop) -> None:
    done = run("-A", APP, "changes", "top", environment=shop._environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().endswith("changes status --watch`.")
