"""The walks of the documentation, as they are written: what a person types, and what they must see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.acceptance.documentation.drill import Step, Walk, chapters, shape
from tests.acceptance.documentation.pages import ROOT, blocks
from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes

CHAPTERS = chapters()
_PAINS = chapters(ROOT / "docs/operations/pains.md")
PAINS = [*_PAINS.values()]
SECOND_SHOP = [*_PAINS].index("You cannot set a position")


@pytest.fixture
def walk(processes: Processes, tmp_path: Path) -> Walk:
    require_server("mongod")
    require_server("redis-server")
    return Walk(processes, tmp_path)


@pytest.mark.slow
def test_the_drill_runs_as_it_is_written(walk: Walk) -> None:
    """All of it, in order: each failure is said as the page says, and cured by what the page types."""
    for steps in CHAPTERS.values():
        for step in steps:
            walk.take(step)
    walk.end()


def test_the_tutorial_runs_as_it_is_written(walk: Walk) -> None:
    """All of it, in order, at the terminals that it names."""
    for steps in chapters(ROOT / "docs/tutorial.md").values():
        for step in steps:
            walk.take(step)
    walk.end()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [PAINS[:SECOND_SHOP], PAINS[SECOND_SHOP:]], ids=["first half", "second half"])
def test_each_problem_is_shown_and_fixed_as_the_page_says(walk: Walk, chosen: list[list[Step]]) -> None:
    """Every pain is brought about, seen by the command that the page names, and cured by the other one."""
    for steps in (CHAPTERS["A shop"], *chosen):
        for step in steps:
            walk.take(step)
    walk.end()


def test_the_drill_begins_with_the_project_of_the_readme() -> None:
    """Whoever has that on the disk goes on from there."""
    (shown,) = blocks(ROOT / "README.md", "python")
    files = [f"# {step.path}\n{step.text}" for step in CHAPTERS["A shop"] if step.path]
    for part in re.split(r"^(?=# shop/)", shown.code, flags=re.MULTILINE):
        assert not part.strip() or any(part.strip() == file.strip() for file in files)


def test_what_is_shown_need_not_have_the_same_numbers_and_breaks() -> None:
    """But the same words: a check that takes everything would prove nothing."""
    wanted = shape("order 1 total 5\n...\nshop is\nhealthy\n")
    assert wanted.search("order 12 total 7 whatever shop is healthy")
    assert wanted.search("order 12 total 7 shop is healthy")
    assert not wanted.search("order 12 total 7 shop is failing")
    assert not wanted.search("order twelve total 7 shop is healthy")
