"""Embedded servers for real: they start, keep or lose data as promised, and leave nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import redis
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet
from tests.fixtures.mongo import MakeReplicaSet
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
    own, cache = make_replica_set(), make_redis()
    pids = [own.pid, cache.pid]
    directories = [own.members[0].directory, cache.directory]
    own.stop()
    cache.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(directory.exists() for directory in directories)


@pytest.mark.parametrize("appendonly", [True, False])
def test_redis_keeps_its_data_over_a_restart_only_if_told_to(make_redis: MakeRedis, *, appendonly: bool) -> None:
    cache = make_redis(appendonly=appendonly)
    url = cache.url
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")
    cache.restart()
    assert cache.url == url
    with redis.Redis.from_url(url) as client:
        assert client.get("key") == (b"value" if appendonly else None)


def test_servers_die_with_a_killed_parent(processes: Processes, mongo_url: str) -> None:
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
