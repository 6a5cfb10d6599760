"""How the findings of a preflight look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mongo_celery.findings import Finding
from mongo_celery.quantities import number
from mongo_celery.visible import visible

_COLORS = {"ok": "green", "degraded": "yellow", "failing": "red"}


def check_view(name: str, findings: Sequence[Finding]) -> RenderableType:
    """
    All findings on a bridge or an outbox, and how many are wrong.

    What is well stands in a table; each of the others has lines of its own, below it, the worst last, and its command
    is not broken, so that it can be copied.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    parts: list[RenderableType] = [Text(name, style="bold"), table]
    for finding in findings:
        if finding.severity == "ok":
            word = Text(finding.severity, style=_COLORS[finding.severity])
            table.add_row(word, Text(finding.code), Text(visible(finding.sentence)))
    for level in ("degraded", "failing"):
        for finding in reversed([each for each in findings if each.severity == level]):
            sentence = f" {finding.code}: {visible(finding.sentence)}"
            parts.append(Text.assemble((finding.severity, _COLORS[finding.severity]), sentence))
            if finding.command is not None:
                parts.append(Text(f"    {visible(finding.command)}", style="bold", no_wrap=True, overflow="ignore"))
    return Group(*parts, Text(_verdict(findings)))


def _verdict(findings: Sequence[Finding]) -> str:
    errors = sum(finding.severity == "failing" for finding in findings)
    warnings = sum(finding.severity == "degraded" for finding in findings)
    if not errors and not warnings:
        return "All is well."
    return f"{number(errors, 'error', 'errors')}, {number(warnings, 'warning', 'warnings')}."
