"""
A status as it fits on one screen: what the listener's page and `top` show of a bridge.

Handlers with what they have done and how their partitions stand, the partitions that need attention, and all that is
about the bridge as a whole; a status has hundreds of partitions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mongo_celery.bridge.operations.reasons import cut

ATTENTION_MAX = 50
LETTERS_MAX = 10
CELLS_MAX = 256

CELLS: Mapping[str, str] = {
    "flowing": "f",
    "running": "r",
    "halted": "h",
    "paused": "p",
    "waiting": "w",
    "retrying": "k",
    "not_led": "n",
}
"""How a partition stands, in one letter; running is one that flows, and whose handler is at work."""

CALM = frozenset({"flowing", "not_led"})
"""States of a partition that waits for nothing but changes, or a listener."""

_AS_IT_IS = (
    "state",
    "at",
    "error",
    "listener",
    "unled_seconds",
    "term",
    "lag_seconds",
    "oplog_window_seconds",
    "outstanding",
    "buffered",
    "buffered_bytes",
    "standing",
    "caught_up",
    "broker_down",
    "unread_seconds",
    "reading_waits",
    "reopenings",
    "dead_letters",
)


def overview(status: Mapping[str, Any], letters: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """
    What one screen shows of a status, as `read_status` gives it.

    Args:
        letters: some dead letters, as `letter_commands.plain` gives them.
    """
    attention = [each for each in status["partitions"] if needs_attention(each)]
    by_handler: dict[str, list[Mapping[str, Any]]] = {}
    for each in status["partitions"]:
        by_handler.setdefault(each["subscription"], []).append(each)
    spill = status["spill"]
    return {
        **{name: status[name] for name in _AS_IT_IS},
        "oplog_share": max((each["oplog_share"] or 0 for each in status["subscriptions"]), default=0),
        "spill": {name: spill[name] for name in ("count", "bytes", "limit", "share", "waits")},
        "handlers": [_handler(each, by_handler.get(each["name"], [])) for each in status["subscriptions"]],
        "attention": [_partition(each) for each in attention[:ATTENTION_MAX]],
        "attention_more": max(len(attention) - ATTENTION_MAX, 0),
        "letters": list(letters)[:LETTERS_MAX],
        "snapshots": list(status.get("snapshots") or ()),
    }


def needs_attention(partition: Mapping[str, Any]) -> bool:
    """Whether a partition stands still, or its change has killed a worker or lost its claim."""
    retry, claim = partition["retry"] or {}, partition["claim"] or {"live": True}
    return partition["state"] not in CALM or bool(retry.get("crashes")) or not claim["live"]


def cell(partition: Mapping[str, Any]) -> str:
    """How a partition stands, in one letter of `CELLS`."""
    state = partition["state"]
    if state in CALM and ((partition["claim"] or {}).get("live") or partition["handled"] is not None):
        state = "running"
    return CELLS.get(state, CELLS["flowing"])


def _handler(subscription: Mapping[str, Any], partitions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    spilled = subscription["spilled"]
    return {
        "name": subscription["name"],
        "state": subscription["state"],
        "lag_seconds": subscription["lag_seconds"],
        "oplog_share": subscription["oplog_share"],
        "dead_letters": subscription["dead_letters"],
        "stored": spilled["count"] if spilled else 0,
        "committed": sum(each["committed"] for each in partitions),
        "partitions": len(partitions),
        "cells": "".join(cell(each) for each in partitions[:CELLS_MAX]),
    }


def _partition(partition: Mapping[str, Any]) -> dict[str, Any]:
    retry, waiting = partition["retry"] or {}, partition["waiting"] or {}
    error = waiting.get("cause") or retry.get("error")
    return {
        "subscription": partition["subscription"],
        "index": partition["index"],
        "state": partition["state"],
        "key": (partition["head"] or {}).get("key"),
        "error": cut(error) if error else None,
        "retries": retry.get("count", 0),
        "crashes": retry.get("crashes", 0),
        "due_seconds": waiting.get("due_seconds", retry.get("due_seconds", 0)),
        "since": waiting.get("since"),
        "stored": (partition["spilled"] or {}).get("count"),
    }
