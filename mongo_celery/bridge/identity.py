"""
The identity of a bridge: app, broker, and the databases of each handler. The lease stores it for each term.

A bridge finds its state by its name. Two environments with the same code have the same name. On one MongoDB, each would
use the other's positions and lose the other's changes. So a listener first compares identities.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from bson import json_util

from mongo_celery.app import app_name
from mongo_celery.broker.connection import Address, describe_broker, is_same_broker, read_address

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.options import BridgeOptions
    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

_EVERY_DATABASE = "*"
_DIGEST_CHARS = 16
_SHOWN = 4
_DEFINING = ("task_name", "transactional", "group", "batch_size", "coalesce", "delay", "max_running", "per_second")
"""Fields of a handler that its definition includes unchanged."""


@dataclass(frozen=True, slots=True)
class Identity:
    """
    The identity of a bridge in one process.

    Attributes:
        app: name of its app. None if it has no name.
        broker: address to which it publishes. None if its URL cannot be read.
        handlers: for each handler by name, the `task`, the `databases` that it watches (`"*"` for all), and a `digest`
            of its definition, to compare the code of two processes.
    """

    app: str | None
    broker: Address | None
    handlers: Mapping[str, Mapping[str, Any]]

    def plain(self) -> dict[str, Any]:
        """Return the identity as the lease stores it."""
        return {"app": self.app, "broker": self.broker, "handlers": dict(self.handlers)}

    def difference(self, stored: Mapping[str, Any] | None) -> str | None:
        """
        Compare this identity with the one in a lease.

        Returns:
            A reason that names both, if they are different apps or environments. None if they are the same, or if none
            is stored. Different handlers of one app in one environment mean a deploy.
        """
        if not stored:
            return None
        moved, broker = self.find_moved_handlers(stored["handlers"]), stored["broker"]
        if other := self._find_other_app(stored):
            return other
        if broker is not None and self.broker is not None and not is_same_broker(self.broker, broker):
            here, there = describe_broker(self.broker), describe_broker(broker)
            return f"its listener uses the broker {there}, but this process uses {here}"
        if moved:
            theirs, mine = (", ".join(each[moved[0]]["databases"]) for each in (stored["handlers"], self.handlers))
            return f"handler {moved[0]} watches database {theirs} in the listener, but {mine} in this process"
        return None

    def _find_other_app(self, stored: Mapping[str, Any]) -> str | None:
        theirs = {name: each["task"] for name, each in stored["handlers"].items()}
        mine = {name: each["task"] for name, each in self.handlers.items()}
        is_renamed = stored["app"] and self.app and stored["app"] != self.app
        # Code is renamed and moved, but rarely all of it together.
        has_none = theirs and mine and not (theirs.keys() & mine.keys() or _modules(theirs) & _modules(mine))
        if not (is_renamed or has_none):
            return None
        shown = ", ".join(sorted(theirs)[:_SHOWN]) + (" ..." if len(theirs) > _SHOWN else "")
        return (
            f"it belongs to app {stored['app'] or 'without a name'} with handlers {shown or 'none'}, and this is app "
            f"{self.app or 'without a name'}"
        )

    def find_moved_handlers(self, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the handlers in both identities that have no database in common."""
        shared = sorted(stored.keys() & self.handlers.keys())
        both = ((name, {*stored[name]["databases"]}, {*self.handlers[name]["databases"]}) for name in shared)
        return [name for name, theirs, mine in both if _EVERY_DATABASE not in theirs | mine and not theirs & mine]

    def find_changed_handlers(self, stored: Mapping[str, Any]) -> list[str]:
        """Return the handlers in both identities whose definitions differ."""
        theirs = stored["handlers"]
        shared = theirs.keys() & self.handlers.keys()
        return sorted(name for name in shared if theirs[name]["digest"] != self.handlers[name]["digest"])


def build_identity(wiring: Wiring) -> Identity:
    """
    Return the identity of a bridge in this process, without opening a connection.

    Raises:
        ConfigurationError: a source cannot work.
    """
    selectors = [handler.selector(wiring.default_database) for handler in wiring.handlers]
    handlers = {
        handler.name: {
            "task": handler.task_name,
            "databases": sorted({source.database or _EVERY_DATABASE for source in selector.sources}),
            "digest": _digest(_definition(handler, selector, wiring.options)),
        }
        for handler, selector in zip(wiring.handlers, selectors, strict=True)
    }
    return Identity(app_name(wiring.app), read_address(wiring.app), handlers)


def ways_out(line: CommandLine) -> str:
    """Return the sentences that say how to fix a difference."""
    return (
        "If this is another environment or app, give this Bridge another name='...' or database='...'. If only the "
        "broker, the collection or the app's name has changed, take this bridge over: "
        f"`{line.celery('listener', '--take-over')}`."
    )


def _modules(tasks: Mapping[str, str]) -> set[str]:
    return {task.rpartition(".")[0] for task in tasks.values()}


def _definition(handler: Handler, selector: Selector, options: BridgeOptions) -> list[Any]:
    filters = ((each.name, getattr(selector.filter, each.name)) for each in fields(selector.filter))
    return [
        sorted(map(str, selector.sources)),
        {name: sorted(value) if isinstance(value, frozenset) else value for name, value in filters},
        {name: getattr(handler, name) for name in _DEFINING},
        handler.partitioner(options).name,
        handler.policy(options),
    ]


def _digest(value: object) -> str:
    # For a value outside JSON use its type: the address in its text would make each process differ.
    text = json_util.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
