"""
Another number of partitions, or another key: what it waits for, kills at each step, listeners that wake too late.

P1 to P16 are the design's promises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery.bridge.handlers import make_handler
from mongo_celery.bridge.listener import repartitioning
from mongo_celery.bridge.listener.repartitioning import DRAIN_SECONDS
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.oplog import time_of_token
from tests.fixtures.process import wait_for
from tests.fixtures.samples import mark, token_data
from tests.rig.repartitioning import NAME, Document, SwitchingTerm, TermsOfShop, region
from tests.rig.term import BRIDGE, KilledError, around, begin_term, handle

OLD, NEW = 4, 3
WRITTEN = range(1, 41)
DELAY = 60.0
"""Longer than the first drain without a delay."""


def time_of(number: int) -> int:
    time = time_of_token({"_data": token_data(number)}, None)
    assert time is not None, "it has one"
    return time.time


@pytest.fixture
def shop(mongo_client: MongoClient[Document], state_database: str) -> TermsOfShop:
    """Give a bridge with forty events of ten keys, some of them handled."""
    shop = TermsOfShop(mongo_client, state_database)
    shop.write(*WRITTEN)
    term = shop.begin(OLD, run_size=3)
    term.turn()
    term.work(most=3)
    return shop


def test_stored_changes_are_handled_before_the_switch(shop: TermsOfShop) -> None:
    term = shop.begin(OLD)
    term.turn()
    for partition in term.led[NAME].partitions.values():
        while partition.queue:
            assert term.storing.store(term.led[NAME], partition, "halted")
    term.watermarks.store(list(term.led.values()), 0.0)
    written, shop.events = shop.events, []
    term = shop.begin(NEW)
    term.turn()
    assert shop.in_force(term).partitions == OLD
    term.finish()
    assert shop.in_force(term).partitions == NEW
    shop.events = written
    shop.check()


def _halt(term: SwitchingTerm) -> Callable[[], object]:
    run, partitions = next(iter(term.runs().values())), term.rig.store.partitions
    claim = term.claim(run)
    assert claim is not None
    token = {"_data": token_data(0)} | dict(term.led[NAME].partitions[run.index].queue.head(1, 1)[0].mark.token)
    assert term.rig.store.claims.halt(claim, token, "a key", "ValueError: no")
    return lambda: partitions.retry(_image(term, run.index))


def _park(term: SwitchingTerm) -> Callable[[], object]:
    run, partitions = next(iter(term.runs().values())), term.rig.store.partitions
    claim = term.claim(run)
    assert claim is not None
    assert term.rig.store.claims.park(claim, delay=3600, not_before=None, error="ConnectionError: later")
    return lambda: partitions.retry(_image(term, run.index))


def _pause(term: SwitchingTerm) -> Callable[[], object]:
    partitions = term.rig.store.partitions
    assert partitions.pause(_image(term, 1))
    return lambda: partitions.resume(_image(term, 1))


def _park_key(term: SwitchingTerm) -> Callable[[], object]:
    where = {"_id": term.rig.partition_id(NAME, 2)}
    term.rig.partitions.update_one(where, {"$set": {"parkedKeys": [{"hash": Int64(7)}]}})
    return lambda: term.rig.partitions.update_one(where, {"$set": {"parkedKeys": []}})


def _replay(term: SwitchingTerm) -> Callable[[], object]:
    where, claims = term.rig.partition_id(NAME, 0), term.rig.store.claims
    assert claims.take_for_replay(where, "letter", owner="me", term=term.rig.version)
    return lambda: claims.relinquish(where, "me")


def _image(term: SwitchingTerm, index: int) -> Any:
    return term.rig.store.partitions.look([term.rig.partition_id(NAME, index)])[0]


_BLOCKED = [
    pytest.param(_halt, "changes retry record ", id="halted"),
    pytest.param(_park, "changes retry record ", id="retrying"),
    pytest.param(_pause, "changes resume record 1", id="paused"),
    pytest.param(_park_key, "changes dead-letters list record", id="parked key"),
]


@pytest.mark.parametrize(("block", "command"), _BLOCKED)
def test_a_blocked_partition_keeps_the_old_ones_which_say_so_and_go_on(
    shop: TermsOfShop,
    block: Callable[[SwitchingTerm], Callable[[], object]],
    command: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = block(shop.begin(OLD))
    term = shop.begin(NEW)
    for _ in range(30):
        term.turn()
        term.work()
    assert command in term.waits[NAME]
    assert "layout_waits" in [getattr(each, "event", "") for each in caplog.records]
    assert shop.in_force(term).partitions == OLD
    shop.write(*range(41, 61))
    before = len(shop.numbers())
    for _ in range(3):
        term.turn()
        term.work()
    assert len(shop.numbers()) > before, "the old ones serve"
    assert release()
    term.finish()
    assert shop.in_force(term).partitions == NEW
    shop.check()


def test_a_drain_that_takes_long_is_given_up_and_tried_again(shop: TermsOfShop) -> None:
    """P12, P16: partitions with nothing left to do never wait for long for one whose handler hangs."""
    before = shop.begin(OLD, claim_ttl=300.0)
    hanging = next(iter(before.runs().values()))
    claim = before.claim(hanging)
    assert claim is not None
    term = shop.begin(NEW, claim_ttl=300.0)
    term.turn()
    shop.write(*range(41, 61))
    led = term.led[NAME]

    def turn_while(condition: Callable[[], bool]) -> float:
        began = term.now
        while condition():
            term.turn()
            term.work()
            assert term.now - began < 3 * DRAIN_SECONDS
        return term.now - began

    turn_while(lambda: led.window.seen == token_data(40))
    assert led.window.seen == token_data(60)
    assert turn_while(lambda: not led.is_draining) > DRAIN_SECONDS / 2
    assert turn_while(lambda: led.is_draining) > 1.5 * DRAIN_SECONDS, "a run may take longer than the first drain"
    assert shop.in_force(term).partitions == OLD
    before.end(claim, hanging)
    term.finish()
    assert shop.in_force(term).partitions == NEW
    shop.check()


def test_what_comes_between_a_drain_and_the_next_reading_is_not_passed_over(shop: TermsOfShop) -> None:
    """P1: the reader is ahead of a handler that has drained, and may wait before it reads again."""
    term = shop.begin(NEW)
    term.repartitioning.resume_reading(term.now + 60.0)  # another handler has just drained
    while not term.led[NAME].is_draining:
        term.turn()
        term.work()
    shop.write(*range(41, 51))
    while shop.in_force(term).partitions == OLD:
        term.turn()
        term.work()
    shop.write(*range(51, 61))
    term.finish(is_done=lambda: len(shop.numbers()) == 60)
    shop.check()


@pytest.mark.parametrize("turn_seconds", [0.1, -1.0])
def test_one_handler_makes_no_other_wait_and_one_that_is_gone_keeps_its_partitions(
    shop: TermsOfShop, monkeypatch: pytest.MonkeyPatch, turn_seconds: float
) -> None:
    """P12: also if each look at a handler takes the whole turn."""
    monkeypatch.setattr(repartitioning, "_TURN_SECONDS", turn_seconds)
    shop.begin(OLD, NAME, "audit", "gone")
    release = _halt(shop.begin(OLD))
    term = shop.begin(NEW, NAME, "audit")
    term.finish(is_done=lambda: set(term.waits) == {NAME} and len(shop.numbers("audit")) == len(WRITTEN))
    assert shop.in_force(term, "audit").partitions == NEW
    assert shop.in_force(term).partitions == shop.in_force(term, "gone").partitions == OLD
    assert release()
    term.finish()
    shop.check()
    shop.check("audit")


def test_a_turn_has_a_bound_however_many_handlers_are_replaced(
    shop: TermsOfShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: what is left is done in the next turn, which is due immediately."""
    shop.begin(OLD, NAME, "audit")
    monkeypatch.setattr(repartitioning, "_TURN_SECONDS", -1.0)
    term = shop.begin(NEW, NAME, "audit")
    term.finish()
    assert shop.in_force(term).partitions == shop.in_force(term, "audit").partitions == NEW
    shop.check()
    shop.check("audit")


