"""
Registrations of handlers, from which the handler and the task of each app are made.

An application factory makes several apps, and each has tasks, settings and positions of its own. A handler may be
declared before any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Celery
from celery.local import Proxy

from mongo_celery.bridge.handlers import TASK_OPTIONS, Handler, check_function, make_handler
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.tasks import make_task
from mongo_celery.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Registration:
    """
    The arguments of a decorator.

    Attributes:
        function: below the decorator.
        sources: the collections to watch.
        given: keyword arguments, Celery's among them.
        batch_size: most changes of one list; None for a handler of single changes.
        shared_with: the name of the bridge that a shared handler names; None if it names none, or is not shared.

    Raises:
        ConfigurationError: the function cannot be a handler.
    """

    function: Callable[..., Any]
    sources: tuple[object, ...]
    given: Mapping[str, Any]
    batch_size: int | None = None
    shared_with: str | None = None

    def __post_init__(self) -> None:
        what = "the change" if self.batch_size is None else "the changes"
        check_function(self.function, bind=self.is_bound, given=what)

    @property
    def is_bound(self) -> bool:
        """Return True if the function gets its task, too."""
        return bool(self.given.get("bind"))

    def make_handler(self, options: BridgeOptions | None, app: Celery | None = None) -> Handler:
        """
        Make its handler by some options, in an app or without one. Without options, checks that need them are left out.

        Raises:
            ConfigurationError: the first mistake, and its fix.
        """
        return make_handler(
            self.function,
            self.sources,
            options,
            task_name=_task_name(app, self.function),
            given=self.given,
            batch_size=self.batch_size,
        )

    def plan_handler(self, wiring: Wiring) -> Handler:
        """
        Make its handler for a bridge, which does not get it yet.

        Raises:
            ConfigurationError: it cannot be a handler there.
        """
        handler = wiring.build_with_options(partial(self.make_handler, app=wiring.bound))
        wiring.check_can_add(handler)
        return handler

    def register_handler(self, wiring: Wiring, handler: Handler) -> Any:
        """Give a bridge its handler, and return the task."""
        wiring.add(handler)
        options = {name: value for name, value in self.given.items() if name in TASK_OPTIONS}
        return make_task(wiring, wiring.app, handler, {"bridge": wiring.public, **options})


def make_app_proxy(find: Callable[[], Any], run: Callable[[], Callable[..., Any] | None] = lambda: None) -> Any:
    """
    Return a proxy for an object that each app has. It finds the object of the current app at each use.

    While there is no current app, the proxy cannot be used. It can be inspected: by `isinstance`, `repr`, test runners,
    and other programs that read the names of a module.

    Args:
        find: returns the object; a ConfigurationError if no app is meant.
        run: returns the function to call while there is no app; None to raise the error.
    """

    def find_now() -> Any:
        try:
            return find()
        except ConfigurationError as error:
            return _Missing(error, run())

    return Proxy(find_now)


class _Missing:
    """An object that raises an error at each use."""

    __slots__ = ("_error", "_run")

    def __init__(self, error: ConfigurationError, run: Callable[..., Any] | None) -> None:
        self._error = error
        self._run = run

    def __getattr__(self, name: str) -> Any:
        # Python itself asks for names with underscores, and an object has them or not.
        raise AttributeError(str(self._error)) if name.startswith("__") else self._error

    def __repr__(self) -> str:
        return f"<{self._error}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            raise self._error
        return self._run(*args, **kwargs)


def _task_name(app: Celery | None, function: Callable[..., Any]) -> str:
    name, module = function.__name__, function.__module__
    return str(app.gen_task_name(name, module)) if app is not None else f"{module}.{name}"
