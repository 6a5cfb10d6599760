"""The results as a picture, with matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.figures import REFERENCE, Figure
from mongo_celery.bench.latency import Latency
from mongo_celery.bench.run import Results
from mongo_celery.bench.tables import PROCESSES, ratio_text

_MISSING = "--plot needs matplotlib, which is not installed; get it with: pip install 'mongo-celery[plot]'"
_PANEL_INCHES = (10, 3.6)
_BAR = 0.4


class Plot:
    """
    A file to draw to. Made before anything is measured, so that what is missing is said at once.

    Raises:
        BenchError: matplotlib is missing, it knows no such kind of file, or its folder is not there.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._figures: Any = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise BenchError(_MISSING) from error
        figure: Any = self._figures.Figure()
        kinds = figure.canvas.get_supported_filetypes()
        if file.suffix.lstrip(".").lower() not in kinds:
            raise BenchError(f"--plot {file} has no ending that says what to draw, such as .png, .svg or .pdf.")
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise BenchError(f"--plot {file} cannot be written: it needs a folder that exists, and a file's name.")
        self._file = file

    def draw(self, results: Results) -> None:
        """
        Draw what was found: ratios, processor time by process, latencies.

        Raises:
            BenchError: the file cannot be written.
        """
        panels: list[Callable[[Any], None]] = []
        if results.figures:
            panels += [lambda axes: _ratios(axes, results.figures), lambda axes: _cpu(axes, results.figures)]
        if results.latency:
            panels.append(lambda axes: _latencies(axes, results.latency, results.latency_under_load))
        width, height = _PANEL_INCHES
        figure = self._figures.Figure(figsize=(width, height * max(len(panels), 1)), layout="constrained")
        if panels:
            all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
            for axes, panel in zip(all_axes, panels, strict=True):
                panel(axes)
        figure.suptitle("mongo-celery bench" + (", rough" if results.rough else ""))
        try:
            figure.savefig(self._file)
        except OSError as error:
            raise BenchError(f"--plot {self._file} cannot be written: {error.strerror}.") from error


def _ratios(axes: Any, figures: Mapping[str, Figure]) -> None:
    """Two bars a mode; a logarithm, since runs are tens of times as fast."""
    names = list(figures)
    for offset, label, values in (
        (-_BAR / 2, f"changes/s, x {REFERENCE}", [figure.ratio for figure in figures.values()]),
        (_BAR / 2, "changes for the same CPU", [figure.cpu_ratio for figure in figures.values()]),
    ):
        heights = [value or 0.0 for value in values]
        bars = axes.bar([place + offset for place in range(len(names))], heights, _BAR, label=label)
        axes.bar_label(bars, [ratio_text(value) for value in values], fontsize=7)
    if any(figure.ratio for figure in figures.values()):
        axes.set_yscale("log")
        axes.axhline(1.0, color="grey", linewidth=0.8)
    _finish(axes, f"times {REFERENCE}", names)


def _cpu(axes: Any, figures: Mapping[str, Figure]) -> None:
    """A bar a mode, of its processes."""
    names = list(figures)
    bottom = [0.0] * len(names)
    for process, label in PROCESSES.items():
        values = [figures[name].cpu_us.get(process, 0.0) for name in names]
        if any(values):
            axes.bar(range(len(names)), values, 2 * _BAR, bottom=bottom, label=label)
            bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    _finish(axes, "CPU us a change", names)


def _latencies(axes: Any, idle: Mapping[str, Latency], loaded: Mapping[str, Latency]) -> None:
    names = list(idle)
    rows = {"idle": idle, "half load": loaded}
    bars = [(f"{kind} {part}", found, part) for kind, found in rows.items() if found for part in ("p50", "p99")]
    width = 2 * _BAR / len(bars)
    for number, (label, found, part) in enumerate(bars):
        places = [place - _BAR + (number + 0.5) * width for place in range(len(names))]
        axes.bar(places, [getattr(found[name], part) if name in found else 0 for name in names], width, label=label)
    _finish(axes, "write to handler, ms", names)


def _finish(axes: Any, what: str, names: list[str]) -> None:
    axes.set_ylabel(what)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.legend(fontsize=8)