def test_lost_history_waits_for_a_decision_where_anything_is_left_to_do(shop: TermsOfShop) -> None:
    term = shop.begin(NEW)
    term.turn()
    term.led[NAME].lost = True
    for _ in range(40):
        term.turn()
        term.work()
    assert "changes reset record --to oldest" in term.waits[NAME]
    assert shop.in_force(term).partitions == OLD
    term.led[NAME].lost = False
    term.finish()
    shop.check()


def test_a_key_whose_old_rule_is_unknown_is_refused_while_anything_is_under_way(shop: TermsOfShop) -> None:
    """P2: only by that rule it is known whose changes have been done; once all is done it may change."""
    shop.begin(OLD, partition_by=region).finish()
    shop.write(*range(41, 61))
    term = shop.begin(OLD, partition_by=region)
    term.turn()
    term.work(most=1)
    term = shop.begin(OLD)
    for _ in range(3):
        assert not term.runs(), "nothing is taken in by the new rule"
        assert f"{region.__module__}:region" in term.repartitioning.stopped[NAME]
    assert shop.in_force(term).key.endswith(":region")
    term = shop.begin(OLD, partition_by=region)
    term.finish()
    term.watermarks.store(list(term.led.values()), 0.0)
    shop.write(*range(61, 81))
    term = shop.begin(OLD)
    assert not term.waits, "it was switched before anything was read"
    term.finish()
    assert shop.in_force(term).key.endswith(":_id")
    shop.check()


