"""The expressions of `docs/operations`, read from the files that people import."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATIONS = Path(__file__).parents[2] / "docs/operations"
ALERTS = OPERATIONS / "alerts.yml"
DASHBOARD = OPERATIONS / "grafana-dashboard.json"
PAGE = OPERATIONS / "monitoring.md"

_RULE = re.compile(r"^ +- alert: (\w+)\n +expr: (.+)\n +for: \w+\n(?: +.+\n)*? +command: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Alert:
    """One alert rule."""

    name: str
    expression: str
    command: str


def alerts() -> list[Alert]:
    """All rules."""
    return [Alert(*found) for found in _RULE.findall(ALERTS.read_text(encoding="utf-8"))]


def panels() -> dict[str, list[str]]:
    """Expressions by title, with Grafana's variables as they are by default."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for panel in dashboard["panels"]:
        texts = [target["expr"].replace("$bridge", ".*") for target in panel["targets"]]
        found[panel["title"]] = [text.replace("$__rate_interval", "5m") for text in texts]
    return found
