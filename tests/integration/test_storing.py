"""
Storing changes and running what is stored, against a real replica set.

P13: what was read is not lost; P2, order; P5, the watermark passes nothing that is neither committed nor stored.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from bson import Int64, Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import read_token
from mongo_celery.bridge.listener import read_back, storing
from mongo_celery.bridge.listener.delay import Delay
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.state.backlog import Backlog, StoredChange
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.bridge.stream.items import ReadError
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.errors import LeaseLostError
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.samples import token_data
from tests.rig.storing import PARTITIONS, Document, RefusedError, StoringTerm, change, number_of, terms
from tests.rig.term import KilledError, around, mark_at

Begin = Callable[..., StoringTerm]
APP = "spilling"
_SECOND = 1.1
_BEGUN, _ENDED = 6.0, 0.3
"""Seconds after which what stands is stored, and after which it is judged again."""


@pytest.fixture
def begin(make_client: MakeClient, state_database: str) -> Iterator[Begin]:
    yield from terms(make_client(appName=APP), state_database)


def halted(term: StoringTerm, *numbers: int) -> None:
    term.read(*numbers)
    (run,) = term.dispatch()
    term.halt(run)
    term.look()


def next_run(term: StoringTerm) -> Run:
    runs: list[Run] = []

    def found() -> bool:
        runs.extend(term.dispatch())
        return bool(runs)

    term.turn_until(found)
    return runs[0]


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__.get("event", "") for record in caplog.records]


def numbers(run: Run) -> list[int]:
    return [number_of(raw) for raw in run.changes]


def test_one_run_of_a_partition_is_out_and_each_change_that_is_owed_comes_once(begin: Begin) -> None:
    """P1, P2, P5, P6: the stream may begin before a position, and again at an earlier time."""
    term = begin(run_size=1)
    term.read(1, 2, 1, 2)
    term.read(3, 4, index=1)
    first, other = term.dispatch()
    assert (numbers(first), numbers(other), term.dispatch()) == ([1], [3], [])
    term.run(other)
    term.look()
    assert ([numbers(run) for run in term.dispatch()], term.watermark) == ([[4]], None)
    term.run(first)
    term.look()
    (second,) = term.dispatch()
    claim = term.claim(second)
    later = begin(run_size=10)
    later.read(1, 2)
    later.read(3, 4, 5, index=1)
    later.read(6)
    assert [numbers(run) for run in later.dispatch()] == [[4, 5]], "an execution of the term before is at work"
    assert later.rig.store.claims.handle(claim, 2, {"_data": token_data(2)})
    assert later.rig.store.claims.commit(second.partition_id, 2)
    later.look()
    (run,) = later.dispatch()
    assert (run.first, numbers(run), later.watermark) == (3, [6], token_data(3))


def test_a_run_carries_as_many_changes_as_the_options_allow(begin: Begin) -> None:
    size = len(change(1).raw)
    several: list[tuple[Document, list[int]]] = [
        ({}, [1, 2, 3]),
        ({"run_bytes": 1}, [1]),
        ({"run_bytes": 2 * size}, [1, 2]),
        ({"max_message_bytes": 3 * size - 1}, [1, 2]),
    ]
    for options, expected in several:
        term = begin(run_size=3, **options)
        term.read(*range(1, 6))
        (run,) = term.dispatch()
        assert (run.first, run.last, numbers(run)) == (1, expected[-1], expected)
        assert run.hashes == ((run.hash,) * len(expected) if len(expected) > 1 else ()), "any of them may fail"
    term.rig.partitions.update_one({"_id": term.partition_id()}, {"$set": {"oneByOneUntil": 2}})
    term = begin(run_size=3)
    term.read(*range(1, 6))
    assert [numbers(run) for run in term.dispatch()] == [[1]]


def test_a_delayed_partition_is_next_when_its_change_is_due(begin: Begin) -> None:
    """P17: nothing polls for it, and a command that passes the change ends its wait."""
    term, now = begin(), time.monotonic()
    term.led.delay = Delay(10, coalesces=False)
    term.led.delay.observe(1003 - now, math.inf)
    term.read(1)
    term.read(2, index=1)
    assert term.dispatch() == []
    assert term.led.next_due() == pytest.approx(now + 8)
    assert term.led.report_delayed() is not None
    passed = {"committed": Int64(1), "resumeToken": {"_data": token_data(1)}}
    term.rig.partitions.update_one({"_id": term.partition_id()}, {"$set": passed})
    term.look()
    assert term.led.partitions[0].delayed_until == 0
    (dispatch,) = term.led.due(now + 8)
    dispatch.partition.note_sent(now + 8)
    assert (numbers(dispatch.run), term.led.report_delayed()) == ([2], None)


def test_a_change_that_was_tried_does_not_wait_for_later_ones_of_its_burst(begin: Begin) -> None:
    term = begin(run_size=5)
    term.read(1)
    (run,) = term.dispatch()
    assert term.rig.store.claims.park(term.claim(run), delay=-1.0, not_before=None, error="later")
    term.look()
    term.led.delay = Delay(10, coalesces=True)
    term.led.delay.observe(1012 - time.monotonic(), math.inf)
    term.led.ingest_item(replace(change(2), mark=mark_at(Timestamp(1009, 2))))
    assert [numbers(run) for run in term.dispatch()] == [[1]]


def test_a_change_that_waits_behind_stored_ones_of_its_burst_is_stored_too(begin: Begin) -> None:
    """P2: a run has stored changes or buffered ones. It must have the last change of the key."""
    term = begin(run_size=5)
    term.led.delay = Delay(60, coalesces=True)
    term.led.delay.observe(1010 - time.monotonic(), math.inf)
    term.read(1)
    assert term.dispatch() == []
    term.turn()
    term.turn(_SECOND)
    assert term.stored() == [1]
    term.led.ingest_item(replace(change(2), mark=mark_at(Timestamp(1020, 2))))
    term.turn(_SECOND)
    assert term.stored() == [1, 2], "although it is younger than `spill_after`"
    term.led.delay.observe(1100 - time.monotonic(), math.inf)
    term.led.partitions[0].delayed_until = 0.0
    assert numbers(next_run(term)) == [1, 2]


@pytest.mark.parametrize("run_size", [1, 100])
def test_what_stands_is_stored_and_runs_in_order_when_it_is_retried(
    begin: Begin, run_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    term = begin(run_size=run_size, spill_after=60.0)
    halted(term, *range(1, 251))
    term.read(251, index=1)
    term.work(until=251)
    assert term.flush() is None, "the halted change holds the watermark"
    term.turn()
    term.turn(30.0)
    assert term.documents.count_documents({}) == 0, "a short stand costs nothing"
    term.turn(30.0)
    assert (term.marked(), term.stored()) == (token_data(250), list(range(1, 251)))
    assert (term.led.window.count, term.flush()) == (0, token_data(251))
    term.retry()
    term.ran.clear()
    assert term.work(until=250) == list(range(1, 251))
    term.read(252)
    assert term.work(until=252)[-1] == 252
    term.turn_until(lambda: not term.stored() and term.marked() is None)
    term.turn_until(lambda: "spill_ended" in events(caplog))
    assert events(caplog).count("spill_begun") == events(caplog).count("spill_ended") == 1


def test_a_run_is_not_slow_because_it_was_delayed(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """P13: `spill_after` begins when it runs, so nobody is asked to start more workers."""
    caplog.set_level(logging.INFO)
    term = begin()
    term.led.delay = Delay(30, coalesces=False)
    term.read(1, 2)
    term.led.partitions[0].delayed_until = time.monotonic()
    term.turn()
    term.turn(_BEGUN)
    term.led.delay, term.led.partitions[0].delayed_until = None, 0.0
    (run,) = term.dispatch()
    assert term.claim(run)
    term.turn(_SECOND)
    assert (term.stored(), "spill_begun" in events(caplog)) == ([], False)


@pytest.mark.parametrize("command", ["insert", "update"])
def test_what_fails_between_storing_and_marking_completes_nothing(
    begin: Begin, failpoint: Failpoint, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    term = begin()
    halted(term, 1, 2, 3)
    term.turn()
    with failpoint(failCommands=[command], errorCode=50, appName=APP):
        for _ in range(5):
            term.turn(_BEGUN)
        assert (term.marked(), term.watermark, term.led.window.count) == (None, None, 3)
        assert events(caplog).count("spill_failed") >= 1
        (failure,) = term.storing.report()["notStored"]
        assert (failure["partition"], bool(failure["error"])) == ("record/0", True)
    term.turn_until(term.marked, later=_BEGUN)
    assert term.storing.report()["notStoredCount"] == 0
    assert (term.stored(), term.watermark) == ([1, 2, 3], token_data(3))
    term.retry()
    assert term.work(until=3) == [1, 2, 3]


def test_a_mark_whose_answer_is_lost_is_made_again(begin: Begin, failpoint: Failpoint) -> None:
    """P5: the partition is marked, and this term does not know that its inserts are behind it."""
    term = begin()
    halted(term, 1, 2, 3)
    lost = {"code": 64, "errmsg": "waiting for replication timed out"}
    failing = failpoint(failCommands=["update"], writeConcernError=lost, appName=APP, mode={"times": 2})
    with failing, pytest.raises(PyMongoError):
        term.store()
    wait_for(term.marked)  # the failpoint does not wait for the majority
    assert (term.marked(), term.watermark) == (token_data(3), None)
    term.look()
    term.retry()
    assert term.work(until=3) == [1, 2, 3]
    assert term.watermark == token_data(3)


def test_a_partition_that_a_transaction_has_locked_holds_up_no_other(
    begin: Begin, mongo_client: MongoClient[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """P12: its mark waits, and nothing waits for it: not even for the time of a call."""
    term = begin(lease_ttl=600.0)
    halted(term, 1, 2, 3)
    term.read(4, index=1)
    (run,) = [run for run in term.dispatch() if run.index == 1]
    term.halt(run)
    term.look()
    assert term.store(1)
    term.read(5, index=1)
    term.turn()
    with mongo_client.start_session() as session, session.start_transaction():
        partitions = mongo_client[term.rig.database.name]["partitions"]
        partitions.update_one({"_id": term.partition_id(0)}, {"$set": {"was": "x"}}, session=session)
        term.turn_until(lambda: term.marked(1) == token_data(5), later=_BEGUN)
        assert (term.marked(0), len(term.led.partitions[0].queue), len(term.led.partitions[1].queue)) == (None, 3, 0)
        assert "spill_failed" in events(caplog)
        session.commit_transaction()  # it was not ended by its age
    term.turn_until(term.marked, later=_BEGUN)
    assert term.flush() == token_data(5)


def test_what_is_read_again_holds_what_is_stored_behind_it(begin: Begin) -> None:
    """P2, P13: a term whose handler matches more reads a change that was not stored, before one that was."""
    old = begin()
    old.read(1)
    halted(old, 3, 5, 6)
    old.store()
    assert old.marked() == token_data(6)
    new = begin()  # the watermark was not stored before the crash
    new.retry()
    new.turn()
    assert new.dispatch() == [], "nothing of the stream was read yet"
    new.read(1, 2, 3)
    assert new.work(until=3) == [1, 2, 3]
    new.read(4, 5, 6, 7)
    assert new.work(until=7) == [1, 2, 3, 4, 5, 6, 7]


def test_a_handler_that_matches_less_still_gets_what_was_stored(begin: Begin) -> None:
    """What was owed when it was read is owed; and places that are passed over let it run."""
    old = begin()
    halted(old, 1, 2, 3)
    old.store()
    new = begin()
    new.retry()
    new.pass_over(2)
    assert new.work(until=2) == [1, 2]
    new.pass_over(9)
    assert new.work(until=3) == [1, 2, 3]


def test_changes_that_a_crash_has_left_without_a_mark_are_found_and_removed(begin: Begin) -> None:
    """P13: the bound holds for them, and nothing else would ever remove them."""
    old = begin()
    halted(old, 1, 2)
    stored = [StoredChange(token_data(number), change(number).raw) for number in (1, 2)]
    old.rig.store.backlog.insert(old.partition_id(), stored, old.rig.version)
    new = begin()
    new.read(1, 2, 3)
    new.retry()
    assert new.work(until=3) == [1, 2, 3]
    new.turn_until(lambda: not new.stored())


def test_a_rewind_stores_again_what_was_removed(begin: Begin) -> None:
    """P13: the mark stays, what is read again is stored again, and everything from the place runs once more."""
    old = begin()
    halted(old, *range(1, 8))
    old.store()
    old.retry()
    assert old.work(until=4) == [1, 2, 3, 4]
    old.turn_until(lambda: old.stored() == [5, 6, 7])
    back = {"_data": token_data(1)}
    old.rig.partitions.update_one({"_id": old.partition_id()}, {"$set": {"resumeToken": back}})
    old.rig.database["handlers"].update_one({"_id": "shop/record"}, {"$set": {"resumeToken": back}})
    new = begin()
    new.read(*range(2, 9))
    assert new.work(until=8) == [2, 3, 4, 5, 6, 7, 8]


def test_at_the_bound_nothing_more_is_stored_and_it_says_what_waits(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    term = begin(spill_bytes=24_000, buffer_bytes=100_000)  # some of it may be counted twice for a while
    halted(term, *range(1, 21))
    term.turn()
    term.turn(_BEGUN)
    assert term.marked() == token_data(20)
    for number in range(21, 61):
        term.read(number, padding=1000)
    term.turn_until(lambda: term.storing.waits)
    kept = term.stored()
    assert 20 < len(kept) < 60, "the longest prefix that has room"
    assert (term.marked(), term.watermark) == (token_data(kept[-1]), token_data(kept[-1]))
    sentence = term.storing.report()["storingWaits"]
    assert all(word in sentence for word in ("record/0", "spill_bytes"))
    assert events(caplog).count("spill_full") == 1
    term.retry()
    assert term.work(until=60) == list(range(1, 61))
    term.turn(_SECOND)
    assert term.storing.report()["storingWaits"] is None


def test_an_undeliverable_change_is_stored_also_at_the_bound(begin: Begin) -> None:
    """P12: else its handler would wait, in all partitions, for somebody who frees what another handler has stored."""
    term = begin(spill_bytes=1)
    term.read(1)
    term.led.ingest_item(replace(change(2), read_error=ReadError("match fails on it")))
    term.read(3)
    term.read(4, index=1)
    term.turn_until(lambda: term.marked() == token_data(2))
    assert term.stored() == [1, 2], "what is behind it has no room"
    assert {(run.index, run.first) for run in term.dispatch()} >= {(1, 1)}
    assert term.storing.report()["storingWaits"] is None


def test_what_must_be_stored_again_is_stored_also_at_the_bound(begin: Begin) -> None:
    """Else the partition would wait for ever for the room that only it can make."""
    old = begin()
    halted(old, *range(1, 11))
    old.store()
    new = begin(spill_bytes=1)
    new.retry()
    new.read(*range(1, 12))
    assert new.work(until=11) == list(range(1, 12))


def test_a_large_change_that_cannot_be_stored_waits_alone_and_runs_by_reference_afterwards(
    begin: Begin, failpoint: Failpoint
) -> None:
    """P9, P12: nothing turns for it in vain, and no message has room for it. It is stored also at the bound."""
    term = begin(max_message_bytes=2000, run_size=10, spill_bytes=1)
    term.read(1)
    term.read(2, 3, padding=3000)
    term.read(4)
    term.read(5, index=1)
    sent: list[tuple[list[int], bool]] = []

    def run_all() -> bool:
        for run in term.dispatch():
            sent.append((numbers(run), bool(run.stored)))
            term.run(run)
        return len(term.ran) == 5

    with failpoint(failCommands=["insert"], errorCode=14031, appName=APP):
        run_all()
        term.look()
        assert (run_all(), sent) == (False, [([1], False), ([5], False)])
        term.turn()
        assert term.dispatch() == []
        assert term.storing.next_turn_time() > time.monotonic()
    term.turn_until(run_all)
    assert sent[2:] == [([2, 3], True), ([4], False)]
    term.flush()
    term.turn_until(lambda: not term.marked() and not term.stored())


def test_stored_changes_that_are_gone_are_told_and_the_mark_stays(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    old = begin()
    halted(old, 1, 2)
    old.store()
    old.flush()
    saved = list(old.documents.find())
    old.documents.delete_many({})
    new = begin()
    new.retry()
    new.turn_until(lambda: "stored_changes_missing" in events(caplog))
    assert f'db.partitions.updateOne({{_id: "{new.partition_id()}"}}, {{$unset: {{stored: 1}}}})' in caplog.text
    assert (new.dispatch(), new.marked()) == ([], token_data(2))
    assert new.storing.report()["storedMissing"] == ["record/0"]
    new.documents.insert_many(saved)
    assert new.work(until=2) == [1, 2]
    assert new.marked() is None or not new.led.backlogs


def test_a_term_ends_whose_partition_is_gone_when_its_stored_changes_are_looked_for(begin: Begin) -> None:
    """P17: somebody has removed the handler, or its partitions are former ones; that is no error of the listener."""
    term = begin()
    halted(term, 1, 2)
    term.store()
    term.documents.delete_many({})
    term.retry()
    term.look()
    assert term.rig.partitions.delete_many({}).deleted_count == PARTITIONS
    with pytest.raises(LeaseLostError):
        term.storing.turn(time.monotonic() + _BEGUN, at_end=False)


def test_stored_changes_that_are_gone_after_others_are_reported(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """P16: also where the ones before them were in memory when they were looked for."""
    term = begin(run_size=1)
    halted(term, 1, 2, 3)
    term.store()
    assert term.documents.delete_one({"_id": {"$regex": token_data(3)}}).deleted_count == 1
    term.retry()
    assert term.work(until=2) == [1, 2]
    term.turn_until(lambda: "stored_changes_missing" in events(caplog))
    assert (term.dispatch(), term.marked()) == ([], token_data(3))


def test_a_watermark_far_back_in_the_oplog_is_freed(begin: Begin) -> None:
    """P13: before the oplog rolls past what is read and not done, it is stored, whoever holds it."""
    term = begin()
    term.read(1, 2, 3)
    (run,) = term.dispatch()
    term.turn(_BEGUN)
    assert term.marked() is None, "a partition that waits for a worker is plain backlog"
    term.share = 0.3
    term.turn(_ENDED)
    assert (term.marked(), term.flush()) == (token_data(3), token_data(3))
    term.run(run)
    assert term.work(until=3) == [1, 2, 3]


def test_a_watermark_far_back_in_the_oplog_is_freed_of_a_change_behind_existing_documents(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13: rows of a snapshot hold no watermark, and the change that holds it may wait behind many bulks of them."""
    monkeypatch.setattr(storing, "_BULK_CHANGES", 5)
    term = begin()
    rows = range(1, 13)
    term.append(*rows, after=20)
    term.read(21, 22)
    (run,) = term.dispatch()
    term.share = 0.3
    term.turn(_ENDED)
    assert (term.marked(), term.flush()) == (token_data(22), token_data(22))
    assert term.led.partitions[0].is_secured(token_data(22)), "the snapshot goes on"
    term.run(run)
    assert term.work(until=22) == [*rows, 21, 22]


