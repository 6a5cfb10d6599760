"""The project's aims, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mongo_celery.bench.figures import REFERENCE, Figure
from mongo_celery.bench.run import Results

_RATIOS = {
    ("bridge_chain", REFERENCE): 0.60,
    ("bridge_inline", REFERENCE): 0.95,
    ("bridge_runs", REFERENCE): 40.0,
    ("bridge_bulk", REFERENCE): 60.0,
    ("listener_alone", "raw_stream"): 0.5,
}
_ASKED = {"listener_alone": "mongod"}
"""Servers that one mode of an aim asks for its own figures alone, so that their time is not compared."""

_LATENCY = ("bridge_chain", "watch_delay")
_LATENCY_AIMS = {"p50": 2.0, "p99": 3.0}


@dataclass(frozen=True, slots=True)
class Aim:
    """
    One aim.

    Attributes:
        name: which two figures it compares.
        aim: the least ratio of rates and of changes for the same processor time, or the largest of latencies.
        values: what was found, by how it was found: `rate` and `cpu`, or `latency`. There is no `cpu` where servers
            were given, whose time is not known.
    """

    name: str
    aim: float
    values: Mapping[str, float]

    @property
    def met(self) -> bool:
        """Whether all that was found meets it."""
        if "latency" in self.values:
            return self.values["latency"] <= self.aim
        return all(value >= self.aim for value in self.values.values())


def aims(results: Results) -> list[Aim]:
    """Those that this run can judge."""
    return [*_ratios(results.figures, counted=not results.uncounted), *_latencies(results)]


def _ratios(figures: Mapping[str, Figure], *, counted: bool) -> Iterator[Aim]:
    for (name, reference), aim in _RATIOS.items():
        if name in figures and reference in figures:
            figure, other = figures[name], figures[reference]
            values = {"rate": figure.rate / other.rate}
            own, others = (_used(each, _ASKED.get(name)) for each in (figure, other))
            if counted and own and others:
                values["cpu"] = others / own
            yield Aim(f"{name} / {reference}", aim, values)


def _used(figure: Figure, but: str | None) -> float:
    return sum(used for process, used in figure.cpu_us.items() if process != but)


def _latencies(results: Results) -> Iterator[Aim]:
    name, reference = _LATENCY
    if {name, reference} <= set(results.latency):
        for part, aim in _LATENCY_AIMS.items():
            ratio = getattr(results.latency[name], part) / getattr(results.latency[reference], part)
            yield Aim(f"idle latency {part}, {name} / {reference}", aim, {"latency": ratio})
