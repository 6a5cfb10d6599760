"""The glossary speaks of what is there: modules, names and stored fields."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mongo_celery"
PAGE = ROOT / "docs/glossary.md"
CELLS = 4
# `_id` is the server's, and has no place of its own in the code.
SERVERS_OWN = {"_id"}


@dataclass(frozen=True)
class Row:
    """One word: the modules where it lives, the names in them, and the fields under which it is stored."""

    word: str
    modules: list[Path]
    names: list[str]
    fields: list[str]


def _rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| **"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == CELLS, line
            lives = re.findall(r"`([^`]+)`", cells[2])
            modules = [ROOT / each for each in lives if each.endswith(".py")]
            names = [each for each in lives if not each.endswith(".py")]
            found.append(Row(cells[0].replace("*", ""), modules, names, re.findall(r"`([^`]+)`", cells[3])))
    return found


def _defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@functools.cache
def _words(room: Path) -> frozenset[str]:
    """Every word of a room's texts, its updates and conditions among them."""
    trees = [ast.parse(module.read_text()) for module in room.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return frozenset(re.findall(r"\w+", " ".join(texts)))


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row.word)
def test_a_word_lives_where_the_glossary_says(row: Row) -> None:
    """Its modules exist and define the names, and their room speaks of the stored fields."""
    assert row.modules, "a word lives somewhere"
    defined = [_defined(ast.parse(module.read_text())) for module in row.modules]
    rooms = {PACKAGE / module.relative_to(PACKAGE).parts[0] for module in row.modules}

    assert set(row.names) <= set().union(*defined)
    fields = {field.rpartition(".")[2] for field in row.fields} - SERVERS_OWN
    assert fields <= frozenset().union(*map(_words, rooms))


def test_no_word_stands_twice() -> None:
    """One word for one thing: who shares a word says whose it is."""
    words = [row.word for row in _rows()]

    assert len(words) > 40
    assert sorted(words) == sorted(set(words))
