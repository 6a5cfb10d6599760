"""README and docs keep their word: tests and files that they name exist, and options are all options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mongo_celery.bridge.options import OPTION_NAMES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
README_LINES_MAX = 110


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_and_test_that_a_page_names_exists(page: Path) -> None:
    """A promise names the test that proves it; a renamed test must not leave an empty promise. The same for links."""
    text = page.read_text()
    for path, function in re.findall(r"`((?:tests|mongo_celery|examples)/[\w/]+\.py)(?:::(\w+))?`", text):
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, f"{path}::{function}"
    for link, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        target = (page.parent / link) if link else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), f"{link}#{anchor}"


def test_the_readme_leads_to_every_page() -> None:
    """It is short, and what it leaves out is two steps away at most; so is every page of a folder from its list."""
    readme, index = README.read_text(), (DOCS / "index.md").read_text()

    assert len(readme.splitlines()) <= README_LINES_MAX
    assert "(docs/index.md)" in readme
    for page in {*DOCS.glob("*.md")} - {DOCS / "index.md"}:
        assert f"(docs/{page.name})" in readme or f"({page.name})" in index, page.name
    for folder in sorted(each.parent.name for each in DOCS.glob("*/README.md")):
        assert f"(docs/{folder}/README.md)" in readme or f"({folder}/README.md)" in index, folder
        beside = DOCS / folder / "README.md"
        for page in sorted({*beside.parent.glob("*.md")} - {beside}):
            assert f"({page.name})" in beside.read_text(), name_of(page)


def test_the_configuration_table_lists_all_options() -> None:
    """An option that the table forgets is an option that nobody finds."""
    tables = (DOCS / "configuration.md").read_text().partition("| option |")[2]
    table = [line for line in tables.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table)))
    described = set(re.findall(r"`(\w+)`", "\n".join(table)))

    assert set(OPTION_NAMES) - {"name", "autodiscover"} <= described
    assert listed <= set(OPTION_NAMES)


def test_the_first_example_is_the_readmes_code() -> None:
    """What the example's test runs is what the README shows: the same handler body."""
    shown = README.read_text().split("# shop/changes.py", 1)[1].split("```", 1)[0]
    handler = shown.split("def summarise(change):", 1)[1]
    body = [line.split("#")[0].strip() for line in handler.splitlines() if line.strip()]
    example = (ROOT / "examples/first_bridge/shop/changes.py").read_text()

    assert body
    for line in body:
        assert line in example, line


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
