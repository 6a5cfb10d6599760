"""
The Celery app of the modes: `celery -A mongo_celery.bench.app worker`, and `... listener` with a bridge.

The handlers and tasks only note the time. `python -m mongo_celery.bench.app publisher COUNT` publishes the chains of
`raw_chain` in the usual way.
"""

from __future__ import annotations

import signal
import sys

from bson import Timestamp, json_util
from celery import chain

from mongo_celery import Change, Changes
from mongo_celery.bench.payload import make_order
from mongo_celery.bench.setting import BRIDGE_BULK, RAW_CHAIN, BenchSetting, make_app, make_bridge
from mongo_celery.bench.stopwatch import Stopwatch

setting = BenchSetting.from_environment()
app = make_app(setting)

_started, _ended = Stopwatch(setting.clock, "started"), Stopwatch(setting.clock, "ended")


@app.task(ignore_result=True, name="bench.first")
def first(_event: str) -> None:
    """Note the start, in place of a handler."""
    _started.lap()


@app.task(ignore_result=True, name="bench.second")
def second(_token: str) -> None:
    """Note the end, in place of a task that would save the token."""
    _ended.lap()


if setting.mode != RAW_CHAIN:
    bridge = make_bridge(app, setting)
    source = f"{setting.database}.orders"

    if setting.mode == BRIDGE_BULK:

        @bridge.on_changes(source, batch_size=500)
        def handle_list(changes: Changes) -> None:
            """Note the start of each change of a list."""
            for _ in changes:
                _started.lap()

    else:

        @bridge.on_change(source)
        def handle(_change: Change) -> None:
            """Note the start of a change."""
            _started.lap()


def publish_chains(count: int) -> None:
    """Publish a chain of two tasks for each of `count` change events, in extended JSON."""
    order = make_order(0)
    token = "82" + "0123456789abcdef" * 8
    event = json_util.dumps(
        {
            "_id": {"_data": token},
            "operationType": "insert",
            "clusterTime": Timestamp(1_770_000_000, 1),
            "wallTime": order["placed"],
            "fullDocument": order,
            "ns": {"db": "shop", "coll": "orders"},
            "documentKey": {"_id": order["_id"]},
        }
    )
    for _ in range(count):
        chain(first.si(event), second.si(token)).apply_async()


if __name__ == "__main__":
    publish_chains(int(sys.argv[2]))
    signal.pause()  # until the bench has read its CPU time
