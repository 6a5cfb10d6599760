"""
What more workers would carry, from what one change costs here.

Each part of a bridge has a rate at which it is full: its limit. A bridge carries what the lowest of them lets
through. That is arithmetic with measured costs and is called *computed* wherever it is shown: it leaves out that
parts get slower before they are full, and that larger batches make them cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORKERS, PARTITIONS, LISTENER, BROKER, MONGOD, CORES = (
    "workers",
    "partitions",
    "listener_core",
    "broker",
    "mongod",
    "cores_here",
)
_SINGLE_THREADED = {LISTENER: "listener", BROKER: "redis"}
"""Parts that have one core each, whatever the machine has, and the process whose time they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """
    What was measured of one mode and workload.

    Attributes:
        cpu: processor seconds for one change, by process.
        worker_rate: changes per second of one worker.
        partition_rate: of one partition, which has one run out at a time.
        partitions: how many there are.
        cores: of this machine.
    """

    cpu: Mapping[str, float]
    worker_rate: float
    partition_rate: float
    partitions: int
    cores: int


def limits(costs: Costs, workers: int, *, here: bool) -> dict[str, float]:
    """
    Changes per second at which each part is full.

    Args:
        costs: of one change.
        workers: how many there are.
        here: all of them on this machine's cores; else each worker and each server on a machine like this one.
    """
    found = {WORKERS: workers * costs.worker_rate, PARTITIONS: costs.partitions * costs.partition_rate}
    for part, process in _SINGLE_THREADED.items():
        if costs.cpu.get(process):
            found[part] = 1 / costs.cpu[process]
    if costs.cpu.get("mongod"):
        found[MONGOD] = costs.cores / costs.cpu["mongod"]
    everything = sum(costs.cpu.values())
    if here and everything:
        found[CORES] = costs.cores / everything
    return found


def lowest(found: Mapping[str, float]) -> tuple[str, float]:
    """The part that is full first, and its rate."""
    name = min(found, key=lambda each: found[each])
    return name, found[name]
