"""Status, commands and preflight against a real replica set, without any other process."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import ObjectId, Timestamp
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from celery import Celery
from celery.app.task import Context
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.bridge.change import FLAGS
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import take_over
from mongo_celery.bridge.operations import broker_check, heads, preflight
from mongo_celery.bridge.operations.bridge_snapshot import PartitionStatus
from mongo_celery.bridge.operations.keys import hash_of_key, partition_of_key
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.operations.preflight import check
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.operations.whereabouts import Whereabouts, find_whereabouts
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.dead_letters import FAILED, Place, dead_letter, iterate_forms
from mongo_celery.bridge.state.leases import Term
from mongo_celery.bridge.state.partitions import Image, Partitions
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import layouts_in_force, parse_name
from mongo_celery.bridge.window import Refusal
from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import AccessError, CommandRefusedError, ServerUnavailableError, TopologyError
from mongo_celery.findings import Finding, failing
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.plan import Plan
from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.fixtures.samples import IDENTITY
from tests.integration.guarded import GuardedMongo
from tests.integration.term_rig import mark_at

Document = dict[str, Any]
MakeBridge = Callable[..., Bridge]

ANSWER_SECONDS_MAX = 25.0
NAME = "shop"


def partitions_of(plan: Plan) -> list[Document]:
    """What a command does to each partition."""
    return list(plan.run().fields["partitions"])


def results_of(plan: Plan) -> list[str]:
    return [each["result"] for each in partitions_of(plan)]


def token(number: int) -> Document:
    """A resume token; larger numbers come later in the stream."""
    return {"_data": f"82{number:08X}00000001"}


@pytest.fixture(autouse=True)
def no_worker_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """None runs here, so nobody waits for their answers."""
    monkeypatch.setattr(broker_check, "INSPECT_SECONDS", 0.01)


@pytest.fixture
def make_bridge(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[MakeBridge]:
    """Give a function that makes a bridge with one handler, on the session's set by default."""
    made: list[Bridge] = []

    def make(
        url: str | None = None, *, source: str | None = None, handler: str = "summarise", **options: Any
    ) -> Bridge:
        app = Celery("operations", broker="memory://", set_as_current=False)
        given = {"name": NAME, "database": state_database, "partitions": 3, "autodiscover": False, **options}
        bridge = Bridge(app, url or mongo_url, **given)

        @bridge.on_change(source or f"{database.name}.orders", name=handler)
        def handle(change: object) -> None:
            del change

        app.finalize()
        made.append(bridge)
        return bridge

    yield make
    for bridge in made:
        bridge.client.close()


@pytest.fixture
def bridge(make_bridge: MakeBridge) -> Bridge:
    """Give a bridge that nobody has led yet."""
    return make_bridge()


class Led:
    """A bridge whose lease is held, with a worker's means to claim."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.store = Store(bridge.client, bridge.options)
        self.store.leases.ensure()
        term = self.store.leases.acquire(IDENTITY)
        assert term is not None, "the lease is free"
        self.term: Term = term
        renewal = Renewal(self.store.leases, self.store.signing, term, bridge.options.lease_ttl)
        takeover = take_over(self.store, renewal, bridge.options, bridge.handlers)
        self.version = takeover.version
        self.generations = {name: layout.term for name, layout in takeover.layouts.items()}

    def claim(self, index: int = 0, number: int = 1, subscription: str = "summarise") -> Claim | None:
        """Claim one change of a partition, as a worker does."""
        return self.store.claims.take(
            self.store.partitions.partition_id(subscription, self.generations[subscription], index),
            owner=str(ObjectId()),
            term=self.version,
            first=number,
            last=number,
            token=token(number)["_data"],
        )

    def halt(self, index: int = 0, number: int = 1) -> None:
        """Let a change fail for good."""
        claim = self.claim(index, number)
        assert claim is not None, "the change may run"
        assert self.store.claims.halt(claim, token(number), f"shop.orders insert {number}", "ValueError: no")

    def park(self, index: int = 0, number: int = 1) -> None:
        """Let a change ask for a retry in an hour."""
        claim = self.claim(index, number)
        assert claim is not None, "the change may run"
        assert self.store.claims.park(claim, delay=3600, not_before=None, error="ConnectionError: later")

    def partition(self, index: int = 0) -> PartitionStatus:
        """A partition as `status` shows it."""
        return read_snapshot(self.bridge.wiring).handlers[0].partitions[index]

    def images(self) -> list[Image]:
        """All partitions, read now."""
        return self.store.partitions.of(self.generations)


@pytest.fixture
def led(bridge: Bridge) -> Led:
    """Give a bridge that is led."""
    return Led(bridge)


# -- status ----------------------------------------------------------------------------------------


def test_the_status_of_a_bridge_that_was_never_started_leaves_nothing_behind(
    bridge: Bridge, mongo_client: MongoClient[Document], state_database: str
) -> None:
    """Looking is free of side effects."""
    status = read_snapshot(bridge.wiring)
    assert status.state == "never_started"
    assert status.handlers[0].partitions == ()
    assert (status.oplog_seconds or 0) >= 0
    assert state_database not in mongo_client.list_database_names()


def test_the_status_follows_the_lease(led: Led) -> None:
    """Held, then given back with an error."""
    status = led.bridge.operations.read_status()
    assert status.state == "leading"
    assert status.term == led.version
    assert status.leader is not None
    assert status.leader.pid == os.getpid()
    assert [each.index for each in status.handlers[0].partitions] == [0, 1, 2]
    assert [each.queue for each in status.handlers[0].partitions] == ["shop.0", "shop.1", "shop.2"]
    led.store.leases.release(led.term, "history_lost", "too late")
    status = read_snapshot(led.bridge.wiring)
    assert (status.state, status.error, status.leader) == ("history_lost", "too late", None)


def test_the_status_follows_the_reports_of_the_listener(led: Led) -> None:
    """Lag is zero only for a listener that says it has caught up."""
    led.store.leases.record_report(led.term, {"outstanding": 2, "buffered": 5, "caughtUp": True})
    status = read_snapshot(led.bridge.wiring)
    assert (status.in_flight, status.buffered) == (2, 5)
    led.store.leases.record_report(led.term, {"outstanding": 0, "buffered": 0, "caughtUp": True})
    assert read_snapshot(led.bridge.wiring).lag_seconds == 0


def test_the_status_follows_a_partition(led: Led) -> None:
    """Claimed, parked, halted, with the server's verdicts."""
    claim = led.claim()
    assert claim is not None
    shown = led.partition()
    assert shown.claim is not None
    assert (shown.claim.live, shown.claim.owner) == (True, claim.owner)
    assert shown.fencing_token == claim.fencing_token
    assert read_snapshot(led.bridge.wiring).in_flight == 1
    assert led.store.claims.park(claim, delay=3600, not_before=None, error="ConnectionError: later")
    shown = led.partition()
    assert shown.state == "retrying"
    assert 3500 < shown.due_seconds <= 3600
    led.halt(index=1)
    status = read_snapshot(led.bridge.wiring)
    assert status.handlers[0].state == "halted"
    assert (led.partition(1).key_token, led.partition(1).key) == (token(1)["_data"], "shop.orders insert 1")


