"""Reasons about handlers that run for long, and that no time limit ends: they may never return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mongo_celery.bridge.operations.reasons import (
    RUNNING_LONG_SECONDS,
    Reason,
    degraded,
    failing,
    listed,
    summed,
    where,
)
from mongo_celery.bridge.state.claims import owner_pid
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding
from mongo_celery.quantities import duration


def slots_of(asked: Sequence[Finding]) -> int | None:
    """Return how many calls the workers that answered can run at a time; None where they were not asked."""
    if any(each.code == "no_worker" for each in asked):
        return 0
    return next((each.amount for each in asked if each.code == "workers" and each.severity == "ok"), None)


def running_long(status: Mapping[str, Any], slots: int | None, line: CommandLine) -> list[Reason]:
    """
    Return a reason for each of some handlers without a time limit whose calls have run for a minute.

    Args:
        status: as `read_status` gives it.
        slots: how many calls all workers can run at a time; None where they were not asked.
        line: how the person who is told types commands.
    """
    handlers = {each["name"]: each for each in status["subscriptions"] if each["state"] != "unregistered"}
    held: dict[str, list[Mapping[str, Any]]] = {}
    for each in status["partitions"]:
        handler, claim = handlers.get(each["subscription"]), each["claim"]
        if handler is None or handler["time_limit"] is not None or claim is None or each["handled"] is not None:
            continue
        if claim["live"] and (claim["seconds"] or 0) >= RUNNING_LONG_SECONDS:
            held.setdefault(each["subscription"], []).append(each)
    holds_all = slots is not None and sum(map(len, held.values())) >= slots
    found = [_reason(handlers[name], partitions, holds_all=holds_all) for name, partitions in held.items()]
    return list(summed(found, f"have calls that run for long; `{line.changes('status', '--all')}` shows them.", None))


def _reason(handler: Mapping[str, Any], partitions: Sequence[Mapping[str, Any]], *, holds_all: bool) -> Reason:
    longest = max(each["claim"]["seconds"] for each in partitions)
    processes = list(dict.fromkeys(each["claim"]["process"] for each in partitions))
    pids = [pid for each in partitions if (pid := owner_pid(each["claim"]["owner"])) is not None]
    kill = f", run there: kill -9 {' '.join(dict.fromkeys(pids))}" if pids else ", end these processes"
    has, it = ("has been", "this partition") if len(partitions) == 1 else ("have been", "these partitions")
    cost = "Every slot of the workers is held: no other change runs." if holds_all else f"Later changes of {it} wait."
    return (failing if holds_all else degraded)(
        "running_long",
        f"{where(handler, [each['index'] for each in partitions])} {has} running for {duration(longest)} in "
        f"{listed(processes)}, and no time limit ends it. {cost} If the handler hangs{kill}. Then give it a "
        "time_limit.",
    )
