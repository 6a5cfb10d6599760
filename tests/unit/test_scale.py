"""`docs/scale.md` computes what it says: its second table follows from its first, by the rule that it states."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.figures import figures_of
from mongo_celery.bench.rates import Measured
from mongo_celery.bench.report import as_json
from mongo_celery.bench.run import Results
from mongo_celery.bench.sizes import QUICK
from mongo_celery.bench.tables import PROCESSES
from tests.benchmarks.carrying import (
    MODES,
    MONGODB_CORES,
    SHARE,
    Costs,
    carried,
    carried_table,
    costs_in,
    costs_of,
    costs_table,
    hours_told,
    missing,
    rounded,
    tables,
)
from tests.fixtures.process import ROOT

PAGE = ROOT / "docs/scale.md"
COSTS = Costs(worker=7000, listener=700, redis=70, mongod=2800)
USED = {"mongod": 2800.0, "redis": 70.0, "worker_parent": 3000.0, "worker_children": 4000.0, "listener": 700.0}
"""The same, by the names of `Scene.usage`."""


def _table(first: str) -> list[str]:
    """The lines of the page's table whose first title is this."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rest = lines[start:]
    return rest[: next((number for number, line in enumerate(rest) if not line.startswith("|")), len(rest))]


def test_the_computed_table_follows_from_the_measured_one() -> None:
    """New figures go into one table; the other is printed by `python -m tests.benchmarks.carrying`, or by this."""
    costs = costs_in(_table("way"))

    assert list(costs) == list(MODES.values())
    assert _table("way") == costs_table(costs)
    assert _table("bridges") == carried_table(costs), "\n".join(["it should be:", *carried_table(costs)])


def test_the_oplogs_hours_follow_from_the_bytes_that_were_measured() -> None:
    """The example below their table: 50 GB, and 200 changes of 1 kB a second."""
    rows = (line.strip("|").split("|") for line in _table("oplog")[2:])
    written = {way.strip(): float(each.replace(",", "")) for way, each in rows}

    assert list(written) == ["chain", "runs"]
    expected = hours_told(written)
    assert expected in " ".join(PAGE.read_text().split()), expected


def test_the_page_names_what_is_reckoned_with() -> None:
    """The share of a core and the primary's cores stand on the page as they stand in the rule."""
    text = " ".join(PAGE.read_text().split())

    assert f"{SHARE:.0%} of a core" in text
    assert f"{MONGODB_CORES} cores" in text


@pytest.mark.parametrize(
    ("bridges", "workers", "rate", "limit"),
    [
        (1, 1, 100, "workers"),
        (1, 10, 500, "listener"),
        (10, 10, 1000, "workers"),
        (1, 100, 500, "listener"),
        (10, 100, 1000, "MongoDB"),
    ],
)
def test_what_is_full_first_is_the_limit(bridges: int, workers: int, rate: float, limit: str) -> None:
    """Seventy per cent of a core for each, four cores of the primary."""
    costs = Costs(worker=7000, listener=1400, redis=70, mongod=2800)

    found = carried(costs, bridges, workers)

    assert found.rate == pytest.approx(rate)
    assert found.limit == limit


def test_redis_is_one_for_all_bridges() -> None:
    """Its core does not grow with them."""
    assert carried(Costs(1, 1, 700, 1), 10, 100).limit == "Redis"


def test_no_more_digits_are_shown_than_are_known() -> None:
    """Two of them."""
    assert [rounded(value) for value in (7.04, 54.6, 538.4, 5384, 58_333)] == ["7", "55", "540", "5,400", "58,000"]


def _bench(*modes: str, uncounted: tuple[str, ...] = ()) -> Any:
    """What the bench prints of a run with these modes."""
    figures = figures_of({mode: [Measured(10, 5.0, USED)] for mode in modes})
    return json.loads(json.dumps(as_json(Results(figures=figures, uncounted=uncounted), QUICK)))


def test_costs_come_from_what_the_bench_prints() -> None:
    """Microseconds by process, of the four ways; and through a table and back they are the same."""
    assert USED.keys() <= PROCESSES.keys()
    found = costs_of(_bench("raw_chain", *MODES))

    assert found == dict.fromkeys(MODES.values(), COSTS)
    assert costs_in(costs_table(found)) == found


def test_what_a_run_has_not_measured_is_left_out_or_refused() -> None:
    """A quick run leaves modes out; and a server that was given would cost nothing."""
    bench = _bench("bridge_chain", "bridge_bulk")

    assert list(costs_of(bench)) == ["chain", "lists"]
    assert missing(bench) == ["bridge_inline", "bridge_runs"]
    with pytest.raises(BenchError, match="has not measured mongod: run it without"):
        costs_of(_bench(*MODES, uncounted=("mongod",)))
    with pytest.raises(BenchError, match="lacks the suite handlers"):
        tables(bench, {"backlog": []})


def _heads(lines: list[str]) -> list[list[str]]:
    """Of all tables, with the line below."""
    return [lines[number - 1 : number + 1] for number, line in enumerate(lines) if line.startswith("|---")]


def test_all_tables_of_the_page_are_one_paste() -> None:
    """From the two files of figures come tables with the page's heads, in its order."""
    shared = [
        {"kind": kind, "handlers": 1, "cpu_us": USED, "oplog_bytes": 1431.4, "listener_mb": 80.4}
        for kind in ("chains of all", "runs of all", "runs of one")
    ]
    backlog = [{"changes": 10_000, "cpu_us": USED, "started_mb": 75.4, "peak_mb": 112.0}]

    lines = tables(_bench(*MODES), {"backlog": backlog, "handlers": {"shared": shared}})

    heads = _heads(lines)
    assert len(heads) == 5
    assert heads == _heads(PAGE.read_text().splitlines())[:5]
    assert "| 10,000 | 700 | 75 | 112 |" in lines
    assert "| chain, all | 1 | 700 | 7,000 | 2,800 | 80 |" in lines
    assert "| chain | 1,430 |" in lines
    assert hours_told({"chain": 1430, "runs": 1430}) in lines
