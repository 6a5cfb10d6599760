"""The examples run as their READMEs say, and come out as printed there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.availability import require_server

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_SECONDS_MAX = 300
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


def run_example(name: str) -> list[str]:
    """What an example prints; its exit status says whether everything came out right."""
    for server in ("mongod", "redis-server"):
        require_server(server)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name / "run.py")],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def shown(name: str) -> list[str]:
    """What the README of an example shows of its output, below its one command."""
    text = (EXAMPLES / name / "README.md").read_text()
    return text.split("run.py\n", 1)[1].split("```", 1)[0].splitlines()


def test_the_list_has_every_example_with_its_number() -> None:
    """A folder that is not in the list is found by nobody; a README's title bears the number of its row."""
    rows = re.findall(r"^\| (\d+) \| \[(\w+)\]\((\w+)\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)

    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert sorted(folder for _, _, folder in rows) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    for number, name, folder in rows:
        assert name == folder
        assert (EXAMPLES / folder / "README.md").read_text().startswith(f"# {number}. "), folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_readme_begins_with_one_command_that_is_there(name: str) -> None:
    """And with what it prints: before anything else, in the first block."""
    first, *_ = re.findall(r"```console\n(.*?)```", (EXAMPLES / name / "README.md").read_text(), re.DOTALL)
    commands = [line for line in first.splitlines() if line.startswith("$ python ")]

    assert len(commands) == 1
    assert (EXAMPLES.parent / commands[0].removeprefix("$ python ")).is_file()
    assert first.splitlines()[-1] != commands[0]


def test_the_first_bridge_summarises_every_order() -> None:
    """One command starts everything; each order has its summary (P1), and `status` shows the bridge."""
    printed = run_example("first_bridge")

    assert printed[:5] == shown("first_bridge")
    assert printed[5].startswith("shop: ")


def test_the_outbox_loses_nothing_where_insert_and_delay_do() -> None:
    """The writer is killed between write and dispatch; the README shows these lines."""
    assert run_example("orders_outbox") == shown("orders_outbox")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outbox_collection", "fenced_outbox", "flask_shop", "fastapi_orders", "django_shop"])
def test_other_programs_save_their_tasks_with_what_they_write(name: str) -> None:
    """In short: `docs/outbox.md`, `flask.md` and `fastapi.md` are executed, and so are these ways in `integration`."""
    assert run_example(name) == shown(name)


@pytest.mark.slow
def test_the_drill_loses_nothing_and_books_nothing_twice() -> None:
    """In short: `acceptance/test_worker_faults.py`, `test_listener.py` and `isolation/test_dead_letters.py`."""
    assert run_example("failure_drill") == shown("failure_drill")


def test_the_seat_reservation_comes_out_even() -> None:
    """Its exit status says that no seat was sold twice and no money is missing."""
    requests, seats, money, verdict = run_example("seat_reservation")
    assert requests.startswith("90 requests: ")
    sold, taken = map(int, re.findall(r"\b(\d+) of 40 seats sold for (\d+)$", seats)[0])
    before, left, till = map(int, re.findall(r"before: (\d+); after: (\d+) \+ (\d+) in the till$", money)[0])
    assert (sold <= 40, till) == (True, taken)
    assert left + till == before
    assert verdict == "each seat was sold at most once, and all the money is there"


@pytest.mark.slow
def test_the_bank_keeps_every_sum_both_ways() -> None:
    lines = run_example("bank")
    assert [line.rpartition(" ")[2] for line in lines[:4]] == ["50000", "50000", "2000", "2000"]
    assert lines[4:] == ["recovered: [('pending', 'done')]", "every sum is right"]
