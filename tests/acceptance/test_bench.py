"""The bench, as a user runs it, with tiny sizes: its shape, never its speed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.bench.sizes import EXTRAS

_TINY = ["--quick", "--changes", "20", "--warm-up", "4", "--samples", "3", "--backlog", "400"]
_SECONDS_MAX = 240
_BENCH = """
from mongo_celery.bench import memory, takeover
from mongo_celery.bench.command import bench
memory._SETTLED_SECONDS = takeover._SETTLED_SECONDS = 0.3
bench()
"""  # the figures need no rest here


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )


def _object(ended: subprocess.CompletedProcess[str]) -> Any:
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_every_extra_and_the_modes_with_a_worker_are_in_one_json_object(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """
    `--json` prints one object with positive rates and ratios that follow from them; given servers keep nothing.

    Latency is that of `watch_delay`, `bridge_chain` and `bridge_inline`, so each kind of worker, feeder and end takes
    part.
    """
    modes = ["raw_chain", "bridge_transactional", "bridge_runs", "bridge_bulk"]
    only = [word for name in (*modes, *EXTRAS) for word in ("--only", name)]
    before = set(mongo_client.list_database_names())

    urls = ["--mongo-url", mongo_url, "--redis-url", redis_url]
    found = _object(_bench(*_TINY, *only, "--lease-ttl", "1", "--load-seconds", "0.1", "--json", *urls))

    assert list(found["modes"]) == modes
    reference = found["modes"]["raw_chain"]
    for figure in found["modes"].values():
        assert figure["changes_per_second"] > 0
        assert figure["changes_per_second"] == pytest.approx(statistics.median(figure["rounds"]), abs=0.01)
        rate = figure["changes_per_second"] / reference["changes_per_second"]
        assert figure["ratio_to_raw_chain"] == pytest.approx(rate, rel=0.01)
        assert figure["cpu_us"] == pytest.approx(sum(figure["cpu_us_per_change"].values()), abs=1)
        assert {"worker_parent", "worker_children"} <= figure["cpu_us_per_change"].keys()
    assert found["cpu_without"] == ["mongod", "redis"]
    for kind in ("latency_ms", "latency_at_half_load_ms"):
        assert list(found[kind]) == ["watch_delay", "bridge_chain", "bridge_inline"]
        for latency in found[kind].values():
            assert latency["samples"] >= 3
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
    """Without `--json` tables show the chosen modes only, and no ratio where `raw_chain` was not measured."""
    modes = ["raw_stream", "watch_loop", "listener_alone"]
    only = [word for name in modes for word in ("--only", name)]

    ended = _bench(*_TINY, *only, "--mongo-url", mongo_url, "--redis-url", redis_url)

    assert ended.returncode == 0, ended.stderr
    rates, cpu = ended.stdout.split("Processor time for one change by process")
    assert [line.split()[0] for line in rates.splitlines()[2:] if line.strip()] == modes
    assert [line.split()[0] for line in cpu.splitlines()[2:5]] == modes
    assert "take-over" not in ended.stdout
    assert "This is rough" in ended.stdout


@pytest.mark.slow
def test_what_a_machine_carries_of_changes_and_handlers_of_ones_own(
    mongo_url: str, redis_url: str, redis_client: Any, tmp_path: Path
) -> None:
    """
    One worker is measured and never reaches what its handlers' time permits; sixteen are computed where the cores
    cannot feed them, and each number has its limit.
    """
    file = tmp_path / "order.json"
    file.write_text('{"total": 1, "lines": [' + ", ".join(["{}"] * 50) + "]}")
    own = ["--payload", str(file), "--handler-seconds", "0.02", "--handler-cpu-seconds", "0.005"]
    many = ["--workers", "1", "--workers", "1000", "--only", "bridge_inline"]

    found = _object(_bench("--quick", "--json", *own, *many, "--mongo-url", mongo_url, "--redis-url", redis_url))

    assert 300 < found["payload_bytes"] < 600
    assert list(found["capacity"]) == ["bridge_inline"]
    mode = found["capacity"]["bridge_inline"]
    one, more = mode["workers"]
    assert [one["workers"], one["measured"], more["workers"], more["measured"]] == [1, True, 1000, False]
    assert 0 < one["changes_per_second"] <= found["worker_processes"] / 0.02 * 1.1
    limits = {"workers", "partitions", "listener_core", "cores_here"}
    assert {one["limit"], more["limit"], one["apart_limit"], more["apart_limit"]} <= limits
    assert limits - mode["limits"].keys() == {"workers"}
    assert more["changes_per_second"] <= mode["limits"]["cores_here"]
    assert mode["cpu_us_per_change"]["worker_children"] >= 5000 * 0.5  # of the processor time that was asked for
    assert not list(redis_client.scan_iter("*bench-*"))
