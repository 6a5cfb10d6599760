"""A bridge on a set of its own, whose oplog rolls over when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bson import Timestamp
from pymongo import MongoClient

from tests.acceptance.chain_rig import APP, Chain
from tests.chaos.history import Due
from tests.fixtures.mongo import sparse
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]

PADDING = "x" * 100_000
_ROOMY_MB = 990.0
"""The least that a running server takes."""


class Rolling(Chain):
    """A bridge on a set whose oplog is rolled over when the test says so."""

    def roll(self, beside: str | None = None) -> None:
        """
        Roll the oplog over all that was written.

        Beside a handler that flows no faster than it is read: on a busy machine the stream itself would be overtaken.
        """
        written = self.client.admin.command("ping")["operationTime"]

        def rolled() -> bool:
            self.client["elsewhere"]["padding"].insert_many([{"padding": PADDING} for _ in range(20)])
            if beside is not None:
                self.write(beside, "beside", len(self.written))
                self.wait_done(handlers=[beside])
            return bool(self.oldest > written)

        wait_for(rolled, message="the oplog has rolled over all that was written")

    def keep(self) -> None:
        """Keep what is in the oplog now: it would roll on for a while, also between a look at it and its use."""
        self.client.admin.command("replSetResizeOplog", size=_ROOMY_MB)

    def roll_past(self, flowing: str) -> None:
        """Roll it over all but a handler that flows, whose watermark is in the oplog then."""
        self.roll(beside=flowing)
        self.keep()
        self.write(flowing, "meanwhile", 1)
        self.wait_done(handlers=[flowing])
        wait_for(lambda: self.watermark(flowing) > self.oldest, message="a watermark in the oplog")

    @property
    def oldest(self) -> Timestamp:
        """Time of the oldest oplog entry."""
        found = self.client["local"]["oplog.rs"].find_one(sort=[("$natural", 1)])
        assert found is not None, "an oplog is never empty"
        time: Timestamp = found["ts"]
        return time

    def subscription(self, name: str) -> Document:
        """The stored document of a subscription."""
        return sparse(self.state["handlers"]).find_one({"_id": f"chain/{name}"}) or {}

    def watermark(self, name: str) -> Timestamp:
        """Time of the stored watermark of a subscription; the beginning of time before the first."""
        return self.subscription(name)["clusterTime"] or Timestamp(0, 0)

    @property
    def lease(self) -> Document:
        """The stored lease."""
        return self.state["leases"].find_one({"_id": "chain"}) or {}

    def halt(self, key: str = "bad", **do: Any) -> Due:
        """Write a change that halts its partition, and wait for the halt."""
        item = self.stand(self.write("halting", key, 1, act="raise", **{"times": 99, **do}))
        self.wait_state(item, lambda state: state["state"] == "halted")
        return item

    def key_beside(self, item: Due) -> str:
        """Give a key of another partition."""
        partition = (self.partition_of(item.handler, item.key) + 1) % self.partitions
        return next(self.keys(item.handler, partition))

    def command(self, *arguments: str) -> ProjectProcess:
        """Run one of the commands on changes to its end."""
        process = self._processes.celery(
            APP,
            "changes",
            *arguments,
            name="changes",
            environment={"CHAIN_BROKER": self.redis.url, "CHAIN_MONGO": self._url, **self._environment},
        )
        process.wait()
        return process

    def shown(self) -> dict[str, str]:
        """What `status` shows of each subscription."""
        return {each["name"]: each["state"] for each in self.changes("status")["handlers"]}


def rollings(client: MongoClient[Document], url: str, directory: Path) -> Iterator[Callable[..., Rolling]]:
    """Give what makes such a bridge, with these handlers and options; they end together."""
    with ExitStack() as stack:

        def make(*handlers: str, **options: Any) -> Rolling:
            return stack.enter_context(Rolling(client, url, directory, handlers=handlers, options=options))

        yield make
