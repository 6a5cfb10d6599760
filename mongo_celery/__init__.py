"""
MongoDB change streams as ordered, fenced Celery tasks.

Public names are imported when they are first used: the `celery` command loads its plug-ins at every
start, and must not pay for PyMongo before a command of ours runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mongo_celery.bridge import Bridge
    from mongo_celery.change import Change
    from mongo_celery.errors import (
        AccessError,
        CommandRefusedError,
        ConfigurationError,
        DeploymentError,
        EmbeddedServerError,
        ForkedClientError,
        HandlerCrashedError,
        HandlerUsageError,
        HistoryLostError,
        InvalidEnvelopeError,
        LayoutError,
        LeaseLostError,
        MongoCeleryError,
        ServerUnavailableError,
        StaleFencingTokenError,
        StreamError,
        StreamRefusedError,
        TopologyError,
        UnreadableEventError,
    )
    from mongo_celery.fenced import FencedCollection
    from mongo_celery.fencing import Fence

_HOMES = {
    "Bridge": "bridge",
    "Change": "change",
    "Fence": "fencing",
    "FencedCollection": "fenced",
}

__all__ = [
    "AccessError",
    "Bridge",
    "Change",
    "CommandRefusedError",
    "ConfigurationError",
    "DeploymentError",
    "EmbeddedServerError",
    "Fence",
    "FencedCollection",
    "ForkedClientError",
    "HandlerCrashedError",
    "HandlerUsageError",
    "HistoryLostError",
    "InvalidEnvelopeError",
    "LayoutError",
    "LeaseLostError",
    "MongoCeleryError",
    "ServerUnavailableError",
    "StaleFencingTokenError",
    "StreamError",
    "StreamRefusedError",
    "TopologyError",
    "UnreadableEventError",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mongo-celery")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mongo_celery.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
