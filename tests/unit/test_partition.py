"""The sweep: what the listener does about one partition, from images and the monotonic time alone."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.listener.partition import (
    LONGEST_GRACE,
    GracePeriods,
    Partition,
    Rejection,
    Step,
)
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


_IMAGES = st.sampled_from(
    [
        FLOWING,
        CLAIMED,
        LAPSED,
        DONE,
        COMMITTED,
        replace(COMMITTED, fencing_token=12),
        replace(COMMITTED, state="paused"),
        replace(COMMITTED, state="halted"),
        replace(COMMITTED, due_in=2.0, retries=1),
        replace(COMMITTED, retries=1),
        replace(COMMITTED, claim=CLAIM, fencing_token=12),
        replace(COMMITTED, stored={"to": "8203"}),
    ]
)


@given(st.lists(st.tuples(_IMAGES, st.sampled_from([0.1, 1.0, 9.0]), st.booleans()), max_size=20))
def test_an_image_that_says_nothing_new_need_not_be_taken_in(steps: list[tuple[Image, float, bool]]) -> None:
    """P8: a partition that leaves such images out decides as one that takes in all of them."""
    now, whole, brief = START, make_partition(), make_partition()
    for seen, seconds, sends in steps:
        now += seconds
        step = whole.observe(seen, now)
        assert (Step.WAIT if brief.is_unchanged(seen) else brief.observe(seen, now)) is step
        assert brief.image == whole.image
        assert is_ready(brief, now) == is_ready(whole, now)
        assert (brief.in_flight, brief.attempt, brief.repeats) == (whole.in_flight, whole.attempt, whole.repeats)
        if sends and is_ready(whole, now):
            whole.note_sent(now)
            brief.note_sent(now)


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


def test_a_poll_leaves_out_what_an_older_term_has_sent_unless_that_may_act() -> None:
    """Where a partition is locked its messages may still be claimed."""
    assert make_partition(CLAIMED).seen == Seen(CLAIMED.fencing_token, claimed=True)
    assert make_partition(replace(CLAIMED, term=0)).seen is None


def state_of(partition: Partition, now: float) -> str:
    """Say if a run is out, or when the next one is due."""
    if partition.in_flight is not None:
        return "out"
    if partition.ready_at <= now:
        return "ready"
    return "never" if partition.ready_at == math.inf else "later"


RETRIED = image(fencing_token=11, retries=1)
AGAIN = replace(LAPSED, fencing_token=12, crashes=1)
NEXT_CLAIMED = replace(COMMITTED, claim=CLAIM, live=True, fencing_token=12)
History = list[tuple[float, Image, str]]

SENT: dict[str, tuple[Image, History]] = {
    "rule 1: handled, committed after its grace, and asked for until it is seen": (
        FLOWING,
        [
            (1, DONE, "wait out"),
            (1 + COMMIT_GRACE - 0.01, DONE, "wait out"),
            (1 + COMMIT_GRACE, DONE, "commit out"),
            (5, DONE, "commit out"),
            (9, COMMITTED, "ended ready"),
        ],
    ),
    **{
        f"rule 1: handled, {name}": (FLOWING, [(0, seen, "wait out"), (10 * LONGEST_GRACE, seen, "commit out")])
        for name, seen in (
            ("the claim has lapsed", replace(DONE, live=False)),
            ("the claim has ended", replace(DONE, claim=None, live=False)),
            ("the partition has halted", replace(DONE, state="halted")),
        )
    },
    "committed": (FLOWING, [(1, COMMITTED, "ended ready")]),
    "committed in part": (image(committed=4), [(1, image(committed=6), "ended ready")]),
    "a rewind": (image(committed=4), [(1, image(committed=2, fencing_token=99), "ended ready")]),
    "halted behind what is committed": (FLOWING, [(1, replace(COMMITTED, state="halted"), "ended never")]),
    "committed, and the next one is claimed": (FLOWING, [(1, NEXT_CLAIMED, "ended out")]),
    "rule 2: a claim that lives": (FLOWING, [(60.0 * minute, CLAIMED, "wait out") for minute in range(600)]),
    "rule 2: a claim that lives again": (
        FLOWING,
        [
            (1, LAPSED, "wait out"),
            (7, CLAIMED, "wait out"),
            (8, LAPSED, "wait out"),
            (8 + GRACE - 0.01, LAPSED, "wait out"),
            (8 + GRACE, LAPSED, "wait ready"),
        ],
    ),
    "rule 3: taken by nobody": (FLOWING, [(GRACE - 0.01, FLOWING, "wait out"), (GRACE, FLOWING, "wait ready")]),
    "rule 3: lapsed": (
        FLOWING,
        [
            (1, CLAIMED, "wait out"),
            (60, LAPSED, "wait out"),
            (60 + GRACE - 0.01, LAPSED, "wait out"),
            (60 + GRACE, LAPSED, "wait ready"),
        ],
    ),
    "rule 3: another claim has lapsed since": (
        FLOWING,
        [
            (1, LAPSED, "wait out"),
            (7, AGAIN, "wait out"),
            (1 + GRACE, AGAIN, "wait out"),
            (7 + GRACE, AGAIN, "wait ready"),
        ],
    ),
    "rule 3: times that the server says are no news": (
        FLOWING,
        [
            *((float(second), image(due_in=-float(second)), "wait out") for second in range(int(GRACE))),
            (GRACE, FLOWING, "wait ready"),
        ],
    ),
    "rule 3: not before it is due": (
        FLOWING,
        [(GRACE, image(due_in=100.0), "wait out"), (GRACE + 100, FLOWING, "wait ready")],
    ),
    **{
        f"{state} meanwhile": (
            FLOWING,
            [
                (1, image(state=state, fencing_token=12), "wait never"),
                (2, image(fencing_token=12), "wait ready"),
            ],
        )
        for state in ("halted", "paused")
    },
    "paused while it runs": (FLOWING, [(1, replace(CLAIMED, state="paused"), "wait out")]),
    "rule 5: a retry": (
        FLOWING,
        [
            (1, CLAIMED, "wait out"),
            (2, replace(RETRIED, due_in=30.0), "wait later"),
            (31.9, replace(RETRIED, due_in=0.1), "wait later"),
            (32, RETRIED, "wait ready"),
        ],
    ),
    "rule 5: a retry whose claim was never seen": (FLOWING, [(0.5, RETRIED, "wait ready")]),
}
"""Histories of a partition to which a run was sent: seconds since, what was read, and the step and state after it."""

FOUND: dict[str, tuple[Image, History]] = {
    "free": (FLOWING, [(0, FLOWING, "wait ready")]),
    "parked": (image(due_in=12.5), [(12.4, image(due_in=0.1), "wait later"), (12.5, FLOWING, "wait ready")]),
    "parked, and retried by an operator": (image(due_in=3600.0), [(1, FLOWING, "wait ready")]),
    **{
        f"{state}, and released": (
            image(state=state),
            [(1, image(state=state), "wait never"), (1000, FLOWING, "wait ready")],
        )
        for state in ("halted", "paused")
    },
    "running": (CLAIMED, [(200, CLAIMED, "wait out"), (3601, COMMITTED, "ended ready")]),
    "running, and retried": (CLAIMED, [(1, replace(RETRIED, due_in=5.0), "wait later"), (6, RETRIED, "wait ready")]),
    "lapsed, given up once, and alive after all": (
        LAPSED,
        [
            (1, LAPSED, "wait out"),
            (1 + GRACE - 0.01, LAPSED, "wait out"),
            *((float(second), LAPSED, "wait ready") for second in range(9, 60)),
            (60, CLAIMED, "wait out"),
        ],
    ),
    "handled": (DONE, [(0, DONE, "wait out"), (COMMIT_GRACE, DONE, "commit out")]),
    "claimed without a message": (FLOWING, [(1, CLAIMED, "wait out")]),
}
"""The same of a partition that a term has just taken over."""

_HISTORIES = [
    pytest.param(first, history, is_sent, id=name)
    for histories, is_sent in ((SENT, True), (FOUND, False))
    for name, (first, history) in histories.items()
]


@pytest.mark.parametrize(("first", "history", "is_sent"), _HISTORIES)
def test_the_sweep_takes_the_step_that_its_rules_say(first: Image, history: History, is_sent: bool) -> None:
    """P1, P2, P6 to P9: nothing is sent beside a run that is out, and nothing waits for ever."""
    partition = dispatched(first) if is_sent else make_partition(first)
    for seconds, seen, expected in history:
        step = partition.observe(seen, START + seconds)
        assert f"{step.value} {state_of(partition, START + seconds)}" == expected, seconds
        if partition.in_flight is None:
            assert partition.next_sequence == seen.committed + 1


def test_a_position_that_moves_under_a_live_claim_is_taken_in_and_nothing_is_sent() -> None:
    """P5, P6: a run that has recorded how far it is goes on, and what it leaves is sent when it ends."""
    partition = dispatched()
    partition.observe(CLAIMED, START + 1)
    further = replace(CLAIMED, committed=1, data="8201", token={"_data": "8201"})
    assert partition.observe(further, START + 2) is Step.MOVED
    assert partition.in_flight is not None
    assert not is_ready(partition, START + 3)
    assert partition.observe(replace(further, claim=None, live=False), START + 4) is Step.WAIT
    assert is_ready(partition, START + 4)


def test_a_run_that_records_how_far_it_is_was_taken_once() -> None:
    """A list that moves its position keeps its worker; `fairness` counts all of its time."""
    partition = dispatched()
    partition.observe(CLAIMED, START + 1)
    for done in (1, 2):
        further = replace(CLAIMED, committed=done, data=f"820{done}", token={"_data": f"820{done}"})
        assert partition.observe(further, START + 1 + done) is Step.MOVED
    run = partition.in_flight
    assert run is not None
    assert (run.sent_at, run.taken_at, run.left_at) == (START, START + 1, None)
    over = replace(further, committed=3, data="8203", token={"_data": "8203"}, claim=None, live=False)
    assert partition.observe(over, START + 5) is Step.ENDED
    assert (run.taken_at, run.left_at) == (START + 1, START + 5)
    assert partition.taken_at == START + 1


def waits(partition: Partition, count: int) -> list[float]:
    """How long each of so many dispatches stays out, when nobody ever takes a message."""
    now, found = START, []
    for _ in range(count):
        partition.note_sent(now)
        before = now
        while partition.in_flight is not None:
            now += 0.5
            partition.observe(FLOWING, now)
        found.append(now - before)
    return found


def test_the_grace_doubles_up_to_five_minutes() -> None:
    """Sweep 3: the message may just be waiting behind slow ones; broker and workers are not flooded."""
    assert waits(make_partition(), 9) == [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0, 300.0]


def test_a_change_that_nobody_takes_for_a_year_is_still_dispatched() -> None:
    """P8: without workers the doubling goes on for thousands of rounds, and must not outgrow a float."""
    partition = make_partition()
    now = START
    for _ in range(2000):
        partition.note_sent(now)
        now += LONGEST_GRACE
        assert partition.observe(FLOWING, now) is Step.WAIT
        assert is_ready(partition, now)


@pytest.mark.parametrize("seen", [COMMITTED, RETRIED], ids=["the next change", "a retry"])
def test_the_first_grace_counts_again(seen: Image) -> None:
    """Sweep 3 and 4: patience is for one change, and a message that was taken shows that workers are there."""
    partition = make_partition()
    waits(partition, 5)
    partition.note_sent(START)
    partition.observe(seen, START + 1)
    partition.note_sent(START + 1)
    partition.observe(seen, START + 1 + GRACE)
    assert is_ready(partition, START + 1 + GRACE)


@pytest.mark.parametrize("epoch", [VERSION + 1, VERSION - 1], ids=["larger", "smaller"])
@pytest.mark.parametrize(
    "seen", [FLOWING, CLAIMED, LAPSED, DONE, COMMITTED], ids=["free", "live", "lapsed", "done", "committed"]
)
def test_another_epoch_means_that_this_term_is_over(seen: Image, epoch: int) -> None:
    """P3: whatever else the image says, with and without a run of one's own; P9: what was won may be gone."""
    other = replace(seen, term=epoch)
    assert make_partition().observe(other, START) is Step.SUPERSEDED
    assert dispatched().observe(other, START) is Step.SUPERSEDED


