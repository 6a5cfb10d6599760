"""The tables of a run, and of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tests.chaos.checks import Longest
from tests.chaos.facts import Fault
from tests.chaos.verdict import Judgement

_SENTENCES = 5
_NAMES = 3


def bound_of(name: str) -> float:
    """The bound of a kind of fault."""
    return Fault(name, 0.0, 0.0).kind.bound


def merged(judgements: Sequence[Judgement]) -> Judgement:
    """The figures of several runs as of one."""
    wrong: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    times: dict[str, int] = {}
    longest: dict[str, Longest] = {}
    for each in judgements:
        for promise, sentences in each.wrong.items():
            wrong.setdefault(promise, []).extend(sentences)
        for total, figures in ((counts, each.counts), (times, each.times)):
            for name, count in figures.items():
                total[name] = total.get(name, 0) + count
        for name, gap in each.longest.items():
            longest[name] = max(longest.get(name, Longest()), gap)
    return Judgement(wrong, counts, times, longest, max((each.longest_stop for each in judgements), default=0.0))


def _beside(gap: Longest) -> str:
    names = list(dict.fromkeys(gap.beside))
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def show(judgement: Judgement, console: Console) -> None:
    """Print what happened, what it cost, and what is wrong."""
    faults = Table("fault", "times", "longest gap", "bound", "beside", title="Seconds, from when the bound counts")
    for name, times in judgement.times.items():
        gap = judgement.longest.get(name, Longest())
        faults.add_row(name, str(times), f"{gap.seconds:.1f}", f"{bound_of(name):.1f}", _beside(gap))
    console.print(faults)
    totals = Table("total", "", show_header=False)
    for name, count in judgement.counts.items():
        totals.add_row(name, str(count))
    for promise, sentences in judgement.wrong.items():
        totals.add_row(promise, f"[red]{len(sentences)}[/red]" if sentences else "0")
    totals.add_row("longest stop of a healthy partition", f"{judgement.longest_stop:.1f} s")
    console.print(totals)
    for promise, sentences in judgement.wrong.items():
        for sentence in sentences[:_SENTENCES]:
            console.print(f"[red]{promise}[/red]: {sentence}", highlight=False)
        if len(sentences) > _SENTENCES:
            console.print(f"[red]{promise}[/red]: and {len(sentences) - _SENTENCES} more", highlight=False)


def show_caught(judgements: Mapping[str, Judgement], console: Console) -> None:
    """Print by what each broken build was caught."""
    table = Table("broken build", "caught by")
    for name, judgement in judgements.items():
        caught = [f"{promise} ({len(wrong)})" for promise, wrong in judgement.wrong.items() if wrong]
        table.add_row(name, ", ".join(caught) or "[red]nothing[/red]")
    console.print(table)
