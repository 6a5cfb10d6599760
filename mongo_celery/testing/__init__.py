"""
Tools for users' tests. The handlers of a bridge run in the test's process, with the bridge's own code.

`BridgeRunner` runs the listener's parts, takes each message from a broker in memory like a worker, and executes it with
claim, policies, retries and commit. It differs from a deployment in one point: one thread is listener and worker in
turn. So a test ends when all work is done, a debugger stops in the handler, and waits are skipped. MongoDB is real.

Names are imported at first use: pytest loads the plugin in every suite, and most suites do not use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mongo_celery.lazy import load_lazily

if TYPE_CHECKING:
    from mongo_celery.testing.calls import HandlerCall
    from mongo_celery.testing.change import deleted, inserted, load_change, replaced, updated
    from mongo_celery.testing.messages import SentTask
    from mongo_celery.testing.once import assert_once
    from mongo_celery.testing.pending import PendingEntry, assert_pending, pending_entries, undispatched
    from mongo_celery.testing.processes import BridgeWorkers, drain
    from mongo_celery.testing.runner import BridgeRunner, DeliveredChanges
    from mongo_celery.testing.sessions import require_sessions

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "calls": ("HandlerCall",),
        "change": ("deleted", "inserted", "load_change", "replaced", "updated"),
        "messages": ("SentTask",),
        "once": ("assert_once",),
        "pending": ("PendingEntry", "assert_pending", "pending_entries", "undispatched"),
        "processes": ("BridgeWorkers", "drain"),
        "runner": ("BridgeRunner", "DeliveredChanges"),
        "sessions": ("require_sessions",),
    },
)

__all__ = [
    "BridgeRunner",
    "BridgeWorkers",
    "DeliveredChanges",
    "HandlerCall",
    "PendingEntry",
    "SentTask",
    "assert_once",
    "assert_pending",
    "deleted",
    "drain",
    "inserted",
    "load_change",
    "pending_entries",
    "replaced",
    "require_sessions",
    "undispatched",
    "updated",
]
