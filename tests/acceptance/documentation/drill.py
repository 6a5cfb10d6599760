"""
`docs/operations/drill.md` and `pains.md` as programs: what a person types at several terminals, and what they must see.

A block of Python that begins with a path is a file of the project. A block `console` has what is typed: `$ ` at the
person's own terminal, `name$ ` at one that belongs to a process, where `^C` ends it, and a comment only looks at it;
capitals are process ids. Lines below a command are what it shows: the breaks of lines do not matter, nor do digits but
for those of the reader's own programs; `...` stands for anything. A command that only looks is repeated until it shows
that, as a person would; any other runs once.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mongo_celery.embedded.server import free_port
from tests.acceptance.documentation.pages import ROOT
from tests.fixtures.forked import read_terminal
from tests.fixtures.process import Processes, ProjectProcess, wait_for

PAGE = ROOT / "docs/operations/drill.md"
LOOKING = ("status", "check", "list", "show", "totals.py")
_TOOLS = "from mongo_celery.cli.tools import main; main()"
_SHOWN_SECONDS_MAX = 120.0
_SILENT_SECONDS_MAX = 300.0  # a test run starts servers before it says a word
_WORKER_OPTIONS = ("--without-gossip", "--without-mingle", "--without-heartbeat")


@dataclass(frozen=True, slots=True)
class Step:
    """
    One file that is written, or one command.

    Attributes:
        terminal: of a process; empty for the person's own.
        text: the command, or the file.
        shown: what must be seen.
        path: of the file; None for a command.
        line: of the page.
    """

    terminal: str
    text: str
    shown: str = ""
    path: str | None = None
    line: int = 0


def chapters(page: Path = PAGE) -> dict[str, list[Step]]:
    """The steps below each heading, in order."""
    found = {}
    text = page.read_text()
    headings = [*re.finditer(r"^## (.*)$", text, re.MULTILINE)]
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=True):
        found[heading[1]] = list(_steps(text, heading.end(), end))
    return found


def _steps(text: str, start: int, end: int) -> Iterator[Step]:
    for block in re.finditer(r"^```(python|console)\n(.*?)^```$", text[start:end], re.MULTILINE | re.DOTALL):
        line = text[: start + block.start(2)].count("\n") + 1
        if block[1] == "python":
            first, body = block[2].split("\n", 1)
            yield Step("", body, path=first.removeprefix("# "), line=line)
        else:
            yield from _typed(block[2], line)


def _typed(block: str, line: int) -> Iterator[Step]:
    for typed in re.finditer(r"^(\w*)\$ (.*)\n((?:(?!\w*\$ ).*\n)*)", block, re.MULTILINE):
        yield Step(typed[1], typed[2], typed[3], line=line + block[: typed.start()].count("\n"))


def shape(shown: str, *, exact: bool = False) -> re.Pattern[str]:
    """
    What a text must be like that is shown so, once its blanks and breaks are single blanks.

    Args:
        exact: digits matter.
    """
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    if not exact:
        parts = [re.sub(r"\d+", r"\\d+", part) for part in parts]
    return re.compile(".*?".join(parts))


class Walk:
    """A person with several terminals, in a directory of a project."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._processes = processes
        self._directory = directory
        self._running: dict[str, ProjectProcess] = {}
        self._ports = {"27017": str(free_port()), "6379": str(free_port())}
        self.said: list[str] = []

    def take(self, step: Step) -> None:
        """Do what the page says, and see what it shows."""
        if step.path is not None:
            file = self._directory / step.path
            file.parent.mkdir(exist_ok=True)
            file.write_text(self._here(step.text))
        elif step.terminal:
            self._at(step)
        else:
            self._type(step)

    def end(self) -> None:
        """Ctrl-C in every terminal, the last one first."""
        for name in reversed(list(self._running)):
            self._interrupt(name)

    def _here(self, text: str) -> str:
        for usual, port in self._ports.items():
            text = text.replace(usual, port)
        return text

    # -- terminals of processes --------------------------------------------------------------------

    def _at(self, step: Step) -> None:
        if step.text == "^C":
            self._interrupt(step.terminal)
            return
        if step.text.startswith("#"):
            running = self._running[step.terminal]
            self._see(step, lambda: running.text)
            return
        words = self._words(step.text)
        options = _WORKER_OPTIONS if "worker" in words else ()
        process = self._processes.start(step.terminal, *words, *options, directory=self._directory)
        self._running[step.terminal] = process
        self._see(step, lambda: process.text)

    def _interrupt(self, name: str) -> None:
        process = self._running.pop(name)
        process.send(signal.SIGINT)
        process.wait()

    # -- the person's own --------------------------------------------------------------------------

    def _type(self, step: Step) -> None:
        killed = re.fullmatch(r"kill -KILL ([A-Z]+)", step.text)
        if killed:
            self._running.pop(killed[1].lower()).end()
            return
        words = self._words(step.text)
        if any(word in LOOKING for word in words):
            self._see(step, lambda: self._output(words))
        else:
            text = self._output(words)
            self._see(step, lambda: text, 0.0)

    def _see(self, step: Step, look: object, seconds: float = _SHOWN_SECONDS_MAX) -> None:
        assert callable(look)
        wanted, texts = shape(step.shown, exact=step.text.startswith("python")), [""]

        def seen() -> bool:
            texts.append(str(look()))
            return wanted.search(" ".join(texts[-1].split())) is not None

        wait_for(seen, seconds, lambda: f"line {step.line}: {step.text}\n{texts[-1]}\nis not like\n{step.shown}")
        self.said.append(f"{step.terminal}$ {step.text}\n{texts[-1]}")

    def _words(self, text: str) -> list[str]:
        program, *rest = shlex.split(self._here(text))
        if program == "celery":
            return [sys.executable, "-m", "celery", *rest]
        if program == "mongo-celery":
            return [sys.executable, "-c", _TOOLS, *rest]
        if program == "python":
            return [sys.executable, *rest]
        assert program in ("touch", "rm"), text
        return [program, *rest]

    def _output(self, words: list[str]) -> str:
        """What a command shows on a terminal of 80 columns."""
        paths = [str(self._directory), str(ROOT)]
        return on_terminal(words, self._directory, {"PYTHONPATH": os.pathsep.join(paths)})


def on_terminal(words: list[str], directory: Path, variables: Mapping[str, str]) -> str:
    """Run a program at a dumb terminal, which has 80 columns; all that it shows."""
    ours, its = pty.openpty()
    environment = {**os.environ, **variables, "TERM": "dumb", "COLUMNS": "80"}
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=its, stderr=its, cwd=directory, env=environment, close_fds=True
    )
    os.close(its)
    try:
        text = read_terminal(ours, silent_seconds_max=_SILENT_SECONDS_MAX)
    finally:
        os.close(ours)
        if process.poll() is None:
            process.wait(_SHOWN_SECONDS_MAX)
    return text.decode(errors="replace").replace("\r\n", "\n")