def test_a_subscription_without_a_handler_is_still_shown(led: Led, make_bridge: MakeBridge) -> None:
    """Its position is kept; somebody may have forgotten an import."""
    other = make_bridge(handler="audit")
    shown = {each.name: each.state for each in read_snapshot(other.wiring).handlers}
    assert shown == {"audit": "new", "summarise": "unregistered"}
    assert led.bridge.name == other.name


def test_a_frozen_server_is_told_in_one_sentence_within_seconds(
    make_replica_set: MakeReplicaSet, make_bridge: MakeBridge
) -> None:
    """Connections stay open and nothing is answered: the worst case of unreachable."""
    server = make_replica_set()
    bridge = make_bridge(server.url)
    assert read_snapshot(bridge.wiring).state == "never_started"
    server.pause()
    began = time.monotonic()
    try:
        with pytest.raises(ServerUnavailableError, match="gave no answer"):
            read_snapshot(bridge.wiring)
        assert time.monotonic() - began < ANSWER_SECONDS_MAX
        assert [finding.code for finding in check(bridge.wiring) if finding.severity == "failing"][:1] == ["mongodb"]
    finally:
        server.resume()


def test_the_status_on_a_standalone_names_the_cure(standalone_url: str, make_bridge: MakeBridge) -> None:
    """There is no bridge without change streams."""
    with pytest.raises(TopologyError, match="replSet"):
        read_snapshot(make_bridge(standalone_url).wiring)


# -- commands --------------------------------------------------------------------------------------


def test_a_paused_partition_is_not_claimed_until_it_is_resumed(led: Led) -> None:
    """Only the named one stands still."""
    assert results_of(led.bridge.operations.pause("summarise", 0)) == ["done"]
    assert led.claim(0) is None
    assert led.claim(1) is not None
    assert led.partition().state == "paused"
    led.bridge.operations.resume("summarise", 0).run()
    assert led.claim(0) is not None


def test_a_pause_leaves_what_runs_alone(led: Led) -> None:
    """The execution may finish, and its outcome counts."""
    claim = led.claim()
    assert claim is not None
    led.bridge.operations.pause().run()
    assert led.store.claims.handle(claim, 1, token(1))
    assert led.store.claims.commit(claim.partition_id, 1)
    assert led.partition().committed == 1
    assert led.partition().state == "paused"


def test_commands_without_a_name_act_on_all_that_fit(led: Led) -> None:
    """Repeating one is harmless; what does not fit is left alone and told."""
    led.halt(2)
    outcomes = partitions_of(led.bridge.operations.pause())
    assert [each["result"] for each in outcomes] == ["done", "done", "unfit"]
    assert "halted" in outcomes[2]["reason"]
    assert results_of(led.bridge.operations.pause()) == ["unchanged", "unchanged", "unfit"]
    assert results_of(led.bridge.operations.resume()) == ["done", "done", "unfit"]
    assert [each["state"] for each in partitions_of(led.bridge.operations.resume())] == ["flowing", "flowing", "halted"]


