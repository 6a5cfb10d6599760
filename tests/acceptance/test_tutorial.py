"""The tutorial, as it is written: what a newcomer types, and what they must see."""

from __future__ import annotations

import re
from pathlib import Path

from tests.acceptance.documentation.drill import Walk, chapters
from tests.acceptance.documentation.pages import ROOT, blocks
from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes

PAGE = ROOT / "docs/tutorial.md"


def test_the_tutorial_runs_as_it_is_written(processes: Processes, tmp_path: Path) -> None:
    """All of it, in order, at the terminals that it names."""
    require_server("mongod")
    require_server("redis-server")
    walk = Walk(processes, tmp_path)

    for steps in chapters(PAGE).values():
        for step in steps:
            walk.take(step)
    walk.end()


def test_what_the_tutorial_installs_is_enough_for_what_it_does() -> None:
    """Its one command names an extra of the project, and what the project does not bring."""
    project = (ROOT / "pyproject.toml").read_text()
    (installed,) = blocks(PAGE, "sh")

    for extra in re.findall(r"\[(\w+)\]", installed.code):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    assert installed.code.count("pytest") == 1
