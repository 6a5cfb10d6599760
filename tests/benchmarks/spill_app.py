"""The Celery app of the suite `spill`: a handler that fails until it is fixed."""

from __future__ import annotations

from pathlib import Path

from mongo_celery import Change
from mongo_celery.bench.setting import BenchSetting, make_app, make_bridge
from mongo_celery.bench.stopwatch import Stopwatch

FIXED = "fixed"
"""A file in the clock's directory: from then on the handler succeeds."""

setting = BenchSetting.from_environment()
app = make_app(setting)
bridge = make_bridge(app, setting)

_handled = Stopwatch(setting.clock, "handled")


@bridge.on_change(f"{setting.database}.orders")
def handler(_change: Change) -> None:
    """Fail, or note the start."""
    if not (Path(setting.clock) / FIXED).exists():
        raise RuntimeError("not fixed yet")
    _handled.lap()
