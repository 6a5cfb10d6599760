"""
Whether this worker was told to end: known in the parent by a signal of Celery, in its children by shared memory.

Prefork children hear nothing of a warm shutdown: the parent waits for them, until a supervisor's patience ends and all
of them are killed. The byte is made before the fork, so a parent's word reaches every child. Where a pool starts its
children as new programs (spawn) they do not share it, and what is said here stays false for them.
So it does where a worker is ended without a signal of the system: `celery control shutdown` announces nothing.
"""

from __future__ import annotations

import mmap
from typing import Any

from celery import signals

_SERVING, _TOLD = b"\0", b"\1"
_byte = mmap.mmap(-1, 1)


def is_leaving() -> bool:
    """Whether the worker that this process belongs to was told to shut down."""
    return _byte[:1] == _TOLD


@signals.worker_init.connect(weak=False)
def begin_service(**_: Any) -> None:
    """A worker begins, which may be the second one of its process: what the first was told is not for it."""
    _byte[:1] = _SERVING


@signals.worker_shutting_down.connect(weak=False)
def announce_departure(**_: Any) -> None:
    """A warm or a cold shutdown begins, in the worker's main process."""
    _byte[:1] = _TOLD
