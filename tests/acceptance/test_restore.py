"""A database that comes back from a backup, as docs/operations/restore.md has it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.embedded import MongoReplicaSet
from tests.fixtures.mongo import MakeClient, MakeReplicaSet, empty
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]

pytestmark = pytest.mark.slow

HANDLER, SLOW, FAILING = "registered", "slow one", "failing"


class Shop(Deployment):
    """A bridge of one partition, so that whoever starts has all before it committed."""

    def move(self, servers: MongoReplicaSet, client: MongoClient[Document]) -> None:
        """Be in this cluster from now on; facts and target stay where they are."""
        self.data, self.state = client[self.data.name], client[self.state.name]
        self.servers, self.url = servers, servers.url
        self.environment["PROJECT_MONGO"] = self.url

    def stop(self) -> int:
        """End listener and worker, and empty the broker; how many handlers have started until then."""
        for each in self._processes.started[-2:]:
            each.terminate()
        with self.broker as broker:
            broker.flushall()
        return self.facts["start"].count_documents({})

    def type(self, *arguments: str) -> None:
        done = self.run("changes", *arguments, "--yes")
        assert done.returncode == 0, done.stdout + done.stderr

    def handle(self, key: str, n: int) -> None:
        self.write(HANDLER, key, n)
        self.accepted(key, n, times=1)

    def accepted(self, key: str, n: int, times: int) -> None:
        """Wait until the target, which knows all fences of before, has taken an effect so many times."""
        wanted = {"_id": key, f"log.{times - 1}": {"$exists": True}, "log": n}
        wait_for(lambda: self.facts["registers"].find_one(wanted), message=f"{key} {n}, the effect {times} of its key")

    def started(self, since: int = 0) -> set[tuple[str, int]]:
        """For what a handler has started, behind so many starts."""
        return {(each.key, each.n) for each in self.starts()[since:]}


def copy_of(database: Database[Any]) -> dict[str, list[Any]]:
    return {name: [*database[name].find()] for name in database.list_collection_names()}


def restore(database: Database[Any], copy: dict[str, list[Any]]) -> None:
    empty(database.client, database)
    for name in filter(copy.get, copy):
        database[name].insert_many(copy[name])


@pytest.fixture
def shop(deployment: MakeDeployment, make_replica_set: MakeReplicaSet, make_client: MakeClient, tmp_path: Path) -> Shop:
    shop = deployment(HANDLER, kind=Shop, include="tests.acceptance.restored_handlers", options={"partitions": 1})
    servers = make_replica_set(directory=tmp_path / "set")
    shop.move(servers, make_client(servers.url))
    shop.both()
    return shop


def test_a_cluster_from_copies_of_its_files_goes_on_where_it_was(shop: Shop, tmp_path: Path) -> None:
    """What was running at the backup runs again, what came since is gone, and a target outside takes what follows."""
    shop.handle("a", 1)
    shop.write(HANDLER, SLOW, 1, gate=SLOW)
    wait_for(lambda: (SLOW, 1) in shop.started())
    shop.data.client.admin.command("fsync", lock=True)
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    shop.data.client.admin.command("fsyncUnlock")
    shop.open_gate(SLOW)
    shop.handle("a", 2)
    shop.handle("b", 1)
    before = shop.stop()
    shop.servers.kill()
    shutil.rmtree(tmp_path / "set")
    (tmp_path / "copy").rename(tmp_path / "set")
    shop.servers.restart()
    shop.both()
    shop.accepted(SLOW, 1, times=2)
    shop.handle("a", 3)
    assert shop.started(before) == {(SLOW, 1), ("a", 3)}
    assert {each["_id"] for each in shop.data[HANDLER].find()} == {"a", SLOW}


def test_with_an_earlier_state_what_came_since_is_handled_again(shop: Shop) -> None:
    """And dead letters that were discarded since are there again."""
    shop.handle("a", 1)
    shop.write(HANDLER, FAILING, 1, act="raise")
    wait_for(lambda: shop.state["dead_letters"].count_documents({}) == 1)
    copy = copy_of(shop.state)
    shop.handle("a", 2)
    shop.handle("b", 1)
    shop.type("dead-letters", "discard", "--all")
    before = shop.stop()
    restore(shop.state, copy)
    shop.both()
    shop.accepted("b", 1, times=2)
    assert shop.started(before) == {("a", 2), ("b", 1)}
    assert shop.state["dead_letters"].count_documents({}) == 1


def _move_to_a_new_set(shop: Shop, make_replica_set: MakeReplicaSet, make_client: MakeClient) -> None:
    servers = make_replica_set()
    shop.move(servers, make_client(servers.url))


@pytest.mark.parametrize("where", ["the same set", "a new set"])
def test_what_is_restored_runs_no_handler_that_was_sent_on_first(
    where: str, shop: Shop, make_replica_set: MakeReplicaSet, make_client: MakeClient
) -> None:
    """From copies of collections; a snapshot brings the documents, and so does a restoring while a listener leads."""
    shop.handle("a", 1)
    copies = copy_of(shop.state), copy_of(shop.data)
    shop.handle("b", 1)
    before = shop.stop()
    if where == "a new set":
        _move_to_a_new_set(shop, make_replica_set, make_client)
    restore(shop.state, copies[0])
    restore(shop.data, copies[1])
    shop.type("reset", HANDLER, "--to", "now")
    shop.both()
    shop.handle("c", 1)
    assert shop.started(before) == {("c", 1)}
    shop.type("snapshot", "start", HANDLER)
    shop.accepted("a", 1, times=2)
    restore(shop.data, copies[1])
    shop.accepted("a", 1, times=3)
    assert shop.started(before) == {("a", 1), ("c", 1)}


def test_in_a_new_set_whoever_was_not_sent_on_stands_still_until_somebody_decides(
    shop: Shop, make_replica_set: MakeReplicaSet, make_client: MakeClient
) -> None:
    """Its oplog is whole, and has the restoring: but nobody can have read up to a place before it."""
    shop.handle("a", 1)
    read = {"$expr": {"$gt": ["$clusterTime", "$startAtOperationTime"]}}
    wait_for(lambda: shop.state["handlers"].find_one(read), message="its position is stored")
    copies = copy_of(shop.state), copy_of(shop.data)
    before = shop.stop()
    _move_to_a_new_set(shop, make_replica_set, make_client)
    restore(shop.state, copies[0])
    restore(shop.data, copies[1])
    shop.listener(awaited="is stopped: its position is")
    shop.type("reset", HANDLER, "--to", "now")
    shop.both()
    shop.handle("b", 1)
    assert shop.started(before) == {("b", 1)}
