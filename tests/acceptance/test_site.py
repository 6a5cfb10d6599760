"""The documentation is built as a site by the command that its first page names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.acceptance.documentation.pages import ROOT, commands
from tests.fixtures.availability import skip_or_fail

PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md"), ROOT / "tests/README.md"]


class _Links(HTMLParser):
    """What a page of the site leads to, and the places on it to which others may lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in {"href", "src"} and value and not re.match(r"\w+:", value):
                self.targets.add(value)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_no_link_on_it_is_dead(tmp_path: Path) -> None:
    """
    Every page, in strict mode; and what is linked is there, folders and files of the repository included.

    In short: `tests/unit/test_readme.py` follows the links of the pages, and `.ci/run` builds the site.
    """
    if find_spec("sphinx") is None:
        skip_or_fail("pip install -e '.[docs]'")
    (command,) = [line for line in commands(ROOT / "docs/index.md") if line.startswith("sphinx-build")]
    program, *options = shlex.split(command.replace("build/site", str(tmp_path / "site")))
    assert (program, options[:2]) == ("sphinx-build", ["-n", "-W"])

    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-q", "-d", str(tmp_path / "doctrees")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.relative_to(ROOT).with_suffix(".html")).exists(), page
    assert _dead_links(tmp_path / "site") == []


def _dead_links(site: Path) -> list[str]:
    pages = {page: _Links(page) for page in site.rglob("*.html")}
    dead = []
    for page, links in pages.items():
        for target in links.targets:
            path, place = urldefrag(unquote(target))
            other = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not other.exists() or (place and other in pages and place not in pages[other].places):
                dead.append(f"{page.relative_to(site)}: {target}")
    return dead
