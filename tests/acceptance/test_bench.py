"""The bench, as a user runs it, with tiny sizes: its shape, never its speed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient

from mongo_celery.bench.latency import quantile
from mongo_celery.bench.modes import MODES
from mongo_celery.bench.payload import event_text, order_bytes
from mongo_celery.bench.report import aims
from mongo_celery.bench.run import Figure, Results
from mongo_celery.bench.sizes import EXTRAS, BenchSizes

_TINY = ["--quick", "--changes", "20", "--warm-up", "4", "--samples", "3", "--backlog", "400"]
_SECONDS_MAX = 240
_BENCH = """
from mongo_celery.bench import memory, takeover
from mongo_celery.bench.command import bench
memory._SETTLED_SECONDS = takeover._SETTLED_SECONDS = 0.3
bench()
"""  # the figures need no rest here
_NOWHERE = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300"


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )


@pytest.mark.slow
def test_every_extra_and_the_modes_with_a_worker_are_in_one_json_object(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """
    `--json` prints one object with positive rates and ratios that follow from them; given servers keep nothing.

    Latency is that of `watch_delay` and `bridge_chain`, so each kind of worker, feeder and end takes part.
    """
    modes = ["raw_chain", "bridge_runs"]
    only = [word for name in (*modes, *EXTRAS) for word in ("--only", name)]
    before = set(mongo_client.list_database_names())

    ended = _bench(*_TINY, *only, "--lease-ttl", "1", "--json", "--mongo-url", mongo_url, "--redis-url", redis_url)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert list(found["modes"]) == modes
    reference = found["modes"]["raw_chain"]["changes_per_second"]
    for figure in found["modes"].values():
        assert figure["changes_per_second"] > 0
        assert figure["changes_per_second"] == pytest.approx(statistics.median(figure["rounds"]), abs=0.01)
        assert figure["ratio_to_raw_chain"] == pytest.approx(figure["changes_per_second"] / reference, rel=0.01)
    for latency in (found["latency_ms"]["watch_delay"], found["latency_ms"]["bridge_chain"]):
        assert latency["samples"] == 3
        assert 0 < latency["p50"] <= latency["p99"]
    memory = found["listener_memory_mb"]
    assert memory["backlog"] == 400
    assert 0 < memory["start"] <= memory["peak"]
    assert all(step <= memory["peak"] for step in memory["steps"])
    take_over = found["take_over_seconds"]
    assert [len(take_over["sigkill"]), len(take_over["sigterm"])] == [1, 1]
    assert take_over["lease_ttl"] == 1
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


def test_people_get_a_table_of_what_they_asked_for(mongo_url: str, redis_url: str) -> None:
    """Without `--json` a table shows the chosen modes only, and no ratio where `raw_chain` was not measured."""
    chosen = ["--only", "raw_stream", "--only", "watch_loop", "--mongo-url", mongo_url, "--redis-url", redis_url]

    ended = _bench(*_TINY, *chosen)

    assert ended.returncode == 0, ended.stderr
    assert [name for name in MODES if name in ended.stdout.split("x raw_chain")[1]] == ["raw_stream", "watch_loop"]
    assert "take-over" not in ended.stdout


@pytest.mark.parametrize("arguments", [["--only", "raw_chian"], ["--rounds", "0"], ["--mongo-url", _NOWHERE]])
def test_wrong_arguments_end_in_one_sentence(arguments: list[str]) -> None:
    """A misspelt mode, no rounds or an impossible address: a non-zero status and no traceback."""
    ended = _bench("--redis-url", "redis://127.0.0.1:1/0", *arguments)

    assert ended.returncode != 0
    assert "Error" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_payload_is_about_600_bytes_and_equally_long() -> None:
    """All modes carry the same document of some 600 bytes; the event that tasks get holds it."""
    event = json.loads(event_text())

    assert 550 <= order_bytes() <= 650
    assert ObjectId.is_valid(event["fullDocument"]["_id"]["$oid"])


def test_a_quantile_is_a_value_that_occurred() -> None:
    """No value is made up between two samples, and the highest is never left behind."""
    values = [3.0, 1.0, 2.0]

    assert quantile(values, 0.5) == 2.0
    assert quantile(values, 0.99) == 3.0
    assert quantile([5.0], 0.99) == 5.0


def test_an_aim_is_judged_by_its_ratio() -> None:
    """A ratio below the aim is called missed: the judge has been seen to fail."""
    figures = {
        "bridge_chain": Figure(10, 64.0, 0.64, (64.0,), {}),
        "bridge_runs": Figure(10, 2500.0, 25.0, (2500.0,), {}),
    }

    judged = aims(Results(figures=figures))

    assert judged["bridge_chain / raw_chain"]["met"] is False
    assert judged["bridge_runs / raw_chain"]["met"] is True


def test_the_modes_are_those_of_the_published_figures() -> None:
    """In the order of a round: figures of different commits are compared by these names."""
    names = ["raw_stream", "raw_task", "raw_chain", "watch_delay", "watch_loop"]

    assert list(MODES) == [*names, "bridge_chain", "bridge_inline", "bridge_runs", "bridge_bulk"]


def test_only_restricts_what_is_measured() -> None:
    """Everything is wanted until something is chosen."""
    assert BenchSizes().wants("memory")
    assert not BenchSizes(only=("raw_chain",)).wants("memory")
