"""
Objects to close when a process ends, whether by Python, multiprocessing or Celery.

Children of `multiprocessing` and of Celery's prefork pool skip `atexit`: multiprocessing has finalizers, and Celery
signals. The first event closes the objects, and later ones find nothing to do.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - a transport that is imported while the process ends needs it, too late
import os
import weakref
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, Protocol

from billiard.util import Finalize as CeleryFinalize
from celery.signals import worker_process_shutdown, worker_shutdown

from mongo_celery.forking import PerProcess

_FINALIZER_PRIORITY = 100
"""Before a process's queues and managers, which have 10 and less."""


class Closing(Protocol):
    """An object that can be closed."""

    def close_soon(self) -> None:
        """Begin to close. All objects begin before the first wait."""

    def close(self) -> None:
        """Close it within a limited time. A second call does nothing."""


class OpenThings:
    """The objects to close at a process's end. A forked child leaves them to its parent."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(self.close_all)
        for finalize in (Finalize, CeleryFinalize):
            finalize(None, self.close_all, exitpriority=_FINALIZER_PRIORITY)

    def add(self, thing: Closing) -> None:
        """Add an object to close at the end."""
        self._open.add(thing)

    def close_all(self) -> None:
        """Close all objects concurrently."""
        if self._pid != os.getpid():
            return
        things = list(self._open)
        for thing in things:
            with suppress(Exception):
                thing.close_soon()
        for thing in things:
            with suppress(Exception):
                thing.close()
        self._open.clear()


_OPEN = PerProcess(OpenThings)


def close_at_exit(thing: Closing) -> None:
    """Close an object when this process ends."""
    _OPEN.get().add(thing)


@worker_process_shutdown.connect(weak=False)
@worker_shutdown.connect(weak=False)
def _close_with_worker(**_arguments: Any) -> None:
    _OPEN.get().close_all()
