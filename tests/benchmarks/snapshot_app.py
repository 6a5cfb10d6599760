"""The Celery app of the snapshot's suite: a handler that is given documents, and one beside it."""

from __future__ import annotations

from mongo_celery import Change
from mongo_celery.bench.setting import BenchSetting, make_app, make_bridge
from mongo_celery.bench.stopwatch import Stopwatch

PROBE = "probe"
"""A field of a document whose start is noted apart."""

setting = BenchSetting.from_environment()
app = make_app(setting)
bridge = make_bridge(app, setting)

_probed, _beside = (Stopwatch(setting.clock, kind) for kind in ("probed", "beside"))


@bridge.on_change(f"{setting.database}.orders")
def handler(change: Change) -> None:
    """Look at the document, and do nothing."""
    if (change.full_document or {}).get(PROBE):
        _probed.lap()


@bridge.on_change(f"{setting.database}.beside")
def beside(change: Change) -> None:
    """Note a change of another handler."""
    del change
    _beside.lap()
