"""The bench, as a user runs it, with tiny sizes: its shape, never its speed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

from tests.fixtures.availability import require_server

_BENCH = "from mongo_celery.cli.tools import main; main()"
_SECONDS_MAX = 600


def _bench(*arguments: str) -> str:
    for server in ("mongod", "redis-server"):
        require_server(server)
    ended = subprocess.run(
        [sys.executable, "-c", _BENCH, "bench", "--changes", "4", *arguments],
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_every_mode_is_in_one_json_object() -> None:
    """`--json` prints one object with positive rates, ratios that follow from them, and processor time by process."""
    found = json.loads(_bench("--json", "--rounds", "2"))

    assert found["rounds"] == 2
    assert list(found["modes"]) == ["raw_chain", "bridge_chain", "bridge_inline", "bridge_runs", "bridge_bulk"]
    reference = found["modes"]["raw_chain"]
    for name, figure in found["modes"].items():
        assert figure["changes_per_second"] > 0
        assert figure["changes_per_second"] == pytest.approx(statistics.median(figure["rounds"]), abs=0.01)
        rate = figure["changes_per_second"] / reference["changes_per_second"]
        assert figure["ratio_to_raw_chain"] == pytest.approx(rate, rel=0.01)
        assert figure["cpu_us"] == pytest.approx(sum(figure["cpu_us_per_change"].values()), abs=1)
        feeder = "publisher" if name == "raw_chain" else "listener"
        assert figure["cpu_us_per_change"].keys() == {"mongod", "redis", "worker_parent", "worker_children", feeder}
