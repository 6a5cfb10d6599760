"""Runs of many changes in real workers: what a SIGKILL repeats, and that every limit is one of a change."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import Any

import pytest

from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

LARGE = {"run_size": 1000, "run_seconds": 30, "partitions": 1}
LINGERING = {"act": "linger", "linger": 0.4}
"""Nine of them are more than the limit of a handler; one is so much less that a busy machine may hold it up."""


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give a listener that leads, with runs that end by nothing but what a test is about; the worker is to be begun."""
    return shared_deployment("plain", "letters", "limited", "soft", "hard", "listed", options=LARGE, start="listener")


def test_a_run_obeys_the_limits_of_its_handler_and_each_change_has_all_of_its_time(chain: Deployment) -> None:
    """P6: a failure anywhere is started once, also in a list; rate limits count changes, time limits are for one."""
    _, bad = _filled(chain, "letters", act="raise")
    in_time = {name: _filled(chain, name, act="linger", linger=30) for name in ("soft", "hard")}
    chain.allow(in_time["hard"][1])
    limited = [chain.write("limited", "key", n) for n in range(1, 7)]
    listed = chain.write_many("listed", [f"k{number}" for number in range(8)], 2)
    guilty = chain.give_up(chain.write("listed", "bad", 1, act="raise", times=9))
    listed += chain.write_many("listed", [f"m{number}" for number in range(8)], 2)
    chain.worker()
    chain.wait_done()
    chain.judge()

    assert len(chain.starts(bad)) == 1, "wherever in a run it stands, and a busy machine may cut one anywhere"
    (letter,) = chain.letters("letters")
    assert (letter["change"]["fullDocument"]["n"], letter["attempts"]) == (bad.n, 1)

    assert len(chain.starts(*listed, guilty)) == len(listed) + 1
    assert max(each["count"] for each in chain.facts["list"].find()) == 8
    assert [letter["change"]["documentKey"]["_id"] for letter in chain.letters("listed")] == ["bad"]

    errors = {name: [letter["error"] for letter in chain.letters(name)] for name in ("soft", "hard")}
    assert [error.split(":")[0] for error in errors["soft"]] == ["SoftTimeLimitExceeded"]
    assert [error.split(":")[0] for error in errors["hard"]] == ["HandlerCrashedError"]
    assert len(chain.starts(in_time["soft"][1])) == 1
    assert len(chain.starts(in_time["hard"][1])) == 2, "it is tried `max_crashes` times more"

    fences = [each.fence for each in chain.starts(*limited)]
    assert len({*fences}) == len(limited), "each was a message of its own, for which the worker waited"


def _filled(chain: Deployment, handler: str, **do: Any) -> tuple[list[Due], Due]:
    """Write changes that take their time, then quick ones, and among these one that fails; the others and that one."""
    slow = [chain.write(handler, "key", n, **LINGERING, times=9) for n in range(1, 10)]
    quick = [chain.write(handler, "key", n) for n in (10, 11)]
    bad = chain.give_up(chain.write(handler, "key", 12, **do, times=9))
    return [*slow, *quick, chain.write(handler, "key", 13)], bad


@pytest.mark.parametrize(("count", "killed_at"), [(400, 300), pytest.param(1000, 700, marks=pytest.mark.slow)])
def test_sigkill_in_the_middle_of_a_run_repeats_what_was_done_in_the_last_moments(
    deployment: MakeDeployment, count: int, killed_at: int
) -> None:
    """P2, P6: those of its changes that are recorded are not started again, and none is charged for good."""
    chain = deployment("plain", options=LARGE, start="both")
    chain.wait_started(chain.write("plain", "first", 1, gate="first"))
    stops = {killed_at + 1: {"gate": "middle"}}
    items = [chain.write("plain", f"k{n % 10}", n, **stops.get(n, {})) for n in range(1, count + 1)]
    chain.open_gate("first")
    running = chain.wait_started(items[killed_at])
    begun = chain.starts()
    recorded = chain.partition("plain", 0)["committed"]
    assert recorded > 1, "how far it is was written while it ran"
    os.kill(running.pid, signal.SIGKILL)
    chain.open_gate("middle")
    for item in items:
        chain.allow(item)
    chain.wait_done()
    chain.judge()

    starts = chain.starts()
    repeated = {each.seq for each, _ in _pairs(starts)}
    assert min(repeated) > recorded
    assert len(repeated) <= len(begun) - recorded
    assert len(repeated) < recorded, "few"
    assert chain.letters("plain") == []


def _pairs(starts: list[Any]) -> list[tuple[Any, Any]]:
    """Starts of one change, one behind the other."""
    by_place = sorted(starts, key=lambda each: each.seq)
    return [(one, next_) for one, next_ in pairwise(by_place) if one.seq == next_.seq]
