"""
Handlers that know neither app nor bridge, in the manner of Celery's `shared_task`.

They are taken up by a bridge of each app: by those that are bound when the decorator runs, and by those that are bound
later. They belong to the process: whoever imports their module has them in all its apps.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Collection
from typing import Unpack

from mongo_celery.arguments import check_name
from mongo_celery.bridge.bindings import Bindings
from mongo_celery.bridge.handlers import Handler, refuse_function_as_source
from mongo_celery.bridge.registration import Registration
from mongo_celery.bridge.signatures import Bulk, HandlerOptions, Single
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.errors import ConfigurationError

BOUND = Bindings()
"""All bridges of all apps of this process."""

_SHARED: dict[tuple[str, str | None], Registration] = {}
"""By the handler's name and the bridge's, in the order of their declaration."""

LOCK = threading.RLock()
"""Held while a bridge is bound or a handler declared: none of them is to miss the other."""


def shared_change(
    *sources: object, bridge: str | None = None, **options: Unpack[HandlerOptions]
) -> Callable[[Single], Single]:
    """
    Register a handler for changes without an app or a bridge: as `Bridge.on_change`, in a module that imports neither.

    Each app's bridge takes it up, also one that is made later. The decorated function stays what it is: called, it
    runs, without app and task (with `bind=True` it is called with something for `self`).

    Args:
        sources: as of `Bridge.on_change`.
        bridge: the name of the bridge that it is for; by default the app's one bridge. An app that has no bridge of
            that name, or none at all, does not have the handler.
        options: all others of `Bridge.on_change`, Celery's among them.

    Raises:
        ConfigurationError: when the decorator runs, whatever is wrong with all this; also where an app has several
            bridges, and none is named. What only an app's settings or its other handlers forbid is refused when the
            app's bridge is bound.
    """
    refuse_function_as_source(sources, "shared_change")

    def decorate(function: Single) -> Single:
        _share(Registration(function, sources, options, shared_with=bridge))
        return function

    return decorate


def shared_changes(
    *sources: object, bridge: str | None = None, batch_size: int = 500, **options: Unpack[HandlerOptions]
) -> Callable[[Bulk], Bulk]:
    """
    Register a bulk handler without an app or a bridge: as `shared_change`, of lists as `Bridge.on_changes` gives them.

    Args:
        sources: as of `Bridge.on_change`.
        bridge: as of `shared_change`.
        batch_size: as of `Bridge.on_changes`.
        options: all others of `Bridge.on_changes`, Celery's among them.

    Raises:
        ConfigurationError: as `shared_change`.
    """
    refuse_function_as_source(sources, "shared_changes")

    def decorate(function: Bulk) -> Bulk:
        _share(Registration(function, sources, options, batch_size, bridge))
        return function

    return decorate


def find_shared_handlers(wiring: Wiring) -> list[Registration]:
    """
    Return the shared handlers for a bridge that is just bound to its app, which does not know it yet.

    Raises:
        ConfigurationError: the app has another bridge, and a handler does not say which of them it is for.
    """
    with LOCK:
        return [each for each in _SHARED.values() if _can_join(each, wiring)]


def find_stray_handlers(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the handlers that name a bridge other than these: the function, and the name."""
    with LOCK:
        found = [(each, name) for (_, name), each in _SHARED.items() if name is not None and name not in names]
    return [(_function_name(each), name) for each, name in found]


def _function_name(shared: Registration) -> str:
    return f"{shared.function.__module__}.{shared.function.__qualname__}"


def _can_join(shared: Registration, wiring: Wiring) -> bool:
    if shared.shared_with is not None:
        return shared.shared_with == wiring.name
    names = {wiring.name, *(other.name for other in BRIDGES.of(wiring.app))}
    if len(names) > 1:
        raise ConfigurationError(
            f"shared handler {_function_name(shared)} names no bridge, and an app has "
            f"{len(names)} ({', '.join(sorted(names))}): write shared_change(..., bridge='...').",
        )
    return True


def _share(shared: Registration) -> None:
    """Keep it for later bridges, and give it to those that exist: to all of them, or to none."""
    if shared.shared_with is not None:
        check_name(shared.shared_with, "the name of a bridge")
    alone = shared.make_handler(None)
    key = alone.name, shared.shared_with
    with LOCK:
        _refuse_another(alone, _SHARED.get(key))
        handlers = _plan(shared)
        _SHARED[key] = shared
        for wiring, handler in handlers:
            shared.register_handler(wiring, handler)


def _plan(shared: Registration) -> list[tuple[Wiring, Handler]]:
    with contextlib.suppress(ConfigurationError):
        return _plan_for_all(shared)
    gc.collect()  # the error may be about an app that nobody can reach any more
    return _plan_for_all(shared)


def _plan_for_all(shared: Registration) -> list[tuple[Wiring, Handler]]:
    return [(wiring, shared.plan_handler(wiring)) for wiring in BOUND.alive() if _can_join(shared, wiring)]


def _refuse_another(handler: Handler, known: Registration | None) -> None:
    other = known.make_handler(None) if known is not None else handler
    if not handler.is_same_code(other):
        raise ConfigurationError(
            f"there is a shared handler named {handler.name!r} already ({other.task_name}); {handler.beside(other)}.",
        )
