"""How the findings of a preflight look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mongo_celery.bridge.operations.findings import Finding

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def check_view(bridge: str, findings: Sequence[Finding]) -> RenderableType:
    """All findings of a bridge, and how many are wrong."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, style=_COLORS[finding.level]), Text(finding.name), Text(finding.message))
    return Group(Text(bridge, style="bold"), table, Text(_verdict(findings)))


def _verdict(findings: Sequence[Finding]) -> str:
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if not errors and not warnings:
        return "All is well."
    return f"{errors} {'error' if errors == 1 else 'errors'}, {warnings} {'warning' if warnings == 1 else 'warnings'}."
