"""The documentation is built as a site by the command that its first page names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.acceptance.documentation.pages import ROOT, commands

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
    Every page, in strict mode, where nothing is installed but what the page says; and what is linked is there, folders
    and files of the repository included.

    In short: `tests/unit/test_docs.py` follows the links of the pages, and `.ci/run` builds the site.
    """
    install, build = commands(ROOT / "docs/index.md")
    assert build.startswith("sphinx-build -n -W ")
    programs = tmp_path / "venv/bin"

    _run(sys.executable, "-m", "venv", programs.parent)
    _run(programs / "python", "-m", *shlex.split(install), "-q", "--disable-pip-version-check")
    program, *options = shlex.split(build.replace("build/site", str(tmp_path / "site")))
    said = _run(programs / program, *options, "-q", "-d", tmp_path / "doctrees")

    assert not said
    for page in PAGES:
        assert (tmp_path / "site" / page.relative_to(ROOT).with_suffix(".html")).exists(), page
    assert _dead_links(tmp_path / "site") == []


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


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
