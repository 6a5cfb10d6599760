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


def run_example(name: str) -> list[str]:
    """What an example prints; its exit status says whether everything came out right."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name / "run.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def shown(name: str) -> list[str]:
    """What the README of an example shows of its output."""
    text = (ROOT / "examples" / name / "README.md").read_text()
    return text.split("run.py\n", 1)[1].split("```", 1)[0].splitlines()


def test_the_outbox_loses_nothing_where_insert_and_delay_do() -> None:
    """The writer is killed between write and dispatch; the README shows these lines."""
    assert run_example("orders_outbox") == shown("orders_outbox")


def test_a_flask_app_saves_mongoengine_documents_with_their_tasks() -> None:
    assert run_example("flask_mongoengine") == shown("flask_mongoengine")


def test_what_a_transaction_sends_is_sent_if_it_is_committed() -> None:
    """Deletes of several documents, one of them aborted, and a kill behind the last commit."""
    assert run_example("outbox_collection") == shown("outbox_collection")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fenced_outbox", "fastapi_outbox", "django_shop"])
def test_other_programs_save_their_tasks_with_what_they_write(name: str) -> None:
    """In short: `docs/outbox.md` is executed, and so are these ways in `tests/integration`."""
    assert run_example(name) == shown(name)


def test_the_bank_keeps_every_sum_both_ways() -> None:
    lines = run_example("bank")
    assert [line.rpartition(" ")[2] for line in lines[:4]] == ["50000", "50000", "2000", "2000"]
    assert lines[4:] == ["recovered: [('pending', 'done')]", "every sum is right"]
