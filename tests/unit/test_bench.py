"""The bench's arithmetic and its arguments. `tests/acceptance/test_bench.py` runs it."""

from __future__ import annotations

import bson

from mongo_celery.bench.command import _plain
from mongo_celery.bench.payload import make_order
from mongo_celery.bench.run import MODES, Figure

RAW = Figure(500, [100.0, 50.0, 200.0], [{"redis": 100.0, "publisher": 300.0}] * 3)
RUNS = Figure(40_000, [9000.0, 10_000.0, 11_000.0], [{"redis": 4.0, "listener": 36.0}] * 3)


def test_a_figure_is_the_median_of_its_rounds_and_its_ratio_to_that_of_raw_chain() -> None:
    """By rate, and by the processor time of all processes; what `raw_chain` lacks is not compared."""
    found = _plain(RUNS, RAW)
    assert (found["changes_per_second"], found["ratio_to_raw_chain"], found["cpu_ratio_to_raw_chain"]) == (
        10_000,
        100,
        10,
    )
    assert _plain(RUNS, None)["ratio_to_raw_chain"] is None


def test_what_is_read_ahead_is_little() -> None:
    """A listener may have read 2,000 changes before the first handler starts, which are in no figure."""
    assert min(500 * MODES[name].scale for name in ("bridge_runs", "bridge_bulk")) >= 20 * 2000


def test_the_payload_is_about_600_bytes_and_equally_long() -> None:
    """All modes carry the same document."""
    (size,) = {len(bson.encode(make_order(number))) for number in (0, 1, 999)}
    assert 550 <= size <= 650
