"""A database that comes back from a backup, as docs/operations/restore.md has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pymongo.database import Database

from mongo_celery.embedded import MongoReplicaSet
from tests.fixtures.forked import run_celery
from tests.fixtures.mongo import MakeClient, MakeReplicaSet, empty
from tests.fixtures.process import Processes, wait_for
from tests.rig.project import OPTIONS

pytestmark = pytest.mark.slow

_APP = "tests.acceptance.project.app"
SLOW, FAILING = "slow one", "failing"


class Shop:
    """A bridge of one partition, so that who starts has all before it committed; its target is in another cluster."""

    def __init__(self, processes: Processes, make_client: MakeClient, sink: Database[Any], **named: str) -> None:
        self.sink, self._processes, self._make_client = sink, processes, make_client
        options = {**OPTIONS, "partitions": 1, "queues": 1, "failure_policy": "dead_letter"}
        self._environment = {**named, "PROJECT_OPTIONS": json.dumps(options), "PROJECT_FAIL": "1"}

    def move(self, servers: MongoReplicaSet) -> None:
        """Be in this cluster from now on."""
        client, names = self._make_client(servers.url), self._environment["PROJECT_NAMES"]
        self.data, self.state = client[f"{names}_data"], client[f"{names}_state"]
        self.servers, self._environment["PROJECT_MONGO"] = servers, servers.url

    def start(self) -> None:
        self.run("listener", "reading from")
        self.run("worker", "ready")

    def run(self, role: str, awaited: str) -> None:
        self._processes.celery(_APP, role, "-l", "INFO", environment=self._environment).wait_for_output(awaited)

    def stop(self) -> int:
        """End both, and empty the broker; how many handlers have started until then."""
        for each in self._processes.started[-2:]:
            each.terminate()
        self.celery("purge", "-f", "-Q", "project.0")
        return self.sink["starts"].count_documents({})

    def celery(self, *arguments: str) -> None:
        done = run_celery("-A", _APP, *arguments, environment=self._environment)
        assert done.returncode == 0, done.stdout + done.stderr

    def write(self, key: str, n: int) -> None:
        self.data["items"].update_one({"_id": key}, {"$set": {"n": n}}, upsert=True)
        self.accepted(key, n, times=1)

    def accepted(self, key: str, n: int, times: int) -> None:
        """Wait until the target, which knows all fences of before, has taken an effect so many times."""
        wanted = {"_id": f"record/{key}", f"log.{times - 1}": {"$exists": True}, "log.n": n}
        wait_for(lambda: self.sink["registers"].find_one(wanted), message=f"{key} {n}, the effect {times} of its key")

    def started(self, since: int = 0) -> set[tuple[str, int]]:
        """For what a handler has started, behind so many starts."""
        return {(each["key"], each["n"]) for each in self.sink["starts"].find().sort("$natural", 1).skip(since)}


def copy_of(database: Database[Any]) -> dict[str, list[Any]]:
    return {name: [*database[name].find()] for name in database.list_collection_names()}


def restore(database: Database[Any], copy: dict[str, list[Any]]) -> None:
    empty(database.client, database)
    for name in filter(copy.get, copy):
        database[name].insert_many(copy[name])


@pytest.fixture
def shop(
    processes: Processes,
    make_replica_set: MakeReplicaSet,
    make_client: MakeClient,
    database: Database[Any],
    mongo_url: str,
    redis_url: str,
    tmp_path: Path,
) -> Shop:
    named = {"PROJECT_SINK": mongo_url, "PROJECT_BROKER": redis_url, "PROJECT_NAMES": database.name}
    shop = Shop(processes, make_client, database.client[f"{database.name}_facts"], **named)
    shop.move(make_replica_set(directory=tmp_path / "set"))
    shop.start()
    return shop


def test_a_cluster_from_copies_of_its_files_goes_on_where_it_was(shop: Shop, tmp_path: Path) -> None:
    """What was running at the backup runs again, what came since is gone, and a target outside takes what follows."""
    shop.write("a", 1)
    shop.data["items"].insert_one({"_id": SLOW, "n": 1})
    wait_for(lambda: (SLOW, 1) in shop.started())
    shop.data.client.admin.command("fsync", lock=True)
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    shop.data.client.admin.command("fsyncUnlock")
    shop.sink["gates"].insert_one({"_id": SLOW})
    shop.write("a", 2)
    shop.write("b", 1)
    before = shop.stop()
    shop.servers.kill()
    shutil.rmtree(tmp_path / "set")
    (tmp_path / "copy").rename(tmp_path / "set")
    shop.servers.restart()
    shop.start()
    shop.accepted(SLOW, 1, times=2)
    shop.write("a", 3)
    assert shop.started(before) == {(SLOW, 1), ("a", 3)}
    assert {each["_id"] for each in shop.data["items"].find()} == {"a", SLOW}


def test_with_an_earlier_state_what_came_since_is_handled_again(shop: Shop) -> None:
    """And dead letters that were discarded since are there again."""
    shop.write("a", 1)
    shop.data["items"].insert_one({"_id": FAILING, "n": 1})
    wait_for(lambda: shop.state["dead_letters"].count_documents({}) == 1)
    copy = copy_of(shop.state)
    shop.write("a", 2)
    shop.write("b", 1)
    shop.celery("changes", "dead-letters", "discard", "--all", "--yes")
    before = shop.stop()
    restore(shop.state, copy)
    shop.start()
    shop.accepted("b", 1, times=2)
    assert shop.started(before) == {("a", 2), ("b", 1)}
    assert shop.state["dead_letters"].count_documents({}) == 1


@pytest.mark.parametrize("where", ["the same set", "a new set"])
def test_what_is_restored_runs_no_handler_that_was_sent_on_first(
    where: str, shop: Shop, make_replica_set: MakeReplicaSet
) -> None:
    """From copies of collections; a snapshot brings the documents, and so does a restoring while a listener leads."""
    shop.write("a", 1)
    copies = copy_of(shop.state), copy_of(shop.data)
    shop.write("b", 1)
    before = shop.stop()
    if where == "a new set":
        shop.move(make_replica_set())
    restore(shop.state, copies[0])
    restore(shop.data, copies[1])
    shop.celery("changes", "reset", "record", "--to", "now", "--yes")
    shop.start()
    shop.write("c", 1)
    assert shop.started(before) == {("c", 1)}
    shop.celery("changes", "snapshot", "start", "record", "--yes")
    shop.accepted("a", 1, times=2)
    restore(shop.data, copies[1])
    shop.accepted("a", 1, times=3)
    assert shop.started(before) == {("a", 1), ("c", 1)}


def test_in_a_new_set_whoever_was_not_sent_on_stands_still_until_somebody_decides(
    shop: Shop, make_replica_set: MakeReplicaSet
) -> None:
    """Its oplog is whole, and has the restoring: but nobody can have read up to a place before it."""
    shop.write("a", 1)
    read = {"$expr": {"$gt": ["$clusterTime", "$startAtOperationTime"]}}
    wait_for(lambda: shop.state["handlers"].find_one(read), message="its position is stored")
    copies = copy_of(shop.state), copy_of(shop.data)
    before = shop.stop()
    shop.move(make_replica_set())
    restore(shop.state, copies[0])
    restore(shop.data, copies[1])
    shop.run("listener", "is stopped: its position is")
    shop.celery("changes", "reset", "record", "--to", "now", "--yes")
    shop.start()
    shop.write("b", 1)
    assert shop.started(before) == {("b", 1)}
