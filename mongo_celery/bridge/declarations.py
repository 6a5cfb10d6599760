"""
Handlers and outboxes as they were declared, from which those of each app are made.

An application factory makes several apps, and each has tasks, settings and positions of its own. A declaration may come
before any of them. Shared handlers know neither app nor bridge, in the manner of Celery's `shared_task`: the bridges of
all apps take them, also those that are bound later.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from celery import Celery

from mongo_celery.arguments import check_name
from mongo_celery.bridge.handlers import TASK_OPTIONS, Handler, check_function, make_handler, refuse_function_as_source
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.signatures import Bulk, HandlerOptions, Single
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker.tasks import make_task
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.options import options_of
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.outbox.watching import OPERATIONS, delivery_handler, handler_name, still_pending, watched_fields

BOUND: weakref.WeakSet[Wiring] = weakref.WeakSet()
"""All bridges of all apps of this process."""

LOCK = threading.RLock()
"""Held while a bridge is bound or a handler declared: none of them is to miss the other."""

_SHARED: dict[tuple[str, str | None], DeclaredHandler] = {}
"""By the handler's name and the bridge's, in the order of their declaration."""


@dataclass(frozen=True, slots=True)
class DeclaredHandler:
    """
    The arguments of a decorator.

    Attributes:
        function: below the decorator.
        sources: the collections to watch.
        given: keyword arguments, Celery's among them.
        batch_size: most changes of one list; None for a handler of single changes.
        bridge: the name of the bridge that a shared handler names. None if it names none, or is not shared.

    Raises:
        ConfigurationError: the function cannot be a handler.
    """

    function: Callable[..., Any]
    sources: tuple[object, ...]
    given: Mapping[str, Any]
    batch_size: int | None = None
    bridge: str | None = None

    def __post_init__(self) -> None:
        what = "the change" if self.batch_size is None else "the changes"
        check_function(self.function, bind=bool(self.given.get("bind")), given=what)

    def make_handler(self, options: BridgeOptions | None = None, app: Celery | None = None) -> Handler:
        """
        Make its handler by some options, in an app or without one. Without options, checks that need them are left out.

        Raises:
            ConfigurationError: the first mistake, and its fix.
        """
        name, module = self.function.__name__, self.function.__module__
        return make_handler(
            self.function,
            self.sources,
            options,
            task_name=f"{module}.{name}" if app is None else app.gen_task_name(name, module),
            given=self.given,
            batch_size=self.batch_size,
        )

    def prepare(self, wiring: Wiring) -> Callable[[], Any]:
        """
        Give its handler to a bridge in its app. What is returned registers the task, and returns it.

        Raises:
            ConfigurationError: it cannot be a handler there.
        """
        handler = wiring.build_with_options(partial(self.make_handler, app=wiring.app))
        wiring.add(handler)
        options = {name: value for name, value in self.given.items() if name in TASK_OPTIONS}
        return partial(make_task, wiring, wiring.app, handler, {"bridge": wiring.public, **options})


@dataclass(frozen=True, slots=True)
class DeclaredOutbox:
    """
    The arguments of `Bridge.outbox`.

    Attributes:
        namespace: of the collection, as given.
        name: of the outbox.
        options: of `Outbox`.
        watch: whether the listener delivers.
    """

    namespace: str
    name: str
    options: Mapping[str, Any]
    watch: bool

    def __post_init__(self) -> None:
        options_of({"name": self.name, **self.options})

    def prepare(self, wiring: Wiring) -> Callable[[], Outbox]:
        """
        Give the handler of its delivery to a bridge in its app. What is returned makes the outbox.

        Raises:
            ConfigurationError: the app has an outbox of this name, or the bridge something else for its delivery.
        """
        OUTBOXES.refuse(wiring.app, self.name)
        register = self._declare_delivery(wiring).prepare(wiring) if self.watch else None
        return partial(self._make, wiring, register)

    def _make(self, wiring: Wiring, register: Callable[[], Any] | None) -> Outbox:
        options = {"database": wiring.given.get("database", DEFAULT_DATABASE), **self.options}
        made = Outbox(wiring.app, lambda: wiring.collection(self.namespace), name=self.name, **options)
        wiring.outboxes[self.name] = made
        if register is not None:
            register()
        return made

    def _declare_delivery(self, wiring: Wiring) -> DeclaredHandler:
        field = PendingField()
        options = {
            "name": handler_name(self.namespace),
            "operations": OPERATIONS,
            "fields": watched_fields(field),
            "match": still_pending(field),
            "partition_by": "_id",
            "bind": True,
        }
        deliver = delivery_handler(lambda: wiring.outboxes[self.name].backing.relay, self.namespace)
        return DeclaredHandler(deliver, (self.namespace,), options)


class NoApp:
    """
    Stands for a task or an outbox while no app is meant: each use is the error that says why.

    Python itself and test runners ask for names with underscores, and an object has them or not.
    """

    def __init__(self, error: ConfigurationError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else self._error

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise the error."""
        raise self._error


