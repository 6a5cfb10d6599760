"""Cached values from servers. A server that hangs delays at most one request, and only briefly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import pymongo

from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short, without_credentials

T = TypeVar("T")

_OLD_SECONDS = 5.0
_REST = 4


class Recent(Generic[T]):
    """
    A value that a requesting thread reads at most once in `keep` seconds.

    Other threads get the previous value. If that is some seconds older, they wait. A value that takes long to read is
    kept longer, so the server is not busy with these requests most of the time.

    Args:
        read: returns the value.
        explain: returns the value for an error, from its sentence.
        keep: seconds to keep the value.
    """

    def __init__(self, read: Callable[[], T], explain: Callable[[str], T], keep: float = 1.0) -> None:
        self._read, self._explain = read, explain
        self._least = self._keep = keep
        self._lock = threading.Lock()
        self._value: T
        self._at = float("-inf")

    def __call__(self) -> T:
        """Return the value."""
        age = time.monotonic() - self._at
        if age > self._keep and self._lock.acquire(blocking=age > self._keep + _OLD_SECONDS):
            try:
                if time.monotonic() - self._at > self._keep:
                    begun = time.monotonic()
                    self._value = self._try()
                    self._at = time.monotonic()
                    self._keep = max(self._least, min(_REST * (self._at - begun), _OLD_SECONDS))
            finally:
                self._lock.release()
        return self._value

    def _try(self) -> T:
        try:
            with pymongo.timeout(ANSWER_SECONDS):
                return self._read()
        except MongoCeleryError as error:
            return self._explain(without_credentials(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, others get their answers
            return self._explain(f"{type(error).__name__}: {short(error)}.")


def call_all(reads: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions concurrently, so that a slow server does not delay the other calls."""
    with ThreadPoolExecutor(len(reads)) as threads:
        return list(threads.map(lambda read: read(), reads))
