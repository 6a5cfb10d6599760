"""
The apps of a bridge: which there are, and which one is meant.

An app keeps its bridges alive, and never the other way: what an application factory has made is gone with its app,
though the bridge at module level stays.
"""

from __future__ import annotations

import gc
import weakref

from celery import Celery, current_app, current_task

from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import ConfigurationError


class Bindings:
    """One bridge in each of its apps, as long as these live. Any thread may ask."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Wiring], ...] = ()

    def add(self, wiring: Wiring) -> None:
        """Note the bridge in one more app."""
        self._known = (*(known for known in self._known if known() is not None), weakref.ref(wiring))

    def alive(self) -> list[Wiring]:
        """In the order in which they were bound."""
        return [wiring for known in self._known if (wiring := known()) is not None]

    def of(self, app: Celery) -> Wiring | None:
        """In an app."""
        app = itself(app)
        return next((wiring for wiring in self.alive() if wiring.bound is app), None)

    def current(self) -> Wiring | None:
        """
        In the only app; of several in that of the task that runs, else in Celery's current app; None without any.

        Raises:
            ConfigurationError: there are several apps, and neither says which one is meant.
        """
        alive = self.alive()
        if len(alive) > 1:
            meant = self._find_current()
            if meant is not None:
                return meant
            del alive  # which would keep them
            gc.collect()  # an app is full of cycles: one that nobody can reach any more is not meant
            alive = self.alive()
            if len(alive) > 1:
                raise ConfigurationError(
                    f"bridge {alive[0].name} is bound to {len(alive)} apps, and Celery's current app is none of them: "
                    "ask bridge.of(app), or call app.set_current() (in all threads: app.set_default()).",
                )
        return alive[0] if alive else None

    def _find_current(self) -> Wiring | None:
        running = self.of(current_task.app) if current_task else None
        return running or self.of(current_app)


def itself(app: Celery) -> Celery:
    """Return the object of a proxy, such as Celery's own `current_app`."""
    found: Celery = getattr(app, "_get_current_object", lambda: app)()
    return found
