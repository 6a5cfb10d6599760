"""
A handler as it was declared, before any app or after: what the handler and the task of each app are made of.

An application factory makes several apps, and each has tasks, settings and positions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from celery import Celery
from celery.local import Proxy

from mongo_celery.bridge.bindings import Bindings
from mongo_celery.bridge.handlers import Handler, check_function, make_handler, refuse_function_as_source
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.tasks import make_task
from mongo_celery.errors import ConfigurationError

_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        ("name", "operations", "fields", "match", "partition_by", "failure_policy", "group", "start_from", "commit")
    ),
    "transactional": False,
    "coalesce": False,
    "bookkeeping": False,
}
"""What the decorators take for themselves, and what it is by default; all else is for Celery's task."""


@dataclass(frozen=True, slots=True)
class Registration:
    """
    What a decorator was given.

    Attributes:
        function: on which the decorator stands.
        sources: what is watched.
        arguments: of the bridge.
        task_options: of Celery's task.
        shared_with: the name of the bridge that it is for, where no bridge was there to be written down; None for
            the only one of each app, or where one was.
    """

    function: Callable[..., Any]
    sources: tuple[object, ...]
    arguments: Mapping[str, Any]
    task_options: Mapping[str, Any]
    shared_with: str | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the function is given its task, too."""
        return bool(self.task_options.get("bind"))

    def handler(self, options: BridgeOptions | None, app: Celery | None = None) -> Handler:
        """
        What it is by some options, in an app or without one; without options, what needs none is judged.

        Raises:
            ConfigurationError: the first thing that is wrong, and its cure.
        """
        return make_handler(
            self.function,
            self.sources,
            options,
            task_name=_task_name(app, self.function),
            arguments=self.arguments,
            task_options=self.task_options,
        )

    def handler_in(self, wiring: Wiring) -> Handler:
        """
        What it is in a bridge, which does not have it yet.

        Raises:
            ConfigurationError: it cannot be a handler there.
        """
        return wiring.judged(partial(self.handler, app=wiring.bound))

    def declare_in(self, wiring: Wiring) -> Handler:
        """
        Make it a handler of a bridge.

        Raises:
            ConfigurationError: it cannot be one.
        """
        handler = self.handler_in(wiring)
        wiring.add(handler)
        return handler

    def make_task_in(self, wiring: Wiring, handler: Handler) -> Any:
        """Make the task of such a handler."""
        return make_task(wiring, wiring.app, handler, {"bridge": wiring.public, **self.task_options})


def registration(
    function: Callable[..., Any],
    sources: tuple[object, ...],
    given: Mapping[str, Any],
    *,
    batch_size: int | None = None,
    shared_with: str | None = None,
) -> Registration:
    """
    What a decorator was given, apart.

    Args:
        function: on which it stands.
        sources: what is watched.
        given: its other keyword arguments, Celery's among them.
        batch_size: most changes of one list; None for a handler of single changes.
        shared_with: as of `Registration`.

    Raises:
        ConfigurationError: the function cannot be a handler.
    """
    task_options = dict(given)
    arguments = {name: task_options.pop(name, default) for name, default in _ARGUMENTS.items()}
    arguments["batch_size"] = batch_size
    what = "the changes" if batch_size is not None else "the change"
    check_function(function, bind=bool(task_options.get("bind")), given=what)  # before its name is asked for
    return Registration(function, sources, arguments, task_options, shared_with)


_Proxy: Any = Proxy
"""Its stubs leave out what is overridden here."""


class Late(_Proxy):  # type: ignore[misc] # see above
    """
    What stands at module level for a thing that each app has: that of the app that is meant when it is used.

    Where no app is meant it cannot be used, but be looked at: by `isinstance`, `repr`, test runners, and whatever else
    goes through the names of a module.
    """

    def _get_class(self) -> type:
        try:
            found: type = super()._get_class()
        except ConfigurationError:
            return type(self)
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except ConfigurationError as error:
            if name.startswith("__"):  # asked by Python, for which an object has it or not
                raise AttributeError(str(error)) from None
            raise

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override] # as in the proxy
        try:
            return cast("dict[str, Any]", self._get_current_object().__dict__)
        except ConfigurationError as error:
            raise AttributeError(str(error)) from None

    def __repr__(self) -> str:
        try:
            return str(super().__repr__())
        except ConfigurationError as error:
            return f"<{type(self).__name__}: {error}>"

    def __dir__(self) -> list[str]:
        try:
            return list(super().__dir__())
        except ConfigurationError:
            return []

    def __bool__(self) -> bool:
        try:
            return bool(super().__bool__())
        except ConfigurationError:
            return True


class LateTask(Late):
    """
    What the decorator of a bridge without an app returns: the task of the app that is meant when it is used.

    Called while there is no app, it is the function.
    """

    def __init__(self, task: Callable[[], Any], bindings: Bindings, given: Registration) -> None:
        super().__init__(task)
        object.__setattr__(self, "_bindings", bindings)
        object.__setattr__(self, "_given", given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task, or without an app the function; a task that is given to its function cannot be made up."""
        given: Registration = object.__getattribute__(self, "_given")
        if given.is_bound or object.__getattribute__(self, "_bindings").alive():
            return self._get_current_object()(*args, **kwargs)
        return given.function(*args, **kwargs)


def checked_sources(sources: tuple[object, ...], decorator: str) -> tuple[object, ...]:
    """
    The sources, unless one of them is the function.

    Raises:
        ConfigurationError: the decorator stands without parentheses.
    """
    refuse_function_as_source(sources, decorator)
    return sources


def _task_name(app: Celery | None, function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "handler")
    module = getattr(function, "__module__", "")
    return app.gen_task_name(name, module) if app is not None else f"{module}.{name}"