def test_a_retry_starts_a_halted_change_again_with_new_counts(led: Led) -> None:
    """The same change, under a larger fence."""
    led.halt()
    fence = led.partition().fencing_token
    led.bridge.operations.retry("summarise", 0).run()
    shown = led.partition()
    assert (shown.state, shown.error, shown.retries, shown.key, shown.committed) == ("flowing", None, 0, None, 0)
    assert shown.fencing_token > fence
    claim = led.claim()
    assert claim is not None
    assert claim.retries == 0


def test_a_retry_does_not_wait_for_a_parked_change(led: Led) -> None:
    """The server is back: nobody wants to wait for the backoff."""
    led.park()
    assert led.claim() is None
    outcomes = partitions_of(led.bridge.operations.retry())
    assert [each["result"] for each in outcomes] == ["done", "unfit", "unfit"]
    assert led.claim() is not None


def test_a_retry_of_what_nothing_would_run_is_refused(led: Led, make_bridge: MakeBridge) -> None:
    """Its subscription is stored, but no handler of this app serves it: a success would be a lie."""
    led.halt()
    other = make_bridge(handler="audit")
    sentence = (
        r"summarise has no handler in this app, so nothing would run it: import the module .* then repeat the command"
    )
    for named in (("summarise", 0), ("summarise",), (None, 0)):
        with pytest.raises(CommandRefusedError, match=sentence):
            other.operations.retry(*named).run()
    assert led.partition().state == "halted"


def test_a_retry_of_all_leaves_out_what_nothing_would_run(led: Led, make_bridge: MakeBridge) -> None:
    """One forgotten import does not keep the others from their retry."""
    both = make_bridge()

    @both.on_change("shop.carts", name="audit")
    def audit(change: object) -> None:
        del change

    led.store.leases.release(led.term, "idle", None)
    again = Led(both)
    again.halt()
    again.park(1)
    claim = again.claim(number=1, subscription="audit")
    assert claim is not None, "the change may run"
    assert again.store.claims.halt(claim, token(1), "shop.carts insert 1", "ValueError: no")
    outcomes = partitions_of(make_bridge(handler="audit").operations.retry())
    found = {(each["subscription"], each["index"]): (each["result"], each["state"]) for each in outcomes}
    assert found == {
        ("audit", 0): ("done", "flowing"),
        ("audit", 1): ("unfit", "flowing"),
        ("audit", 2): ("unfit", "flowing"),
        ("summarise", 0): ("unfit", "halted"),
        ("summarise", 1): ("unfit", "retrying"),
        ("summarise", 2): ("unfit", "flowing"),
    }
    assert "no handler in this app" in outcomes[3]["reason"]
    assert "no handler in this app" in outcomes[4]["reason"]
    assert "nothing to retry" in outcomes[5]["reason"]


def test_a_retry_of_a_change_that_nobody_has_any_more_is_refused(led: Led) -> None:
    """P16: it would flow on as if nothing were lost; unless the listener says that the change is in its buffer."""
    led.halt()
    place, later = Timestamp(5, 1), Timestamp(9, 1)
    head = {"$set": {"halted.resumeToken": mark_at(Timestamp(6, 1)).token}}
    partition = led.store.partitions.partition_id("summarise", led.generations["summarise"], 0)
    led.bridge.client[led.bridge.options.database]["partitions"].update_one({"_id": partition}, head)
    assert led.store.subscriptions.pin("summarise", led.version, place, None)
    assert led.store.subscriptions.mark_lost("summarise", led.version, place, later, "rolled over")
    with pytest.raises(CommandRefusedError, match="can no longer be read"):
        led.bridge.operations.retry("summarise", 0).run()
    assert led.store.subscriptions.move_start("summarise", led.version, later, "oldest")
    with pytest.raises(CommandRefusedError, match="then skip it"):
        led.bridge.operations.retry("summarise", 0).run()
    assert led.partition().state == "halted"
    assert led.store.leases.record_report(led.term, {"held": [{"subscription": "summarise", "partition": 0}]})
    led.bridge.operations.retry("summarise", 0).run()
    assert led.partition().state == "flowing"


def test_a_lost_history_is_passed_once_and_leaves_a_record(led: Led) -> None:
    """P12: it is decided once, beside a listener. A second decision finds that it has changed."""
    operations = led.bridge.operations
    with pytest.raises(CommandRefusedError, match="did you mean 'summarise'"):
        operations.reset("summarize", "now")
    assert led.store.subscriptions.pin("summarise", led.version, Timestamp(5, 1), None)
    assert led.store.subscriptions.mark_lost("summarise", led.version, Timestamp(5, 1), Timestamp(9, 1), "why")
    with pytest.raises(CommandRefusedError, match="reset summarise --to oldest"):
        operations.reset("summarise", "2026-01-01")
    first, second = operations.reset("summarise", "now", reason="why"), operations.reset("summarise", "oldest")
    assert first.fields["from"] == Timestamp(5, 1).as_datetime().isoformat()
    before = led.store.leases.read() or {}
    to = first.run().fields["to"]
    with pytest.raises(CommandRefusedError, match="has changed since"):
        second.run()
    (document,) = [each for each in led.store.subscriptions.read_all() if parse_name(each) == "summarise"]
    start = document["startAtOperationTime"]
    assert start.as_datetime().isoformat() == to
    assert not document.keys() & {"lost", "resumeToken"}
    assert [(each["policy"], each["until"]) for each in document["gaps"]] == [("now", start)]
    lease = led.store.leases.read() or {}
    assert (lease["term"], lease["live"]) == (before["term"], before["live"]), "the term continues"
    (record,) = operations.history()
    assert (record["command"], record["reason"]) == ("reset summarise --to now", "why")


