"""The dashboard and the alerts in Prometheus itself, where it is installed, on what a real listener serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from mongo_celery.embedded.server import free_port
from tests.acceptance.monitoring import ALERTS, alerts, panels
from tests.acceptance.test_http import _WORKER, Watched, orders, port_of, watched
from tests.fixtures.process import Processes, wait_for

__all__ = ["orders", "watched"]

_CONFIGURATION = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs: [{{job_name: listener, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


def _asked(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]


@pytest.mark.slow
def test_prometheus_evaluates_every_expression(
    watched: Watched, orders: Any, processes: Processes, tmp_path: Path
) -> None:
    """Its own parser and engine: rules are healthy, panels have values, and a halt is pending as an alert."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("there is no Prometheus on this machine: install prometheus")
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, timeout=60)
    listener = watched.start("listener", "--http", "0")
    watched.start(*_WORKER).wait_for_output("ready")
    listener.wait_for_output("reading from")
    (tmp_path / "prometheus.yml").write_text(_CONFIGURATION.format(rules=ALERTS, port=port_of(listener)))
    port = free_port()
    processes.start(
        "prometheus",
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ).wait_for_output("Server is ready")
    orders.insert_many([{"_id": number} for number in range(5)])
    wait_for(lambda: _asked(port, f"query?query={quote('mongo_celery_bridge_committed_total > 0')}")["result"])
    orders.insert_one({"_id": "bad", "bad": "a [bad] order"})

    def pending() -> bool:
        return {"MongoCeleryHalted", "MongoCeleryFailing"} == {
            each["labels"]["alertname"] for each in _asked(port, "alerts")["alerts"]
        }

    wait_for(pending, message=lambda: f"{_asked(port, 'alerts')}")
    rules = [rule for group in _asked(port, "rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {alert.name for alert in alerts()}
    assert {rule["health"] for rule in rules} == {"ok"}
    for title, expressions in panels().items():
        for expression in expressions:
            result = _asked(port, f"query?query={quote(expression)}")["result"]
            assert result, (title, expression)
