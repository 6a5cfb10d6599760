"""The versions that are promised: the page has what the command knows, and no failure."""

from __future__ import annotations

from pathlib import Path

from tests.versions.__main__ import BEGIN, CELLS, END, NEEDED, PAGE, PROJECT, list_requirements, record
from tests.versions.servers import PROGRAMS


def rows(page: Path) -> list[str]:
    table = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [line for line in table.splitlines() if line.startswith("| `")]


def test_the_page_has_a_row_without_failure_for_every_cell() -> None:
    found = rows(PAGE)
    assert [row.split("`")[1] for row in found] == list(CELLS)
    assert [row for row in found if "not run:" not in row and not row.endswith("| 0 |")] == []


def test_a_cell_names_servers_requirements_and_tests_that_exist() -> None:
    assert len(list_requirements()) == len(NEEDED)
    for cell in CELLS.values():
        assert {cell.mongod, cell.redis} <= PROGRAMS.keys()
        assert [path for path in cell.tests if not (PROJECT / path).exists()] == []


def test_a_row_is_written_into_the_table_and_all_else_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"before\n{BEGIN}\n| `newest` | as it was |\n| `gone` | no cell |\n{END}\nafter\n", encoding="utf-8"
    )
    record("oldest", ["`oldest`", "2026-11-28"], page)
    assert rows(page) == ["| `oldest` | 2026-11-28 |", "| `newest` | as it was |"]
    assert page.read_text(encoding="utf-8").endswith(f"{END}\nafter\n")