images = st.builds(
    image,
    committed=st.integers(0, 2),
    fencing_token=st.integers(10, 13),
    state=st.sampled_from(["flowing", "halted", "paused"]),
    claim=st.none() | st.just(CLAIM),
    handled=st.none() | st.just(HANDLED),
    live=st.booleans(),
    due_in=st.floats(-100, 100),
).map(lambda seen: replace(seen, live=seen.live and seen.claim is not None))


@given(st.lists(st.tuples(images, st.floats(0, 1000), st.booleans()), max_size=12))
def test_a_run_is_never_out_and_ready_at_once(history: list[tuple[Image, float, bool]]) -> None:
    """P2: whatever is observed in whatever order, and nothing that stands still is ever ready."""
    partition, now = make_partition(), START
    for seen, passed, sends in history:
        now += passed
        partition.observe(seen, now)
        assert (partition.in_flight is None) or partition.ready_at == math.inf
        if partition.ready_at < math.inf:
            assert seen.state == "flowing"
            if sends and partition.ready_at <= now:
                partition.note_sent(now)


@pytest.mark.parametrize(("token_seconds", "expected"), [(GRACE / 2, GRACE), (GRACE * 3, GRACE * 3), (9e9, 300)])
def test_a_message_that_may_wait_for_a_token_has_as_long_as_all_partitions_need(
    token_seconds: float, expected: float
) -> None:
    """I14: a duplicate spends a token; P17: never longer than five minutes."""
    partition = dispatched()
    partition.token_seconds = token_seconds
    partition.observe(FLOWING, START + expected - 0.01)
    assert partition.in_flight is not None
    partition.observe(FLOWING, START + expected)
    assert is_ready(partition, START + expected)


