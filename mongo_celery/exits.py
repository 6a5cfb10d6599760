"""
What is to be closed when a process ends, by whatever way Python, multiprocessing or Celery ends one.

Children of `multiprocessing` and of Celery's prefork pool leave without `atexit`: each has finalizers of its own, and
Celery has signals. Whichever comes first closes; the others find nothing to do.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - a transport that is imported while the process ends needs it, too late
import os
import threading
import weakref
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, Protocol

from billiard.util import Finalize as CeleryFinalize
from celery.signals import worker_process_shutdown, worker_shutdown

_FINALIZER_PRIORITY = 100
"""Before queues and managers of the process, which are at 10 and less."""


class Closing(Protocol):
    """A thing with an end."""

    def close_soon(self) -> None:
        """Begin to end; what has begun before others end takes no time of theirs."""

    def close(self) -> None:
        """End it, within a bound; a second time does nothing."""


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_REGISTERED: set[int] = set()
"""Processes that have been prepared; a child inherits its parent's, and not its own."""
_lock = threading.Lock()


def _forget_lock() -> None:
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def close_at_exit(thing: Closing) -> None:
    """Close a thing of this process when the process ends."""
    pid = os.getpid()
    with _lock:  # or the second of two threads would clear what the first has added
        if pid not in _REGISTERED:
            _OPEN.clear()  # the parent's
            atexit.register(_close_all, pid)
            Finalize(None, _close_all, args=(pid,), exitpriority=_FINALIZER_PRIORITY)
            CeleryFinalize(None, _close_all, args=(pid,), exitpriority=_FINALIZER_PRIORITY)
            _REGISTERED.clear()
            _REGISTERED.add(pid)
        _OPEN.add(thing)


def _close_all(pid: int) -> None:
    if pid != os.getpid() or pid not in _REGISTERED:  # a child that has none of its own leaves its parent's alone
        return
    things = list(_OPEN)
    for thing in things:  # all of them at once, within the time of one
        with suppress(Exception):
            thing.close_soon()
    for thing in things:
        with suppress(Exception):
            thing.close()
    _OPEN.clear()


@worker_process_shutdown.connect(weak=False)
@worker_shutdown.connect(weak=False)
def _close_with_worker(**_arguments: Any) -> None:
    _close_all(os.getpid())
