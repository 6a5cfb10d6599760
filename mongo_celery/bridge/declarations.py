"""
Declared handlers and outboxes. From each declaration the bridge makes one for every app.

An application factory makes several apps, and each has its own tasks, settings and positions. You may declare a handler
before you make the first app.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, overload

from celery import Celery

from mongo_celery.bridge.change import Change, Changes
from mongo_celery.bridge.handlers import TASK_OPTIONS, Handler, check_function, make_handler
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.tasks import make_task
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.options import parse_options
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.outbox.watching import OPERATIONS, STILL_PENDING, WATCHED_FIELDS, delivery_handler, handler_name

Given_contra = TypeVar("Given_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

LOCK = threading.RLock()
"""Hold it while binding a bridge or declaring a handler, so that neither misses the other."""


@dataclass(frozen=True, slots=True)
class DeclaredHandler:
    """
    The arguments of a decorator.

    Attributes:
        function: the decorated function.
        sources: the collections to watch.
        given: keyword arguments, Celery's among them.
        batch_size: the largest number of changes in a list. None for a handler of single changes.

    Raises:
        ConfigurationError: the function cannot be a handler.
    """

    function: Callable[..., Any]
    sources: tuple[object, ...]
    given: Mapping[str, Any]
    batch_size: int | None = None

    def __post_init__(self) -> None:
        what = "the change" if self.batch_size is None else "the changes"
        check_function(self.function, bind=bool(self.given.get("bind")), given=what)

    @property
    def name(self) -> str:
        """The name of the handler."""
        return self.given.get("name") or self.function.__name__

    def make_handler(self, options: BridgeOptions | None = None, app: Celery | None = None) -> Handler:
        """
        Make the handler for these options, in an app or without one. Without options, skip the checks that need them.

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
        Add its handler to a bridge in an app. Return a function that registers and returns the task.

        Raises:
            ConfigurationError: it cannot be a handler of this app.
        """
        handler = wiring.build_with_options(partial(self.make_handler, app=wiring.app))
        wiring.add(handler)
        options = {name: value for name, value in self.given.items() if name in TASK_OPTIONS}
        return partial(make_task, wiring, wiring.app, handler, {"bridge": wiring.public, **options})

    def find(self, wiring: Wiring) -> Any:
        """Return the handler's task in a bridge's app."""
        return wiring.app.tasks[wiring.task_name(self.name)]


@dataclass(frozen=True, slots=True)
class DeclaredOutbox:
    """
    The arguments of `Bridge.outbox`.

    Attributes:
        namespace: the namespace of the collection, as given.
        name: the name of the outbox.
        options: the options of `Outbox`.
        watch: True if the listener delivers.
    """

    namespace: str
    name: str
    options: Mapping[str, Any]
    watch: bool

    def __post_init__(self) -> None:
        parse_options({"name": self.name, **self.options})

    def prepare(self, wiring: Wiring) -> Callable[[], Outbox]:
        """
        Add the delivery handler to a bridge in an app. Return a function that makes the outbox.

        Raises:
            ConfigurationError: the app has an outbox of this name, or the bridge has another handler of this name.
        """
        OUTBOXES.refuse(wiring.app, self.name)
        register = self._declare_delivery(wiring).prepare(wiring) if self.watch else None
        return partial(self._make, wiring, register)

    def find(self, wiring: Wiring) -> Outbox:
        """Return the outbox in a bridge's app."""
        return wiring.outboxes[self.name]

    def _make(self, wiring: Wiring, register: Callable[[], Any] | None) -> Outbox:
        options = {"database": wiring.given.get("database", DEFAULT_DATABASE), **self.options}
        made = Outbox(wiring.app, lambda: wiring.collection(self.namespace), name=self.name, **options)
        wiring.outboxes[self.name] = made
        if register is not None:
            register()
        return made

    def _declare_delivery(self, wiring: Wiring) -> DeclaredHandler:
        options = {
            "name": handler_name(self.namespace),
            "operations": OPERATIONS,
            "fields": WATCHED_FIELDS,
            "match": STILL_PENDING,
            "partition_by": "_id",
            "bind": True,
        }
        deliver = delivery_handler(lambda: wiring.outboxes[self.name].runtime.relay, self.namespace)
        return DeclaredHandler(deliver, (self.namespace,), options)


class NoApp:
    """
    A stand-in for a task or an outbox while no app is current. Each use raises an error that names the reason.

    Names with underscores raise AttributeError, because Python and test runners look them up.
    """

    def __init__(self, error: ConfigurationError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else self._error

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise the error."""
        raise self._error


Declared = DeclaredHandler | DeclaredOutbox


def bind_all(pairs: Iterable[tuple[Declared, Wiring]]) -> list[Any]:
    """
    Register handlers and outboxes in the apps of bridges. If one fails, none is registered.

    Returns:
        The tasks and outboxes, in order.

    Raises:
        ConfigurationError: one of them cannot be registered.
    """
    with ExitStack() as stack:
        registers = []
        for declared, wiring in pairs:
            stack.enter_context(wiring.keep_handlers_on_error())
            registers.append(declared.prepare(wiring))
        return [register() for register in registers]


class HandlerTask(Protocol[Given_contra, Result_co]):
    """
    The task that `on_change` and `on_changes` return. Call it like the function.

    With `bind=True`, omit `self`. Only the listener dispatches it: `delay` raises.
    """

    @property
    def name(self) -> str:
        """Name of the Celery task."""

    @property
    def app(self) -> Celery:
        """The Celery app."""

    @property
    def max_retries(self) -> int | None:
        """Retries before the failure policy applies."""

    @property
    def request(self) -> Any:
        """Celery's request, inside the handler."""

    def retry(self, *, exc: BaseException | None = ..., countdown: float | None = ..., **options: Any) -> Any:
        """Retry as in Celery, inside the handler. It always raises."""

    def __call__(self, given: Given_contra, /) -> Result_co:
        """Run the function, as a unit test does."""


class OnChange(Protocol):
    """The decorator of a handler of single changes. With `bind=True`, its first argument is its task."""

    @overload
    def __call__(self, function: Callable[[Change], Result], /) -> HandlerTask[Change, Result]: ...

    @overload
    def __call__(self, function: Callable[[Any, Change], Result], /) -> HandlerTask[Change, Result]: ...


class OnChanges(Protocol):
    """The decorator of a bulk handler."""

    @overload
    def __call__(self, function: Callable[[Changes], Result], /) -> HandlerTask[Sequence[Change], Result]: ...

    @overload
    def __call__(self, function: Callable[[Any, Changes], Result], /) -> HandlerTask[Sequence[Change], Result]: ...
