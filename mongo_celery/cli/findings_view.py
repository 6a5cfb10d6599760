"""The findings of a bridge or an outbox on a terminal: problems first, each with the commands that fix it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mongo_celery.findings import SEVERITIES, Finding, worst_severity
from mongo_celery.quantities import number
from mongo_celery.visible import visible

COLORS = {"ok": "green", "healthy": "green", "degraded": "yellow", "failing": "red"}
_WORDS = {"ok": "healthy", "degraded": "DEGRADED", "failing": "FAILING"}


def findings_view(name: str, findings: Sequence[Finding], *, folded: bool = False) -> RenderableType:
    """
    Show the worst severity, then the problems, the worst first, then the healthy findings.

    Each command has its own unbroken line, so you can copy it. Print it with `crop=False`.

    Args:
        folded: True to break commands at the terminal's edge, for a view that redraws itself.
    """
    return Group(headline(name, findings), *problems(findings, folded=folded), *_well(findings))


def headline(name: str, findings: Sequence[Finding]) -> Text:
    """Return `shop: FAILING (3 problems)`."""
    severity = worst_severity(findings)
    count = sum(each.severity != "ok" for each in findings)
    more = f" ({number(count, 'problem', 'problems')})" if count else ""
    return Text.assemble((visible(name), "bold"), ": ", (_WORDS[severity], f"bold {COLORS[severity]}"), more)


def problems(findings: Sequence[Finding], *, folded: bool = False) -> Iterator[RenderableType]:
    """Show each finding that is not ok, with its commands, the worst first."""
    found = [each for each in findings if each.severity != "ok"]
    for each in sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)):
        words = Text.assemble((f"{each.severity} {each.code}", COLORS[each.severity]), f": {visible(each.sentence)}")
        yield Padding(words, (0, 0, 0, 2), expand=False)
        for command in map(visible, each.commands):
            if folded:
                yield Padding(Text(command, "bold", overflow="fold"), (0, 0, 0, 4), expand=False)
            else:
                yield Text(f"    {command}", style="bold", no_wrap=True, overflow="ignore")


def _well(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ({"no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}):
        table.add_column(**column)
    for each in findings:
        if each.severity == "ok":
            table.add_row(Text("  ok", COLORS["ok"]), Text(each.code), Text(visible(each.sentence)))
    if table.rows:
        yield table
