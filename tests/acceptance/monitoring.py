"""The expressions of `docs/operations`, read from the files that people import."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

OPERATIONS = Path(__file__).parents[2] / "docs/operations"
ALERTS = OPERATIONS / "alerts.yml"
DASHBOARD = OPERATIONS / "grafana-dashboard.json"
PAGE = OPERATIONS / "monitoring.md"

_SELECTOR = re.compile(r"(mongo_celery_\w+)(?:\{(.*?)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
_RULE = re.compile(r"^ +- alert: (\w+)\n +expr: (.+)\n +for: \w+\n(?: +.+\n)*? +command: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    command: str


def alerts() -> list[Alert]:
    return [Alert(*found) for found in _RULE.findall(ALERTS.read_text(encoding="utf-8"))]


def panels() -> dict[str, list[str]]:
    """Expressions by title, with Grafana's variables as they are by default."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for panel in dashboard["panels"]:
        texts = [target["expr"].replace("$bridge", ".*") for target in panel["targets"]]
        found[panel["title"]] = [text.replace("$__rate_interval", "5m") for text in texts]
    return found


def unknown(expression: str, scraped: str) -> Iterator[str]:
    """
    Yield what an expression asks for and `/metrics` does not have: a metric, a label, a value, the rate of a gauge.

    Prometheus itself would be silent. `test_monitoring.py` has it evaluate the expressions where it is installed.
    """
    labels: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            labels.setdefault(sample.name, []).append({**sample.labels, "instance": ""})
    grouped = {name for group in re.findall(r"by \((.*?)\)", expression) for name in group.split(", ")} - {"le"}
    for metric, matchers in _SELECTOR.findall(expression):
        found = labels.get(metric, [])
        if not all(grouped <= each.keys() for each in found) or not found:
            yield f"{metric} by {sorted(grouped)}"
        for label, operator, value in _MATCHER.findall(matchers):
            if operator != "=~" and value not in {each.get(label) for each in found}:
                yield f'{metric}{{{label}="{value}"}}'
        is_counter = metric.endswith(("_total", "_bucket"))
        if is_counter is not bool(re.search(rf"(rate|increase)\({metric}\b", expression)):
            yield f"a rate of {metric}" if not is_counter else f"{metric} without a rate"
