"""Values for one process: connections do not survive a fork, and prefork workers fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class PerProcess(Generic[T]):
    """
    A value that is made at first use, once in a process and again after a fork.

    All threads of a process share it. A forked child does not touch its parent's value.

    Args:
        make: makes the value. The caller gets its error, and the next call tries again. It must not wait for a server,
            because other threads would wait too.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None
        self._locks: dict[int, threading.RLock] = {}

    def get(self) -> T:
        """Return the value of this process."""
        pid, made = os.getpid(), self._made
        if made is None or made[0] != pid:
            # A lock for each process: a thread that does not exist here may hold the parent's.
            with self._locks.setdefault(pid, threading.RLock()):
                made = self._made
                if made is None or made[0] != pid:
                    made = self._made = (pid, self._make())
        return made[1]

    def take(self) -> T | None:
        """Return the value of this process for closing, or None. The next `get` makes another."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] == os.getpid() else None


class per_process(Generic[T]):  # noqa: N801 - a decorator, as `cached_property`
    """A property that is computed once per object and process. See `PerProcess`."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> per_process[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> per_process[T] | T:
        if instance is None:
            return self
        values: dict[str, PerProcess[T]] = instance.__dict__.setdefault("_per_process", {})
        found = values.get(self._name) or values.setdefault(self._name, PerProcess(partial(self._make, instance)))
        return found.get()
