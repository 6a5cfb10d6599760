"""
Contracts for your own implementations: `pytest --pyargs mongo_celery.testing.contract`.

`test_fence_target` checks a store other than MongoDB that `change.fence` guards. Configure a function without arguments
that returns a new, empty target (see `FenceTarget`)::

    pytest --pyargs mongo_celery.testing.contract -o mongo_celery_fence_target=shop.targets:make_target

`test_transport` checks a broker, with a real worker::

    pytest --pyargs mongo_celery.testing.contract -o mongo_celery_broker_url=amqp://guest:guest@localhost//

Without configuration they check a fence in memory, and a Redis started for the session. MongoDB comes from
`mongo_celery_mongodb_url`, or is also started.
"""

from __future__ import annotations

from typing import Protocol

from mongo_celery.bridge.fenced.fence import Fence


class FenceTarget(Protocol):
    """A store of numbers by key. Each write has a fence."""

    def write(self, fence: Fence, key: str, value: int) -> None:
        """
        Write a number if the fence admits it.

        Raises:
            StaleFencingTokenError: a newer execution has already written.
        """

    def read(self, key: str) -> int | None:
        """Return the number of a key, or None."""
