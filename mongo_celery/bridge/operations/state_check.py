"""Preflight of the stored state: the verdict on it, as findings beside what is well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.operations.amounts import LOOK_SECONDS
from mongo_celery.bridge.operations.spill_check import check_marks, judge_spill
from mongo_celery.bridge.operations.status import read_status
from mongo_celery.bridge.operations.verdict import judge
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_STANDING = frozenset({"halted", "paused", "waiting", "retrying"})
_SAME = {"history_lost": "history"}
"""What the verdict and an earlier finding call by different names."""


def check_state(wiring: Wiring, found: Sequence[Finding], line: CommandLine) -> list[Finding]:
    """
    Read the bridge's state and judge it, with what was found before; what the verdict says too is said once.

    Args:
        found: what else has been looked at.
    """
    status = read_status(wiring, LOOK_SECONDS)
    marks = list(check_marks(wiring))
    said = [
        each for each in judge_state(status, found, line) if not (marks and each.code == "spill_missing")
    ]  # the marks say more
    names = {each.code for each in said if each.severity != "ok"}
    names |= {_SAME[name] for name in names & _SAME.keys()}
    return [*(each for each in found if each.severity == "ok" or each.code not in names), *said, *marks]


def judge_state(
    status: Mapping[str, Any], found: Sequence[Finding] = (), line: CommandLine | None = None
) -> Iterator[Finding]:
    """Findings from a status, as `read_status` gives it: what is well, then the reasons of the verdict."""
    line = line or CommandLine()
    verdict = judge(status, found, line)
    codes = {reason.code for reason in verdict.reasons}
    if status["state"] == "leading":
        yield ok("listener", f"One leads on {status['listener']['host']}, pid {status['listener']['pid']}.")
        if not codes & {"identity", "definitions"}:
            yield ok("definitions", "The listener that leads has every handler of this app.")
    if not codes & _STANDING:
        yield ok("partitions", "None is halted or paused, waits for MongoDB or the broker, or is parked for long.")
    yield from (each for each in judge_spill(status, line) if each.code not in codes)
    for reason in verdict.reasons:
        level = failing if reason.severity == "failing" else degraded
        yield level(reason.code, reason.sentence, reason.command)