def bind_all(pairs: Iterable[tuple[DeclaredHandler | DeclaredOutbox, Wiring]]) -> list[Any]:
    """
    Register handlers and outboxes in the apps of bridges: all of them, or none.

    Returns:
        The tasks and outboxes, in their order.

    Raises:
        ConfigurationError: one of them cannot be there.
    """
    with ExitStack() as stack:
        registers = []
        for declared, wiring in pairs:
            stack.enter_context(wiring.keep_handlers_on_error())
            registers.append(declared.prepare(wiring))
        return [register() for register in registers]


# -- shared handlers -------------------------------------------------------------------------------


def shared_change(
    *sources: object, bridge: str | None = None, **options: Unpack[HandlerOptions]
) -> Callable[[Single], Single]:
    """
    Register a handler for changes without an app or a bridge: as `Bridge.on_change`, in a module that imports neither.

    Each app's bridge takes it, also one that is made later. The decorated function stays what it is: called, it runs,
    without app and task (with `bind=True` it is called with something for `self`).

    Args:
        sources: as of `Bridge.on_change`.
        bridge: the name of the bridge that it is for; by default the app's one bridge. An app that has no bridge of
            that name, or none at all, does not have the handler.
        options: all others of `Bridge.on_change`, Celery's among them.

    Raises:
        ConfigurationError: when the decorator runs, for all mistakes that can be seen then; also where an app has
            several bridges, and none is named. What only an app's settings or its other handlers forbid is refused
            when the app's bridge is bound.
    """
    refuse_function_as_source(sources, "shared_change")
    return lambda function: _share(DeclaredHandler(function, sources, options, bridge=bridge))


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
    return lambda function: _share(DeclaredHandler(function, sources, options, batch_size, bridge))


def _share(shared: DeclaredHandler) -> Any:
    """Keep a handler for later bridges, give it to those that exist, and return its function."""
    if shared.bridge is not None:
        check_name(shared.bridge, "the name of a bridge")
    handler = shared.make_handler()
    with LOCK:
        known = _SHARED.get((handler.name, shared.bridge), shared).make_handler()
        if not handler.is_same(known):
            raise ConfigurationError(f"there is a shared handler {handler.name!r} already; {handler.name_fix(known)}.")
        gc.collect()  # an app that nobody can reach any more takes no handler
        bind_all([(shared, wiring) for wiring in BOUND if is_for_bridge(shared, wiring)])
        _SHARED.setdefault((handler.name, shared.bridge), shared)
    return shared.function


def find_shared_handlers(wiring: Wiring) -> Iterator[DeclaredHandler]:
    """Yield the shared handlers for a bridge."""
    return (each for each in list(_SHARED.values()) if is_for_bridge(each, wiring))


def find_stray_handlers(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the handlers that name a bridge other than these: the function, and the name."""
    with LOCK:
        strays = [each for each in _SHARED.values() if each.bridge is not None and each.bridge not in names]
    return [(_function_name(each), str(each.bridge)) for each in strays]


def is_for_bridge(shared: DeclaredHandler, wiring: Wiring) -> bool:
    """
    Return True if a bridge takes a shared handler.

    Raises:
        ConfigurationError: the app has several bridges, and the handler names none of them.
    """
    names = {wiring.name, *(other.name for other in BRIDGES.of(wiring.app))}
    if shared.bridge is None and len(names) > 1:
        raise ConfigurationError(
            f"shared handler {_function_name(shared)} names no bridge, and an app has "
            f"{len(names)} ({', '.join(sorted(names))}): write shared_change(..., bridge='...').",
        )
    return shared.bridge in (None, wiring.name)


def _function_name(shared: DeclaredHandler) -> str:
    return f"{shared.function.__module__}.{shared.function.__qualname__}"
