"""The bench's arithmetic and its arguments. `tests/acceptance/test_bench.py` runs it."""

from __future__ import annotations

import io

import bson
import pytest
from click.testing import CliRunner
from rich.console import Console

from mongo_celery.bench.command import _plain, _show, bench
from mongo_celery.bench.payload import make_order
from mongo_celery.bench.run import MODES, Figure

RAW = Figure(500, [100.0, 50.0, 200.0], [{"redis": 100.0, "publisher": 300.0}] * 3)
RUNS = Figure(40_000, [9000.0, 10_000.0, 11_000.0], [{"redis": 4.0, "listener": 36.0}] * 3)


def test_a_figure_is_the_median_of_its_rounds_and_its_ratio_to_that_of_raw_chain() -> None:
    """By rate, and by the processor time of all processes; what `raw_chain` lacks is not compared."""
    found = _plain(RUNS, RAW)

    assert found["changes_per_second"] == 10_000
    assert found["rounds"] == [9000, 10_000, 11_000]
    assert (found["cpu_us"], found["cpu_us_per_change"]) == (40, {"redis": 4, "listener": 36})
    assert (found["ratio_to_raw_chain"], found["cpu_ratio_to_raw_chain"]) == (100, 10)
    assert _plain(RUNS, None)["ratio_to_raw_chain"] is None
    assert _plain(RAW, RAW)["cpu_ratio_to_raw_chain"] == 1


def test_tables_fit_a_terminal() -> None:
    """80 columns, with every process and large figures."""
    processes = ("mongod", "redis", "worker_parent", "worker_children", "listener", "publisher")
    large = Figure(40_000, [123_456.0], [dict.fromkeys(processes, 12_345.0)])
    console = Console(file=io.StringIO(), width=200)

    _show(dict.fromkeys(MODES, large), console)

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert text.count("bridge_bulk") == 2


def test_what_is_read_ahead_is_little() -> None:
    """A listener may have read 2,000 changes before the first handler starts, which are in no figure."""
    for name in ("bridge_runs", "bridge_bulk"):
        assert 500 * MODES[name].scale >= 20 * 2000


def test_the_payload_is_about_600_bytes_and_equally_long() -> None:
    """All modes carry the same document."""
    assert {len(bson.encode(make_order(number))) for number in (0, 999)} == {len(bson.encode(make_order(1)))}
    assert 550 <= len(bson.encode(make_order(0))) <= 650


@pytest.mark.parametrize("arguments", [["--only", "raw_stream"], ["--rounds", "0"], ["--payload", "4096"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    """Before any server is started."""
    assert CliRunner().invoke(bench, arguments).exit_code == 2
