"""The README keeps its word: its tests exist, its options are all options, its code compiles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mongo_celery.bridge.options import OPTION_NAMES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_test_that_the_readme_names_exists() -> None:
    """A promise names the test that proves it; a renamed test must not leave an empty promise."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README)

    assert len(named) > 10
    for path, function in named:
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, f"{path}::{function}"


def test_every_file_and_test_that_the_documents_name_exists() -> None:
    """The same for docs/: tests, and the files that are linked."""
    for document in sorted((ROOT / "docs").glob("*.md")):
        text = document.read_text()
        named = re.findall(r"`((?:tests|mongo_celery)/[\w/]+\.py)`", text)
        linked = re.findall(r"\]\(([\w./-]+)\)", text)
        assert named
        for path in (*(ROOT / name for name in named), *(document.parent / link for link in linked)):
            assert path.exists(), f"{document.name}: {path}"


def test_every_guarantee_names_its_test() -> None:
    """No row of the guarantees table goes without proof."""
    table = README.split("## Guarantees", 1)[1].split("\n\n", 3)[1]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]

    assert len(rows) >= 11
    for row in rows:
        assert "`tests/" in row, row


def test_the_configuration_table_lists_all_options() -> None:
    """An option that the table forgets is an option that nobody finds."""
    table = README.split("## Configuration", 1)[1].split("## In production", 1)[0]
    listed = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    described = set(re.findall(r"`(\w+)`", table))

    assert set(OPTION_NAMES) - {"name", "autodiscover"} <= described
    assert listed - {"option"} <= set(OPTION_NAMES)


def test_the_readmes_python_compiles() -> None:
    """The code that users copy is at least Python."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

    assert len(blocks) >= 2
    for block in blocks:
        ast.parse(block)


def test_the_first_example_is_the_readmes_code() -> None:
    """What the example's test runs is what the README shows: the same handler body."""
    shown = README.split("# shop/changes.py", 1)[1].split("```", 1)[0]
    handler = shown.split("def summarise(change):", 1)[1]
    body = [line.split("#")[0].strip() for line in handler.splitlines() if line.strip()]
    example = (ROOT / "examples/first_bridge/shop/changes.py").read_text()

    assert body
    for line in body:
        assert line in example, line
