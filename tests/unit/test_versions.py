"""The versions that are promised: what the command knows, and what the page says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.versions.environment import NEEDED, needed_requirements
from tests.versions.matrix import CELLS, MATRIX, SHORT
from tests.versions.report import BEGIN, END
from tests.versions.servers import MONGODB, REDIS_PACKAGES, REDIS_WHEELS

ROOT = Path(__file__).parents[2]


def test_the_page_has_a_row_for_every_cell() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == [name for name in CELLS if name not in SHORT]


def test_the_table_of_the_page_has_no_failure() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if "not run:" not in row and not row.endswith("| 0 |")] == []


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_names_servers_and_tests_that_exist(name: str) -> None:
    cell = CELLS[name]
    assert cell.mongodb in MONGODB
    assert cell.redis in {**REDIS_WHEELS, **REDIS_PACKAGES}
    assert [path for path in cell.tests if not (ROOT / path).exists()] == []


def test_cells_have_names_of_their_own() -> None:
    assert len(CELLS) == len(MATRIX)


def test_what_a_cell_needs_is_part_of_the_extra_for_development() -> None:
    assert len(needed_requirements()) == len(NEEDED)
