"""The processes whose time is told: what the bench calls them, with a worker and its pool as one."""

from __future__ import annotations

from collections.abc import Mapping

PROCESSES = ("listener", "worker", "mongod", "redis")

_PARTS = {"worker_parent": "worker", "worker_children": "worker"}


def with_pool(cpu_us: Mapping[str, float]) -> dict[str, float]:
    """The same times, that of a worker's pool in the worker's."""
    found: dict[str, float] = {}
    for process, used in cpu_us.items():
        name = _PARTS.get(process, process)
        found[name] = found.get(name, 0.0) + used
    return found