def test_a_message_is_unclaimed_until_its_run_is_claimed() -> None:
    """The broker answers about messages, not about executions."""
    partition = dispatched()
    run = partition.in_flight
    assert partition.is_unclaimed
    partition.observe(CLAIMED, START + 2)
    shown = [partition.is_unclaimed]
    partition.observe(LAPSED, START + 3)
    shown.append(partition.is_unclaimed)  # its message is used up
    assert shown == [False, False]
    assert run is not None
    assert (partition.taken_at, run.taken_at, run.left_at) == (START + 2, START + 2, START + 3)
    partition.repeat(START + 4)
    partition.note_sent(START + 4)
    assert partition.is_unclaimed, "the next one, for a claim that has lapsed"


@pytest.mark.parametrize("after", [COMMITTED, DONE])
def test_a_run_that_was_never_seen_claimed_was_taken_all_the_same(after: Image) -> None:
    """Claim and commit may both fall between two reads; how long it has run is not known then, and it was quick."""
    partition = dispatched()
    run = partition.in_flight
    partition.observe(after, START + 1)
    assert run is not None
    assert partition.taken_at == run.taken_at == run.left_at == START + 1


def rejection(until: float) -> Rejection:
    return Rejection("(shop.orders insert 7 seq=1)", 12, "too large", datetime(2024, 1, 1, tzinfo=UTC), 1, until)


def test_a_rejected_run_waits_for_its_own_next_attempt_whatever_is_read_meanwhile() -> None:
    """P12: nothing of it is out, and a sweep that sees the partition unchanged makes it no earlier."""
    partition = make_partition()
    partition.note_rejected(rejection(START + 15))
    partition.observe(FLOWING, START + 1)
    assert partition.in_flight is None
    assert not is_ready(partition, START + 14)
    assert is_ready(partition, START + 15)


def test_a_rejection_ends_when_the_run_is_sent_or_its_change_is_passed() -> None:
    """P16: what is reported is what is so."""
    partition = make_partition()
    partition.note_rejected(rejection(START + 15))
    partition.note_sent(START + 15)
    assert partition.rejection is None
    partition = make_partition()
    partition.note_rejected(rejection(START + 15))
    partition.observe(COMMITTED, START + 1)
    assert partition.rejection is None
    assert is_ready(partition, START + 1)