def test_a_skip_passes_over_the_change_that_was_seen(led: Led) -> None:
    """The position moves by one, and a stale message of the skipped change cannot claim."""
    led.halt()
    operations = led.bridge.operations
    with pytest.raises(CommandRefusedError, match=r"changes skip summarise 0 --discard"):
        operations.skip("summarise", 0).run()
    assert led.partition().state == "halted"
    plan = operations.skip("summarise", 0, discard=True)
    (halted,) = plan.fields["halted"]
    assert (halted["key"], halted["token"]) == ("shop.orders insert 1", plan.seen)
    assert results_of(plan) == ["done"]
    shown = led.partition()
    assert (shown.committed, shown.state, shown.token) == (1, "flowing", token(1)["_data"])
    assert led.claim(number=1) is None
    assert led.claim(number=2) is not None


def test_a_skip_refuses_a_change_that_its_operator_has_not_seen(led: Led) -> None:
    """Another operator was faster, and the next change has failed, too."""
    led.halt()
    first, second = (led.bridge.operations.skip("summarise", 0, discard=True) for _ in range(2))
    first.run()
    led.halt(number=2)
    with pytest.raises(CommandRefusedError, match="another change"):
        second.run()
    assert led.partition().committed == 1


def test_a_retry_does_not_run_a_change_that_its_operator_has_not_seen(led: Led) -> None:
    """Another operator skipped the first change, and the next has failed, too."""
    led.halt()
    operations = led.bridge.operations
    plan, again = operations.retry("summarise", 0), operations.retry("summarise", 0)
    assert plan.seen == again.seen != ""
    operations.skip("summarise", 0, discard=True).run()
    led.halt(number=2)
    with pytest.raises(CommandRefusedError, match="another change"):
        plan.run()
    assert led.partition().state == "halted"
    assert operations.retry("summarise", 0).seen != plan.seen


def test_a_plan_names_the_partitions_that_it_is_about(led: Led) -> None:
    """A page can so refuse to confirm a plan that has become another one."""
    operations = led.bridge.operations
    pause = operations.pause()
    assert pause.seen == operations.pause().seen
    operations.pause("summarise", 0).run()
    assert operations.pause().seen not in ("", pause.seen)
    resume = operations.resume()
    operations.pause("summarise", 1).run()
    assert operations.resume().seen not in ("", resume.seen)


