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
from tests.versions.report import BEGIN, END
from tests.versions.run import run_cell
from tests.versions.servers import MONGODB, REDIS_PACKAGES, REDIS_WHEELS, MissingError

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
    assert cell.redis in {**REDIS_WHEELS, **REDIS_PACKAGES}
    assert [path for path in cell.tests if not (ROOT / path).exists()] == []


def test_cells_have_names_of_their_own() -> None:
    assert len(CELLS) == len(MATRIX)


def test_what_a_cell_needs_is_part_of_the_extra_for_development() -> None:
    assert len(needed_requirements()) == len(NEEDED)


def _program(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def _folder(folder: Path, mongod: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has servers and an environment already, so that nothing is downloaded."""
    _program(folder / "programs/python3.14", "exit 0")
    monkeypatch.setenv("PATH", f"{folder / 'programs'}:{os.environ['PATH']}")
    _program(folder / "mongod-6.0.5" / MONGODB["6.0.5"].program, mongod)
    _program(folder / "redis-server-6.2" / REDIS_WHEELS["6.2"].program, "echo v=6.2.14")
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


def test_a_python_that_cannot_make_environments_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has `venv` everywhere, and what it needs in a package of its own."""
    _program(tmp_path / "bin/python3.14", 'case "$2" in *ensurepip*) exit 1; esac')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(MissingError, match=r"no Python 3\.14 on this machine that makes"):
        find_python("3.14")


def test_a_broker_that_is_not_here_is_said_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one cell's leavings are in no other's way."""
    monkeypatch.setattr(rabbitmq, "_UNWRAPPED", ())
    monkeypatch.setattr(rabbitmq, "_PROGRAM", "no-such-rabbitmq")
    folder = _folder(tmp_path, "echo db version v6.0.5", monkeypatch)
    for queues in ("classic", "quorum"):
        outcome = run_cell(Cell("tried", python=NEWEST, broker=queues), folder)
        assert "install the system package rabbitmq-server" in outcome.missing
    assert list(tmp_path.glob("rabbitmq-*")) == []
