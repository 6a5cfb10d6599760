"""The versions that are promised: the page has what the command knows, and no failure."""

from __future__ import annotations

from tests.versions.__main__ import BEGIN, CELLS, END, NEEDED, PAGE, PROJECT, list_requirements
from tests.versions.servers import PROGRAMS


def test_the_page_has_a_row_without_failure_for_every_cell() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in found] == list(CELLS)
    assert [row for row in found if "not run:" not in row and not row.endswith("| 0 |")] == []


def test_a_cell_names_servers_requirements_and_tests_that_exist() -> None:
    assert len(list_requirements()) == len(NEEDED)
    for cell in CELLS.values():
        assert {cell.mongod, cell.redis} <= PROGRAMS.keys()
        assert [path for path in cell.tests if not (PROJECT / path).exists()] == []