def test_a_partition_that_is_halted_no_more_does_not_refuse_the_others(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody retries one before the halted changes are read, and one after that; named alone it is refused."""
    for index in range(3):
        led.halt(index)
    operations, read = led.bridge.operations, heads._read

    def read_late(wiring: Any, handler: str, index: int) -> Any:
        if index == 0:
            operations.retry("summarise", 0).run()
        return read(wiring, handler, index)

    monkeypatch.setattr(heads, "_read", read_late)
    plan = operations.skip("summarise", discard=True)
    assert [each["index"] for each in plan.fields["halted"]] == [1, 2]
    operations.retry("summarise", 1).run()
    result = plan.run()
    assert [each["result"] for each in result.fields["partitions"]] == ["unfit", "done"]
    assert len(result.refused) == 1
    with pytest.raises(CommandRefusedError, match="not halted"):
        operations.skip("summarise", 2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (lambda operations: operations.retry("summarise", 1), "nothing to retry"),
        (lambda operations: operations.skip("summarise", 1), "not halted"),
        (lambda operations: operations.pause("summarise", 0), "halted"),
        (lambda operations: operations.resume("summarise", 0), "retry it, or skip it"),
        (lambda operations: operations.retry("summarise", 2), "handled at this moment"),
        (lambda operations: operations.pause("summarize"), "did you mean 'summarise'"),
        (lambda operations: operations.pause("summarise", 9), "0 to 2"),
    ],
)
def test_a_command_that_does_not_fit_is_refused_in_a_sentence(
    led: Led, command: Callable[[Operations], Plan], words: str
) -> None:
    """Named partitions are taken at their word."""
    led.halt(0)
    assert led.claim(2) is not None
    with pytest.raises(CommandRefusedError, match=words) as caught:
        command(led.bridge.operations).run()
    assert str(caught.value).endswith(".")


def test_a_bridge_that_was_never_led_has_nothing_to_command(bridge: Bridge) -> None:
    """There are no partitions yet."""
    with pytest.raises(CommandRefusedError, match="never been led"):
        bridge.operations.pause().run()


def test_a_lost_race_is_decided_by_a_second_reading(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first reading saw is gone: the command looks again, and judges anew."""
    led.halt(0)
    stale = led.images()
    led.bridge.operations.retry("summarise", 0).run()
    monkeypatch.setattr(Partitions, "of", lambda *_: stale)
    with pytest.raises(CommandRefusedError, match="nothing to retry"):
        led.bridge.operations.retry("summarise", 0).run()
    led.bridge.operations.pause("summarise", 1).run()
    assert results_of(led.bridge.operations.pause("summarise", 1)) == ["unchanged"]


def test_a_partition_that_keeps_moving_refuses_the_command(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts are enough; in a command on all partitions the others are done."""
    led.halt(0)
    led.halt(1)
    stale = led.images()
    led.bridge.operations.retry("summarise", 0).run()
    monkeypatch.setattr(Partitions, "look", lambda *_: [image for image in stale if image.index == 0])
    monkeypatch.setattr(Partitions, "of", lambda *_: stale)
    assert results_of(led.bridge.operations.retry()) == ["refused", "done", "unfit"]
    with pytest.raises(CommandRefusedError, match="kept changing"):
        led.bridge.operations.retry("summarise", 0).run()


# -- stored changes --------------------------------------------------------------------------------


def stored_change(number: int, **fields: Any) -> StoredChange:
    """An insert as the listener stores it."""
    event = {"_id": token(number), "operationType": "insert", "ns": {"db": "shop", "coll": "orders"}, **fields}
    event["documentKey"] = {"_id": number}
    return StoredChange(token(number)["_data"], bson.encode(event), hash=number)


class Storing:
    """A bridge whose first partition has three stored changes, as the listener leaves them."""

    def __init__(self, led: Led) -> None:
        self.led = led
        self.wiring = led.bridge.wiring
        self.backlog = led.store.backlog
        self.partition_id = led.store.partitions.partition_id("summarise", led.generations["summarise"], 0)
        self.store([stored_change(number, fullDocument={"_id": number, "note": "n" * 500}) for number in (1, 2, 3)])

    def store(self, changes: list[StoredChange], *, mark: bool = True) -> None:
        """Store changes, and let the mark reach the last one."""
        self.backlog.insert(self.partition_id, changes, self.led.version)
        if mark:
            partitions = self.led.store.partitions
            assert partitions.mark_spilled(self.partition_id, self.led.version, changes[-1].data, "halted")

    def commit(self, last: int) -> None:
        """Let all changes up to one be done."""
        for number in range(int(self.image.committed) + 1, last + 1):
            claim = self.led.claim(number=number)
            assert claim is not None, "the change may run"
            assert self.led.store.claims.discard(claim, token(number))

    @property
    def stored(self) -> list[str]:
        """What the listener would run next, in order."""
        found = self.backlog.read(self.partition_id, self.image.data, token(99)["_data"], 9)
        return [change.data for change in found]

    @property
    def image(self) -> Image:
        """The partition, read now."""
        return self.led.images()[0]

    def lose_history(self) -> None:
        """Let the handler stand before the oldest entry of the oplog, with all that was stored behind it."""
        subscriptions, version = self.led.store.subscriptions, self.led.version
        assert subscriptions.pin("summarise", version, Timestamp(5, 1), None)
        assert subscriptions.mark_lost("summarise", version, Timestamp(5, 1), Timestamp(0x10000000, 1), "rolled over")


@pytest.fixture
def storing(led: Led) -> Storing:
    """Give a bridge that has something stored."""
    return Storing(led)


def test_the_status_counts_what_is_stored_where_no_listener_says(storing: Storing) -> None:
    """P16: of the marked partitions; and how many bytes there are, as the listener says."""
    status = read_snapshot(storing.wiring)
    (handler,), backlog = status.handlers, status.backlog
    shown = handler.partitions[0].stored
    assert backlog is not None
    assert shown is not None
    assert (backlog.count, backlog.bytes, handler.stored) == (3, None, 3)
    assert (shown.count, shown.reason, shown.to, shown.missing) == (3, "halted", token(3)["_data"], False)
    assert shown.since
    assert status.at is not None
    age = int(status.at.timestamp()) - 1  # of the first one, by the time in its token
    assert [each.lag_seconds for each in (status, handler)] == [age, age]
    assert handler.partitions[0].oldest_seconds == age
    assert storing.led.store.leases.record_report(storing.led.term, {"spilledBytes": 900, "spillLimit": 1000})
    backlog = read_snapshot(storing.wiring).backlog
    assert backlog is not None
    assert (backlog.count, backlog.bytes, backlog.share) == (3, 900, 0.9)


def test_counting_what_is_stored_has_a_limit(storing: Storing) -> None:
    """P16: what takes too long is not known, and the rest of the status is there."""
    status = read_snapshot(storing.wiring, counting=1e-6)
    stored = status.handlers[0].partitions[0].stored
    assert (status.backlog and status.backlog.count, stored and stored.count) == (None, None)


def test_commands_work_on_a_partition_with_stored_changes(storing: Storing) -> None:
    """P13: retry and skip act on the head; mark and changes stay, so that what follows is run from there, in order."""
    led, operations = storing.led, storing.led.bridge.operations
    led.halt()
    assert results_of(operations.retry("summarise", 0)) == ["done"]
    led.halt()
    plan = operations.skip("summarise", 0)
    assert json.loads("\n".join(plan.contents))["fullDocument"]["_id"] == 1
    assert results_of(plan) == ["done"]
    assert results_of(operations.pause("summarise", 0)) == ["done"]
    assert led.claim(number=2) is None
    assert results_of(operations.resume("summarise", 0)) == ["done"]
    assert storing.image.spilled is not None
    assert (storing.image.committed, storing.image.spilled["to"]) == (1, token(3)["_data"])
    assert storing.stored == [token(2)["_data"], token(3)["_data"]]
    assert led.claim(number=2) is not None


@pytest.mark.parametrize("marked", [True, False])
def test_a_retry_of_a_stored_change_outlives_its_history(storing: Storing, *, marked: bool) -> None:
    """P13: also where its execution alone has stored it; then the mark lets the next listener find it."""
    number = 3 if marked else 4
    storing.store([stored_change(number)], mark=False)
    storing.commit(number - 1)
    storing.led.halt(number=number)
    storing.lose_history()
    halted = by_name(check(storing.wiring))["halted"]
    command = f"celery -A operations changes {'retry' if marked else 'skip'} summarise 0"
    assert (halted.command, "Repair" in halted.sentence) == (command, not marked)
    assert results_of(storing.led.bridge.operations.retry("summarise", 0)) == ["done"]
    assert storing.image.spilled is not None
    assert storing.image.spilled["to"] == token(number)["_data"]
    assert storing.image.spilled["reason"] == "halted"
    assert storing.stored == [token(number)["_data"]]


def test_what_is_stored_is_named_before_lost_history_is_given_up(storing: Storing) -> None:
    """P13: it runs whatever is decided."""
    storing.lose_history()
    assert storing.led.bridge.operations.reset("summarise", "oldest").fields["stored"] == [0]


def test_the_change_at_which_a_partition_stands_is_shown(storing: Storing) -> None:
    """P13: halted, or the first one that is stored; and where its bytes are not stored, that is all that is missing."""
    led, wiring = storing.led, storing.wiring
    led.park()
    first = heads.read_head(wiring, "summarise", 0)
    assert (first.state, first.token, first.key) == ("retrying", token(1)["_data"], "shop.orders insert 1")
    assert (first.error, first.retries, first.committed) == ("ConnectionError: later", 1, 0)
    assert 3500 < first.due_seconds <= 3600
    assert first.since is not None
    assert first.event is not None
    assert (first.event["fullDocument"], first.raw) == ({"_id": 1, "note": "n" * 500}, None)
    led.halt(index=1)
    halted = heads.read_head(wiring, "summarise", 1)
    assert (halted.key, halted.token, halted.error) == ("shop.orders insert 1", token(1)["_data"], "ValueError: no")
    assert (halted.bytes, halted.event) == (None, None)
    with pytest.raises(CommandRefusedError, match="no change blocks it"):
        heads.read_head(wiring, "summarise", 2)
    led.park(2)
    unknown = heads.read_head(wiring, "summarise", 2)
    assert (unknown.state, unknown.key, unknown.token, unknown.bytes) == ("retrying", None, None, None)


def test_an_event_that_is_no_document_is_shown_as_bytes(storing: Storing) -> None:
    """P13: what a person has to repair is there, whatever it is; what the bridge has added to an event is not shown."""
    broken = StoredChange(token(4)["_data"], b"no document", token=token(4), refusal=Refusal("it cannot be read"))
    storing.store([broken])
    storing.commit(3)
    head = heads.read_head(storing.wiring, "summarise", 0)
    assert (head.error, head.bytes, head.event) == ("it cannot be read", 11, None)
    assert base64.b64decode(head.raw or "") == b"no document"
    odd = {"flags": float("nan"), "at": DatetimeMS(1 << 60), "uuid": Binary(b"u" * 16, 4)}
    storing.store([stored_change(5, fullDocument=odd, **{FLAGS: {"a": True}})])
    storing.commit(4)
    event = heads.read_head(storing.wiring, "summarise", 0).event
    assert event is not None
    assert FLAGS not in event
    assert event["fullDocument"]["flags"] == {"$numberDouble": "NaN"}


def test_a_status_finds_what_is_said_to_be_stored_and_is_not(storing: Storing) -> None:
    """P13: a state database of which only a part was restored; loud, and never taken for empty."""
    codes = {each.code for each in read_snapshot(storing.wiring).findings}
    assert "backlog_missing" not in codes
    database = storing.led.bridge.client[storing.led.bridge.options.database]
    database["backlog"].delete_many({})
    missing = by_name(list(read_snapshot(storing.wiring).findings))["backlog_missing"]
    assert (missing.severity, "summarise/0" in missing.sentence) == ("failing", True)


# -- preflight -------------------------------------------------------------------------------------


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings}


def test_a_check_of_a_sound_deployment_leaves_nothing_behind(
    make_replica_set: MakeReplicaSet, make_client: MakeClient, make_bridge: MakeBridge, state_database: str
) -> None:
    """Nothing is written. On a set of its own: the session's oplog may be full."""
    own = make_replica_set()
    found = by_name(check(make_bridge(own.url).wiring))
    for name in ("topology", "state_rights", "change_stream", "oplog_rights", "oplog_window", "broker", "handlers"):
        assert found[name].severity == "ok", found[name]
    assert state_database not in make_client(own.url).list_database_names()


def test_a_check_names_who_has_lost_its_history(led: Led) -> None:
    """P16: an error with the command that decides, as long as nobody has."""
    now = operation_time(led.bridge.wiring.client)  # the session's oplog may have rolled: in front of it all is at risk
    assert led.store.subscriptions.pin("summarise", led.version, now, None)
    assert "history_lost" not in by_name(check(led.bridge.wiring))
    assert led.store.subscriptions.mark_lost("summarise", led.version, now, now, "why")
    found = by_name(check(led.bridge.wiring))
    lost = found["history_lost"]
    assert (lost.severity, lost.command) == ("failing", "celery -A operations changes reset summarise --to oldest")


def test_a_check_whose_reading_of_the_state_fails_names_broker_and_workers_all_the_same(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P16: they are judged with the state; where it cannot be read, nothing else would name them."""

    def fail(*_: object, **__: object) -> None:
        raise ServerUnavailableError("MongoDB gave no answer.")

    monkeypatch.setattr(preflight, "read_unjudged", fail)
    monkeypatch.setattr(preflight, "ask_servers", lambda _wiring: (None, [failing("broker", "No answer.")]))
    codes = {each.code for each in check(led.bridge.wiring) if each.severity == "failing"}
    assert {"state", "broker"} <= codes


def test_a_check_on_a_standalone_names_the_cure(standalone_url: str, make_bridge: MakeBridge) -> None:
    """And looks at the rest all the same."""
    found = by_name(check(make_bridge(standalone_url).wiring))
    assert found["topology"].severity == "failing"
    assert "replSet" in found["topology"].sentence
    assert "broker" in found


@pytest.mark.parametrize(("wanted", "level"), [("required", "failing"), ("whenAvailable", "degraded")])
def test_a_check_finds_collections_that_keep_no_images(
    make_bridge: MakeBridge, database: Database[Document], wanted: str, level: str
) -> None:
    """Missing, without the option, and with it."""
    bridge = make_bridge(full_document_before_change=wanted)
    assert by_name(check(bridge.wiring))["images"].severity == level
    database.create_collection("orders")
    found = by_name(check(bridge.wiring))["images"]
    assert found.severity == level
    assert f"{database.name}.orders" in found.sentence
    assert "changeStreamPreAndPostImages" in found.sentence
    database.command("collMod", "orders", changeStreamPreAndPostImages={"enabled": True})
    assert by_name(check(bridge.wiring))["images"].severity == "ok"


def test_a_check_finds_sources_in_the_state_database(make_bridge: MakeBridge, state_database: str) -> None:
    """The bridge would feed itself."""
    assert by_name(check(make_bridge(source=f"{state_database}.orders").wiring))["sources"].severity == "failing"


def test_a_check_finds_overridden_attributes_and_pickle(bridge: Bridge) -> None:
    """Settings that break the protocol, or let the broker run code."""
    bridge.app.conf.accept_content = ["json", "pickle"]
    bridge.app.conf.task_always_eager = True
    bridge.app.tasks["mongo_celery.commit"].acks_late = False
    found = by_name(check(bridge.wiring))
    for name in ("accept_content", "task_always_eager", "task_annotations"):
        assert found[name].severity == "failing"
    assert "acks_late of mongo_celery.commit" in found["task_annotations"].sentence


@pytest.fixture(scope="module")
def guarded(replica_set: object) -> Iterator[GuardedMongo]:
    """Give a mongod with access control; the session's set shows that there is a mongod at all."""
    del replica_set
    with GuardedMongo() as server:
        yield server


def test_a_check_names_each_missing_right(guarded: GuardedMongo, make_bridge: MakeBridge, state_database: str) -> None:
    """State, stream and oplog, one by one."""
    database = f"data_{state_database}"
    source = f"{database}.orders"
    users = {
        "reader": (("read", database),),
        "stateful": (("readWrite", state_database),),
        "usual": (("read", database), ("readWrite", state_database)),
        "sufficient": (("read", database), ("readWrite", state_database), ("read", "local")),
    }
    missing = {
        "reader": {"state_rights", "oplog_rights"},
        "stateful": {"change_stream", "oplog_rights"},
        "usual": {"oplog_rights"},
        "sufficient": set(),
    }
    for name, rights in users.items():
        bridge = make_bridge(guarded.add_user(f"{name}_{state_database}", *rights), source=source)
        findings = check(bridge.wiring)
        assert {each.code for each in findings if each.severity == "failing"} == missing[name], name
        assert all(f"{name}_" not in each.sentence or "***@" in each.sentence for each in findings)


def test_the_oplog_window_is_unknown_without_the_right_to_see_it(
    guarded: GuardedMongo, make_bridge: MakeBridge, state_database: str
) -> None:
    """The rest of the status is there."""
    user = guarded.add_user(f"blind_{state_database}", ("readWrite", state_database))
    status = read_snapshot(make_bridge(user).wiring)
    assert (status.oplog_seconds, status.state) == (None, "never_started")


def test_a_wrong_password_is_told_without_it(guarded: GuardedMongo, make_bridge: MakeBridge) -> None:
    """No retry, no traceback, no secret."""
    with pytest.raises(AccessError, match="login") as caught:
        read_snapshot(make_bridge(guarded.address_of("nobody")).wiring)
    assert "nobody" not in str(caught.value)


def test_a_worker_with_a_wrong_password_says_in_its_log_that_the_login_was_refused(
    guarded: GuardedMongo, make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a message comes in, since nothing was asked of MongoDB before."""
    bridge = make_bridge(guarded.address_of("nobody"))
    signed = sign_run("run", Run("shop", "summarise", 1, 0, 1, 1, 1, carrier=Carrier("id")), bytes(32))
    assert bridge.wiring.of_process(WorkerRuntime).open("run", signed, None, Context()) is None
    assert "refused the login; check user, password and authSource" in caplog.text
    assert "lacks a right" not in caplog.text
    assert [each.event for each in caplog.records if hasattr(each, "event")] == ["envelope_unverified"]


# -- where -----------------------------------------------------------------------------------------


def find(led: Led, key: str) -> Whereabouts:
    return led.bridge.operations.find_document("summarise", key)


def partition_of(led: Led, key: object) -> int:
    layout = layouts_in_force(led.store.subscriptions.read_all())["summarise"]
    return partition_of_key(led.bridge.wiring, "summarise", layout, key, None)


def test_a_key_is_found_with_what_holds_its_changes(storing: Storing) -> None:
    """P16: what is stored of it, and what blocks its partition; of another key nothing is said to be stored."""
    led = storing.led
    here = next(str(key) for key in range(1000) if partition_of(led, key) == 0)
    other = next(str(key) for key in range(1000) if partition_of(led, key) == 1)
    layout = layouts_in_force(led.store.subscriptions.read_all())["summarise"]
    hash_ = hash_of_key(led.bridge.wiring, "summarise", layout, int(here), None)
    mine = replace(stored_change(4), hash=hash_)
    storing.store([mine])
    found = find(led, here)
    assert (found.partition.index, found.stored, found.blocked, found.lasts) == (0, 1, False, False)
    assert (found.parked, found.dead_letters, found.running) == (False, (), False)
    storing.commit(3)
    led.halt(number=4)
    found = find(led, here)
    assert (found.partition.state, found.blocked, found.stored) == ("halted", True, 1)
    assert (find(led, other).partition.index, find(led, other).stored) == (1, 0)


def test_a_key_of_a_bridge_that_has_done_everything_is_handled_up_to_now(led: Led) -> None:
    """P16: by the time of the reading; and a handler that is not there is refused with those that are."""
    led.store.leases.record_report(led.term, {"outstanding": 0, "buffered": 0, "caughtUp": True})
    found = find(led, '{"$oid": "6b0c1ef5aaaaaaaaaaaaaaaa"}')
    assert (found.lasts, found.partition.state) == (True, "flowing")
    assert found.handled_until is not None
    assert abs((found.handled_until - datetime.now(UTC)).total_seconds()) < 60
    with pytest.raises(CommandRefusedError, match="summarise"):
        find_whereabouts(led.bridge.wiring, "summarize", "1")


@pytest.mark.parametrize("left", [{"outstanding": 7}, {"buffered": 500}, {}])
def test_what_waits_in_memory_or_runs_is_not_called_handled(led: Led, left: Document) -> None:
    """P16: neither by `where`, nor by the status; also where the claim is newer than the report."""
    led.store.leases.record_report(led.term, {"outstanding": 0, "buffered": 0, "caughtUp": True, **left})
    if not left:
        assert led.claim() is not None
    snapshot = read_snapshot(led.bridge.wiring)
    found = find(led, '{"$oid": "6b0c1ef5aaaaaaaaaaaaaaaa"}')
    assert (snapshot.caught_up, found.lasts) == (False, False)
    assert snapshot.reported_at is not None
    assert found.handled_until is None or found.handled_until < snapshot.reported_at


def test_a_dead_letter_of_a_key_is_found_by_the_rule_that_spreads_the_keys(led: Led) -> None:
    """P16: with `partition_by` a key is no `_id`, and a text and a number that look alike are two keys."""
    layout = layouts_in_force(led.store.subscriptions.read_all())["summarise"]
    for number, key in enumerate([42, "42"]):
        place = Place(1, 0, number, 1, hash_of_key(led.bridge.wiring, "summarise", layout, key, None))
        letter = dead_letter(
            bridge=NAME,
            subscription="summarise",
            token=token(number),
            key="a change",
            kept=next(iterate_forms(bson.encode({"documentKey": {"_id": "another"}})))(),
            error="no",
            traceback="",
            attempts=1,
            place=place,
            cause=FAILED,
        )
        led.store.dead_letters.collection.insert_one(letter)
    (found,) = find(led, "42").dead_letters
    assert found.startswith(token(0)["_data"])


def test_a_handler_that_nobody_serves_has_handled_nothing_up_to_now(led: Led, make_bridge: MakeBridge) -> None:
    """P16: the listener's report speaks for its own handlers, and the app that asks knows no other."""
    led.store.leases.record_report(led.term, {"outstanding": 0, "buffered": 0, "caughtUp": True})
    other = make_bridge(handler="bill")
    found = other.operations.find_document("summarise", "42", source="shop.orders")
    assert not found.lasts
