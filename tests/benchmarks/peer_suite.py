"""The bridge beside the fastest peer: the same servers, payload and rounds; and what the peer does not promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mongo_celery.bench.modes import MODES, Mode
from mongo_celery.bench.rates import Measured, measure
from mongo_celery.bench.stage import Scene, Stage
from mongo_celery.embedded.crew import ChildProcess
from tests.benchmarks.parts_suite import MICROSECONDS
from tests.benchmarks.peer_package import KEY_PREFIX, NAME, VERSION, cache_directory, installed
from tests.benchmarks.readings import RATE, Reading, reading
from tests.benchmarks.sizes import Sizes

PEER = "peer"
REFERENCE = "raw_chain"
BATCH = 500
"""The peer's changes between two positions."""

BESIDE = (REFERENCE, "bridge_runs", "bridge_bulk")

NOT_PROMISED: Mapping[str, tuple[str, str]] = {
    "a change that fails": (
        "is retried, set aside or halts its partition alone, by its handler's policy",
        "its batch fails: the stream's loop ends, and what follows is the caller's",
    ),
    "order per key": (
        "also across retries, crashes and several workers",
        "that of the stream, as long as nothing fails and there is one process",
    ),
    "a second process": (
        "stands by, and takes over within lease_ttl + 2 s",
        "handles every change once more, and writes the same position",
    ),
    "a fence": (
        "each execution has a token: what is stale is refused",
        "none: a process that was frozen goes on where it was",
    ),
    "a position": (
        "by majority in MongoDB, under the execution's guard",
        "in Redis behind each batch of 500: as durable as Redis is, and a crash repeats up to 500 changes",
    ),
    "the first start": (
        "at a time or token that is chosen, or behind a snapshot",
        "now: what is written before the first batch is saved is missed by a restart",
    ),
    "more than one core": ("as many workers as are started", "one process for each collection"),
}
"""What is compared: what the bridge does, and what the peer does."""


@dataclass(slots=True)
class PeerResults:
    """
    What the suite has found.

    Attributes:
        package: the peer, with its version.
        rates: changes per second; the ratio is to `raw_chain`.
        cpu: processor time of all processes for one change, in microseconds; the ratio is to `raw_chain`, too.
        cpu_us: the same, by process.
    """

    package: str = f"{NAME} {VERSION}"
    rates: list[Reading] = field(default_factory=list)
    cpu: list[Reading] = field(default_factory=list)
    cpu_us: dict[str, dict[str, float]] = field(default_factory=dict)


def run_peer(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> PeerResults:
    """Measure the peer between modes of the bench, all of them in each round."""
    announce(f"npm install {NAME}@{VERSION}")
    modes = [*(MODES[name] for name in BESIDE), _mode(installed(cache_directory()))]
    found: dict[str, list[Measured]] = {mode.name: [] for mode in modes}
    for number in range(sizes.rounds):
        for mode in modes:
            announce(f"{mode.name}, round {number + 1} of {sizes.rounds}")
            found[mode.name].append(_measured(stage, mode, sizes))
    return _results(found)


def _measured(stage: Stage, mode: Mode, sizes: Sizes) -> Measured:
    if mode.name != PEER:
        return measure(stage, mode, max(int(sizes.changes * mode.scale), 2), sizes.warm_up)
    scenes: list[Scene] = []

    def feeder(scene: Scene, count: int) -> ChildProcess:
        scenes.append(scene)
        return mode.feeder(scene, count)

    batches = max(int(sizes.changes * mode.scale) // BATCH, 2)  # whole ones: for the rest it would wait half a minute
    try:
        return measure(stage, replace(mode, feeder=feeder), batches * BATCH, 0)
    finally:
        for scene in scenes:
            for key in stage.broker.scan_iter(f"{KEY_PREFIX}:{scene.setting.database}:*"):
                stage.broker.delete(key)


def _mode(directory: Path) -> Mode:
    def feeder(scene: Scene, count: int) -> ChildProcess:
        del count
        return scene.program("tests.benchmarks.peer_program", PEER, str(directory))

    return Mode(PEER, feeder, role="reader", ends="ended", scale=40)


def _results(found: Mapping[str, Sequence[Measured]]) -> PeerResults:
    results = PeerResults()
    rates = {name: [each.rate for each in measured] for name, measured in found.items()}
    used = {name: [sum(each.cpu_us.values()) for each in measured] for name, measured in found.items()}
    for name, measured in found.items():
        beside = name != REFERENCE
        results.rates.append(reading(name, RATE, rates[name], (REFERENCE, rates[REFERENCE]) if beside else None))
        results.cpu.append(reading(name, MICROSECONDS, used[name], (REFERENCE, used[REFERENCE]) if beside else None))
        middle = sorted(measured, key=lambda each: sum(each.cpu_us.values()))[len(measured) // 2]
        results.cpu_us[name] = dict(middle.cpu_us)
    return results
