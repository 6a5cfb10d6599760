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
        replace(COMMITTED, spilled={"to": "8203"}),
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


# What a look may leave out


def test_a_look_leaves_out_what_nobody_has_claimed_and_what_runs_under_a_claim_that_stands() -> None:
    """Each by what was seen of it: the fence, and whether somebody has it."""
    partition = dispatched()
    assert partition.seen == Seen(FLOWING.fencing_token, claimed=False)
    partition.observe(CLAIMED, START + 1)
    assert partition.seen == Seen(CLAIMED.fencing_token, claimed=True)
    partition.observe(COMMITTED, START + 2)
    partition.note_sent(START + 3)
    assert partition.seen == Seen(COMMITTED.fencing_token, claimed=False)
    assert make_partition(CLAIMED).seen == Seen(CLAIMED.fencing_token, claimed=True), "also what an older term has sent"


@pytest.mark.parametrize("seen", [LAPSED, DONE], ids=["lapsed", "handled"])
def test_a_look_reads_all_that_waits_for_a_time(seen: Image) -> None:
    """No write need come before the listener acts there."""
    partition = dispatched()
    partition.observe(seen, START + 1)
    assert partition.in_flight is not None
    assert partition.seen is None


def test_a_look_reads_what_is_locked() -> None:
    """An older term may act there, whose messages this one has not sent."""
    assert make_partition(replace(CLAIMED, term=0)).seen is None


# Without a run


def test_a_partition_with_nothing_under_way_is_ready_at_once() -> None:
    """P7: no message of this term exists yet, so nothing has to be waited for."""
    assert is_ready(make_partition(), START)
    assert make_partition(image(committed=7)).next_sequence == 8


def test_a_parked_change_is_ready_when_it_is_due() -> None:
    """The server says how long that is; a due time that has passed means now."""
    assert make_partition(image(due_in=12.5)).ready_at == START + 12.5
    assert make_partition(image(due_in=-99.0)).ready_at == START


def test_a_parked_change_that_an_operator_retries_is_ready_sooner() -> None:
    """The newest image counts, not the first one."""
    partition = make_partition(image(due_in=3600.0))
    assert partition.observe(image(due_in=0.0), START + 1) is Step.WAIT
    assert is_ready(partition, START + 1)


@pytest.mark.parametrize("state", ["halted", "paused"])
def test_a_partition_that_stands_still_is_never_ready(state: str) -> None:
    """P9: a halt lasts until a person decides; then the partition goes on at once."""
    partition = make_partition(image(state=state))
    assert partition.ready_at == math.inf
    partition.observe(FLOWING, START + 1000)
    assert is_ready(partition, START + 1000)


def test_a_sent_run_is_the_only_one() -> None:
    """P2: window 1. Nothing more is ready until its outcome is known."""
    partition = dispatched(image(committed=4))
    assert partition.in_flight is not None
    assert partition.in_flight.first == 5
    assert partition.ready_at == math.inf


def test_repeated_dispatches_of_one_head_are_counted_for_the_task_id() -> None:
    """A revoke of one dispatch must not hit the next; the count begins anew with the next change."""
    partition = make_partition()
    for attempt in range(3):
        assert partition.attempt == attempt
        partition.note_sent(START)
    partition.observe(COMMITTED, START + 1)
    assert partition.attempt == 0


# Rule 1: handled


def test_what_is_handled_is_committed_after_the_commit_grace() -> None:
    """Sweep 1: the commit task is usually faster; the grace is a matter of speed only."""
    partition = dispatched()
    assert partition.observe(DONE, START + 1) is Step.WAIT
    assert partition.observe(DONE, START + 1 + COMMIT_GRACE - 0.01) is Step.WAIT
    assert partition.observe(DONE, START + 1 + COMMIT_GRACE) is Step.COMMIT


@pytest.mark.parametrize(
    "seen",
    [
        DONE,
        replace(DONE, live=False),
        replace(DONE, claim=None, live=False),
        replace(DONE, state="halted"),
    ],
    ids=["live", "lapsed", "unclaimed", "halted"],
)
def test_what_is_handled_is_committed_whatever_the_claim_says(seen: Image) -> None:
    """Sweep 1, P6: a handler that has succeeded is never started again."""
    partition = dispatched()
    partition.observe(seen, START)
    assert partition.observe(seen, START + 10 * LONGEST_GRACE) is Step.COMMIT
    assert partition.in_flight is not None


