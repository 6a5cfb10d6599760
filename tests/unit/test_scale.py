"""`docs/scale.md` computes what it says: its second table follows from its first, by the rule that it states."""

from __future__ import annotations

import pytest

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
    hours_of_oplog,
    rounded,
)
from tests.fixtures.process import ROOT

PAGE = ROOT / "docs/scale.md"
COSTS = Costs(worker=7000, listener=700, redis=70, mongodb=2800)


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
    hours = hours_of_oplog(50e9, 200, 1000, written)

    assert list(written) == ["chain", "runs"]
    expected = (
        f"{hours['chain']:.0f} hours beside one handler of chains, and {hours['runs']:.0f} hours beside one of runs"
    )
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
    costs = Costs(worker=7000, listener=1400, redis=70, mongodb=2800)

    found = carried(costs, bridges, workers)

    assert found.rate == pytest.approx(rate)
    assert found.limit == limit


def test_redis_is_one_for_all_bridges() -> None:
    """Its core does not grow with them."""
    assert carried(Costs(1, 1, 700, 1), 10, 100).limit == "Redis"


def test_no_more_digits_are_shown_than_are_known() -> None:
    """Two of them."""
    assert [rounded(value) for value in (7.04, 54.6, 538.4, 5384, 58_333)] == ["7", "55", "540", "5,400", "58,000"]


def test_costs_come_from_what_the_bench_prints() -> None:
    """Microseconds by process, of the four ways; and through a table and back they are the same."""
    used = {"worker": 7000, "listener": 700, "redis": 70, "mongodb": 2800}
    bench = {"modes": {mode: {"cpu_us_per_change": {**used, "publisher": 1}} for mode in MODES}}

    assert costs_of(bench) == dict.fromkeys(MODES.values(), COSTS)
    assert costs_in(costs_table(costs_of(bench))) == costs_of(bench)
