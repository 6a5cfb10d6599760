"""The results as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from mongo_celery.bench.aims import aims
from mongo_celery.bench.figures import REFERENCE, Figure
from mongo_celery.bench.latency import Latency
from mongo_celery.bench.payload import order_bytes
from mongo_celery.bench.run import Results
from mongo_celery.bench.sizes import BenchSizes

_PACKAGES = ("celery", "kombu", "pymongo", "redis")


def as_json(results: Results, sizes: BenchSizes) -> dict[str, Any]:
    """One object; parts that were not measured are null or empty."""
    memory, take_over = results.memory, results.take_over
    return {
        "seconds": round(results.seconds, 1),
        "machine": machine(),
        "payload_bytes": order_bytes(),
        "rounds": sizes.rounds,
        "rough": results.rough,
        "left_out": list(results.left_out),
        "others_share": None if results.others is None else round(results.others, 3),
        "cpu_without": list(results.uncounted),
        "modes": {name: _figure(figure) for name, figure in results.figures.items()},
        "latency_ms": _latencies(results.latency),
        "latency_at_half_load_ms": _latencies(results.latency_under_load),
        "listener_memory_mb": None
        if memory is None
        else {
            "backlog": memory.backlog,
            "start": round(memory.start, 1),
            "steps": [round(step, 1) for step in memory.steps],
            "peak": round(memory.peak, 1),
        },
        "take_over_seconds": None
        if take_over is None
        else {
            "lease_ttl": take_over.lease_ttl,
            "sigkill": [round(each, 3) for each in take_over.sigkill],
            "sigterm": [round(each, 3) for each in take_over.sigterm],
        },
        "aims": {
            each.name: {
                "aim": each.aim,
                "met": each.met,
                **{f"by_{how}": round(value, 3) for how, value in each.values.items()},
            }
            for each in aims(results)
        },
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def _latencies(found: Mapping[str, Latency]) -> dict[str, Any]:
    return {
        name: {
            "samples": each.samples,
            "p50": round(each.p50, 2),
            "p99": round(each.p99, 2),
            "writes_per_second": round(each.per_second, 2),
        }
        for name, each in found.items()
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "changes": figure.changes,
        "changes_per_second": round(figure.rate, 2),
        f"ratio_to_{REFERENCE}": None if figure.ratio is None else round(figure.ratio, 4),
        f"cpu_ratio_to_{REFERENCE}": None if figure.cpu_ratio is None else round(figure.cpu_ratio, 4),
        "rounds": [round(rate, 2) for rate in figure.rounds],
        "cpu_us": round(figure.cpu_total_us, 1),
        "cpu_us_per_change": {name: round(used, 1) for name, used in figure.cpu_us.items()},
    }
