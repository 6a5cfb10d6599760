"""The versions that are promised: what the command knows, and what the page says of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.fixtures import rabbitmq
from tests.versions.environment import NEEDED, find_python, needed_requirements
from tests.versions.matrix import CELLS, MATRIX, NEWEST, Cell
from tests.versions.report import BEGIN, END, is_done, keep, kept, record
from tests.versions.run import Outcome, run_cell
from tests.versions.servers import MONGODB, REDIS, MissingError, Servers

ROOT = Path(__file__).parents[2]


def test_the_page_has_a_row_for_every_cell() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(CELLS)


def test_the_table_of_the_page_has_no_failure() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if "not run:" not in row and not row.endswith("| 0 |")] == []


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_names_servers_and_tests_that_exist(name: str) -> None:
    cell = CELLS[name]
    assert cell.mongodb in MONGODB
    assert cell.redis in REDIS
    assert [path for path in cell.tests if not (ROOT / path).exists()] == []


def test_cells_have_names_of_their_own() -> None:
    assert len(CELLS) == len(MATRIX)


def test_what_a_cell_needs_is_part_of_the_extra_for_development() -> None:
    assert len(needed_requirements()) == len(NEEDED)


def test_what_ran_is_written_into_the_table_and_all_else_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    table = "| `newest` | as it was |\n| `gone` | no cell |"
    page.write_text(f"before\n{BEGIN}\n{table}\n{END}\nafter\n", encoding="utf-8")
    record([Outcome(CELLS["oldest"], "2026-11-28", missing="no server")], page)
    lines = page.read_text(encoding="utf-8").splitlines()

    assert (lines[:2], lines[-2:]) == (["before", BEGIN], [END, "after"])
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(CELLS)
    assert rows[0].startswith("| `oldest` | 2026-11-28 | not run: no server |")
    assert rows[1] == "| `newest` | as it was |"
    assert "not run: not yet" in rows[2]


def _program(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def _folder(folder: Path, mongod: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has servers and an environment already, so that nothing is downloaded."""
    _program(folder / "programs/python3.14", "exit 0")
    monkeypatch.setenv("PATH", f"{folder / 'programs'}:{os.environ['PATH']}")
    _program(folder / "mongod-6.0.5" / MONGODB["6.0.5"].path, mongod)
    _program(folder / "redis-server-6.2" / REDIS["6.2"].path, "echo v=6.2.14")
    _program(folder / "venv-tried/bin/python", f'exec "{sys.executable}" "$@"')
    (folder / "venv-tried/complete").touch()
    return folder


def test_a_server_that_does_not_run_here_is_said_and_the_other_cells_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is missing, say."""
    folder = _folder(tmp_path, "echo libcurl.so.4: cannot open >&2; exit 127", monkeypatch)
    outcome = run_cell(Cell("tried", python=NEWEST), folder)

    assert outcome.missing == "mongod does not run here: libcurl.so.4: cannot open"


def test_a_python_that_does_not_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version manager's stand-in for one that it does not have."""
    _program(tmp_path / "bin/python3.10", "exit 127")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(MissingError, match=r"no Python 3\.10 on this machine"):
        find_python("3.10", Servers(tmp_path))


def test_the_newest_python_is_one_of_the_machine_where_there_is_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every machine is a Debian; and Debian may have left that version behind."""
    _program(tmp_path / "bin/python3.12", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert find_python(NEWEST, Servers(tmp_path)) == tmp_path / "bin/python3.12"
    with pytest.raises(MissingError, match="from Debian's archive, by apt-get and dpkg-deb"):
        find_python("3.14", Servers(tmp_path))


def test_a_cell_is_done_that_has_run_well_with_the_same_files(tmp_path: Path) -> None:
    """What `--resume` leaves out."""
    assert not is_done("oldest", tmp_path, "files")
    for name, failed in (("oldest", ()), ("newest", ("a test",))):
        keep(Outcome(CELLS[name], "2026-11-28", passed=1, failed=failed), tmp_path, "files")
    assert is_done("oldest", tmp_path, "files")
    assert not is_done("oldest", tmp_path, "other files")
    assert not is_done("newest", tmp_path, "files")
    assert [outcome.failed for outcome in kept(tmp_path)] == [(), ("a test",)]


def test_a_broker_that_is_not_here_is_said_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one cell's leavings are in no other's way."""
    monkeypatch.setattr(rabbitmq, "_UNWRAPPED", ())
    monkeypatch.setattr(rabbitmq, "_PROGRAM", "no-such-rabbitmq")
    folder = _folder(tmp_path, "echo db version v6.0.5", monkeypatch)
    for queues in ("classic", "quorum"):
        outcome = run_cell(Cell("tried", python=NEWEST, broker=queues), folder)
        assert "install the system package rabbitmq-server" in outcome.missing
    assert list(tmp_path.glob("rabbitmq-*")) == []
