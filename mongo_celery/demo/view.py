"""What a run shows: a live table on a terminal, plain lines elsewhere, nothing with `--json`."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mongo_celery.demo.progress import Progress
from mongo_celery.demo.verdict import Judgement

_FRAME_SECONDS = 0.2
_LINE_SECONDS = 2.0
_FINDINGS_MAX = 10
_LABELS = {"changes_per_second": "changes per second without faults"}


class DemoView:
    """Takes in progress, and shows nothing of it; a context manager."""

    def show(self, progress: Progress) -> None:
        """Take in the latest look; call it as often as you like."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class LineView(DemoView):
    """One line for each new phase or event, and one every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._events = 0
        self._shown_at = 0.0

    def show(self, progress: Progress) -> None:
        """Print what is new."""
        for event in progress.events[self._events :]:
            self._print(f"{progress.seconds:5.1f} s  * {event}")
        self._events = len(progress.events)
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._print(f"{progress.seconds:5.1f} s  {progress.phase}")
        elif progress.total and time.monotonic() - self._shown_at >= _LINE_SECONDS:
            self._print(f"{progress.seconds:5.1f} s  {_figures(progress)}")

    def _print(self, text: str) -> None:
        self._shown_at = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class LiveView(DemoView):
    """A table that is painted anew five times a second."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._shown_at = 0.0

    def show(self, progress: Progress) -> None:
        """Paint, unless that was just done."""
        if time.monotonic() - self._shown_at >= _FRAME_SECONDS:
            self._shown_at = time.monotonic()
            self._live.update(_painted(progress), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()


def view_for(console: Console, *, silent: bool) -> DemoView:
    """The view that suits the console."""
    if silent:
        return DemoView()
    return LiveView(console) if console.is_terminal else LineView(console)


def verdict_table(verdict: Judgement, figures: dict[str, object]) -> Table:
    """The figures at the end, one row each."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in figures.items():
        shown = "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
        bad = name in {"lost", "out_of_order"} and bool(value)
        table.add_row(_LABELS.get(name, name.replace("_", " ")), Text(shown, style="bold red" if bad else "bold"))
    for finding in (verdict.lost + verdict.out_of_order + verdict.unexpected)[:_FINDINGS_MAX]:
        table.add_row("!", Text(finding, style="red"))
    return table


def _figures(progress: Progress) -> str:
    lag = progress.written - progress.committed
    holder = f"pid {progress.holder}" if progress.holder else "nobody"
    return (
        f"written {progress.written}/{progress.total}  committed {progress.committed}  lag {lag}  "
        f"lease {holder}, version {progress.version}"
    )


def _painted(progress: Progress) -> Group:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(width=11)
    table.add_column()
    table.add_row("", Text(f"{progress.phase} ({progress.seconds:.0f} s)", style="bold"))
    if progress.total:
        for name, count in (("written", progress.written), ("committed", progress.committed)):
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(progress.total, count, width=40), f"{count}/{progress.total}")
            table.add_row(name, bar)
        table.add_row("lag", f"{progress.written - progress.committed} changes")
        holder = Text(f"pid {progress.holder}", "green") if progress.holder else Text("nobody", "bold red")
        table.add_row("lease", holder.append(f"  version {progress.version}", "default"))
        takeover = "-" if progress.takeover_seconds is None else f"{progress.takeover_seconds:.1f} s"
        table.add_row("take-over", takeover)
    return Group(table, *(Text(f"* {event}", style="yellow") for event in progress.events))
