"""The cost of a write with its task through the outbox, beside a plain write and `delay()`; sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mongo_celery.bench.stage import Stage
from tests.benchmarks.answers import ask
from tests.benchmarks.readings import MILLISECONDS, Reading, Tables, readings
from tests.benchmarks.sizes import Sizes

_PROGRAMS = "tests.benchmarks.outbox_programs"
_NAMES = ("insert", "update", "insert_many", "update_many", "hot")
_PLAIN = {f"{name}_outbox": f"{name}_plain" for name in _NAMES}
_MANY = 100
_HOT_THREADS = 8
_DUE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    Writes whose cost is measured.

    Attributes:
        part: of `Sizes.writes`: how many each way makes in a round.
        size: messages of a write.
        threads: how many write together.
    """

    title: str
    kind: str
    part: float
    size: int = 1
    threads: int = 1


CASES = (
    Case(title="Writes without a pause", kind="single", part=1),
    Case(title=f"Bulks of {_MANY} writes", kind="bulk", part=1 / 75, size=_MANY),
    Case(title=f"Writes of {_HOT_THREADS} threads to one document", kind="hot", part=1 / 10, threads=_HOT_THREADS),
    Case(title=f"Writes with {_MANY} tasks each to one document", kind="hot", part=1 / 75, size=_MANY),
)


def run_outbox(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    """Measure writes of each case, and a sweep among documents that are held back."""
    found: dict[str, list[Reading]] = {}
    for case in CASES:
        announce(case.title)
        for what, table in _costs(stage, sizes, case):
            found[f"{case.title}: {what}"] = table
    announce("sweeps")
    with stage.scene("outbox-held") as scene:
        swept = ask(scene, _PROGRAMS, "held_back", str(sizes.rounds), str(sizes.held), str(_DUE))
    found[f"A sweep that finds {_DUE} due documents, {sizes.held:,} held back"] = readings(
        MILLISECONDS, _thousandths(swept["seconds"]), {"sweep_among_held_back": "sweep_alone"}
    )
    return found


def _costs(stage: Stage, sizes: Sizes, case: Case) -> Iterator[tuple[str, list[Reading]]]:
    """Yield the caller's time, and the processor time of all processes where the servers are this run's own."""
    count = max(int(sizes.writes * case.part), 1)
    with stage.scene("outbox-costs") as scene:
        numbers = (sizes.rounds, count, case.size, case.threads)
        found = ask(scene, _PROGRAMS, "costs", case.kind, *map(str, numbers), *_servers(stage))
    for what, seconds in found.items():
        times = _thousandths(seconds)
        if what == "caller" or (_servers(stage) and _is_measurable(times)):
            yield what, readings(MILLISECONDS, times, _PLAIN)


def _servers(stage: Stage) -> list[str]:
    """Return the pids of both servers, if both are this run's own."""
    pids = [str(pid) for pid in stage.server_pids.values()]
    return pids if len(pids) == 2 else []


def _is_measurable(times: dict[str, list[float]]) -> bool:
    """Return True if each took processor time, which has steps of 10 ms."""
    return all(min(rounds) > 0 for rounds in times.values())


def _thousandths(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [each * 1000 for each in rounds] for name, rounds in seconds.items()}
