"""The benchmarks with tiny sizes: their shape, never their speed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pymongo import MongoClient

from tests.benchmarks.pending_query import _index_of
from tests.benchmarks.readings import MILLISECONDS, quantile, reading
from tests.benchmarks.sizes import FULL, QUICK
from tests.fixtures.process import ROOT

_TINY = ["--quick", "--json", "--writes", "3", "--entries", "20", "--documents", "400", "--transfers", "4"]
_SECONDS_MAX = 240


def _benchmarks(
    *arguments: str, seconds: float = _SECONDS_MAX, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )


@pytest.mark.slow
def test_the_outboxs_suite_gives_writes_entries_the_query_and_the_recovery(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """Ratios beside the plain way, the index in the server's own words, and nothing left on given servers."""
    before = set(mongo_client.list_database_names())

    ended = _benchmarks("outbox", *_TINY, "--mongo-url", mongo_url, "--redis-url", redis_url)

    assert ended.returncode == 0, ended.stderr
    whole = json.loads(ended.stdout)
    found = whole["outbox"]
    assert "transactions" not in whole
    for name in ("paced_insert_caller", "update_caller", "bulk_1000_caller", "hot_longest", "frozen_longest"):
        (ratio,) = (value for key, value in found["costs"][name].items() if key.startswith("ratio_to_"))
        assert ratio > 0
    assert found["costs"]["undelivered"] == 0
    assert {"hot_p99", "insert_caller"} <= found["aims"].keys()
    for kind in ("insert", "update"):
        assert found["writes"][f"{kind}_outbox"][f"ratio_to_{kind}_delay"] > 0
        assert len(found["writes"][f"{kind}_later"]["rounds"]) == 1
    assert found["entries"]["sweep"]["ratio_to_delay"] > 0
    assert found["entries"]["listener"]["value"] > 0
    query = found["sweep_query"]
    assert (query["documents"], query["pending"], query["index"]) == (400, 100, "pendingEvents")
    assert query["documents_examined"] == 100
    assert query["keys_examined"] <= 101  # the end of the range may be one of them
    recovery = found["recovery"]
    assert recovery["left_pending"][0] >= 1
    assert recovery["value"] > 0
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


@pytest.mark.slow
def test_the_suite_of_transactions_gives_transfers_and_recoveries(redis_url: str) -> None:
    """Every kind under low and high contention with right sums; a lock of a killed holder on a server of its own."""
    ended = _benchmarks("transactions", *_TINY, "--processes", "2", "--redis-url", redis_url)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["transactions"]
    for contention in ("low", "high"):
        for kind in ("two_phase", "locked"):
            assert found["transfers"][f"{kind}_{contention}"][f"ratio_to_plain_{contention}"] > 0
        assert found["transfers"][f"across_{contention}"][f"ratio_to_plain_across_{contention}"] > 0
    assert found["many"]["locked_hundred"]["ratio_to_plain_hundred"] > 0
    assert found["recovery"]["left_open"][0] >= 1
    assert found["recovery"]["value"] >= 1, "recover takes what is older than a second"
    assert found["lock_released"]["transaction_lifetime_limit"] == 2


