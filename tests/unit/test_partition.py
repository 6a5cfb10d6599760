"""The sweep: what the listener does about one partition, from images and the monotonic time alone."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from mongo_celery.bridge.listener.partition import LONGEST_GRACE, GracePeriods, Partition, Rejection, Step
from mongo_celery.bridge.state.partitions import Image, Seen
from tests.fixtures.samples import image

VERSION = 1
GRACE = 8.0
COMMIT_GRACE = 3.0
START = 1000.0
CLAIM: dict[str, Any] = {"owner": "a", "first": 1, "last": 1, "ttl": 10_000, "until": "2024-01-01T00:00:10Z"}
HANDLED: dict[str, Any] = {"owner": "a", "last": 1, "resumeToken": {"_data": "8201"}}

FLOWING = image()
CLAIMED = image(claim=CLAIM, live=True, fencing_token=11)
LAPSED = replace(CLAIMED, live=False)
DONE = image(claim=CLAIM, handled=HANDLED, fencing_token=11, live=True)
COMMITTED = image(committed=1, data="8201", token={"_data": "8201"}, fencing_token=11)


def make_partition(seen: Image = FLOWING, now: float = START) -> Partition:
    return Partition("shop/summarise/0/0", seen, VERSION, GracePeriods(GRACE, COMMIT_GRACE), now)


def dispatched(seen: Image = FLOWING, now: float = START) -> Partition:
    made = make_partition(seen, now)
    made.note_sent(now)
    return made


def is_ready(partition: Partition, now: float) -> bool:
    return partition.in_flight is None and partition.ready_at <= now


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ([], Seen(FLOWING.fencing_token, claimed=False)),
        ([CLAIMED], Seen(CLAIMED.fencing_token, claimed=True)),
        ([CLAIMED, COMMITTED], Seen(COMMITTED.fencing_token, claimed=False)),
        ([LAPSED], None),
        ([DONE], None),
    ],
    ids=["sent", "claimed", "sent again", "lapsed", "handled"],
)
def test_a_poll_leaves_out_a_partition_that_only_a_write_can_change(read: list[Image], expected: Seen | None) -> None:
    """Where a time alone can change what is to be done, it is read each time."""
    partition = dispatched()
    for seen in read:
        partition.observe(seen, START + 1)
    if partition.in_flight is None:
        partition.note_sent(START + 2)
    assert partition.seen == expected


def state_of(partition: Partition, now: float) -> str:
    """Say if a run is out, or when the next one is due."""
    if partition.in_flight is not None:
        return "out"
    if partition.ready_at <= now:
        return "ready"
    return "never" if partition.ready_at == math.inf else "later"


RETRIED = image(fencing_token=11, retries=1)
History = list[tuple[float, Image, str]]

BEFORE = 60 + GRACE - 0.01
SENT: dict[str, History] = {
    "rule 1: handled, committed after its grace, and asked for until it is seen": [
        *((1, DONE, "wait out"), (0.99 + COMMIT_GRACE, DONE, "wait out"), (1 + COMMIT_GRACE, DONE, "commit out")),
        (9, COMMITTED, "ended ready"),
    ],
    **{
        f"rule 1: handled, {name}": [(0, seen, "wait out"), (10 * LONGEST_GRACE, seen, "commit out")]
        for name, seen in (
            ("the claim has lapsed", replace(DONE, live=False)),
            ("the claim has ended", replace(DONE, claim=None, live=False)),
            ("the partition has halted", replace(DONE, state="halted")),
        )
    },
    "committed": [(1, COMMITTED, "ended ready")],
    "halted behind what is committed": [(1, replace(COMMITTED, state="halted"), "ended never")],
    "rule 2: a claim that lives": [(60.0 * minute, CLAIMED, "wait out") for minute in range(600)],
    "rule 2: a claim that lives again": [
        *((1, LAPSED, "wait out"), (59, CLAIMED, "wait out"), (60, LAPSED, "wait out"), (BEFORE, LAPSED, "wait out")),
        (60 + GRACE, LAPSED, "wait ready"),
    ],
    "rule 3: lapsed": [
        *((1, CLAIMED, "wait out"), (60, LAPSED, "wait out"), (BEFORE, LAPSED, "wait out")),
        (60 + GRACE, LAPSED, "wait ready"),
    ],
    "rule 3: times that the server says are no news": [
        *((float(second), image(due_in=-float(second)), "wait out") for second in range(int(GRACE))),
        (GRACE, FLOWING, "wait ready"),
    ],
    "rule 3: not before it is due": [(GRACE, image(due_in=100.0), "wait out"), (GRACE + 100, FLOWING, "wait ready")],
    **{
        f"{state} meanwhile": [
            (1, image(state=state, fencing_token=12), "wait never"),
            (2, image(fencing_token=12), "wait ready"),
        ]
        for state in ("halted", "paused")
    },
    "paused while it runs": [(1, replace(CLAIMED, state="paused"), "wait out")],
    "rule 5: a retry": [
        *((1, CLAIMED, "wait out"), (2, replace(RETRIED, due_in=30.0), "wait later")),
        *((31.9, replace(RETRIED, due_in=0.1), "wait later"), (32, RETRIED, "wait ready")),
    ],
}
"""Histories of a partition to which a run was sent: seconds since, what was read, and the step and state after it."""

FOUND: dict[str, History] = {
    "parked": [(0, image(due_in=12.5), "wait later"), (12.4, image(due_in=0.1), "wait later")],
    "halted": [(0, image(state="halted"), "wait never"), (1000, FLOWING, "wait ready")],
    "running": [(0, CLAIMED, "wait out"), (200, CLAIMED, "wait out"), (3601, COMMITTED, "ended ready")],
    "running, and retried": [(0, CLAIMED, "wait out"), (1, replace(RETRIED, due_in=5.0), "wait later")],
    "lapsed, given up once, and alive after all": [
        *((1, LAPSED, "wait out"), (GRACE + 0.99, LAPSED, "wait out")),
        *((float(second), LAPSED, "wait ready") for second in range(9, 60)),
        (60, CLAIMED, "wait out"),
    ],
    "handled": [(0, DONE, "wait out"), (COMMIT_GRACE, DONE, "commit out")],
}
"""The same of a partition that a term has just taken over, as it was read first."""


@pytest.mark.parametrize("history", [*SENT.values(), *FOUND.values()], ids=[*SENT, *FOUND])
def test_the_sweep_takes_the_step_that_its_rules_say(history: History) -> None:
    partition = dispatched() if history in SENT.values() else make_partition(history[0][1])
    for seconds, seen, expected in history:
        step = partition.observe(seen, START + seconds)
        assert f"{step.value} {state_of(partition, START + seconds)}" == expected, seconds
        if partition.in_flight is None:
            assert partition.next_sequence == seen.committed + 1


def test_a_position_that_moves_under_a_live_claim_is_taken_in_and_nothing_is_sent() -> None:
    """P5, P6: a run that has recorded how far it is goes on, and what it leaves is sent when it ends."""
    partition = dispatched()
    partition.observe(CLAIMED, START + 1)
    unclaimed, run = partition.is_unclaimed, partition.in_flight
    assert not unclaimed
    assert run is not None
    for done in (1, 2):
        further = replace(CLAIMED, committed=done, data=f"820{done}", token={"_data": f"820{done}"})
        assert partition.observe(further, START + 1 + done) is Step.MOVED
        assert not is_ready(partition, START + 3)
    assert (partition.in_flight, run.sent_at, run.taken_at, run.left_at) == (run, START, START + 1, None)
    assert partition.observe(replace(further, claim=None, live=False), START + 4) is Step.WAIT
    assert is_ready(partition, START + 4)
    assert (run.taken_at, run.left_at) == (START + 1, START + 4), "fairness counts all of its time"


def test_the_grace_doubles_up_to_five_minutes_and_counts_again_for_the_next_change() -> None:
    """P8: the message may just be waiting behind slow ones; a message that was taken shows that workers are there."""

    def wait(partition: Partition, now: float) -> float:
        partition.note_sent(now)
        seconds = 0.0
        while partition.in_flight is not None:
            seconds += 0.5
            partition.observe(partition.image, now + seconds)
        return seconds

    for seen in (COMMITTED, RETRIED):
        partition, now = make_partition(), START
        for expected in (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0):
            assert wait(partition, now) == expected
            now += expected
        partition.note_sent(now)
        partition.observe(seen, now + 1)
        assert wait(partition, now + 1) == GRACE


@pytest.mark.parametrize("seen", [FLOWING, LAPSED], ids=["its message is lost", "its worker is dead"])
def test_changes_that_are_stored_meanwhile_do_not_keep_a_run_waiting(seen: Image) -> None:
    """P8, P12: the listener itself moves the mark with each change, and there may be no end of changes."""
    partition = dispatched()
    marks = ({"to": f"82{number:04}", "since": datetime.now(UTC), "reason": "running"} for number in range(1, 99))
    for second in range(int(GRACE)):
        partition.observe(replace(seen, stored=next(marks)), START + second)
        assert not is_ready(partition, START + second)
    partition.observe(replace(seen, stored=next(marks)), START + 1 + GRACE)
    assert is_ready(partition, START + 1 + GRACE)


def test_a_change_that_nobody_takes_for_a_year_is_still_dispatched() -> None:
    """P8: without workers the doubling goes on for thousands of rounds, and must not outgrow a float."""
    partition = make_partition()
    now = START
    for _ in range(2000):
        partition.note_sent(now)
        now += LONGEST_GRACE
        assert partition.observe(FLOWING, now) is Step.WAIT
        assert is_ready(partition, now)


@pytest.mark.parametrize(
    "seen", [FLOWING, CLAIMED, LAPSED, DONE, COMMITTED], ids=["free", "live", "lapsed", "done", "committed"]
)
def test_another_epoch_means_that_this_term_is_over(seen: Image) -> None:
    """P3: whatever else the image says, with and without a run of one's own; P9: what was won may be gone."""
    for epoch in (VERSION + 1, VERSION - 1):
        for partition in (make_partition(), dispatched()):
            assert partition.observe(replace(seen, term=epoch), START) is Step.SUPERSEDED
    assert make_partition(replace(CLAIMED, term=VERSION - 1)).seen is None, "a locked partition is read each time"


@pytest.mark.parametrize("passed", [True, False])
def test_a_rejected_run_waits_for_its_own_next_attempt_whatever_is_read_meanwhile(passed: bool) -> None:
    """P12: a sweep that sees the partition unchanged makes it no earlier. P16: it ends with its run or change."""
    partition = make_partition()
    at = datetime(2024, 1, 1, tzinfo=UTC)
    partition.note_rejected(Rejection("(shop.orders insert 7 seq=1)", 12, "too large", at, 1, START + 15))
    assert partition.block_reason == "rejected"
    partition.observe(FLOWING, START + 1)
    assert partition.in_flight is None
    assert not is_ready(partition, START + 14)
    assert is_ready(partition, START + 15)
    if passed:
        partition.observe(COMMITTED, START + 14)
    else:
        partition.note_sent(START + 15)
    assert partition.rejection is None