def test_a_commit_that_was_not_seen_to_work_is_asked_for_again() -> None:
    """P1: until an image shows the new position."""
    partition = dispatched()
    partition.observe(DONE, START)
    assert [partition.observe(DONE, START + 5 + turn) for turn in range(3)] == [Step.COMMIT] * 3
    assert partition.observe(COMMITTED, START + 9) is Step.ENDED


# The end of a run


def test_a_committed_run_has_ended_and_the_next_is_ready() -> None:
    """P2: in the same turn."""
    partition = dispatched()
    assert partition.observe(COMMITTED, START + 1) is Step.ENDED
    assert is_ready(partition, START + 1)
    assert partition.next_sequence == 2


def test_a_run_that_was_committed_in_part_has_ended_too() -> None:
    """The rest of the run is dispatched anew, from what is committed now."""
    partition = dispatched(image(committed=4))
    assert partition.observe(image(committed=6), START + 1) is Step.ENDED
    assert partition.next_sequence == 7


def test_a_position_that_went_back_ends_the_run() -> None:
    """P4: a rewind is the one exception, and the run was numbered against the old position."""
    partition = dispatched(image(committed=4))
    assert partition.observe(image(committed=2, fencing_token=99), START + 1) is Step.ENDED
    assert partition.next_sequence == 3


def test_a_run_that_ended_in_a_halt_leaves_nothing_ready() -> None:
    """P9: the prefix of the run is committed, its head stands still."""
    partition = dispatched()
    assert partition.observe(replace(COMMITTED, state="halted"), START + 1) is Step.ENDED
    assert partition.ready_at == math.inf


def test_a_commit_whose_successor_is_claimed_already_is_adopted() -> None:
    """P6: a message of ours for the next change cannot exist, but an operator's retry may."""
    partition = dispatched()
    assert partition.observe(replace(COMMITTED, claim=CLAIM, live=True, fencing_token=12), START + 1) is Step.ENDED
    assert partition.in_flight is not None
    assert partition.in_flight.first == 2


# Rule 2: a live claim


def test_a_live_claim_is_waited_for_however_long_it_runs() -> None:
    """Sweep 2, P6: a slow handler is not a lost one."""
    partition = dispatched()
    for minutes in range(600):
        assert partition.observe(CLAIMED, START + 60.0 * minutes) is Step.WAIT
    assert partition.in_flight is not None


def test_a_claim_that_came_alive_again_begins_the_count_anew() -> None:
    """Sweep 3: the grace runs from the read that showed the claim lapsed, and a heartbeat may be late."""
    partition = dispatched()
    partition.observe(LAPSED, START + 1)
    partition.observe(CLAIMED, START + 7)
    partition.observe(LAPSED, START + 8)
    partition.observe(LAPSED, START + 8 + GRACE - 0.01)
    assert partition.in_flight is not None
    partition.observe(LAPSED, START + 8 + GRACE)
    assert is_ready(partition, START + 8 + GRACE)


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


# Rule 3: lapsed, or never taken


def test_a_message_that_nobody_took_is_dispatched_again_after_the_grace() -> None:
    """Sweep 3, P8: the broker may have lost it."""
    partition = dispatched()
    assert partition.observe(FLOWING, START + GRACE - 0.01) is Step.WAIT
    assert partition.in_flight is not None
    assert partition.observe(FLOWING, START + GRACE) is Step.WAIT
    assert is_ready(partition, START + GRACE)


def test_a_lapsed_claim_is_dispatched_again_after_the_grace() -> None:
    """Sweep 3, P8: the worker may have died; the grace runs from the read that showed it."""
    partition = dispatched()
    partition.observe(CLAIMED, START + 1)
    partition.observe(LAPSED, START + 60)
    partition.observe(LAPSED, START + 60 + GRACE - 0.01)
    assert partition.in_flight is not None
    partition.observe(LAPSED, START + 60 + GRACE)
    assert is_ready(partition, START + 60 + GRACE)


