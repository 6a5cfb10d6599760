"""
Lost history: the warning before, and who is moved, whereto, and what stays after it.

The set's own oplog decides: it holds this moment, and nothing of 1970. P1 to P16 are the design's invariants.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener import history, starts
from mongo_celery.bridge.listener.history import LostHistory
from mongo_celery.bridge.listener.horizon import THRESHOLDS, Horizon, judge_risk, remedy
from mongo_celery.bridge.listener.starts import find_starts, read_starts
from mongo_celery.bridge.listener.stored_range import StoredRange
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.bridge.state.audit import make_record
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.window import Mark, PendingChange
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import AccessError, HistoryLostError, LeaseLostError
from mongo_celery.mongo import oplog
from mongo_celery.mongo.oplog import Oplog, operation_time, read_oplog
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import Document, MakeClient, MakeReplicaSet, sparse
from tests.fixtures.rights import UrlOf
from tests.rig.term import TermRig, advance, begin_term, mark_at

APP = "history"
ROLLED = mark_at(Timestamp(5, 1))
ROLLED_LATER = mark_at(Timestamp(6, 1))
PINNED = Timestamp(1, 1)
STREAM = "the fingerprint"
FUTURE = Timestamp(4_000_000_000, 1)
FUTURE_MARK = mark_at(FUTURE)


@dataclass
class Bridge:
    """A term with subscriptions at places of the test's choice."""

    client: MongoClient[Document]
    rig: TermRig
    led: dict[str, Subscription]
    watermarks: Watermarks

    def history(self, decision: str) -> LostHistory:
        return LostHistory(self.rig.wiring, self.rig.renewal, decision=decision, fingerprint=STREAM)

    def go_on(self, decision: str) -> Position | None:
        return self.history(decision).settle_refusal(HistoryLostError(), self.led, self.watermarks)

    def begin(self, decision: str = "halt") -> Position | None:
        starts_ = read_starts(self.rig.store, list(self.led), self.rig.version)
        return self.history(decision).begin(self.led, starts_)

    def look(self, decision: str = "halt") -> Position | None:
        return self.history(decision).follow_moves(self.led, time.monotonic())

    def decide(self, name: str, policy: str) -> Timestamp:
        """Move one as `changes reset` does; where to."""
        start = self.oldest if policy == "oldest" else operation_time(self.client)
        record = make_record("reset", [name], "why", "who", [name], {"handlers": 1})
        seen = self.document(name)["lost"]
        assert self.rig.store.positions.pass_gap(name, seen, start, policy, record)
        assert not self.rig.store.positions.pass_gap(name, seen, start, policy, record), "once"
        return start

    def document(self, name: str) -> Document:
        return sparse(self.rig.database["handlers"]).find_one({"_id": f"shop/{name}"}) or {}

    @property
    def given_up(self) -> list[str]:
        """Handlers that gave some history up, each as often as it did."""
        return [name for name in self.led for _ in self.document(name).get("gaps") or ()]

    @property
    def oldest(self) -> Timestamp:
        return read_oplog(self.client).first


def make_on(client: MongoClient[Document], database: str, **marks: Mark | None) -> Bridge:
    """Return a bridge whose subscriptions stand at these marks, or nowhere yet."""
    rig = begin_term(client, database, 2, list(marks))
    takeover = rig.take_over()
    for name, mark in marks.items():
        assert rig.store.subscriptions.pin(name, rig.version, PINNED, None)
        if mark is not None:
            advance(rig.store.subscriptions, name, rig.version, mark.token, mark.cluster_time, STREAM)
    led = {each.name: each for each in rig.led(takeover, marks)}
    bridge = Bridge(client, rig, led, Watermarks(rig.store, rig.renewal, STREAM, dict))
    bridge.watermarks.store(led.values(), 0.0)
    return bridge


Make = Callable[..., Bridge]


@pytest.fixture
def make(mongo_client: MongoClient[Document], state_database: str) -> Make:
    return partial(make_on, mongo_client, state_database)


@pytest.fixture
def tip(mongo_client: MongoClient[Document]) -> Mark:
    return mark_at(operation_time(mongo_client))


def test_only_what_lies_before_the_oldest_entry_is_moved(make: Make, tip: Mark) -> None:
    """P1: the others' changes can still be read, whatever was decided; the stream is opened there."""
    bridge = make(record=ROLLED, audit=tip)
    before = bridge.document("audit")
    assert bridge.go_on("now") == Position(tip.token, tip.cluster_time)
    assert bridge.document("audit") == before
    moved = bridge.document("record")
    assert moved["resumeToken"] is None
    assert moved["startAtOperationTime"] == moved["clusterTime"] > tip.cluster_time
    assert bridge.led["record"].plan.start == moved["startAtOperationTime"]
    assert (bridge.led["record"].stored, bridge.led["audit"].stored) == (None, tip)


