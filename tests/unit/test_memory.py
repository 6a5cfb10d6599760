"""Servers' data is kept in memory only where the kernel would leave it to the tests."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.fixtures.memory import left_to_groups


@pytest.mark.parametrize(
    ("line", "group", "files"),
    [
        ("0::/pod/tests", "pod", ("memory.max", "memory.current")),
        ("0::/../elsewhere", "", ("memory.max", "memory.current")),
        ("4:memory:/docker/1", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
    ids=["around", "seen as the root", "first version"],
)
def test_a_containers_limit_counts(tmp_path: Path, line: str, group: str, files: tuple[str, str]) -> None:
    """Files in memory are charged to it; the machine's own memory says nothing of that."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(f"1:name=systemd:/\n{line}\n")
    (groups / group).mkdir(parents=True)
    for name, value in zip(files, (4000, 1500), strict=True):
        (groups / group / name).write_text(f"{value}\n")

    assert left_to_groups(own, groups) == 2500


def test_without_a_limit_all_is_left(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/tests\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "memory.max").write_text("max\n")
    (tmp_path / "tests" / "memory.current").write_text("1\n")

    assert left_to_groups(tmp_path / "own", tmp_path) == math.inf
    assert left_to_groups(tmp_path / "none", tmp_path) == math.inf
