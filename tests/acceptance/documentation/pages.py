"""
The pages, their blocks of code, and the commands that they name.

A page's Python runs block by block, in order, in one namespace: `python -m tests.acceptance.documentation.pages
PAGE MONGO_URL REDIS_URL`. Beside this module is what gives what the page calls the reader's (an app, a client,
collections, functions), and judges afterwards what the code has done (`_prepare_of`).
The only thing that is changed in a block is the address of the servers.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MONGO_URL = "mongodb://localhost:27017/?replicaSet=rs0"
REDIS_URL = "redis://localhost:6379/0"
PAGE_MODULE = "shop.page"
"""What the code of a page is called: the name of its tasks begins with it, and its warnings are errors."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its code, and the line of the page on which the code begins."""

    language: str
    code: str
    line: int


def name_of(page: Path) -> str:
    """What people call the page: its path in the project."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks in a language, in order; a block may be indented, as in a list."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        indent, kind, code = match.groups()
        if kind == language:
            lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
            found.append(Block(kind, "".join(lines), text[: match.start(3)].count("\n") + 1))
    return found


def addressed(code: str, mongo_url: str, redis_url: str) -> str:
    """The code with these servers in place of those on their usual ports."""
    return code.replace(MONGO_URL, mongo_url).replace(REDIS_URL, redis_url)


def commands(page: Path) -> Iterator[str]:
    """Every command that the page names, in blocks and in its text, one line each; also one inside another."""
    for line in _command_lines(page):
        yield line
        yield from re.findall(r"\$\(([^)]*)\)", line)


def _command_lines(page: Path) -> Iterator[str]:
    for block in blocks(page, "console"):
        for line in block.code.splitlines():
            if line.startswith("$ "):
                yield from re.split(r" && ", line.removeprefix("$ ").partition(" #")[0])
    for language, before in (("sh", ""), ("ini", "ExecStart=")):
        for block in blocks(page, language):
            yield from (
                line.removeprefix(before)
                for line in block.code.splitlines()
                if line.startswith((f"{before}celery ", f"{before}/"))
            )
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", prose):
        words = " ".join(span.replace("\\|", "|").split())  # as tables have it
        if words.startswith(("celery ", "mongo-celery ")):
            yield words


def run(page: Path, mongo_url: str, redis_url: str) -> None:
    """Run a page; its errors come with the page's own lines."""
    with _prepare_of(page)(mongo_url, redis_url) as namespace:
        namespace["__name__"] = PAGE_MODULE
        for block in blocks(page, "python"):
            code = "\n" * (block.line - 1) + addressed(block.code, mongo_url, redis_url)
            exec(compile(code, str(page), "exec"), namespace)


def _prepare_of(page: Path) -> Callable[[str, str], AbstractContextManager[dict[str, Any]]]:
    """Return what prepares a page: `prepared` of a module of its own, or the function of its name beside others."""
    *folder, name = page.relative_to(ROOT / "docs").with_suffix("").parts
    package = ".".join([__spec__.parent or "", *folder])
    if Path(__file__).parent.joinpath(*folder, f"{name}.py").exists():
        found: Any = importlib.import_module(f"{package}.{name}").prepared
    else:
        found = getattr(importlib.import_module(package if folder else f"{package}.guides"), name)
    prepare: Callable[[str, str], AbstractContextManager[dict[str, Any]]] = found
    return prepare


if __name__ == "__main__":
    run(ROOT / sys.argv[1], *sys.argv[2:])
