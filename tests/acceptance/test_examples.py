"""The examples run as their READMEs say, and come out as printed there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.availability import require_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _servers() -> None:
    require_server("mongod")
    require_server("redis-server")


def test_the_first_bridge_summarises_every_order() -> None:
    """One command starts everything; each order has its summary (P1), and `status` shows the bridge leading."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/first_bridge/run.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "12 orders, 12 summaries"
    assert [f"customer-{n}: 3 orders, 30 in total" for n in range(4)] == lines[1:5]
    assert "leading" in done.stdout
