"""
The identity of a bridge: app, broker, and for each handler its databases. The lease keeps that of its last term.

The state of a bridge is found by its name. Two environments with the same code have the same name, so on one MongoDB
each would lead with the other's positions, and the other's changes would be lost. A listener therefore compares first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import json_util

from mongo_celery.app import app_name
from mongo_celery.broker.address import Address, describe_broker, is_same_broker, read_address

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.options import BridgeOptions
    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.wiring import Wiring

_EVERY_DATABASE = "*"
_DIGEST_CHARS = 16
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """
    The use that a process would make of a bridge's state.

    Attributes:
        app: name of its app; None for one without a name.
        broker: address to which it publishes; None where the URL of that cannot be read.
        handlers: by name: the `task`, the `databases` to which it listens (`"*"` for all), and a `digest` of its
            definition, to see whether two processes run the same code.
    """

    app: str | None
    broker: Address | None
    handlers: Mapping[str, Mapping[str, Any]]

    def plain(self) -> dict[str, Any]:
        """Return it as the lease keeps it."""
        return {"app": self.app, "broker": self.broker, "handlers": dict(self.handlers)}

    def difference(self, stored: Mapping[str, Any] | None) -> str | None:
        """
        Compare it with the identity that a lease keeps.

        Returns:
            Why the two are different apps or environments, naming both; None where they are the same, or none is
            stored. Different handlers of one app in one environment are a deploy.
        """
        if not stored:
            return None
        return self._other_app(stored) or self._other_broker(stored) or self._other_databases(stored["handlers"])

    def _other_app(self, stored: Mapping[str, Any]) -> str | None:
        theirs = {name: each["task"] for name, each in stored["handlers"].items()}
        mine = {name: each["task"] for name, each in self.handlers.items()}
        is_renamed = stored["app"] and self.app and stored["app"] != self.app
        # Code is renamed and moved, but rarely all of it at the same time.
        has_none = theirs and mine and not (theirs.keys() & mine.keys() or _modules(theirs) & _modules(mine))
        if not (is_renamed or has_none):
            return None
        shown = ", ".join(sorted(theirs)[:_SHOWN]) + (" ..." if len(theirs) > _SHOWN else "")
        return (
            f"it belongs to app {stored['app'] or 'without a name'} with handlers {shown or 'none'}, and this is app "
            f"{self.app or 'without a name'}"
        )

    def _other_broker(self, stored: Mapping[str, Any]) -> str | None:
        theirs = stored["broker"]
        if theirs is None or self.broker is None or is_same_broker(self.broker, theirs):
            return None
        return (
            f"its listener publishes to {describe_broker(theirs)}, and this process to {describe_broker(self.broker)}"
        )

    def _other_databases(self, stored: Mapping[str, Mapping[str, Any]]) -> str | None:
        for name in self.find_moved_handlers(stored):
            return (
                f"its listener listens to database {', '.join(stored[name]['databases'])} for handler {name}, and this "
                f"process to {', '.join(self.handlers[name]['databases'])}"
            )
        return None

    def find_moved_handlers(self, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the handlers that both have, and that have no database in common."""
        shared = sorted(stored.keys() & self.handlers.keys())
        both = ((name, {*stored[name]["databases"]}, {*self.handlers[name]["databases"]}) for name in shared)
        return [name for name, theirs, mine in both if _EVERY_DATABASE not in theirs | mine and not theirs & mine]

    def find_changed_handlers(self, stored: Mapping[str, Any]) -> list[str]:
        """Return the handlers that both have, with different definitions."""
        theirs = stored["handlers"]
        shared = theirs.keys() & self.handlers.keys()
        return sorted(name for name in shared if theirs[name]["digest"] != self.handlers[name]["digest"])


def build_identity(wiring: Wiring) -> Identity:
    """
    Return the identity of a bridge in this process. Connects to nothing.

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


def ways_out(command: str = "celery -A APP listener --take-over") -> str:
    """Return what to do about a difference."""
    return (
        "Another environment or app needs a bridge of its own: give this Bridge another name='...' or database='...'. "
        f"Run `{command}` only if the broker or the collection has moved, or the app has another name."
    )


def _modules(tasks: Mapping[str, str]) -> set[str]:
    return {task.rpartition(".")[0] for task in tasks.values()}


def _definition(handler: Handler, selector: Selector, options: BridgeOptions) -> list[Any]:
    filter_ = selector.filter
    return [
        handler.task_name,
        sorted(str(source) for source in selector.sources),
        sorted(filter_.operations),
        sorted(filter_.fields) if filter_.fields is not None else None,
        filter_.match,
        filter_.bookkeeping,
        handler.partitioner(options).name,
        handler.policy(options),
        handler.transactional,
        handler.group,
        [handler.batch_size, handler.coalesce],
    ]


def _digest(value: object) -> str:
    # What JSON does not know counts by its type: an address in its text would make each process another.
    text = json_util.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
