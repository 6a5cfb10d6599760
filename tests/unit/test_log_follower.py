"""The log follows: what is gathered, what is kept apart, and what happens where that is not possible."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from mongo_celery.exits import Closing
from mongo_celery.twophase import follower
from mongo_celery.twophase.follower import BATCH, FollowerLane, LogFollower
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import State, Transaction
from tests.fixtures.process import wait_for

PATIENCE_SECONDS = 60.0


def decided(number: int, cluster: str = "east") -> Transaction:
    part = Part(cluster, "bank.accounts", number, {"$inc": {"n": 1}}, {"$inc": {"n": -1}}, {}, {})
    return Transaction(
        id=number,
        state=State.PENDING,
        application="App1",
        version=1,
        driver=None,
        parts=(part,),
        reason=None,
        last_modified=None,
        document={},
    )


class Log:
    """Notes the batches that are finished; those of a cluster wait until it answers."""

    def __init__(self, *, silent: str | None = None) -> None:
        self.batches: list[list[int]] = []
        self.answers = threading.Event()
        self._silent = silent

    def finish(self, transactions: Sequence[Transaction], deadline: float | None) -> None:
        del deadline
        if transactions[0].parts[0].cluster == self._silent:
            assert self.answers.wait(PATIENCE_SECONDS)
        self.batches.append([each.id for each in transactions])

    @property
    def finished(self) -> list[int]:
        return [number for batch in self.batches for number in batch]


def in_time() -> float:
    return time.monotonic() + PATIENCE_SECONDS


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is finished before somebody asks for it, or a batch is full."""
    monkeypatch.setattr(follower, "LINGER_SECONDS", PATIENCE_SECONDS)


@pytest.mark.usefixtures("patient")
def test_what_comes_together_is_finished_together_in_its_order() -> None:
    log = Log()
    handed = LogFollower(log.finish)
    for number in range(3):
        handed.take(decided(number), in_time())
    assert log.batches == []
    assert handed.flush(in_time())
    assert log.batches == [[0, 1, 2]]


@pytest.mark.usefixtures("patient")
def test_a_full_batch_waits_for_nobody() -> None:
    log = Log()
    handed = LogFollower(log.finish)
    for number in range(2 * BATCH + 1):
        handed.take(decided(number), in_time())
    assert handed.flush(in_time())
    assert log.finished == list(range(2 * BATCH + 1))
    assert max(map(len, log.batches)) <= BATCH


def test_a_cluster_that_does_not_answer_keeps_no_other_waiting() -> None:
    log = Log(silent="east")
    handed = LogFollower(log.finish)
    handed.take(decided(1, "east"), in_time())
    handed.take(decided(2, "west"), in_time())
    assert not handed.flush(time.monotonic())
    wait_for(lambda: log.finished)
    assert log.finished == [2]
    log.answers.set()
    assert handed.flush(in_time())
    assert log.finished == [2, 1]


@pytest.mark.usefixtures("patient")
def test_where_there_is_no_place_the_caller_finishes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "QUEUE_MAX", 2)
    log = Log()
    handed = LogFollower(log.finish)
    for number in range(3):
        handed.take(decided(number), in_time())
    assert log.batches == [[2]]
    assert handed.flush(in_time())
    assert log.batches == [[2], [0, 1]]


def test_the_soft_time_limit_of_the_callers_task_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the caller finishes its own; what is left of that is said."""
    monkeypatch.setattr(follower, "QUEUE_MAX", 0)

    def finish(transactions: Sequence[Transaction], deadline: float | None) -> None:
        del transactions, deadline
        raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded):
        LogFollower(finish).take(decided(1), in_time())
    assert [vars(each)["event"] for each in caplog.records] == ["log_behind"]


def test_it_waits_on_while_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of few costs as much as one of many; what comes alone does not wait for long."""
    monkeypatch.setattr(follower, "LONGEST_SECONDS", PATIENCE_SECONDS)
    lane, waits = FollowerLane(Log().finish), [0.0]
    lane._waiting = [decided(0)]

    def wait_for(is_enough: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) < 5:
            lane._waiting.append(decided(len(waits)))
        return is_enough()

    monkeypatch.setattr(lane._changed, "wait_for", wait_for)
    lane._linger()
    assert (len(waits), len(lane._waiting)) == (5, 4)
    monkeypatch.setattr(follower, "LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(follower, "LINGER_SECONDS", 0.0)
    lane._linger()
    assert len(waits) == 5


def test_while_others_come_the_first_one_waits_no_longer_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "LINGER_SECONDS", 0.2)
    monkeypatch.setattr(follower, "LONGEST_SECONDS", 0.3)
    lane = FollowerLane(Log().finish)
    lane._waiting = [decided(0)]
    waits: list[float] = []
    never = threading.Event()

    def wait_for(is_enough: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        never.wait(seconds)
        lane._waiting.append(decided(len(waits)))
        return is_enough()

    monkeypatch.setattr(lane._changed, "wait_for", wait_for)
    lane._linger()
    assert sum(waits) <= follower.LONGEST_SECONDS


def test_a_caller_waits_for_two_seconds_at_most_where_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transaction is done; it has more to do than to wait for a log that does not answer."""
    monkeypatch.setattr(follower, "QUEUE_MAX", 0)
    given: list[float | None] = []
    handed = LogFollower(lambda _, deadline: given.append(deadline))
    handed.take(decided(1), in_time())
    soon = time.monotonic()
    handed.take(decided(2), soon)
    assert given[0] is not None
    assert given[0] <= time.monotonic() + follower.INLINE_SECONDS
    assert given[1] == soon


def test_what_cannot_be_finished_is_said_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it fails, nobody is told that a transaction failed which is done."""
    log = Log()

    def finish(transactions: Sequence[Transaction], deadline: float | None) -> None:
        if transactions[0].id == 1:
            raise OSError("no route")
        log.finish(transactions, deadline)

    handed = LogFollower(finish)
    handed.take(decided(1), in_time())
    assert handed.flush(in_time())
    handed.take(decided(2), in_time())
    assert handed.flush(in_time())
    handed.close()
    handed.take(decided(1), in_time())
    assert log.finished == [2]
    assert [vars(each)["event"] for each in caplog.records] == ["log_behind"] * 2
    assert "no route; recovery will do it" in caplog.text


@pytest.mark.usefixtures("patient")
def test_the_end_of_a_process_finishes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once at the most, and without a thread from then on."""
    closing: list[Closing] = []
    monkeypatch.setattr(follower, "close_at_exit", closing.append)
    log = Log()
    handed = LogFollower(log.finish)
    handed.take(decided(1), in_time())
    handed.take(decided(2), in_time())
    assert closing == [handed]
    handed.close_soon()
    handed.close()
    assert log.batches == [[1, 2]]
    handed.take(decided(3), in_time())
    assert log.batches == [[1, 2], [3]]


@pytest.mark.usefixtures("patient")
def test_where_no_thread_can_start_the_caller_finishes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log = Log()
    LogFollower(log.finish).take(decided(1), in_time())
    assert log.batches == [[1]]


def test_a_thread_that_nobody_needs_ends_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_IDLE_SECONDS", 0.0)
    log = Log()
    handed = LogFollower(log.finish)
    for number in range(5):
        handed.take(decided(number), in_time())
        assert handed.flush(in_time())
    assert log.finished == list(range(5))
