"""Embedded servers for real: they start, keep or lose data as promised, and leave nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import redis
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery.embedded import MongoReplicaSet
from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.fixtures.process import PATIENCE_SECONDS, Processes
from tests.fixtures.redis import MakeRedis

_PARENT = """
import threading
from mongo_celery.embedded import MongoReplicaSet, RedisServer
mongo, cache = MongoReplicaSet(), RedisServer()
mongo.start(), cache.start()
print("pids", mongo.pid, cache.pid, mongo.members[0].directory, cache.directory)
threading.Event().wait()
"""


def test_a_set_keeps_port_and_data_over_a_crash_and_a_regular_restart(
    make_replica_set: MakeReplicaSet, make_client: MakeClient
) -> None:
    """After restart() returns, the set accepts writes at the same address, and nothing is lost."""
    own = make_replica_set()
    url = own.url
    collection = make_client(url).get_database("test").get_collection("kept")
    collection.insert_one({"_id": 1})

    own.kill()
    own.restart()
    collection.insert_one({"_id": 2})
    own.restart()
    collection.insert_one({"_id": 3})

    assert own.url == url
    assert collection.count_documents({}) == 3


def test_data_in_a_given_directory_outlives_the_object(tmp_path: Path, mongo_url: str) -> None:
    """A second set over the same directory has the first one's data, ports and configuration."""
    del mongo_url  # only to be skipped where there is no mongod
    with MongoReplicaSet(directory=tmp_path) as first, MongoClient[dict[str, Any]](first.url) as client:
        client.test.kept.insert_one({"_id": 1})
        url = first.url

    with MongoReplicaSet(directory=tmp_path) as second, MongoClient[dict[str, Any]](second.url) as client:
        assert second.url == url
        assert client.test.kept.find_one() == {"_id": 1}


def test_stop_leaves_no_process_and_no_directory(make_replica_set: MakeReplicaSet, make_redis: MakeRedis) -> None:
    """After stop() the processes and the temporary directories are gone."""
    own, cache = make_replica_set(), make_redis()
    pids = [own.pid, cache.pid]
    directories = [own.members[0].directory, cache.directory]

    own.stop()
    cache.stop()

    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(directory.exists() for directory in directories)


def test_three_members_elect_another_primary_and_take_the_old_one_back(
    three_members: MongoReplicaSet,
) -> None:
    """`primary` waits for the election; a restarted member becomes a secondary."""
    before = three_members.primary
    before.kill()
    after = three_members.primary
    assert after is not before

    before.restart()
    three_members.wait_until_ready()

    assert three_members.primary.running
    assert len({member.pid for member in three_members.members}) == 3


def test_a_paused_set_answers_after_it_is_resumed(make_replica_set: MakeReplicaSet, make_client: MakeClient) -> None:
    """pause() freezes without cutting connections."""
    own = make_replica_set()
    client = make_client(own.url, socketTimeoutMS=300, retryReads=False, directConnection=True)
    client.admin.command("ping")

    own.pause()
    own.pause()  # harmless
    with pytest.raises(AutoReconnect):
        client.admin.command("ping")
    own.resume()

    assert client.admin.command("ping")["ok"] == 1


@pytest.mark.parametrize("appendonly", [True, False])
def test_redis_keeps_its_data_over_a_restart_only_if_told_to(make_redis: MakeRedis, *, appendonly: bool) -> None:
    """With an append-only file a regular restart loses nothing; without one it loses everything."""
    cache = make_redis(appendonly=appendonly)
    url = cache.url
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")

    cache.restart()

    assert cache.url == url
    with redis.Redis.from_url(url) as client:
        assert client.get("key") == (b"value" if appendonly else None)


def test_servers_die_with_a_killed_parent(processes: Processes, mongo_url: str) -> None:
    """SIGKILL of the process that started them ends the servers. Their directories are left behind."""
    del mongo_url
    parent = processes.python("parent", "-c", _PARENT)
    match = parent.wait_for_output(r"pids (\d+) (\d+) (\S+) (\S+)\n")
    servers = [psutil.Process(int(match[index])) for index in (1, 2)]
    directories = [Path(match[index]) for index in (3, 4)]

    parent.kill()

    gone, left = psutil.wait_procs(servers, timeout=PATIENCE_SECONDS)
    assert len(gone) == 2, left
    for directory in directories:
        shutil.rmtree(directory)
