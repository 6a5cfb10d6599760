"""
The housekeeping of one term: server queries beside the listener's work, in one thread.

Nothing waits for it. A slow or frozen server delays other jobs by one call's time limit, and never the leader.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mongo_celery.mongo.redaction import short

logger = logging.getLogger("mongo_celery.listener")

_FAILED_SECONDS = 30.0


class Job:
    """
    A repeated job.

    Args:
        run: does the job in bounded time. Returns the seconds until the next run, or infinity for none.
        close: called in the thread at the end.
        changed: notified when the job becomes due.

    Attributes:
        due_at: monotonic time of the next run.
    """

    def __init__(self, run: Callable[[], float], close: Callable[[], None], changed: threading.Condition) -> None:
        self.run = run
        self.close = close
        self.due_at = 0.0
        self._changed = changed

    def wake(self) -> None:
        """Run it as soon as the thread is free. Any thread may call this."""
        with self._changed:
            self.due_at = 0.0
            self._changed.notify()


class Housekeeping:
    """The jobs of one term, and their thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="mongo_celery-housekeeping", daemon=True)

    def add(self, run: Callable[[], float], close: Callable[[], None] = lambda: None) -> Job:
        """Add a job. Any thread may call this."""
        job = Job(run, close, self._changed)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        return job

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Start no more jobs, without waiting. A running call has a time limit."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _run(self) -> None:
        while (job := self._await_job()) is not None:
            job.due_at = time.monotonic() + _FAILED_SECONDS  # `wake` may meanwhile set an earlier time
            try:
                pause = job.run()
            except Exception as error:  # noqa: BLE001 - one job must not end the others
                self._log(job, error)
                continue
            with self._changed:
                if job.due_at:
                    job.due_at = time.monotonic() + pause
        for job in self._jobs:
            job.close()

    def _await_job(self) -> Job | None:
        """Wait until a job is due, and return it. None at the end."""
        with self._changed:
            while not self._is_over:
                job = min(self._jobs, key=lambda each: each.due_at, default=None)
                pause = job.due_at - time.monotonic() if job is not None else threading.TIMEOUT_MAX
                if job is not None and pause <= 0:
                    return job
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
        return None

    def _log(self, job: Job, error: Exception) -> None:
        if self._is_over:  # its client may already be closed
            return
        logger.error(
            "a bug: %s failed. The listener tries again in %.0f s. Report this error: %s: %s",
            job.run.__qualname__,
            _FAILED_SECONDS,
            type(error).__name__,
            short(error),
            extra={"event": "housekeeping_failed"},
        )
