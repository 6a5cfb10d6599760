"""The benchmarks with tiny sizes: every suite runs and has its figures. Nothing here looks at speed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pymongo import MongoClient

from tests.benchmarks.compare import judge
from tests.benchmarks.readings import quantile, reading
from tests.fixtures.process import ROOT

_TINY = {
    "outbox": ("writes=3", "held=100"),
    "transactions": ("transfers=4", "processes=2"),
    "backlog": ("owed=4000",),
    "handlers": ("reached=9600",),
    "latency": ("live=3", "lease_ttl=1"),
}
_EXPECTED = {
    "outbox": {
        "Writes without a pause: caller": {"insert_outbox", "update_outbox"},
        "A sweep that finds 20 due documents, 100 held back": {"sweep_alone", "sweep_among_held_back"},
    },
    "transactions": {"Transfers per second among 2 accounts, 2 processes together": {"two_phase", "locked", "across"}},
    "backlog": {"A change of a backlog of 4,000": {"listener", "worker", "listener at its highest"}},
    "handlers": {"A change of 16 for one handler, chains of all, 60 handlers": {"listener", "worker", "oplog"}},
    "latency": {"From a write to the start of its handler": {"bridge_chain_p50", "bridge_inline_p99"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("suite", _TINY)
def test_a_suite_has_its_figures_and_leaves_nothing_on_given_servers(
    suite: str, mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    before = set(mongo_client.list_database_names())
    given = [word for size in _TINY[suite] for word in ("--size", size)]
    servers = ["--mongo-url", mongo_url, "--redis-url", redis_url]

    ended = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", suite, "--quick", "--json", *given, *servers],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)[suite]
    for title, names in _EXPECTED[suite].items():
        assert names <= set(found[title])
    assert all(each["value"] > 0 for table in found.values() for each in table.values())
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A round in which the machine was slow is slow for both."""
    found = reading("own", "ms", [2.0, 30.0, 4.0], ("other", [1.0, 10.0, 2.0]))

    assert found.plain() == {"unit": "ms", "value": 4.0, "rounds": [2.0, 30.0, 4.0], "ratio_to_other": 2.0}
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0


def test_two_commits_differ_if_their_rounds_do_not_overlap() -> None:
    assert judge([10, 12], [8, 9]) is True
    assert judge([10, 12], [13, 14]) is False
    assert judge([10, 12], [11, 13]) is None