def test_the_streams_suite_gives_entries_per_second_for_each_number_of_sources(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """Every pipeline has shown the watched changes and none of the neighbour's; beside one `$in` over the names."""
    before = set(mongo_client.list_database_names())

    given = ("--mongo-url", mongo_url, "--redis-url", redis_url)
    ended = _benchmarks("stream", *_TINY, "--scanned", "300", *given)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["stream"]
    assert found["entries"] == 300
    for count in (1, 10, 60, 200):
        assert found["scanned"][f"plain_in_{count}"]["value"] > 0
        for name in ("bridge", "bridge_databases", "bridge_whole", "clause_each"):
            assert found["scanned"][f"{name}_{count}"][f"ratio_to_plain_in_{count}"] > 0
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


@pytest.mark.slow
def test_the_suite_of_what_is_stored_gives_the_others_throughput_and_costs(redis_url: str) -> None:
    """P12, P13: the others are done beside each kind of standing, plain backlog is not stored, and nothing is lost."""
    sizes = ("--beside", "60", "--standing", "120", "--backlog", "300", "--stored", "120", "--spilled", "200")
    ended = _benchmarks("spill", "--quick", "--json", *sizes, "--redis-url", redis_url, seconds=900)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["spill"]
    for prefix in ("", "small_"):
        for act in ("hot", "parked", "halted"):
            assert found["others"][f"{prefix}{act}"][f"ratio_to_{prefix}alone"] > 0
    assert found["others"]["rolled_halted_later"]["ratio_to_rolled_alone_later"] > 0
    assert found["backlogs"]["all partitions"]["inserted"] == 0
    assert found["backlogs"]["3 keys"]["changes"] == 300
    for size in ("1000", "10000"):
        assert set(found["cost_us"][size]) == {"storing", "reading_back"}
    nothing, some = found["handovers"]
    assert (nothing["stored"], some["stored"]) == (0, 200)
    assert some["take_over_seconds"] > 0


@pytest.mark.slow
def test_the_suite_of_snapshots_gives_rates_costs_and_what_live_changes_wait(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """Documents and live inserts through one handler, and live changes of two; nothing is left on given servers."""
    before = set(mongo_client.list_database_names())

    given = ("--mongo-url", mongo_url, "--redis-url", redis_url)
    ended = _benchmarks("snapshot", "--quick", "--json", "--existing", "3000", "--live", "2", *given)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["snapshot"]
    assert found["documents"] == 3000
    assert found["delivered"]["snapshot"]["ratio_to_live"] > 0
    for name in ("snapshot", "live"):
        assert {"listener", "worker_parent", "worker_children"} <= set(found["cpu_us"][name])
    for waits in found["live_ms"].values():
        for handler in ("same handler", "other handler"):
            assert waits[handler]["longest"] >= waits[handler]["p50"] > 0
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


@pytest.mark.slow
def test_the_suite_of_parts_gives_cpu_time_beside_decoding_an_event(mongo_url: str, redis_url: str) -> None:
    """Each part of a change for itself."""
    given = ("--mongo-url", mongo_url, "--redis-url", redis_url)
    ended = _benchmarks("parts", "--quick", "--json", "--parts", "400", *given)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["parts"]
    assert found["event_bytes"] > 500
    for part in (
        "look",
        "read",
        "take_in",
        "pass_over",
        "seal",
        "seal_run",
        "publish",
        "publish_run",
        "open_run",
        "token",
        "change",
        "change_read",
    ):
        assert found["cpu"][part]["ratio_to_decode"] > 0


@pytest.mark.slow
def test_the_suite_of_backlogs_gives_memory_and_costs_by_length(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """Every length for itself; nothing is left on given servers."""
    before = set(mongo_client.list_database_names())

    given = ("--mongo-url", mongo_url, "--redis-url", redis_url)
    ended = _benchmarks("backlog", "--quick", "--json", "--owed", "4000", "--owed", "9000", *given)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["backlog"]
    assert [each["changes"] for each in found] == [4000, 9000]
    for each in found:
        assert {"listener", "worker_parent", "worker_children"} <= set(each["cpu_us"])
        assert each["rate"] > 0
        assert 0 < each["started_mb"] <= each["peak_mb"]
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


@pytest.mark.slow
def test_the_suite_of_handlers_gives_what_a_change_costs_for_each_of_them(mongo_url: str, redis_url: str) -> None:
    """Three numbers of handlers in three kinds, the changes so that all take about as long."""
    given = ("--mongo-url", mongo_url, "--redis-url", redis_url)
    ended = _benchmarks("handlers", "--quick", "--json", "--reached", "2400", *given)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["handlers"]["shared"]
    assert [(each["kind"], each["handlers"], each["changes"]) for each in found] == [
        *(("chains of all", count, 240 // count) for count in (1, 10, 60)),
        *(("runs of all", count, 2400 // count) for count in (1, 10, 60)),
        *(("runs of one", count, 2400) for count in (1, 10, 60)),
    ]
    for each in found:
        assert {"listener", "worker_parent", "worker_children"} <= set(each["cpu_us"])
        assert each["oplog_bytes"] > 0


@pytest.mark.slow
def test_the_suite_of_latency_gives_waits_and_take_overs(
    mongo_url: str, mongo_client: MongoClient[dict[str, Any]], redis_url: str, redis_client: Any
) -> None:
    """Both modes beside the naive loop, and both ways in which a leader ends; nothing is left on given servers."""
    before = set(mongo_client.list_database_names())

    given = ("--mongo-url", mongo_url, "--redis-url", redis_url)
    ended = _benchmarks("latency", "--quick", "--json", "--live", "3", "--lease-ttl", "1", *given)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["latency"]
    for mode in ("bridge_chain", "bridge_inline"):
        for part in ("p50", "p99"):
            assert found["waits"][f"{mode}_{part}"][f"ratio_to_watch_delay_{part}"] > 0
    assert found["lease_ttl"] == 1
    assert found["take_overs"].keys() == {"SIGTERM", "SIGKILL"}
    assert not {name for name in mongo_client.list_database_names() if name.startswith("bench-")} - before
    assert not list(redis_client.scan_iter("*bench-*"))


def test_a_suite_that_does_not_exist_ends_in_one_sentence() -> None:
    """Nothing is measured that was not asked for."""
    ended = _benchmarks("bridge")

    assert ended.returncode == 2
    assert "'outbox', 'transactions', 'stream', 'spill', 'snapshot'" in ended.stderr


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A round in which the machine was slow is slow for both."""
    found = reading("own", MILLISECONDS, [2.0, 30.0, 4.0], ("other", [1.0, 10.0, 2.0]))

    assert found.value == 4.0
    assert found.plain() == {"unit": "ms", "value": 4.0, "rounds": [2.0, 30.0, 4.0], "ratio_to_other": 2.0}
    assert reading("own", MILLISECONDS, [2.0], None).plain()["value"] == 2.0


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"stage": "FETCH", "inputStage": {"stage": "IXSCAN", "indexName": "pending-events"}}, "pending-events"),
        ({"isCached": False, "queryPlan": {"inputStage": {"indexName": "a"}}, "slotBasedPlan": {}}, "a"),
        ({"stage": "COLLSCAN"}, None),
    ],
)
def test_the_index_of_a_plan_is_found_where_the_server_puts_it(plan: dict[str, Any], name: str | None) -> None:
    """Both of the server's engines; and a scan has none."""
    assert _index_of(plan) == name


def test_the_full_sizes_are_those_of_the_figures() -> None:
    """A million documents, of which 100 are pending, or that a snapshot delivers: what the project promises to show."""
    assert FULL.documents == FULL.existing == 1_000_000
    assert QUICK.documents < FULL.documents
    assert QUICK.existing < FULL.existing


def test_a_quantile_is_a_value_that_occurred() -> None:
    """Also of few values."""
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([float(each) for each in range(100)], 0.99) == 99.0