def test_what_is_stored_takes_no_memory(begin: Begin) -> None:
    """However much is stored, the listener has tokens of the next ones alone; and a reader that waits can go on."""
    last = 300
    term = begin(buffer_bytes=100_000)
    halted(term, 1)
    for number in range(2, last + 1):
        term.read(number, padding=1000)
        if term.storing.is_full:
            term.turn(_BEGUN)
    term.turn_until(lambda: term.marked() == token_data(last))
    term.retry()
    while not term.ran or term.ran[-1] < last:
        term.turn(_ENDED)
        assert (term.storing.size, [each.raw for each in term.in_memory() if each.raw]) == (0, [])
        for run in term.dispatch():
            term.run(run)
    assert term.ran == list(range(1, last + 1))


def test_partitions_take_turns_to_read_what_is_stored(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: also where each reading takes all the time of a turn; the listener then reads on without a pause."""
    term = begin()
    term.read(1, 2, 3)
    term.read(4, 5, 6, index=1)
    assert term.store(0)
    assert term.store(1)
    monkeypatch.setattr(read_back, "_TURN_SECONDS", -1.0)
    term.turn()
    assert term.storing.next_turn_time() <= time.monotonic()

    def all_ran() -> bool:
        for run in term.dispatch():
            term.run(run)
        term.turn()
        return len(term.ran) == 6

    wait_for(all_ran)
    assert [[number for number in term.ran if (number > 3) is later] for later in (False, True)] == [
        [1, 2, 3],
        [4, 5, 6],
    ]


def test_no_change_before_the_start_of_a_handler_is_taken_in(begin: Begin) -> None:
    """P1, P5: the stream may begin before it, for another handler; the watermark passes what lies there."""
    term = begin()
    start = change(3).mark.cluster_time
    assert start is not None
    term.led.plan = replace(term.led.plan, start=start)
    term.read(1, 2, 3)
    assert [numbers(run) for run in term.dispatch()] == [[3]]
    assert term.watermark == token_data(2)


def test_what_flows_is_stored_only_while_a_full_memory_keeps_another_partition_idle(begin: Begin) -> None:
    """P12: the stream waits for room with a backlog of all alike, and the state database is not paid for it."""
    bound, last = 20_000, 40
    term = begin(buffer_bytes=bound, run_size=1)
    term.read(1, 2, index=1)
    term.run(next_run(term))
    term.turn()
    (waiting,) = term.dispatch()
    term.read(*range(3, last + 1), padding=1000)
    for _ in range(3):
        term.turn(_BEGUN)
    assert (term.storing.is_full, term.documents.count_documents({})) == (True, 0)
    term.run(waiting)
    term.turn_until(term.stored)
    assert term.storing.size < bound / 2
    assert term.work(until=last) == list(range(1, last + 1))


@pytest.mark.parametrize("others", [(), ("audit",)], ids=["alone", "beside a new handler"])
def test_a_handler_that_has_never_run_waits_behind_no_full_memory(begin: Begin, others: tuple[str, ...]) -> None:
    """P12: its first change may be the next one in the stream; partitions that no key has used yet keep nobody busy."""
    term = begin(buffer_bytes=20_000, run_size=1, names=("record", *others))
    term.read(*range(1, 41), padding=1000)
    (waiting,) = term.dispatch()
    for _ in range(3):
        term.turn(_BEGUN)
    assert bool(term.stored()) is bool(others)
    term.run(waiting)
    assert term.work(until=40) == list(range(1, 41))


def keyless(event: Mapping[str, Any]) -> Any:
    return event["documentKey"]["nothing"]


def corrected(event: Mapping[str, Any]) -> Any:
    """The same rule, which sends all changes to one partition by now."""
    return key_of_one if event else None


def keyless_for_two(event: Mapping[str, Any]) -> Any:
    """A partition rule that fails for the change at 2."""
    return event["documentKey"]["nothing"] if event["fullDocument"]["n"] == 2 else key_of_zero


keyless.__qualname__ = keyless_for_two.__qualname__ = corrected.__qualname__ = "rule"
key_of_zero = next(key for key in range(100) if partition_hash(key) % PARTITIONS == 0)
key_of_one = next(key for key in range(100) if partition_hash(key) % PARTITIONS == 1)


@pytest.mark.parametrize("command", ["insert", "update"])
def test_nothing_that_was_read_after_an_undeliverable_change_runs_before_that_is_stored(
    begin: Begin, failpoint: Failpoint, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P1, P5, P13: with a corrected rule, a later term would find it passed; and the watermark holds nothing back."""
    term = begin()
    term.read(1, index=1)
    term.led.ingest_item(replace(change(2), read_error=ReadError("match fails on it")))
    term.read(3, index=1)
    with failpoint(failCommands=[command], errorCode=50, appName=APP):
        for _ in range(5):
            term.turn()
        (run,) = term.dispatch()
        assert (number_of(run.changes[0]), len(run.changes)) == (1, 1), "the one that was read before"
        assert (term.marked(), term.watermark, term.led.next_due()) == (None, None, math.inf)
        assert "spill_failed" in events(caplog)
    term.run(run)
    term.turn_until(term.marked)
    assert (term.stored(), term.stored(1)) == ([2], [])
    runs: dict[int, Run] = {}

    def found() -> bool:
        runs.update((each.index, each) for each in term.dispatch())
        return len(runs) == PARTITIONS

    term.turn_until(found)
    assert {number_of(each.changes[0]): each.refusal is not None for each in runs.values()} == {2: True, 3: False}
    term.led.window.complete(term.led.partitions[1].queue, token_data(3))
    assert term.flush() == token_data(3), "what is stored holds no watermark"
    assert set(term.rig.database["handlers"].find_one({}) or ()) & {"refused", "undeliverable"} == set()


@pytest.mark.parametrize("is_read_again", [True, False], ids=["read again", "behind the watermark"])
def test_a_change_whose_rule_was_corrected_runs_once_where_it_is_stored(begin: Begin, *, is_read_again: bool) -> None:
    """P1, P6: also where the corrected rule would send it to a partition that has not passed it."""
    old = begin(partition_by=keyless)
    old.read(1, 2)
    old.turn_until(old.marked)
    if not is_read_again:
        assert old.flush() == token_data(2)
    new = begin(partition_by=corrected)
    if is_read_again:
        new.read(1, 2)
    new.pass_over(3)
    new.work(until=2)
    assert new.ran == [1, 2]
    assert (new.image(0).committed, new.image(1).committed) == (2, 0)
    assert new.flush() == token_data(3)


@pytest.mark.parametrize("how", ["discarded", "run"])
def test_a_change_that_was_undeliverable_and_is_done_is_not_run_where_the_corrected_rule_sends_it(
    begin: Begin, how: str
) -> None:
    """P1, P6: it stays stored until the watermark has passed it, so that it is known where it is done."""
    term = begin(partition_by=keyless_for_two)
    term.read(1, 2, 3)
    term.turn_until(lambda: term.marked() == token_data(2))
    if how == "discarded":
        term.run(next_run(term))
        run = next_run(term)
        assert run.refusal is not None
        assert term.rig.store.claims.discard(term.claim(run), read_token(run.changes[0]))
    else:
        term = begin(partition_by=corrected)
        term.read(2, 3)
        term.pass_over(4)
    handled = [1, 3] if how == "discarded" else [1, 2, 3]

    def all_ran() -> bool:
        for run in term.dispatch():
            term.run(run)
        return sorted(term.ran) == handled

    term.turn_until(all_ran)
    term.turn_until(lambda: not term.marked() and term.stored() == [2])
    new = begin(partition_by=corrected)
    new.read(2)
    new.pass_over(4)
    assert new.led.window.count == 0
    assert new.flush() == token_data(4)
    new.turn_until(lambda: not new.stored())


def test_nothing_is_read_back_before_a_partition_was_seen(begin: Begin) -> None:
    """P13: a session that has seen nothing may be answered by a deposed primary, which has other changes, or none."""
    old = begin()
    halted(old, 1, 2)
    old.store()
    old.retry()
    old.flush()
    new = begin()
    new.storing.turn(time.monotonic(), at_end=False)
    assert not new.in_memory()
    new.turn()
    assert len(new.in_memory()) == 2


STEPS: list[tuple[type, str]] = [
    (Backlog, "insert"),
    (Partitions, "mark_stored"),
    (Subscriptions, "advance_all"),
    (Backlog, "outline"),
    (Partitions, "clear_stored"),
]
_NAMES = [name for _, name in STEPS]
_FIRST, _LAST = 12, 20


class Life:
    """Changes of a partition that halts at the first, over several terms; `ran` is what workers have run in all."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self.ran: list[int] = []
        term = self.next()
        term.read(*range(1, _FIRST + 1))
        (run,) = term.dispatch()
        term.halt(run)
        self.first = term

    def next(self) -> StoringTerm:
        term = self._begin(run_size=5)
        term.ran = self.ran
        return term

    def live(self, term: StoringTerm) -> None:
        """Do in one term all that is left to be done: store, let it be retried, run, clear and remove."""
        self._store(term)
        term.look()
        if term.image().state == "halted":
            term.retry()
        term.read(*range(_FIRST + 1, _LAST + 1))
        if not self.ran or self.ran[-1] < _LAST:
            term.work(until=_LAST)
        term.turn_until(lambda: term.marked() is None and not term.stored())
        term.flush()
        term.look()

    def _store(self, term: StoringTerm) -> None:
        seen = term.watermark or ""
        term.read(*[number for number in range(1, _FIRST + 1) if token_data(number) > max(seen, term.image().data)])
        term.turn()
        term.turn_until(lambda: term.image().state != "halted" or term.marked(), later=_BEGUN)
        term.flush()

    def judge(self) -> None:
        assert self.ran == list(range(1, _LAST + 1))
        last = self.next()
        last.turn_until(lambda: not last.stored())
        assert (last.marked(), last.watermark) == (None, token_data(_LAST))


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "wakes late"])
def test_a_listener_that_is_killed_or_wakes_late_at_any_step_has_lost_and_doubled_nothing(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, is_killed: bool, step: tuple[type, str], behind: bool
) -> None:
    """P2, P3, P6, P13: its successor stores, runs and removes all of it; late writes are refused, or removed."""
    life = Life(begin)

    def interrupt() -> None:
        if is_killed:
            raise KilledError
        life.live(life.next())

    with monkeypatch.context() as patch:
        around(patch, step, interrupt, behind=behind)
        with pytest.raises(KilledError if is_killed else (LeaseLostError, RefusedError)):
            life.live(life.first)
    if is_killed:
        life.live(life.next())
    life.judge()