def test_any_change_of_the_document_prolongs_the_grace() -> None:
    """Sweep 3: somebody was there a moment ago."""
    partition = dispatched()
    partition.observe(LAPSED, START + 1)
    partition.observe(replace(LAPSED, fencing_token=12, crashes=1), START + 7)
    partition.observe(replace(LAPSED, fencing_token=12, crashes=1), START + 1 + GRACE)
    assert partition.in_flight is not None
    partition.observe(replace(LAPSED, fencing_token=12, crashes=1), START + 7 + GRACE)
    assert is_ready(partition, START + 7 + GRACE)


def test_the_servers_verdicts_on_times_are_no_change_of_the_document() -> None:
    """P8: they differ at every reading, and would put off a repair for ever."""
    partition = dispatched()
    for second in range(int(GRACE) + 1):
        partition.observe(replace(FLOWING, due_in=-float(second)), START + second)
    assert is_ready(partition, START + GRACE)


def test_a_change_is_not_dispatched_again_before_it_is_due() -> None:
    """P8: the claim would refuse it."""
    partition = dispatched()
    partition.observe(image(due_in=100.0), START + GRACE)
    assert partition.in_flight is not None
    partition.observe(image(due_in=0.0), START + GRACE + 100)
    assert is_ready(partition, START + GRACE + 100)


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


def test_the_next_change_has_the_first_grace_again() -> None:
    """Sweep 3: patience is for one head."""
    partition = make_partition()
    waits(partition, 4)
    partition.note_sent(START)
    partition.observe(COMMITTED, START)
    partition.note_sent(START)
    partition.observe(COMMITTED, START + GRACE)
    assert is_ready(partition, START + GRACE)


@pytest.mark.parametrize("state", ["halted", "paused"])
def test_a_partition_that_was_stopped_meanwhile_is_given_up(state: str) -> None:
    """P9: its message will be refused; when the partition flows again the change is dispatched at once."""
    partition = dispatched()
    assert partition.observe(image(state=state, fencing_token=12), START + 1) is Step.WAIT
    assert partition.in_flight is None
    assert partition.ready_at == math.inf
    partition.observe(image(fencing_token=12), START + 2)
    assert is_ready(partition, START + 2)


def test_a_handler_that_runs_while_its_partition_is_paused_may_finish() -> None:
    """Pausing leaves a running execution alone."""
    partition = dispatched()
    partition.observe(replace(CLAIMED, state="paused"), START + 1)
    assert partition.in_flight is not None


# Rule 4: a claim that has ended without an outcome


def test_a_retry_is_dispatched_when_it_is_due() -> None:
    """Sweep 4: the message was used up by the claim, so there is nothing to wait for but the time."""
    partition = dispatched()
    partition.observe(CLAIMED, START + 1)
    assert partition.observe(image(fencing_token=11, retries=1, due_in=30.0), START + 2) is Step.WAIT
    assert partition.in_flight is None
    assert partition.ready_at == START + 2 + 30


def test_a_retry_that_was_never_seen_claimed_is_recognised_by_its_fence() -> None:
    """Sweep 4: claim and retry may both fall between two reads."""
    partition = dispatched()
    partition.observe(image(fencing_token=11, retries=1), START + 0.5)
    assert is_ready(partition, START + 0.5)


def test_a_retry_begins_with_the_first_grace_again() -> None:
    """Sweep 4: the message was taken, so workers are there."""
    partition = make_partition()
    waits(partition, 5)
    partition.note_sent(START)
    partition.observe(image(fencing_token=11, retries=1), START + 1)
    partition.note_sent(START + 1)
    partition.observe(image(fencing_token=11, retries=1), START + 1 + GRACE)
    assert is_ready(partition, START + 1 + GRACE)


# Adoption


def test_a_live_claim_of_an_earlier_term_is_adopted() -> None:
    """P6, P7: the listener counts the partition as outstanding, and its handler finishes undisturbed."""
    partition = make_partition(CLAIMED)
    assert partition.in_flight is not None
    assert partition.ready_at == math.inf
    assert partition.observe(CLAIMED, START + 200) is Step.WAIT
    assert partition.observe(COMMITTED, START + 3601) is Step.ENDED
    assert is_ready(partition, START + 3601)


def test_an_adopted_execution_that_is_retried_is_dispatched_when_due() -> None:
    """Sweep 4: its message is of an older term and used up; no grace is owed."""
    partition = make_partition(CLAIMED)
    partition.observe(image(fencing_token=11, retries=1, due_in=5.0), START + 1)
    assert partition.in_flight is None
    assert partition.ready_at == START + 6


