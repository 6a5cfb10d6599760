"""Lost history stops only those who lost it, is decided for each of them, and does not come without a warning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.demo.history import Due
from mongo_celery.embedded import MongoReplicaSet
from tests.acceptance.chain_rig import APP, Chain
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
        return self.state["subscriptions"].find_one({"_id": f"chain/{name}"}) or {}

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

    def changes(self, *arguments: str) -> ProjectProcess:
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
        status = json.loads(self.changes("status", "--json").text)
        return {each["name"]: each["state"] for each in status["subscriptions"]}


@pytest.fixture
def make_rolling(
    rolling_oplog: MongoReplicaSet, make_client: Callable[..., MongoClient[Document]], tmp_path: Path
) -> Iterator[Callable[..., Rolling]]:
    """Give what makes such a bridge, with these handlers."""
    made: list[Rolling] = []

    def make(*handlers: str, **options: Any) -> Rolling:
        chain = Rolling(make_client(rolling_oplog.url), rolling_oplog.url, tmp_path, handlers=handlers, options=options)
        made.append(chain.__enter__())
        return chain

    yield make
    for chain in made:
        chain.__exit__()


def test_a_halted_change_is_not_given_up_because_no_watermark_was_ever_stored(
    make_rolling: Callable[..., Rolling],
) -> None:
    """I1: `start_from="oldest"` says where to begin, and not what may be lost once something was committed."""
    chain = make_rolling("halting")
    bad = chain.stand(chain.write("halting", "bad", 1, act="raise", times=99))
    good = chain.write("halting", chain.key_beside(bad), 1)
    listener, _ = chain.both()
    chain.wait_state(bad, lambda state: state["state"] == "halted")
    chain.wait_state(good, lambda state: state["committed"] == 1)
    assert listener.terminate() == 0
    assert chain.subscription("halting")["resumeToken"] is None, "the halted change is the first one"
    chain.roll()
    chain.keep()

    again = chain.run("listener", name="again")

    assert again.wait() == 1
    assert "no longer reaches back" in again.text
    assert chain.subscription("halting")["lost"]["oldest"] == chain.oldest
    assert "gaps" not in chain.lease


def test_those_who_lost_their_history_stand_still_and_the_others_go_on(make_rolling: Callable[..., Rolling]) -> None:
    """I2, P12: until somebody decides, and for that one alone; the decision needs no restart."""
    chain = make_rolling("plain", "halting")
    listener, _ = chain.both()
    bad = chain.halt()
    chain.roll_past("plain")
    assert listener.terminate() == 0

    again = chain.listener("again")
    chain.write("plain", "two", 1)
    chain.wait_done(handlers=["plain"])
    unread = chain.write("halting", chain.key_beside(bad), 1)

    again.wait_for_output("handler halting has lost its history.* go-on halting --from oldest")
    assert chain.shown() == {"halting": "history_lost", "plain": "flowing"}
    assert chain.starts(unread) == []

    done = chain.changes("go-on", "halting", "--from", "oldest", "--yes")
    assert done.returncode == 0, done.text
    chain.wait_started(unread)
    assert chain.of(bad)["state"] == "halted", "its partitions stay as they are"
    assert [(gap["policy"], gap["subscriptions"]) for gap in chain.lease["gaps"]] == [("oldest", ["halting"])]
    where = ("halting", "--partition", str(chain.partition_of("halting", bad.key)))
    gone = chain.changes("retry", *where)
    assert (gone.returncode, "can no longer be read" in gone.text) == (1, True), gone.text
    assert chain.of(bad)["state"] == "halted", "a retry of nothing would hide what is lost"
    assert again.running
    chain.judge()


def test_a_handler_that_returns_too_late_stands_alone(make_rolling: Callable[..., Rolling]) -> None:
    """I2, P12: it was away for longer than the oplog; nobody else has lost anything."""
    chain = make_rolling("plain", "other")
    chain.worker()
    first = chain.listener("first")
    for handler in ("plain", "other"):
        chain.write(handler, "before", 1)
    chain.wait_done()
    assert first.terminate() == 0
    without = chain.listener("without", CHAIN_HANDLERS="plain")
    chain.roll_past("plain")
    assert without.terminate() == 0

    late = chain.listener("late")
    chain.write("plain", "after", 1)
    chain.wait_done(handlers=["plain"])

    late.wait_for_output("handler other has lost its history")
    assert chain.subscription("other")["lost"]["at"] < chain.oldest
    assert chain.subscription("plain").get("lost") is None
    assert chain.lease["clusterTime"] > chain.oldest, "a handler that is added now begins where the others stand"


def test_what_is_buffered_outlives_the_oplog_and_a_listener_warns_before(make_rolling: Callable[..., Rolling]) -> None:
    """I2: a listener names the partition and the command, which still finds the change and what came behind it."""
    chain = make_rolling("plain", "halting")
    listener, _ = chain.both()
    keys = chain.keys("halting", 0)
    bad = chain.write("halting", next(keys), 1, act="raise", times=2)
    chain.allow(bad, 2)
    chain.wait_state(bad, lambda state: state["state"] == "halted")
    behind = chain.write("halting", next(keys), 1)
    chain.wait_read(2)
    chain.roll(beside="plain")

    listener.wait_for_output(r"handler halting .*partition 0.*halted.*changes retry halting --partition 0")
    assert chain.changes("retry", "halting", "--partition", "0").returncode == 0
    chain.wait_state(bad, lambda state: state["state"] == "halted" and state["retry"])
    assert chain.changes("retry", "halting", "--partition", "0").returncode == 0

    chain.wait_done()
    assert len(chain.starts(behind)) == 1
    chain.judge()
