"""One run: rounds of all modes, then latency, memory and take-over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mongo_celery.bench.figures import Figure, figures_of, others_share
from mongo_celery.bench.latency import Latency, measure_latency, measure_latency_under_load
from mongo_celery.bench.memory import Memory, measure_memory
from mongo_celery.bench.modes import MODES
from mongo_celery.bench.rates import Measured, measure
from mongo_celery.bench.sizes import BenchSizes
from mongo_celery.bench.stage import Stage
from mongo_celery.bench.takeover import TakeOver, measure_takeover

LATENCY_MODES = ("watch_delay", "bridge_chain", "bridge_inline")
_LOAD_SAMPLES_MIN = 20
_LOAD = 0.5


@dataclass(slots=True)
class Results:
    """
    What a run has found; parts that were not asked for are empty.

    Attributes:
        latency: while idle.
        latency_under_load: at half of what the mode carries.
        others: which share of the cores went to processes that have nothing to do with the run.
        uncounted: servers whose processor time is not in the figures, since they were given.
        left_out: what was not begun, since the time was over.
        rough: whether one round of little had to do.
    """

    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    latency: dict[str, Latency] = field(default_factory=dict)
    latency_under_load: dict[str, Latency] = field(default_factory=dict)
    memory: Memory | None = None
    take_over: TakeOver | None = None
    others: float | None = None
    uncounted: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    rough: bool = False


def run(stage: Stage, sizes: BenchSizes, announce: Callable[[str], None], began: float | None = None) -> Results:
    """
    Measure what the sizes ask for.

    Args:
        stage: the servers, started.
        sizes: how much, and of what.
        announce: called with a line about what is being measured now.
        began: when the time of the sizes began to run, by the monotonic clock; now by default.
    """
    return _BenchRun(stage, sizes, announce, time.monotonic() if began is None else began).results()


class _BenchRun:
    """The steps of one run, as long as there is time for them."""

    def __init__(self, stage: Stage, sizes: BenchSizes, announce: Callable[[str], None], began: float) -> None:
        self._stage = stage
        self._sizes = sizes
        self._announce = announce
        self._began = began
        self._longest = 0.0
        self._left_out: list[str] = []
        self._measured: dict[str, list[Measured]] = {}

    def results(self) -> Results:
        """Everything, one after the other."""
        results = Results(rough=self._sizes.rough, uncounted=self._stage.uncounted)
        self._measure_rounds()
        # In the order of modes, whatever the order was in which they were measured.
        measured = {name: self._measured[name] for name in MODES if self._measured.get(name)}
        results.figures, results.others = (
            figures_of(measured, counted=not results.uncounted),
            others_share(measured),
        )
        if self._sizes.wants("latency"):
            self._measure_latencies(results)
        if self._wants("memory"):
            self._step("the listener's memory under a backlog", lambda: self._measure_memory(results))
        if self._wants("take_over"):
            self._step("take-over", lambda: self._measure_take_over(results))
        results.left_out = tuple(self._left_out)
        results.seconds = time.monotonic() - self._began
        return results

    def _measure_rounds(self) -> None:
        """Every mode once, then every mode once more: a machine that slows down slows all of them."""
        sizes = self._sizes
        for number in range(sizes.rounds):
            for name in self._in_time(sizes.order):
                self._step(f"round {number + 1} of {sizes.rounds}: {name}", lambda name=name: self._measure(name))  # type: ignore[misc]

    def _measure(self, name: str) -> None:
        mode = MODES[name]
        sizes = self._sizes
        found = measure(self._stage, mode, mode.changes(sizes.changes), sizes.warm_up, rough=sizes.rough)
        self._measured.setdefault(name, []).append(found)

    def _measure_latencies(self, results: Results) -> None:
        stage, sizes = self._stage, self._sizes
        for name in self._in_time(LATENCY_MODES, "latency of "):
            mode = MODES[name]
            self._announce(f"latency of {name}, idle")
            results.latency[name] = measure_latency(stage, mode, sizes.samples, sizes.warm_up)
            if sizes.load_seconds:
                self._announce(f"latency of {name}, at half load")
                rate = self._rate_of(name, results.figures) * _LOAD
                samples = max(int(rate * sizes.load_seconds), _LOAD_SAMPLES_MIN)
                found = measure_latency_under_load(stage, mode, samples, sizes.warm_up, rate)
                results.latency_under_load[name] = found

    def _rate_of(self, name: str, figures: Mapping[str, Figure]) -> float:
        """What a mode carries: as the rounds say, or one measurement where it was not among their modes."""
        if name in figures:
            return figures[name].rate
        return measure(self._stage, MODES[name], self._sizes.changes, self._sizes.warm_up).rate

    def _measure_memory(self, results: Results) -> None:
        results.memory = measure_memory(self._stage, self._sizes.backlog)

    def _measure_take_over(self, results: Results) -> None:
        results.take_over = measure_takeover(self._stage, self._sizes.lease_ttl, self._sizes.takeovers)

    def _step(self, what: str, act: Callable[[], None]) -> None:
        self._announce(what)
        began = time.monotonic()
        act()
        self._longest = max(self._longest, time.monotonic() - began)

    def _wants(self, name: str) -> bool:
        return self._sizes.wants(name) and any(self._in_time([name]))

    def _in_time(self, names: Iterable[str], what: str = "") -> Iterable[str]:
        """Those for which there is time, if the next takes as long as the longest did; the others are noted."""
        for name in names:
            limit = self._sizes.seconds_max
            if limit is None or time.monotonic() - self._began + self._longest < limit:
                yield name
            else:
                self._left_out.append(f"{what}{name}")
