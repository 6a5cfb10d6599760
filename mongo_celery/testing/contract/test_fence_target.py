"""The contract of a fenced target: the newest execution of a partition wins, even if an older one writes last."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Lock
from typing import Any

import pytest

from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.testing.contract import FenceTarget

OPTION = "mongo_celery_fence_target"
TOKENS = 40
WRITERS = 8


class MemoryTarget:
    """The default target: one stamp for each key, compared by `Fence.stamp`."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Mapping[str, Any], int]] = {}
        self._lock = Lock()

    def write(self, fence: Fence, key: str, value: int) -> None:
        """Compare and write under a lock."""
        with self._lock:
            stamps, _ = self._rows.get(key, ({}, 0))
            self._rows[key] = fence.stamp(stamps), value

    def read(self, key: str) -> int | None:
        """Return the number."""
        return self._rows[key][1] if key in self._rows else None


@pytest.fixture
def target(pytestconfig: pytest.Config) -> FenceTarget:
    """Give a new target from the configured function."""
    module, _, name = str(pytestconfig.getini(OPTION)).partition(":")
    make: Callable[[], FenceTarget] = getattr(importlib.import_module(module), name) if module else MemoryTarget
    return make()


def fence(token: int, index: int = 0, partitioning: int = 1, handler: str = "totals") -> Fence:
    """Return the fence of one execution."""
    return Fence(f"shop/{handler}", partitioning=partitioning, index=index, token=token)


def refuses(target: FenceTarget, stale: Fence, key: str = "ann", value: int = -1) -> bool:
    """Return True if a write raises the package's error and changes nothing."""
    before = target.read(key)
    with pytest.raises(StaleFencingTokenError):
        target.write(stale, key, value)
    return target.read(key) == before


def test_a_newer_execution_overwrites_an_older_one(target: FenceTarget) -> None:
    """It also writes to an empty key."""
    assert target.read("ann") is None
    target.write(fence(7), "ann", 1)
    target.write(fence(8), "ann", 2)
    assert target.read("ann") == 2


def test_an_older_execution_is_refused_and_changes_nothing(target: FenceTarget) -> None:
    """P3: repeated writes are refused, even with the current value."""
    target.write(fence(8), "ann", 2)
    assert refuses(target, fence(7))
    assert refuses(target, fence(0), value=2)
    target.write(fence(8), "ann", 3)
    assert target.read("ann") == 3


def test_one_execution_writes_as_often_as_it_wants(target: FenceTarget) -> None:
    """All writes of a run have the same token."""
    for value in (1, 2, 3):
        target.write(fence(7), "ann", value)
        target.write(fence(7), "bob", value)
    assert (target.read("ann"), target.read("bob")) == (3, 3)


def test_tokens_of_other_partitions_do_not_compare(target: FenceTarget) -> None:
    """A small token of one partition is not older than a large one of another."""
    target.write(fence(900, index=0), "ann", 1)
    target.write(fence(2, index=1), "joe", 2)
    assert refuses(target, fence(1, index=1), "joe")
    assert (target.read("ann"), target.read("joe")) == (1, 2)


def test_tokens_of_other_handlers_do_not_compare(target: FenceTarget) -> None:
    """One handler's writes do not move another's fence back."""
    target.write(fence(900), "ann", 1)
    target.write(fence(2, handler="sums"), "ann", 2)
    assert refuses(target, fence(899))
    assert target.read("ann") == 2


def test_a_newer_partitioning_begins_anew_and_ends_the_older_one(target: FenceTarget) -> None:
    """P3: indexes then name other partitions, so even a large earlier token is refused."""
    target.write(fence(900), "ann", 1)
    target.write(fence(1, index=3, partitioning=2), "ann", 2)
    assert refuses(target, fence(901))
    assert refuses(target, fence(901, index=3))
    target.write(fence(2, index=3, partitioning=2), "ann", 3)
    assert target.read("ann") == 3


def test_the_newest_of_many_writers_wins(target: FenceTarget) -> None:
    """P3: comparison and write are atomic. Only a late writer is refused."""
    tokens = list(range(1, TOKENS + 1))
    Random(1).shuffle(tokens)
    lock, written = Lock(), set[int]()

    def write(token: int) -> None:
        try:
            target.write(fence(token), "ann", token)
        except StaleFencingTokenError:
            return
        with lock:
            written.add(token)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, tokens))
    assert target.read("ann") == TOKENS
    assert TOKENS in written
