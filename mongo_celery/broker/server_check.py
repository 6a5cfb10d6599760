"""Check that the broker answers, and that Redis keeps its queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kombu import Connection

from mongo_celery.broker.connection import bounded_connection, demand_answer
from mongo_celery.errors import ConfigurationError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from celery import Celery

BROKER_SECONDS = 3
"""Seconds that a preflight waits for the broker's answer."""

_REDIS = "redis"
_NEVER_EVICT = "noeviction"


def check_broker(app: Celery) -> list[Finding]:
    """Return findings about the broker: whether it answers within some seconds, and whether Redis keeps queues."""
    try:
        with bounded_connection(app, BROKER_SECONDS) as connection:
            return [*check_server(connection)]
    except (ConfigurationError, KeyError, ImportError, ValueError) as failure:
        return [failing("broker", f"broker_url cannot be used ({short(failure)}). Correct it.")]


def check_server(connection: Connection) -> Iterator[Finding]:
    """Check the server of a bounded connection."""
    where = connection.as_uri()  # without the password
    try:
        demand_answer(connection, BROKER_SECONDS)
    except Exception as failure:  # noqa: BLE001 - every transport raises its own
        yield failing(
            "broker",
            f"The broker at {where} did not answer within {BROKER_SECONDS} s. Check broker_url, the network and "
            f"the server. Last error: {short(failure)}",
        )
        return
    yield ok("broker", f"{where} answers.")
    if connection.transport.driver_type == _REDIS:
        yield from _check_redis(connection)


def _check_redis(connection: Connection) -> Iterator[Finding]:
    try:
        channel: Any = connection.default_channel
        info: Mapping[str, Any] = channel.client.info()
        snapshots = channel.client.config_get("save").get("save") if not info.get("aof_enabled") else None
    except Exception as failure:  # noqa: BLE001 - a restricted or managed Redis refuses in its own ways
        yield degraded("redis", f"Redis refuses INFO or CONFIG, so its settings are unknown: {short(failure)}")
        return
    yield judge_eviction(info.get("maxmemory_policy"))
    yield judge_persistence(is_kept=bool(info.get("aof_enabled") or snapshots))


def judge_eviction(policy: object) -> Finding:
    """Judge the eviction policy. Redis must refuse writes, not drop messages."""
    if policy == _NEVER_EVICT:
        return ok("redis_eviction", "maxmemory-policy is noeviction.")
    if policy is None:
        return degraded("redis_eviction", "maxmemory-policy cannot be read. Make sure that it is noeviction.")
    return failing(
        "redis_eviction",
        f"maxmemory-policy is {policy}. If memory runs out, Redis deletes queued tasks. Set it to noeviction, "
        "and use another Redis for caches.",
    )


def judge_persistence(*, is_kept: bool) -> Finding:
    """Judge persistence. A restart of Redis costs a bridge only time, but other tasks everything."""
    if is_kept:
        return ok("redis_persistence", "Redis keeps its queues on disk.")
    return degraded(
        "redis_persistence",
        "Redis keeps nothing on disk, so a restart loses all queued tasks. A bridge dispatches its changes "
        "again, but other tasks of this app are lost. Set appendonly yes.",
    )
