"""A bridge on a set of its own, whose oplog rolls over when the test says so."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from bson import Timestamp
from pymongo.errors import OperationFailure

from mongo_celery.mongo.oplog import operation_time
from tests.fixtures.mongo import sparse
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment
from tests.rig.history import Due
from tests.rig.project import Done

Document = dict[str, Any]

PADDING = "x" * 100_000
_ROOMY_MB = 990.0
"""The least that a running server takes."""


class Rolling(Deployment):
    """A bridge on a set whose oplog is rolled over when the test says so."""

    def roll(self, beside: str | None = None) -> None:
        """
        Roll the oplog over all that was written.

        Beside a handler that flows no faster than it is read: on a busy machine the stream itself would be overtaken.
        """
        self.is_recorded = False
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
        def found() -> Timestamp | None:
            with suppress(OperationFailure):  # it was removed between its finding and its reading
                return (self.client["local"]["oplog.rs"].find_one(sort=[("$natural", 1)]) or {}).get("ts")
            return None

        return wait_for(found, message="the oldest entry of the oplog")

    def subscription(self, name: str) -> Document:
        return sparse(self.state["handlers"]).find_one({"_id": f"chain/{name}"}) or {}

    def watermark(self, name: str) -> Timestamp:
        """Time of the stored watermark of a subscription; the beginning of time before the first."""
        return self.subscription(name)["clusterTime"] or Timestamp(0, 0)

    def wait_passed(self, handler: str) -> None:
        """Wait until the stored watermark has passed all that was written, whether it is done or stored."""
        written = operation_time(self.client)
        wait_for(lambda: self.watermark(handler) >= written, message="a watermark behind all that was written")

    def wait_removed(self) -> None:
        """Wait until nothing is stored any more, and no partition is marked."""
        marked = {"stored": {"$ne": None}}
        partitions, stored = self.state["partitions"], self.state["backlog"]
        wait_for(
            lambda: not stored.count_documents({}) and not partitions.count_documents(marked),
            message=lambda: f"{stored.count_documents({})} stored, marked: {list(partitions.find(marked))}",
        )

    def halt(self, key: str = "bad", **do: Any) -> Due:
        item = self.stand(self.write("halting", key, 1, act="raise", **{"times": 99, **do}))
        self.wait_state(item, lambda state: state["state"] == "halted")
        return item

    def key_beside(self, item: Due) -> str:
        partition = (self.partition_of(item.handler, item.key) + 1) % self.partitions
        return next(self.keys(item.handler, partition))

    def command(self, *arguments: str) -> Done:
        return self.run("changes", *arguments)

    def shown(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.changes("status")["handlers"]}
