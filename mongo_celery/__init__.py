"""
MongoDB change streams as ordered, fenced Celery tasks.

Public names are imported when they are first used: the `celery` command loads its plug-ins at every
start, and must not pay for PyMongo before a command of ours runs. Errors are in `mongo_celery.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mongo_celery.bridge.bridge import Bridge
    from mongo_celery.bridge.change import Change, Changes
    from mongo_celery.bridge.declarations import shared_change, shared_changes
    from mongo_celery.bridge.fenced import FencedCollection
    from mongo_celery.bridge.fenced.fence import Fence
    from mongo_celery.locking import select_for_update, select_many_for_update, transactional
    from mongo_celery.outbox import STORED_ID, Event, Outbox, OutboxCollection
    from mongo_celery.outbox.once import once  # by itself: mypy takes the package's for the module of that name
    from mongo_celery.twophase import Participant, TwoPhaseCommit

    __version__: str

_HOMES = {
    "Bridge": "bridge.bridge",
    "Change": "bridge.change",
    "Changes": "bridge.change",
    "Event": "outbox",
    "Fence": "bridge.fenced.fence",
    "FencedCollection": "bridge.fenced",
    "Outbox": "outbox",
    "OutboxCollection": "outbox",
    "Participant": "twophase",
    "STORED_ID": "outbox",
    "TwoPhaseCommit": "twophase",
    "once": "outbox",
    "select_for_update": "locking",
    "select_many_for_update": "locking",
    "shared_change": "bridge.declarations",
    "shared_changes": "bridge.declarations",
    "transactional": "locking",
}

__all__ = [
    "STORED_ID",
    "Bridge",
    "Change",
    "Changes",
    "Event",
    "Fence",
    "FencedCollection",
    "Outbox",
    "OutboxCollection",
    "Participant",
    "TwoPhaseCommit",
    "once",
    "select_for_update",
    "select_many_for_update",
    "shared_change",
    "shared_changes",
    "transactional",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mongo-celery")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mongo_celery.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


importlib.import_module("mongo_celery.visible").guard_logs()
