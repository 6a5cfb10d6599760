"""What `once` has let run: by its idempotency records, of all processes, and by the bodies that ran in this one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from bson import ObjectId
from pymongo.client_session import ClientSession

from mongo_celery.mongo.opening import Source, plain_types, resolve_collection, with_majority
from mongo_celery.outbox.idempotency import IdempotencyClaim, IdempotencyStore

__tracebackhide__ = True  # for pytest: what fails is the test's line, and the handler's
_SHOWN = 10


class OnceRuns:
    """
    The bodies of functions under `once` that were begun in this process, of `once_runs`.

    ::

        runs: OnceRuns
        with once_runs() as runs:
            pay.apply([7])
            pay.apply([7])
        assert runs.count(7, task="shop.pay") == 1

    A body that failed counts, and so does each time that a transaction repeats it. A call without a record does not: a
    direct call, or one of which `key=` gave None.
    """

    def __init__(self) -> None:
        self._identities: list[Any] = []
        self._lock = threading.Lock()

    def count(self, key: Any, *, task: str | None = None) -> int:
        """
        How often the body of a key was begun.

        Args:
            key: what `key=` of `once` gives, with `task`; else the task's id.
            task: name of the task, or `module.function` where the function is called by another one.
        """
        wanted = identity_of(key, task)
        with self._lock:
            return self._identities.count(wanted)

    def assert_ran(self, key: Any, *, task: str | None = None, times: int = 1) -> None:
        """
        Demand that the body of a key was begun so many times.

        Args:
            key: as of `count`.
            task: as of `count`.
            times: how often; 0 for never.

        Raises:
            AssertionError: it was not; with what was begun instead.
        """
        count = self.count(key, task=task)
        if count != times:
            with self._lock:
                others = ", ".join(map(_shown, self._identities[:_SHOWN])) or "nothing"
            said = _shown(identity_of(key, task))
            raise AssertionError(f"the body of {said} was begun {count} times, not {times}; begun were: {others}.")

    def note(self, identity: Any) -> None:
        """A body begins."""
        with self._lock:
            self._identities.append(_plain(identity))


@contextlib.contextmanager
def once_runs() -> Iterator[OnceRuns]:
    """
    Count the bodies of all functions under `once` that this process begins inside, in whatever thread.

    ::

        with once_runs() as runs:
            pay.apply([9])
        runs.assert_ran(9, task="shop.pay")
    """
    runs = OnceRuns()
    claim, claim_done = IdempotencyStore.claim, IdempotencyStore.claim_done

    def claimed(store: IdempotencyStore, identity: Any, owner: ObjectId) -> IdempotencyClaim:
        return _noted(runs, identity, claim(store, identity, owner))

    def claimed_done(
        store: IdempotencyStore, identity: Any, owner: ObjectId, session: ClientSession
    ) -> IdempotencyClaim:
        return _noted(runs, identity, claim_done(store, identity, owner, session))

    with patch.multiple(IdempotencyStore, claim=claimed, claim_done=claimed_done):
        yield runs


def assert_once(marks: Source, key: Any, *, task: str | None = None, ran: bool = True) -> None:
    """
    Demand that what has a key has run to its end under `once`, or was not run: whoever ran it, in whatever process.

    ::

        pay.apply([10])
        assert_once(records, 10, task="shop.pay")
        assert_once(records, 11, task="shop.pay", ran=False)

    Args:
        marks: what `once` was given: the collection, or a callable that returns it.
        key: what `key=` of `once` gives, with `task`; else the task's id.
        task: name of the task, or `module.function` where the function is called by another one.
        ran: False demands that it has no record: it was not run, or has failed, or its record has expired.

    Raises:
        AssertionError: its record says otherwise.
    """
    identity = identity_of(key, task)
    collection = resolve_collection(marks)
    found = with_majority(collection, plain_types(collection)).find_one({"_id": identity})
    state = None if found is None else found["state"]
    if state == ("done" if ran else None):
        return
    without = "has no idempotency record: it has not run, or has failed"
    said = {None: without, "done": "has run"}.get(state, "is running")
    raise AssertionError(f"{_shown(identity)} {said}, by {collection.full_name}.")


def identity_of(key: Any, task: str | None) -> Any:
    """Return the `_id` of an idempotency record."""
    return _plain(key) if task is None else {"t": task, "k": _plain(key)}


def _noted(runs: OnceRuns, identity: Any, found: IdempotencyClaim) -> IdempotencyClaim:
    if found.owner is not None:
        runs.note(identity)
    return found


def _plain(value: Any) -> Any:
    """As MongoDB has it: tuples are lists there."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _shown(identity: Any) -> str:
    if isinstance(identity, dict) and set(identity) == {"t", "k"}:
        return f"{identity['t']} with key {identity['k']!r}"
    return f"task {identity!r}"
