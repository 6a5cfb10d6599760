"""
MongoDB change streams as ordered, fenced Celery tasks.

Public names are imported at first use: the `celery` command loads its plug-ins at every start, and must not load
PyMongo before a command of this package runs. Errors are in `mongo_celery.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mongo_celery.lazy import load_lazily
from mongo_celery.visible import guard_logs

if TYPE_CHECKING:
    from mongo_celery.bridge.bridge import Bridge
    from mongo_celery.bridge.change import Change, Changes
    from mongo_celery.bridge.fenced import AsyncFencedCollection, FencedCollection
    from mongo_celery.bridge.fenced.fence import Fence
    from mongo_celery.locking import select_for_update, select_many_for_update, transactional
    from mongo_celery.outbox import STORED_ID, Event, Outbox, OutboxCollection
    from mongo_celery.outbox.once import once  # separate: mypy takes the package's for the module of that name
    from mongo_celery.twophase import Participant, TwoPhaseCommit

    __version__: str

_load, _list_names = load_lazily(
    __name__,
    {
        "bridge.bridge": ("Bridge",),
        "bridge.change": ("Change", "Changes"),
        "bridge.fenced": ("AsyncFencedCollection", "FencedCollection"),
        "bridge.fenced.fence": ("Fence",),
        "locking": ("select_for_update", "select_many_for_update", "transactional"),
        "outbox": ("STORED_ID", "Event", "Outbox", "OutboxCollection", "once"),
        "twophase": ("Participant", "TwoPhaseCommit"),
    },
)

__all__ = [
    "STORED_ID",
    "AsyncFencedCollection",
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
    "transactional",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mongo-celery")
    return _load(name)


def __dir__() -> list[str]:
    return [*_list_names(), "__version__"]


guard_logs()
