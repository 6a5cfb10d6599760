"""What happens when the oplog no longer reaches back: stop and say so, or go on as somebody decided."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet
from tests.acceptance.scene import OPTIONS
from tests.fixtures.mongo import sparse
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]
APP = "tests.acceptance.project.app"
PADDING = "x" * 100_000
_ROOMY_MB = 990.0
"""The least that a running server takes."""


class Rolled:
    """A bridge whose position has rolled out of the oplog while no listener ran."""

    def __init__(self, processes: Processes, watched: MongoClient[Document], sink: MongoClient[Document]) -> None:
        self.names = f"rolled_{uuid4().hex[:10]}"
        self.watched = watched
        self.items = watched[f"{self.names}_data"]["items"]
        self.starts = sink[f"{self.names}_sink"]["starts"]
        self.state = watched[f"{self.names}_state"]
        self._processes = processes
        self._environment: dict[str, str] = {}

    def begin(self, url: str, sink_url: str, broker: str, handlers: str = "") -> None:
        """Handle one change, stop the listener, write another, and roll the oplog over both."""
        self._environment = {
            "PROJECT_HANDLERS": handlers,
            "PROJECT_MONGO": url,
            "PROJECT_SINK": sink_url,
            "PROJECT_BROKER": broker,
            "PROJECT_NAMES": self.names,
            "PROJECT_OPTIONS": json.dumps(OPTIONS),
        }
        self.start("worker", "-c", "1", "--without-gossip", "--without-mingle")
        first = self.start("listener")
        self.write("before")
        self.wait_for("before")
        wait_for(self.position, message="a stored position")
        first.terminate()
        first.wait()
        self.write("lost")
        self._roll()
        self._keep()

    def start(self, *arguments: str) -> ProjectProcess:
        """Start a process of the project."""
        return self._processes.start(
            arguments[0], sys.executable, "-m", "celery", "-A", APP, *arguments, environment=self._environment
        )

    def write(self, key: str) -> None:
        """Write a document that the bridge watches."""
        self.items.insert_one({"_id": key, "n": 1})

    def wait_for(self, key: str, handler: str = "record") -> None:
        """Wait until the handler has started for a key."""
        wait_for(lambda: key in self.handled_by(handler), message=f"the handler {handler} of {key}")

    @property
    def handled(self) -> set[str]:
        """Keys for which a handler has started."""
        return {start["key"] for start in self.starts.find()}

    def handled_by(self, handler: str) -> set[str]:
        """Keys for which this handler has started."""
        return {start["key"] for start in self.starts.find({"handler": handler})}

    def put_at_the_tip(self, handler: str) -> None:
        """Let a handler stand at this moment, as if only the others had stood still."""
        now = self.watched.admin.command("ping")["operationTime"]
        place = {"startAtOperationTime": now, "clusterTime": now, "resumeToken": None, "fingerprint": None}
        self.state["handlers"].update_one({"_id": f"project/{handler}"}, {"$set": place})

    @property
    def lease(self) -> Document:
        """The lease document."""
        return self.state["leases"].find_one({"_id": "project"}) or {}

    def gaps(self, handler: str = "record") -> list[Document]:
        """What a handler gave up."""
        found = self.state["handlers"].find_one({"_id": f"project/{handler}"}) or {}
        return list(found.get("gaps", ()))

    def position(self) -> Timestamp | None:
        """Return the smallest place that all handlers have stored; None while one has none."""
        times = [each["clusterTime"] for each in sparse(self.state["handlers"]).find()]
        return None if None in times else min(times, default=None)

    def _roll(self) -> None:
        written = self.watched.admin.command("ping")["operationTime"]

        def rolled() -> bool:
            self.watched["elsewhere"]["padding"].insert_many([{"padding": PADDING} for _ in range(40)])
            oldest = self.watched["local"]["oplog.rs"].find_one(sort=[("$natural", 1)])
            return oldest is not None and oldest["ts"] > written

        wait_for(rolled, message="the oplog has rolled over all that was written")

    def _keep(self) -> None:
        # What is in the oplog now stays: it would roll on for a while, also between a choice of a place and its use.
        self.watched.admin.command("replSetResizeOplog", size=_ROOMY_MB)


@pytest.fixture
def roll(
    processes: Processes,
    rolling_oplog: MongoReplicaSet,
    make_client: Callable[..., MongoClient[Document]],
    mongo_client: MongoClient[Document],
    mongo_url: str,
    redis_url: str,
) -> Callable[..., Rolled]:
    """Give what makes such a bridge, with these handlers beside `record`."""

    def make(handlers: str = "") -> Rolled:
        bridge = Rolled(processes, make_client(rolling_oplog.url), mongo_client)
        bridge.begin(rolling_oplog.url, mongo_url, redis_url, handlers)
        return bridge

    return make


@pytest.fixture
def rolled(roll: Callable[..., Rolled]) -> Rolled:
    return roll()


def test_lost_history_stops_the_listener_until_somebody_decides(rolled: Rolled) -> None:
    """P1, P9: never skipped silently, also by a supervisor's restarts; the remedy is in the sentence and works."""
    for _ in range(2):
        listener = rolled.start("listener")
        assert listener.wait() == 1
        assert "no longer reaches back" in listener.text
        assert "--on-history-lost" in listener.text
        assert "Traceback" not in listener.text
    assert rolled.lease["state"] == "history_lost"
    assert rolled.lease.get("listenerId") is None

    going_on = rolled.start("listener", "--on-history-lost", "now")
    going_on.wait_for_output("is lost; it continues at")
    rolled.write("after")
    rolled.wait_for("after")

    assert rolled.handled == {"before", "after"}
    (gap,) = rolled.gaps()
    assert gap["policy"] == "now"
    wait_for(lambda: (rolled.position() or Timestamp(0, 0)) > gap["until"])
    going_on.terminate()
    assert going_on.wait() == 0
    again = rolled.start("listener")
    rolled.write("later")
    rolled.wait_for("later")
    assert again.running, "the new position is in the oplog: no decision is needed any more"


def test_going_on_at_the_oldest_entry_delivers_all_that_the_oplog_still_holds(rolled: Rolled) -> None:
    """P1: what was written before the start, and is still in the oplog, is not lost."""
    rolled.write("still there")
    rolled.start("listener", "--on-history-lost", "oldest").wait_for_output("is lost; it continues at")

    rolled.wait_for("still there")

    assert "lost" not in rolled.handled
    assert [gap["policy"] for gap in rolled.gaps()] == ["oldest"]


def test_a_handler_whose_history_can_be_read_loses_nothing_of_it(roll: Callable[..., Rolled]) -> None:
    """P1: `record` stood still since long ago; `audit` goes on where it stood, although the decision was `now`."""
    rolled = roll("audit")
    rolled.put_at_the_tip("audit")
    rolled.write("readable")
    listener = rolled.start("listener", "--on-history-lost", "now")
    listener.wait_for_output("is lost; it continues at")
    rolled.write("after")

    for handler in ("record", "audit"):
        rolled.wait_for("after", handler)
    rolled.wait_for("readable", "audit")  # of another partition: it may come behind "after"
    assert rolled.handled_by("record") == {"before", "after"}
    assert [len(rolled.gaps(handler)) for handler in ("record", "audit")] == [1, 0]
