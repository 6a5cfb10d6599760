"""Every regular expression of the package takes linear time, whatever the text: `re` holds the interpreter lock."""

from __future__ import annotations

import ast
import importlib
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mongo_celery

ROOT = Path(mongo_celery.__file__).parent
METHODS = {"sub", "subn", "search", "match", "fullmatch", "findall", "finditer", "split"}
LENGTH = 1_000_000
SECONDS_MAX = 60  # for what takes a fraction of a second; a quadratic one takes hours
GENERAL = ("a", "0", " ", "\n", ":", "@", "a://", "://a:b ", '"', "a=", "to execute command { a: ", "Authorization: ")


@pytest.fixture(scope="module")
def patterns() -> dict[str, tuple[re.Pattern[Any], set[str]]]:
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    code = "".join(texts.values())
    found: dict[str, tuple[re.Pattern[Any], set[str]]] = {}
    for path, text in texts.items():
        named = re.findall(r"^(\w+) = re\.compile\(", text, re.MULTILINE)
        module = importlib.import_module(".".join(("mongo_celery", *path.with_suffix("").parts))) if named else None
        for name in named:
            if isinstance(value := getattr(module, name), re.Pattern):
                used = set(re.findall(rf"(?<!\w){name}\.(\w+)\(", code)) & METHODS
                found[f"{path}:{name}"] = value, used or {"sub"}
        for method, literal in re.findall(r"(?<!^\w)(?<!= )re\.(\w+)\((r?b?\"[^\"\n]+\"|r?'[^'\n]+')", text):
            if method in {*METHODS, "compile"}:
                found[f"{path}:{literal}"] = re.compile(ast.literal_eval(literal)), {method} & METHODS or {"sub"}
    return found


def _texts(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Hostile beginnings: of urls, of blanks, and about what the expression itself matches but for its end."""
    given = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    example = re.sub(r"\(\?\S*?[:=!]|\\(?=\w)|[^\w\s:@/{=,;.'\"-]", "", given) or "a"
    yield from dict.fromkeys((*GENERAL, example, example[:-1] or "b", example[: len(example) // 2 + 1]))


@contextmanager
def _ended_after(seconds: int) -> Iterator[None]:
    """Have an expression end: its engine looks for signals."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _is_slow(pattern: re.Pattern[Any], method: str, text: str, seconds: int, length: int = LENGTH) -> bool:
    whole = text * (length // len(text)) + "\0"
    given: Any = whole if isinstance(pattern.pattern, str) else whole.encode("latin-1", "replace")
    replacing = ("" if isinstance(given, str) else b"",) if method in {"sub", "subn"} else ()
    try:
        with _ended_after(seconds):
            found = getattr(pattern, method)(*replacing, given)
            if method == "finditer":
                list(found)
    except TimeoutError:
        return True
    return False


def test_every_expression_takes_linear_time(patterns: dict[str, tuple[re.Pattern[Any], set[str]]]) -> None:
    """A new one is found by itself."""
    slow = [
        f"{place}: {method} on {text!r}"
        for place, (pattern, methods) in patterns.items()
        for method in methods
        for text in _texts(pattern)
        if _is_slow(pattern, method, text, SECONDS_MAX)
    ]
    assert slow == []


def test_the_search_finds_expressions_and_the_slow_ones(
    patterns: dict[str, tuple[re.Pattern[Any], set[str]]],
) -> None:
    """A checker that has never failed has not been tested."""
    assert len(patterns) > 20
    assert {place.partition(":")[0] for place in patterns} >= {"mongo/redaction.py", "tracing.py", "visible.py"}
    assert _is_slow(re.compile(r"[^\s\"'(]+@"), "sub", "a", 1, 30_000)
    assert _is_slow(re.compile(r" +$", re.MULTILINE), "sub", " ", 1, 30_000)
