"""
For users' own tests: the handlers of a bridge run in the test's process, by the bridge's own code.

`BridgeRunner` leads a bridge with the listener's parts, takes each message from a broker in memory as a worker's
consumer would, and runs it under claim, policies, retries and commit. What differs from a deployment is only who calls
whom: one thread leads and works in turn, so that a test ends when all is done, a debugger stops where the handler is,
and times are moved instead of waited for. MongoDB is a real one.

Names are imported when they are first used: pytest loads the plugin in every suite, and most do not use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mongo_celery.testing.calls import HandlerCall
    from mongo_celery.testing.change import deleted, inserted, replaced, updated
    from mongo_celery.testing.messages import SentTask
    from mongo_celery.testing.once import OnceRuns, assert_once, once_runs
    from mongo_celery.testing.pending import PendingEntry, assert_pending, pending_entries, undispatched
    from mongo_celery.testing.processes import BridgeWorkers, drain
    from mongo_celery.testing.runner import BridgeRunner, DeliveredChanges
    from mongo_celery.testing.sessions import require_sessions

_NAMES = {
    "calls": ("HandlerCall",),
    "change": ("deleted", "inserted", "replaced", "updated"),
    "messages": ("SentTask",),
    "once": ("OnceRuns", "assert_once", "once_runs"),
    "pending": ("PendingEntry", "assert_pending", "pending_entries", "undispatched"),
    "processes": ("BridgeWorkers", "drain"),
    "runner": ("BridgeRunner", "DeliveredChanges"),
    "sessions": ("require_sessions",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "BridgeRunner",
    "BridgeWorkers",
    "DeliveredChanges",
    "HandlerCall",
    "OnceRuns",
    "PendingEntry",
    "SentTask",
    "assert_once",
    "assert_pending",
    "deleted",
    "drain",
    "inserted",
    "once_runs",
    "pending_entries",
    "replaced",
    "require_sessions",
    "undispatched",
    "updated",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
