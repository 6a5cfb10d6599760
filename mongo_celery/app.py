"""The state of a Celery app: its named objects by kind, and tasks with their beat entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess

if TYPE_CHECKING:
    from celery import Celery

_ATTRIBUTE = "_mongo_celery"
_EXPIRES_SECONDS = 60.0
"""Beat's messages must not accumulate without workers, but busy workers must find a valid one."""


class Named(Protocol):
    """An object with a name, which may be unknown before first use."""

    @property
    def name(self) -> str:
        """The name for commands."""


T = TypeVar("T", bound=Named)


@dataclass(slots=True)
class _AppState:
    """State of one app: objects and known names by kind, tasks, seconds between periodic calls, shared objects."""

    things: dict[str, list[tuple[str | None, Any]]] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    periods: dict[tuple[str, ...], float] = field(default_factory=dict)
    shared: dict[Any, PerProcess[Any]] = field(default_factory=dict)


def check_app(app: object) -> None:
    """
    Refuse an object that is not a Celery app, such as the app of a web framework, a URL or a collection.

    Raises:
        ConfigurationError: it is not a Celery app.
    """
    from celery import Celery

    if not isinstance(app, Celery):
        raise ConfigurationError(
            f"The app must be a Celery app, not {type(app).__name__}. For a Flask app, pass the result of "
            "celery_init_app(app). Pass a URL as url='...'.",
        )


def _get_state(app: Celery) -> _AppState:
    check_app(app)
    held: _AppState = app.__dict__.setdefault(_ATTRIBUTE, _AppState())
    return held


def app_name(app: Celery) -> str | None:
    """Return an app's name, the same in every process. None if it has none, or belongs to a script."""
    name = app.main
    return str(name) if name and name != "__main__" else None


def shared(app: Celery, make: Callable[[Celery], Any]) -> PerProcess[Any]:
    """
    Return the object that all parts of an app share in a process.

    Args:
        app: the Celery app.
        make: makes the object, and identifies it. A class, or a function at module level.
    """
    return _get_state(app).shared.setdefault(make, PerProcess(partial(make, app)))


@dataclass(frozen=True)  # without slots: Python 3.11 cannot make a frozen generic Registry[...] with slots
class Registry(Generic[T]):
    """
    The objects of one kind, by app.

    Attributes:
        kind: the word for such an object in messages.
        create: the call that makes one, for messages about an app without one.
        rename: the fix for a name that is taken.
    """

    kind: str
    create: str
    rename: str

    def add(self, app: Celery, thing: T, name: str | None) -> bool:
        """
        Register an object of an app.

        Args:
            app: the Celery app.
            thing: the object.
            name: name of the object, if already known.

        Returns:
            True if it is the app's first.

        Raises:
            ConfigurationError: the app already has another object of this name.
        """
        self.refuse(app, name)
        known = _get_state(app).things.setdefault(self.kind, [])
        known.append((name, thing))
        return len(known) == 1

    def refuse(self, app: Celery, name: str | None) -> None:
        """
        Raise the error with which `add` would refuse this name.

        Raises:
            ConfigurationError: see `add`.
        """
        if name is not None and name in {other for other, _ in _get_state(app).things.get(self.kind, ())}:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise ConfigurationError(
                f"The app already has {article} {self.kind} named {name!r}. To fix this, {self.rename}."
            )

    def of(self, app: Celery) -> list[T]:
        """Return all objects of an app, in order of creation."""
        return [thing for _, thing in _get_state(app).things.get(self.kind, ())]

    def find(self, app: Celery, name: str) -> T | None:
        """Return the object with this name, after reading all names."""
        return next((thing for thing in self.of(app) if thing.name == name), None)

    def select(self, app: Celery, names: Sequence[str]) -> list[T]:
        """
        Return the objects that a command names, or by default all.

        Raises:
            ConfigurationError: there is none, or a name is unknown.
        """
        found = self.of(app)
        if not found:
            raise ConfigurationError(
                f"This app has no {self.kind}. Create one with {self.create}, and name the app with -A."
            )
        if not names:
            return found
        by_name = {thing.name: thing for thing in found}
        for name in names:
            if name not in by_name:
                raise ConfigurationError(f"This app has no {self.kind} {name!r}. It has {', '.join(sorted(by_name))}.")
        return [by_name[name] for name in names]


def add_task(app: Celery, name: str, function: Callable[..., Any], **options: Any) -> None:
    """
    Register a task without a result, once per app.

    Args:
        app: the Celery app.
        name: the task's name.
        function: a plain function. Celery silently ignores other callables.
        options: the task's options.
    """
    held = _get_state(app)
    if name not in held.tasks:
        held.tasks.add(name)
        register: Any = app.task
        register(name=name, shared=False, ignore_result=True, **options)(function)


def expiry(every: float) -> float:
    """Return the seconds after which a periodic message expires. Busy workers must still find a valid one."""
    return max(every, _EXPIRES_SECONDS)


def schedule(app: Celery, task: str, every: float, *args: str) -> None:
    """
    Have beat send a task with these arguments. The shortest requested period applies, at least one second.

    Messages expire (see `expiry`).
    """
    call = (task, *args)
    periods = _get_state(app).periods
    if every < periods.get(call, math.inf):
        periods[call] = every
        signature = app.signature(task, args=args)
        # A scheduler with whole seconds, such as django-celery-beat, would send without a pause.
        app.add_periodic_task(max(every, 1.0), signature, name=" ".join(call), expires=expiry(every))


def list_periods(app: Celery) -> dict[tuple[str, ...], float]:
    """Return the seconds between two of beat's messages, by task and arguments."""
    return dict(_get_state(app).periods)
