"""Check that the broker answers, and, for Redis, what it does when its memory is full or its machine fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kombu import Connection

from mongo_celery.broker.connection import demand_answer
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.redaction import short

BROKER_SECONDS = 3
"""How long a preflight waits for the broker's answer."""

_REDIS = "redis"
_NEVER_EVICT = "noeviction"
_NEARLY_FULL = 0.9


def check_server(connection: Connection) -> Iterator[Finding]:
    """The server behind a bounded connection."""
    where = connection.as_uri()  # masks the password
    try:
        demand_answer(connection, BROKER_SECONDS)
    except Exception as failure:  # noqa: BLE001 - every transport raises its own
        yield failing(
            "broker",
            f"No answer from {where} within {BROKER_SECONDS} s; check broker_url, the network and the server. "
            f"Last error: {short(failure)}",
        )
        return
    yield ok("broker", f"{where} answers.")
    if connection.transport.driver_type == _REDIS:
        yield from _check_redis(connection)


def _check_redis(connection: Connection) -> Iterator[Finding]:
    try:
        channel: Any = connection.default_channel
        client = channel.client
        info: Mapping[str, Any] = client.info()
    except Exception as failure:  # noqa: BLE001 - a restricted or managed Redis refuses in its own ways
        yield degraded("redis", f"Its INFO cannot be read, so memory and persistence are unknown: {short(failure)}")
        return
    yield judge_eviction(info)
    yield judge_memory(info)
    yield judge_persistence(info, _snapshots(client))


def _snapshots(client: Any) -> bool | None:
    """Return True if Redis writes snapshots; None if its configuration cannot be read."""
    try:
        return bool(client.config_get("save").get("save"))
    except Exception:  # noqa: BLE001 - managed Redis refuses CONFIG in its own ways
        return None


def judge_eviction(info: Mapping[str, Any]) -> Finding:
    """Redis must refuse writes, not throw messages away."""
    policy = info.get("maxmemory_policy")
    if policy == _NEVER_EVICT:
        return ok("redis_eviction", "maxmemory-policy is noeviction.")
    if policy is None:
        return degraded("redis_eviction", "maxmemory-policy cannot be read; make sure that it is noeviction.")
    return failing(
        "redis_eviction",
        f"maxmemory-policy is {policy}: under pressure Redis would throw queued tasks away. Set it to noeviction, and "
        "use another Redis for caches.",
    )


def judge_memory(info: Mapping[str, Any]) -> Finding:
    """Judge how near Redis is to its limit."""
    limit, used = int(info.get("maxmemory") or 0), int(info.get("used_memory") or 0)
    if not limit:
        return ok("redis_memory", "maxmemory is not set; the machine's memory is the limit.")
    if used < _NEARLY_FULL * limit:
        return ok("redis_memory", f"{used / limit:.0%} of maxmemory are in use.")
    if used >= limit:
        return failing("redis_memory", f"{used / limit:.0%} of maxmemory are in use: Redis takes no tasks. Raise it.")
    return degraded(
        "redis_memory",
        f"{used / limit:.0%} of maxmemory are in use: soon Redis refuses to take tasks, and who sends them waits. "
        "Raise it, or see what fills it.",
    )


def judge_persistence(info: Mapping[str, Any], snapshots: bool | None) -> Finding:
    """Judge the loss by a restart of Redis: of a bridge only time, of other tasks everything."""
    if info.get("aof_enabled"):
        return ok("redis_persistence", "The append-only file is on.")
    if snapshots:
        return ok("redis_persistence", "Snapshots are on; a crash loses the tasks since the last one.")
    unknown = " (its snapshots cannot be seen)" if snapshots is None else ""
    return degraded(
        "redis_persistence",
        f"Redis keeps nothing on disk{unknown}: a restart loses all queued tasks. A bridge dispatches its changes "
        "again, other tasks of this app are gone; set appendonly yes.",
    )