def test_without_the_right_to_read_the_oplog_the_smallest_position_is_moved(
    make: Make, tip: Mark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P9: said in the log; the next failure moves the next one, until the stream opens."""
    caplog.set_level(logging.ERROR, "mongo_celery.listener")
    bridge = make(record=ROLLED, audit=ROLLED_LATER, third=tip)

    def refuse(_client: object) -> None:
        raise AccessError

    monkeypatch.setattr(oplog, "read_oplog", refuse)
    monkeypatch.setattr(starts, "read_oplog", refuse)
    assert bridge.go_on("now") == Position(ROLLED_LATER.token, ROLLED_LATER.cluster_time)
    assert [vars(each)["subscription"] for each in caplog.records] == ["record"]
    assert bridge.go_on("now") == Position(tip.token, tip.cluster_time)
    with pytest.raises(AccessError):
        bridge.go_on("oldest")


@pytest.mark.parametrize("skip", range(7))
def test_what_an_error_interrupts_is_judged_again_where_the_server_refuses_it_again(
    make_client: MakeClient,
    state_database: str,
    tip: Mark,
    monkeypatch: pytest.MonkeyPatch,
    failpoint: Failpoint,
    skip: int,
) -> None:
    """P1, P17: nobody else is taken for the one that is first."""
    bridge = make_on(make_client(appName=APP), state_database, record=ROLLED, audit=ROLLED_LATER, third=tip)
    monkeypatch.setattr(starts, "read_oplog", lambda _client: None)
    monkeypatch.setattr(history, "oplog_or_none", lambda _client: None)
    interrupted = bridge.history("now")

    def go_on() -> Position | None:
        return interrupted.settle_refusal(HistoryLostError(), bridge.led, bridge.watermarks)

    fault: Any = {"failCommands": ["update", "find", "findAndModify"], "errorCode": 50, "mode": {"skip": skip}}
    with failpoint(appName=APP, **fault), pytest.raises(PyMongoError):
        go_on()
    position = interrupted.find_position(bridge.led)
    if position == Position(ROLLED.token, ROLLED.cluster_time):
        position = go_on()
    assert position == Position(ROLLED_LATER.token, ROLLED_LATER.cluster_time)
    assert [bridge.document(name)["resumeToken"] for name in bridge.led] == [None, ROLLED_LATER.token, tip.token]
    assert bridge.given_up == ["record"]
    assert [name for name, each in bridge.led.items() if each.has_gap] == ["record"]
    assert bridge.led["record"].plan.watermark is None


def test_a_token_that_is_refused_within_the_oplog_is_replaced_by_its_time_once(make: Make, tip: Mark) -> None:
    """P1, P9: nothing is skipped, and no hot loop where that does not help."""
    later = mark_at(Timestamp(FUTURE.time, 1))
    bridge = make(record=tip, audit=later)
    assert bridge.go_on("oldest") == Position(None, tip.cluster_time)
    bridge.watermarks.store(bridge.led.values(), 0.0)
    assert bridge.document("record")["resumeToken"] is None, "the refused token does not come back"
    assert bridge.document("audit")["resumeToken"] == later.token
    assert bridge.go_on("oldest") == Position(later.token, later.cluster_time)
    assert bridge.led["record"].lost, "it stands, and the other one goes on"
    assert bridge.document("record")["lost"]["at"] == tip.cluster_time


def test_a_start_that_rolled_away_before_it_was_read_is_chosen_again_once(make: Make) -> None:
    """P1, P9: `oldest` was asked for, and a young bridge races a fast oplog; then somebody has to know."""
    bridge = make(record=None)
    lost, given = bridge.history("halt"), (HistoryLostError(), bridge.led, bridge.watermarks)
    assert lost.settle_refusal(*given) == Position(None, bridge.oldest)
    rolled = {"startAtOperationTime": PINNED, "clusterTime": PINNED}
    bridge.rig.database["handlers"].update_one({}, {"$set": rolled})
    assert lost.settle_refusal(*given) is None
    assert bridge.led["record"].lost


@pytest.fixture
def rolling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the set's oplog, which is whole, count as one that has removed its oldest entries."""

    def read(client: MongoClient[Document]) -> Oplog:
        return replace(read_oplog(client), is_whole=False)

    monkeypatch.setattr(oplog, "read_oplog", read)
    monkeypatch.setattr(starts, "read_oplog", read)


def test_a_start_before_the_beginning_of_a_whole_oplog_is_not_lost(
    make_replica_set: MakeReplicaSet, make_client: MakeClient
) -> None:
    """
    P1, P12: nothing was ever removed from it, and the server reads from there. The session's set may have rolled.

    But nobody can have read up to there in this set: such a position has come with a state that was restored.
    """
    client, at_its_start = make_client(make_replica_set().url), mark_at(PINNED)
    assert read_oplog(client).is_whole
    bridge = make_on(client, "state", record=None)
    assert bridge.begin() == Position(None, PINNED)
    bridge = make_on(client, "restored", record=at_its_start, restored=ROLLED)
    assert bridge.begin() == Position(at_its_start.token, PINNED)
    assert [name for name, each in bridge.led.items() if each.lost] == ["restored"]
    assert bridge.begin() == Position(at_its_start.token, PINNED), "it stands still, whoever leads"
    bridge.decide("restored", "now")
    assert bridge.look() is not None
    assert not bridge.led["restored"].lost


@pytest.mark.usefixtures("rolling")
def test_a_handler_that_is_added_while_all_others_are_lost_can_be_read(make: Make) -> None:
    """P12: the bridge's start rolled away long ago; no handler of a deploy is born there."""
    bridge = make(record=ROLLED)
    assert bridge.begin() is None
    rig = begin_term(bridge.client, bridge.rig.options.database, 2, ("record", "late"), start_from=ROLLED.cluster_time)
    takeover = rig.take_over()
    found = find_starts(rig.store, bridge.client, rig.renewal, rig.options, rig.handlers, takeover.documents)
    assert (found["late"].place, found["record"].place[0]) == ((bridge.oldest, ""), ROLLED.cluster_time)
    led = {each.name: each for each in rig.led(takeover, {"record": ROLLED})}
    later = replace(bridge, rig=rig, led=led)
    assert later.begin() == Position(None, bridge.oldest)
    assert {name: each.lost for name, each in led.items()} == {"record": True, "late": False}


@pytest.mark.usefixtures("rolling")
@pytest.mark.parametrize("touched", [False, True])
def test_a_first_start_is_chosen_again_only_where_nothing_was_ever_claimed(make: Make, *, touched: bool) -> None:
    """P1, I1: a halted first change stores no watermark, and must not be given up."""
    bridge = make(record=None)
    if touched:
        halted = {"state": "halted", "halted": {"resumeToken": {"_data": "82"}, "key": "k"}}
        bridge.rig.partitions.update_one({"_id": bridge.rig.partition_id("record", 1)}, {"$set": halted})
    position = bridge.begin()
    assert bridge.led["record"].lost is touched
    assert position == (None if touched else Position(None, bridge.oldest))
    assert bool(bridge.given_up) is not touched


@pytest.mark.usefixtures("rolling")
@pytest.mark.parametrize("policy", ["oldest", "now"])
def test_a_decision_moves_one_subscription_while_the_listener_runs(make: Make, tip: Mark, policy: str) -> None:
    """P12: the stream is not opened before the oplog; what was given up is kept; the other one is not touched."""
    bridge = make(record=ROLLED, audit=tip)
    since = set()
    for _ in range(2):  # whoever leads
        assert bridge.begin() == Position(tip.token, tip.cluster_time)
        lost = bridge.document("record")["lost"]
        since.add(lost["since"])
    assert (len(since), lost["at"], lost["oldest"]) == (1, ROLLED.cluster_time, bridge.oldest)
    assert bridge.look() is None
    before = bridge.document("audit")
    bridge.decide("record", policy)
    position = bridge.look()
    moved = bridge.document("record")
    start = moved["startAtOperationTime"]
    assert (start == bridge.oldest) is (policy == "oldest")
    assert position == (Position(None, start) if policy == "oldest" else Position(tip.token, tip.cluster_time))
    assert (moved["lost"], bridge.led["record"].lost) == (None, False)
    (gap,) = moved["gaps"]
    assert (gap["from"], gap["until"], gap["policy"]) == (ROLLED.cluster_time, start, policy)
    assert bridge.given_up == ["record"]
    assert bridge.document("audit") == before


@pytest.mark.usefixtures("rolling")
def test_attempts_at_a_change_that_is_given_up_are_not_charged_to_the_next_one(make: Make, tip: Mark) -> None:
    """P14: a parked change is gone with its history; a halted one stays as the record of what is lost."""
    bridge = make(record=ROLLED, audit=tip)
    parked = {"count": 2, "crashes": 1, "notBefore": datetime(2100, 1, 1, tzinfo=UTC), "error": "later"}
    halted = {"state": "halted", "retry": {"count": 3}, "halted": {"resumeToken": ROLLED_LATER.token, "key": "k"}}
    for name in ("record", "audit"):
        bridge.rig.partitions.update_one({"_id": bridge.rig.partition_id(name, 0)}, {"$set": {"retry": parked}})
        bridge.rig.partitions.update_one({"_id": bridge.rig.partition_id(name, 1)}, {"$set": halted})
    before = bridge.rig.documents()
    bridge.begin("oldest")
    after = bridge.rig.documents()
    changed = {name for name, document in after.items() if document != before[name]}
    assert changed == {bridge.rig.partition_id("record", 0)}
    assert after[bridge.rig.partition_id("record", 0)]["retry"] is None


def test_what_is_buffered_outlives_a_move_and_its_place_is_not_stored_over_the_new_one(make: Make) -> None:
    """P4, P13: the leader that has read it keeps it; the oplog no longer has it."""
    bridge = make(record=ROLLED)
    led = bridge.led["record"]
    led.window.add(PendingChange(ROLLED_LATER, 0, b"change"), led.partitions[0].queue)
    assert bridge.go_on("halt") is None
    start = bridge.decide("record", "now")
    assert bridge.look() == Position(None, start)
    assert len(led.partitions[0].queue) == 1
    led.window.complete(led.partitions[0].queue, ROLLED_LATER.data)
    bridge.watermarks.store(bridge.led.values(), 0.0)
    assert bridge.document("record")["clusterTime"] == start
    led.ingest_item(FUTURE_MARK)
    bridge.watermarks.store(bridge.led.values(), 0.0)
    assert bridge.document("record")["clusterTime"] == FUTURE


def test_who_was_read_further_in_this_term_is_judged_by_that(make: Make) -> None:
    """P13: a halted change holds the watermark; what came behind it is in the buffer, and is not lost yet."""
    bridge = make(record=ROLLED, audit=ROLLED)
    now = operation_time(bridge.client)
    led = bridge.led["audit"]
    led.window.add(PendingChange(ROLLED_LATER, 0, b"change"), led.partitions[0].queue)
    led.window.pass_over(mark_at(now))
    assert bridge.go_on("halt") == Position(None, now)
    assert [each.lost for each in bridge.led.values()] == [True, False]
    assert len(led.partitions[0].queue) == 1
    bridge.led["record"].ingest_item(mark_at(now))
    bridge.watermarks.store(bridge.led.values(), 0.0)
    assert bridge.document("record")["resumeToken"] == ROLLED.token, "nothing is read for it, and its watermark stands"
    assert bridge.given_up == []


def test_the_listener_ends_once_nothing_is_left_to_lead(make: Make) -> None:
    """P9, P13: but not while it has something that only it has, nor before what is stored has run."""
    bridge = make(record=ROLLED)
    led = bridge.led["record"]
    led.window.add(PendingChange(ROLLED_LATER, 0, b"change"), led.partitions[0].queue)
    assert bridge.go_on("halt") is None
    assert bridge.look() is None
    led.window.complete(led.partitions[0].queue, ROLLED_LATER.data)
    backlog = StoredRange(ROLLED.data, mark_at(Timestamp(4, 1)).data)
    led.run_stored(led.partitions[0], backlog)
    assert bridge.look() is None, "stored changes are left to run"
    backlog.complete(ROLLED.data)
    with pytest.raises(HistoryLostError):
        bridge.look()


def test_a_term_that_has_ended_moves_nothing(make: Make, tip: Mark) -> None:
    """P3: somebody else leads and decides."""
    bridge = make(record=ROLLED, audit=tip)
    later = begin_term(bridge.client, bridge.rig.options.database, 2, ("record", "audit"))
    later.take_over()
    before = bridge.document("record")
    with pytest.raises(LeaseLostError):
        bridge.go_on("now")
    assert bridge.document("record") == before


BEGIN, END = 1_000_000, 1_001_000
LISTENER = "mongo_celery.listener"


def oplog_from(first: int = BEGIN) -> Oplog:
    return Oplog(Timestamp(first, 1), Timestamp(END, 1))


MakeHorizon = Callable[[str], Horizon]


@pytest.fixture
def horizon_on(state_database: str) -> Iterator[MakeHorizon]:
    with ExitStack() as stack:

        def make(url: str) -> Horizon:
            wiring = Wiring("shop", url, {"name": "shop", "database": state_database})
            wiring.bound = Celery("horizon", set_as_current=False)
            stack.callback(wiring.client.close)
            return Horizon(wiring)

        yield make


@pytest.fixture
def endangered(mongo_client: MongoClient[Document], state_database: str) -> Subscription:
    """Give a subscription whose change at half of the oplog is not done."""
    rig = begin_term(mongo_client, state_database, 2)
    (led,) = rig.led(rig.take_over(), {"record": mark_at(Timestamp(BEGIN + 500, 1))})
    led.window.add(PendingChange(mark_at(Timestamp(BEGIN + 501, 1)), 1, b"change"), led.partitions[1].queue)
    return led


def test_each_threshold_is_named_once_as_the_oplog_comes_nearer(
    endangered: Subscription, mongo_url: str, horizon_on: MakeHorizon, caplog: pytest.LogCaptureFixture
) -> None:
    """
    P16: 50, 75, 90 and 100 %, with the command that frees the place.

    Oplogs are truncated in pieces, so a share goes up and down. Once the place is freed, the next fall is a new one.
    """
    caplog.set_level(logging.WARNING, LISTENER)
    horizon, partition = horizon_on(mongo_url), endangered.partitions[1]
    partition.image = replace(partition.image, state="halted")

    def judge(read: Oplog | None) -> None:
        horizon._read = read
        horizon.judge([endangered])

    for first in range(BEGIN - 400, BEGIN + 520, 5):
        for tremble in (0, -10, 0):
            judge(oplog_from(first + tremble))
    shares = [record.__dict__["share"] for record in caplog.records]
    assert [max(limit for limit in THRESHOLDS if limit <= share) for share in shares] == list(THRESHOLDS)
    for record in caplog.records:
        assert (record.__dict__["event"], record.__dict__["subscription"]) == ("history_at_risk", "record")
        assert "changes retry record 1" in record.getMessage()
    judge(oplog_from(BEGIN - 4000))
    judge(oplog_from())
    assert len(caplog.records) == len(THRESHOLDS) + 1
    judge(None)
    assert len(caplog.records) == len(THRESHOLDS) + 1, "there is room again"


_HELD: list[tuple[Document, str, str]] = [
    ({"state": "halted"}, "halted", "celery -A shop changes skip record 1"),
    ({"state": "paused"}, "paused", "celery -A shop changes resume record 1"),
    ({"due_in": 9.0}, "retrying", "celery -A shop changes retry record 1"),
    ({"due_in": 9.0, "waiting": {"cause": "AutoReconnect: away"}}, "waiting", "server"),
    ({}, "unclaimed", "workers"),
    ({}, "limited", "rate"),
]


def test_the_remedy_fits_what_holds_it(endangered: Subscription) -> None:
    """P16: who is told to retry what is paused learns nothing. Where nothing is left to do, no partition is named."""
    partition, untouched = endangered.partitions[1], endangered.partitions[1].image
    for changes, state, command in _HELD:
        partition.image = replace(untouched, **changes)
        endangered.limit.waiting = int(state == "limited")
        endangered.candidates[partition] = None
        risk = judge_risk(endangered, oplog_from())
        assert (risk.partition, risk.state) == (1, state)
        assert command in remedy(CommandLine("shop"), risk.subscription, risk.partition, risk.state)
    endangered.window.complete(partition.queue, endangered.window.seen)
    risk = judge_risk(endangered, oplog_from(BEGIN + 2))
    assert (risk.partition, risk.state) == (None, None)
    assert "changes status" in remedy(CommandLine("shop"), risk.subscription, risk.partition, risk.state)


def test_a_whole_oplog_endangers_nobody(make_replica_set: MakeReplicaSet, horizon_on: MakeHorizon) -> None:
    """P16: it has never removed an entry, however far back somebody stands. The session's set may have rolled."""
    horizon = horizon_on(make_replica_set().url)
    assert horizon.read_oplog() < math.inf
    assert horizon._read is None


def test_without_the_right_to_see_the_oplog_it_is_said_once(
    guarded_url: UrlOf, horizon_on: MakeHorizon, caplog: pytest.LogCaptureFixture
) -> None:
    """P16: a mongos has none, either. Once in a term: the oplog is not asked for again."""
    caplog.set_level(logging.INFO, LISTENER)
    assert horizon_on(guarded_url("without_oplog")).read_oplog() == math.inf
    said = [record.__dict__["event"] for record in caplog.records if record.name == LISTENER]
    assert said == ["horizon_unseen"]