def test_an_adopted_claim_that_lapses_is_dispatched_after_the_grace() -> None:
    """Sweep 3, P7: the worker that ran it has died."""
    partition = make_partition(LAPSED)
    partition.observe(LAPSED, START + 1)
    partition.observe(LAPSED, START + 1 + GRACE - 0.01)
    assert partition.in_flight is not None
    partition.observe(LAPSED, START + 1 + GRACE)
    assert is_ready(partition, START + 1 + GRACE)


def test_an_outcome_that_is_found_is_adopted_and_committed() -> None:
    """Sweep 1: a mark that was set between take-over and the first look."""
    partition = make_partition(DONE)
    assert partition.in_flight is not None
    partition.observe(DONE, START)
    assert partition.observe(DONE, START + COMMIT_GRACE) is Step.COMMIT


def test_a_claim_that_appears_without_a_dispatch_is_adopted() -> None:
    """P2: whatever brought it about, nothing is sent beside it."""
    partition = make_partition()
    partition.observe(CLAIMED, START + 1)
    assert partition.in_flight is not None
    assert partition.ready_at == math.inf


# Newer terms


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


def test_a_lapsed_claim_is_given_up_once_also_while_nothing_can_be_dispatched() -> None:
    """
    Sweep 3: the grace runs once for a claim that has lapsed, and doubles only with what was sent.

    While the broker is down the head stays ready; it must not wait again, and longer, with every look.
    """
    one = make_partition(LAPSED, START)
    one.observe(LAPSED, START)
    one.observe(LAPSED, START + 10)
    assert one.ready_at == START + 10

    for seconds in range(11, 60):
        one.observe(LAPSED, START + seconds)
        assert one.in_flight is None
        assert one.ready_at <= START + seconds


def test_a_lapsed_claim_whose_heartbeat_comes_after_all_is_adopted_again() -> None:
    """P6: the execution lives; its change is not given to another one."""
    one = make_partition(LAPSED, START)
    one.observe(LAPSED, START)
    one.observe(LAPSED, START + 10)

    one.observe(CLAIMED, START + 11)

    assert one.in_flight is not None
    assert one.ready_at == math.inf


# Lost messages


def is_unclaimed(partition: Partition) -> bool:
    return partition.is_unclaimed


def test_the_return_of_the_broker_begins_the_grace_anew_and_makes_it_short() -> None:
    """I14: five minutes of silence must not be answered by five minutes more."""
    partition = make_partition()
    waits(partition, 7)
    partition.note_sent(START)
    partition.reset_grace(START + 200)
    partition.observe(FLOWING, START + 200 + GRACE - 0.01)
    assert partition.in_flight is not None
    partition.observe(FLOWING, START + 200 + GRACE)
    assert is_ready(partition, START + 200 + GRACE)


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


def test_a_message_that_is_lost_is_sent_again_without_grace() -> None:
    """I14: and the next one has twice the grace, since nobody was seen to take it."""
    partition = dispatched()
    partition.observe(FLOWING, START + 1)
    partition.repeat(START + 1)
    assert is_ready(partition, START + 1)
    partition.note_sent(START + 1)
    assert partition.repeats == 1


def test_a_message_is_unclaimed_until_its_run_is_claimed() -> None:
    """The broker answers about messages, not about executions."""
    partition = dispatched()
    run = partition.in_flight
    assert is_unclaimed(partition)
    partition.observe(CLAIMED, START + 2)
    assert not is_unclaimed(partition)
    partition.observe(LAPSED, START + 3)
    assert not is_unclaimed(partition), "its message is used up"
    assert run is not None
    assert (partition.taken_at, run.taken_at, run.left_at) == (START + 2, START + 2, START + 3)
    partition.repeat(START + 4)
    partition.note_sent(START + 4)
    assert is_unclaimed(partition), "the next one, for a claim that has lapsed"


@pytest.mark.parametrize("after", [COMMITTED, DONE])
def test_a_run_that_was_never_seen_claimed_was_taken_all_the_same(after: Image) -> None:
    """Claim and commit may both fall between two reads; how long it has run is not known then, and it was quick."""
    partition = dispatched()
    run = partition.in_flight
    partition.observe(after, START + 1)
    assert run is not None
    assert partition.taken_at == run.taken_at == run.left_at == START + 1


# A message that the broker rejects


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