def test_a_switch_without_an_answer_at_the_beginning_stops_its_own_handler_alone(
    shop: TermsOfShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2, P12: before the switch, which is made again, the handler takes in nothing by the new rule."""

    def lose() -> None:
        raise AutoReconnect("the answer is lost")

    before = shop.begin(OLD, NAME, "audit", partition_by=region)
    before.finish()
    before.watermarks.store(list(before.led.values()), 0.0)
    shop.write(*range(41, 61))
    around(monkeypatch, (Partitions, "replace"), lose, behind=True)
    term = shop.begin(OLD, NAME, "audit")
    (stopped,) = term.repartitioning.stopped
    term.turn()
    assert not term.led[stopped].window.count
    term.finish()
    assert shop.in_force(term, stopped).key.endswith(":_id")
    assert sorted(shop.numbers()) == sorted(shop.numbers("audit")) == list(range(1, 61))


@pytest.mark.parametrize("rule", [None, region])
def test_a_handler_whose_stored_place_lies_before_its_start_is_switched(shop: TermsOfShop, rule: Any) -> None:
    """P1, P12: it was added while the stream was read from further back, and its old rule may not be known."""
    first = shop.begin(OLD, NAME, "added", partition_by=rule)
    place = {"resumeToken": {"_data": token_data(5)}, "clusterTime": mark(5).cluster_time}
    start = {"startAtOperationTime": mark(30).cluster_time}
    first.rig.database["handlers"].update_one({"_id": f"{BRIDGE}/added"}, {"$set": place | start})
    for partitions in (NEW, OLD):  # the second time, the old ones stand at that place
        term = shop.begin(partitions, "added")
        term.repartitioning.turn(term.now)
        assert not term.waits
        assert shop.in_force(term, "added").partitions == partitions
        assert {image.data for image in shop.images(term, "added").values()} == {token_data(5)}


STEPS: list[tuple[type, str]] = [(Subscriptions, "advance_all"), (Partitions, "replace"), (Partitions, "of")]
_NAMES = [f"{kind.__name__}.{name}" for kind, name in STEPS]


@pytest.mark.parametrize("wanted", [OLD, NEW, NEW + 2])
@pytest.mark.parametrize("end", ["killed before", "killed after", "wakes late"])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
def test_a_listener_that_is_killed_or_wakes_late_at_any_step_has_lost_and_doubled_nothing(
    shop: TermsOfShop, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], end: str, wanted: int
) -> None:
    interrupted, successors = shop.begin(NEW), list[SwitchingTerm]()

    def succeed() -> None:
        successors.append(shop.begin(wanted))
        successors[0].finish()

    def kill() -> None:
        raise KilledError

    is_killed = end.startswith("killed")
    with monkeypatch.context() as patch:
        around(patch, step, kill if is_killed else succeed, behind=end == "killed after")
        with pytest.raises(KilledError if is_killed else LeaseLostError):
            interrupted.finish()
    if is_killed:
        shop.write(*range(41, 61))
        succeed()
    (term,) = successors
    assert shop.in_force(term).partitions == wanted
    assert {image.term for image in shop.images(term).values()} == {term.rig.version}
    assert shop.partitionings() == {shop.in_force(term).term}
    shop.check()


def test_partitions_that_a_late_listener_makes_anew_are_led_by_nobody_and_go(
    shop: TermsOfShop, mongo_client: MongoClient[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P3: it has read of a layout whose partitions are gone by the time at which it makes them."""
    shop.begin(OLD)
    frozen = begin_term(mongo_client, shop.database, OLD)
    with monkeypatch.context() as patch:
        around(patch, (Partitions, "prepare"), lambda: shop.begin(NEW).finish())
        with pytest.raises(LeaseLostError):
            frozen.take_over()
    assert len(shop.partitionings()) == 2
    term = shop.begin(OLD)
    term.finish()
    assert shop.partitionings() == {term.rig.version}
    shop.check()


def test_what_is_stored_of_former_partitions_is_removed_but_not_that_of_a_later_term(shop: TermsOfShop) -> None:
    """P1, P12: a listener that wakes late may store there; what a person has put beside it stays."""
    term = shop.begin(NEW)
    term.finish()
    spill = term.rig.database["backlog"]
    foreign = [f"{BRIDGE}/0", f"{BRIDGE}/{NAME}"]
    spill.insert_many([{"_id": name} for name in foreign])
    for partitioning, version in ((1, term.rig.version), (2, term.rig.version + (1 << 50))):
        late = StoredChange(token_data(99), b"")
        term.rig.store.backlog.insert(f"{BRIDGE}/{NAME}/{partitioning}/0", [late], version)
    term = shop.begin(NEW)
    term.housekeeping.start()

    def left() -> bool:
        term.turn()
        return sorted(spill.distinct("_id")) == sorted([*foreign, f"{BRIDGE}/{NAME}/2/0/{token_data(99)}"])

    wait_for(left, message="the late change is removed")
    term.housekeeping.stop()


@pytest.mark.parametrize("command", [_pause, _park_key, _replay])
def test_what_comes_in_between_the_look_and_the_switch_is_not_overlooked(
    shop: TermsOfShop, monkeypatch: pytest.MonkeyPatch, command: Callable[[SwitchingTerm], Callable[[], object]]
) -> None:
    term = shop.begin(NEW)
    released: list[Callable[[], object]] = []
    around(monkeypatch, (Partitions, "replace"), lambda: released.append(command(term)))
    term.finish(is_done=lambda: bool(released))
    assert shop.in_force(term).partitions == OLD
    assert released[0]()
    term.finish()
    assert shop.in_force(term).partitions == NEW
    shop.check()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_killed", [False, True], ids=["the answer is lost", "the listener is killed"])
def test_no_fencing_token_is_given_twice_whatever_interrupts_a_switch(
    shop: TermsOfShop, monkeypatch: pytest.MonkeyPatch, is_killed: bool, behind: bool
) -> None:
    """P4: tokens may be far ahead of cluster time, since each dead letter leaves some thousands free."""
    monkeypatch.setattr("mongo_celery.bridge.listener.repartitioning._PAUSE_SECONDS", 0.0)
    term = shop.begin(NEW)
    term.finish(is_done=lambda: len(shop.numbers()) == 40)
    state = shop.client[shop.database]["partitions"]
    state.update_many({"handler": NAME}, {"$inc": {"fencingToken": 1 << 40}})
    largest = max(each["fencingToken"] for each in state.find({"handler": NAME}))
    failures: list[type[Exception]] = [KilledError if is_killed else AutoReconnect]

    def interrupt() -> None:
        if failures:
            raise failures.pop()

    with monkeypatch.context() as patch:
        around(patch, (Partitions, "replace"), interrupt, behind=behind)
        if is_killed:
            with pytest.raises(KilledError):
                term.finish()
            term = shop.begin(NEW)
        term.finish()
    assert not failures
    assert shop.in_force(term).partitions == NEW
    assert min(each["fencingToken"] for each in state.find({"handler": NAME})) >= largest


@pytest.mark.parametrize("coalesce", [False, True])
def test_a_limited_handler_gets_its_partitions_when_what_is_delayed_has_run(
    shop: TermsOfShop, mongo_client: MongoClient[Document], state_database: str, coalesce: bool
) -> None:
    before, rig = len(shop.numbers()), begin_term(mongo_client, state_database, NEW)
    limited = {"name": NAME, "delay": DELAY, "coalesce": coalesce, "max_running": 1}
    handler = make_handler(handle, ("shop.orders",), None, task_name="shop.record", given=limited, batch_size=5)
    term = SwitchingTerm(replace(rig, handlers=[handler]), shop.events, shop.handled)
    is_due = False

    def turn() -> None:
        term.turn()
        led, now = term.led[NAME], time.monotonic()
        assert led.delay is not None, "it has one"
        led.delay.observe(time_of(WRITTEN[-1]) - now + (2 * DELAY if is_due else 0.5), math.inf)
        chosen = list(led.due(now))
        assert len(chosen) + len(led.in_flight) <= 1
        for each in chosen:
            each.partition.note_sending()
            each.partition.note_sent(now)
            assert term.handle(each.run)

    for _ in range(5):
        turn()
    assert term.led[NAME].is_draining
    assert (len(shop.numbers()), shop.in_force(term).partitions) == (before, OLD)
    is_due = True
    for partition in term.led[NAME].partitions.values():
        partition.delayed_until = 0.0  # the clock was set
    for _ in range(3 * len(WRITTEN)):
        turn()
    assert (term.waits, shop.in_force(term).partitions) == ({}, NEW)
    shop.check()


def test_a_larger_epoch_anywhere_raises_the_version(shop: TermsOfShop) -> None:
    """P4: a lease from a backup; what later partitions begin with must lie above it."""
    before = shop.begin(OLD)
    ahead = before.rig.version + (1 << 50)
    before.rig.partitions.update_one({"_id": before.rig.partition_id(NAME, 0)}, {"$set": {"term": Int64(ahead)}})
    term = shop.begin(NEW)
    assert term.takeover.version == term.rig.version > ahead
    term.finish()
    assert shop.in_force(term).term > ahead
