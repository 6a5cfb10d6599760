"""The servers of a run: embedded ones, or given ones, which are left as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.demo.setting import DemoSetting
from mongo_celery.embedded import MongoReplicaSet, RedisServer, find_binary
from mongo_celery.errors import ConfigurationError, ServerUnavailableError
from mongo_celery.mongo.oplog import check_topology

_LEAST_OPLOG_MB = 64
_ORDERS_A_MEGABYTE = 20  # what an order, its changes and the bridge's own writes take in the oplog
_ANSWER_SECONDS_MAX = 10.0

_PARAMETERS = ["transactionLifetimeLimitSeconds=5"]
"""A fenced upsert that creates a document is a transaction. If its process is killed within, the server keeps it,
and the document locked, for this time; with the server's default of 60 s a demo would look as if it hung."""


@dataclass(frozen=True, slots=True)
class Urls:
    """Where the servers are."""

    mongo: str
    redis: str


def given_urls(mongo: str | None, broker: str | None) -> Urls | None:
    """
    The servers that the user named, or None for embedded ones.

    Raises:
        ConfigurationError: only one of both was named, or the broker is no Redis.
    """
    if mongo is None and broker is None:
        return None
    if mongo is None or broker is None:
        raise ConfigurationError("Give both --mongo-url and --redis-url, or neither for embedded servers.")
    if not broker.startswith(("redis://", "rediss://")):
        raise ConfigurationError("--redis-url must begin with redis:// or rediss://, such as redis://127.0.0.1:6379/0.")
    return Urls(mongo, broker)


@contextmanager
def embedded_servers(orders: int, directory: Path | None) -> Iterator[Urls]:
    """
    Start MongoDB and Redis, and end them.

    Args:
        orders: the oplog must hold the whole run, since the verdict reads its history.
        directory: where to leave the data; None for a temporary one.
    """
    find_binary("redis-server")  # said before three seconds are spent on the other one
    oplog_mb = _LEAST_OPLOG_MB + orders // _ORDERS_A_MEGABYTE
    under = (directory / "mongodb", directory / "redis") if directory else (None, None)
    with (
        MongoReplicaSet(oplog_mb=oplog_mb, directory=under[0], parameters=_PARAMETERS) as mongo,
        RedisServer(directory=under[1]) as broker,
    ):
        yield Urls(mongo.url, broker.url)


def open_client(url: str) -> MongoClient[dict[str, Any]]:
    """
    A client of a MongoDB that can serve a bridge.

    Raises:
        DeploymentError: it gives no answer, or has no change streams.
    """
    client: MongoClient[dict[str, Any]] = MongoClient(url, serverSelectionTimeoutMS=int(_ANSWER_SECONDS_MAX * 1000))
    try:
        check_topology(client)
    except PyMongoError as error:
        client.close()
        reason = str(error).split(", Timeout:")[0]
        raise ServerUnavailableError(f"MongoDB gave no answer: {reason}. Check --mongo-url and the server.") from error
    except BaseException:
        client.close()
        raise
    return client


def check_redis(url: str) -> None:
    """
    Raise unless Redis answers.

    Raises:
        ServerUnavailableError: it does not.
    """
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=_ANSWER_SECONDS_MAX) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        raise ServerUnavailableError(f"Redis gave no answer: {error}. Check --redis-url and the server.") from error


def remove_traces(client: MongoClient[dict[str, Any]], setting: DemoSetting) -> None:
    """Remove what a run has left in given servers."""
    client.drop_database(setting.database)
    client.drop_database(str(setting.bridge_options["database"]))
    with redis.Redis.from_url(setting.redis_url) as broker:
        for key in broker.scan_iter(match=f"{setting.key_prefix}*"):
            broker.delete(key)
