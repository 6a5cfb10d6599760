"""What the site adds to the pages: where a link to a folder leads, and which page stands below which."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@cache
def navigation() -> Any:
    spec = importlib.util.spec_from_file_location("navigation", DOCS / "site/navigation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_the_site(page: str, text: str | None = None, root: Path = ROOT) -> str:
    given = (root / f"{page}.md").read_text() if text is None else text
    found: str = navigation().on_the_site(root, page, given)
    return found


def listed(text: str) -> list[str]:
    """What the lists of a page name."""
    lists = re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = [line for each in lists for line in each.splitlines() if line and not line.startswith(":")]
    return [re.sub(r".*<(.*)>", r"\1", name) for name in names]


def test_every_page_stands_in_one_list() -> None:
    """In the index, or in the list of its folder; none is in two."""
    folders = sorted({page.parent for page in DOCS.rglob("README.md")})
    found = [*listed(on_the_site("docs/index"))]
    for folder in folders:
        name = folder.relative_to(DOCS).as_posix()
        found += [f"{name}/{each}" for each in listed(on_the_site(f"docs/{name}/README"))]

    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - {"index"}
    assert pages <= set(found)
    assert len(found) == len(set(found))


def test_a_page_that_nobody_has_listed_is_listed_last(tmp_path: Path) -> None:
    """And so are examples without a list of their own; where there is one, they stand below it."""
    for page in ("docs/index", "docs/known", "docs/forgotten", "examples/first/README"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{page}.md").write_text("")
    index = "```{toctree}\nknown\n```\n"

    assert listed(on_the_site("docs/index", index, tmp_path)) == ["known", "forgotten", "/examples/first/README"]
    (tmp_path / "examples/README.md").write_text("")
    assert listed(on_the_site("docs/index", index, tmp_path))[2:] == ["/examples/README"]
    assert listed(on_the_site("examples/README", root=tmp_path)) == ["first/README"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("[one](../examples/first_bridge)", "[one](../examples/first_bridge/README.md)"),
        ("[pictures](pictures)", "pictures"),
        ("[a page](handlers.md)", "[a page](handlers.md)"),
        ("[a place](handlers.md#bookkeeping)", "[a place](handlers.md#bookkeeping)"),
        ("[a file](../docker-compose.yml)", "[a file](../docker-compose.yml)"),
    ],
)
def test_a_link_to_a_folder_leads_to_its_readme(written: str, read: str) -> None:
    """As in the repository's view; a folder without one has no page to lead to."""
    assert on_the_site("docs/handlers", written) == read
