"""
A bridge in the process of a test: the product's own claims, outcomes and commits, with faults that are asked for.

A production case becomes, in a unit test, the change that the worker gave to the handler.

The docs' own example is `acceptance/test_testing_page.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from celery import Celery
from celery.exceptions import Ignore
from click.testing import CliRunner
from kombu.exceptions import ContentDisallowed
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import AutoReconnect, ServerSelectionTimeoutError

from mongo_celery import Bridge, Change, Changes, Outbox
from mongo_celery.bridge.existing import place_at_time
from mongo_celery.bridge.listener import feedback
from mongo_celery.bridge.operations.lookups import read_blocked_change
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.subscriptions import Advance
from mongo_celery.cli.dead_letters import list_dead_letters
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from mongo_celery.mongo.oplog import earliest_token, operation_time
from mongo_celery.testing import BridgeRunner, BridgeWorkers, drain, load_change
from mongo_celery.testing.calls import CrashPoint
from tests.fixtures.mongo import Document, MakeClient
from tests.fixtures.process import PATIENCE_SECONDS
from tests.rig.positions import PositionsRig, staged

NOWHERE = "mongodb://localhost:1/?replicaSet=nowhere"


class Shop:
    """One app with its bridge, which knows neither server, and what its handler has seen."""

    def __init__(self, database: Database[Document], server: str, url: str = NOWHERE, name: str = "shop") -> None:
        self.server, self.orders = server, database["orders"]
        self.app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
        self.bridge = Bridge(self.app, url, name=name, autodiscover=False)
        self.seen: list[Any] = []
        self.failing: list[Exception] = []

    def handle(self, **options: Any) -> None:
        def note(change: Change) -> None:
            if self.failing:
                raise self.failing.pop(0)
            self.seen.append((change.operation_type, change.document_key["_id"]))

        self.bridge.on_change(self.orders.full_name, name="note", **options)(note)

    def run(self) -> BridgeRunner:
        return BridgeRunner(self.bridge, url=self.server)


@pytest.fixture
def shop(database: Database[Document], mongo_url: str) -> Shop:
    return Shop(database, mongo_url)


def test_a_halted_change_keeps_its_traceback(shop: Shop) -> None:
    """A person looks at it later; the dead letter that `skip` makes has it, too."""
    shop.handle(failure_policy="halt")
    with shop.run() as runner:
        shop.failing.append(ValueError("no address"))
        shop.orders.insert_one({"_id": 1})
        runner.deliver(raises=False)
        (halted,) = shop.bridge.operations.read_status().handlers[0].list_partitions("halted")
        change = read_blocked_change(shop.bridge.wiring, "note", halted.partition)
        assert "raise self.failing.pop(0)" in change.traceback
        assert (change.attempts, change.since is None) == (1, False)
        shop.bridge.operations.skip("note").run()
        (letter,) = shop.bridge.operations.find_dead_letters("note").letters
        assert letter.traceback == change.traceback


def test_changes_come_in_order_and_from_its_beginning_on(shop: Shop) -> None:
    """Not what an earlier test has written, however long the oplog; a second runner begins anew."""
    shop.handle()
    shop.orders.insert_one({"_id": 0})
    with shop.run() as runner:
        shop.orders.insert_many([{"_id": number} for number in range(1, 40)])
        shop.orders.update_many({"_id": {"$gt": 0}}, {"$set": {"seen": 1}})
        assert len(runner.deliver().calls) == 78
    for number in range(1, 40):
        assert [operation for operation, key in shop.seen if key == number] == ["insert", "update"]
    with shop.run() as runner:
        assert runner.deliver().calls == ()
        shop.orders.delete_one({"_id": 1})
        runner.deliver()
    assert shop.seen[-1] == ("delete", 1)
    assert not any(key == 0 for _, key in shop.seen)


def test_what_it_has_used_is_as_it_was_afterwards(shop: Shop, mongo_client: MongoClient[Document]) -> None:
    """The bridge's address and options, the app's broker, the handlers' tasks; and no state is left."""
    shop.handle(start_from="oldest")
    shop.app.conf.task_always_eager = True
    before, handler = set(mongo_client.list_database_names()), shop.bridge.handlers[0]
    task = shop.app.tasks[handler.task_name]
    with shop.run() as runner:
        assert shop.bridge.url != NOWHERE
        runner.deliver()
    after = set(mongo_client.list_database_names())
    assert not [name for name in after - before if name.startswith("mongo_celery_test_")]
    assert (shop.bridge.url, shop.bridge.options.database) == (NOWHERE, "mongo_celery")
    assert shop.bridge.handlers == [handler]
    assert shop.app.conf.task_always_eager is True
    assert "run" not in vars(task)
    assert shop.app.connection_for_write().transport_cls == "redis"


def test_retries_need_no_time(shop: Shop) -> None:
    """An hour of backoff is moved into the past, unless the test wants the change to wait."""
    shop.handle(autoretry_for=(ConnectionError,), default_retry_delay=3600, retry_backoff=3600)
    shop.failing = [ConnectionError("away"), ConnectionError("still")]
    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        assert len(runner.deliver(retries=False).retries) == 1
        assert not shop.seen
        delivered = runner.deliver()
        assert len(delivered.retries) == 1
        assert not delivered.failures
    assert shop.seen == [("insert", 1)]


@pytest.mark.parametrize("point", ["claimed", "called", "handled"])
def test_a_killed_execution_is_made_up_for(shop: Shop, point: CrashPoint) -> None:
    """At least once: what was not recorded is repeated, under a larger token; what was recorded is not."""
    shop.handle()
    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        runner.crash(point)
        calls = runner.deliver().calls
        shop.orders.delete_one({"_id": 1})
        assert len(runner.deliver().calls) == 1
    assert [call.was_killed for call in calls] == ([False] if point == "handled" else [True, False])
    assert len(shop.seen) - 1 == {"claimed": 1, "called": 2, "handled": 1}[point]
    tokens = [call.changes[0].fencing_token for call in calls]
    assert tokens == sorted(set(tokens))


def test_a_failure_for_good_is_raised_with_what_stands(shop: Shop) -> None:
    """Once: what stood before does not fail the next delivery. What pytest shows are the test and the handler."""
    shop.handle()
    shop.failing = [KeyError("no such order")]
    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        with pytest.raises(KeyError) as raised:
            runner.deliver()
        assert "is halted" in raised.value.__notes__[0]
        shown = raised.traceback.filter(raised)
        assert [each.name for each in shown] == ["test_a_failure_for_good_is_raised_with_what_stands", "note"]
        assert len(runner.deliver().standing) == 1


def test_a_handler_that_feeds_itself_ends_with_a_sentence(shop: Shop) -> None:
    """It would never end; and the process is free for the next runner."""

    @shop.bridge.on_change(shop.orders.full_name)
    def count(change: Change) -> None:
        shop.orders.update_one({"_id": change.document_key["_id"]}, {"$inc": {"seen": 1}})

    for _ in range(2):
        with shop.run() as runner:
            shop.orders.insert_one({})
            with pytest.raises(AssertionError, match="5"):
                runner.deliver(limit=5)


def test_a_fault_that_had_no_occasion_fails_the_test(shop: Shop) -> None:
    """A test that tries nothing is none; the next delivery is as if nothing had been asked for."""
    shop.handle()
    with shop.run() as runner:
        runner.crash("called")
        with pytest.raises(AssertionError, match="'called'"):
            runner.deliver()
        runner.stall()
        with pytest.raises(AssertionError):
            runner.deliver()
        shop.orders.insert_one({"_id": 1})
        assert len(runner.deliver().calls) == 1


def test_a_server_that_stays_away_ends_the_delivery(shop: Shop) -> None:
    """In production the change waits as long as it takes, uncounted; here that would be for ever."""
    shop.handle()
    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        shop.failing = [AutoReconnect("away"), ServerSelectionTimeoutError("still")]
        runner.deliver()
        assert shop.seen == [("insert", 1)]
        shop.orders.insert_one({"_id": 2})
        shop.failing = [AutoReconnect("localhost:1 is away") for _ in range(9)]
        with pytest.raises(AssertionError, match="localhost:1"):
            runner.deliver(raises=False)
        assert 0 < len(shop.failing) <= 6, "a wait may end before the runner ends it"


def test_what_a_worker_would_refuse_is_refused(shop: Shop) -> None:
    """Messages in a serializer that is not accepted; an app whose messages carry no chain."""

    @shop.app.task(name="shop.yaml", serializer="yaml", shared=False)
    def mail() -> None: ...

    shop.handle()
    with shop.run() as runner:
        mail.delay()
        with pytest.raises(ContentDisallowed):
            runner.run_tasks()
    shop.app.conf.task_protocol = 1
    with pytest.raises(ConfigurationError), shop.run():
        pass


KINDS = ("plain", "list", "transactional", "transactional_list")


@pytest.mark.parametrize("outer", KINDS)
def test_a_handler_that_another_one_calls_is_part_of_that(shop: Shop, outer: str) -> None:
    """Its effects go with the caller's execution, which is repeated here; a transactional one needs its transaction."""
    copies, attempts = shop.orders.database.create_collection("copies"), list[str]()

    def copy(change: Change, name: str) -> None:
        into = shop.bridge.collection(copies.full_name)
        into.insert_one({"kind": name}, session=change.session)

    def make(role: str, kind: str, source: str, handle: Callable[[Any], None]) -> Any:
        def handler(given: Any) -> None:
            handle(given[0] if isinstance(given, Changes) else given)

        handler.__name__ = f"{role}_{kind}"
        register = shop.bridge.on_changes if kind.endswith("list") else shop.bridge.on_change
        return register(source, transactional=kind.startswith("transactional"), autoretry_for=(OSError,))(handler)

    others = f"{shop.orders.database.name}.others"
    inner = {kind: make("inner", kind, others, partial(copy, name=kind)) for kind in KINDS}

    def call(change: Change) -> None:
        attempts.append(outer)
        for kind, handler in inner.items():
            given = [change] if kind.endswith("list") else change
            if kind.startswith("transactional") and not outer.startswith("transactional"):
                with pytest.raises(HandlerUsageError):
                    handler(given)
            else:
                handler(given)
        if len(attempts) == 1:
            raise OSError

    make("outer", outer, shop.orders.full_name, call)
    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        assert runner.deliver(raises=False).standing == ()
    assert len(attempts) == 2
    found = sorted(each["kind"] for each in copies.find())
    assert found == (sorted(KINDS) if outer.startswith("transactional") else ["list", "list", "plain", "plain"])


def test_a_body_that_ends_otherwise_when_it_is_repeated_counts_as_it_ended(shop: Shop) -> None:
    """The first body meets a write conflict; the second ignores the change, which is then done."""
    copies, tokens = shop.orders.database["copies"], list[int]()
    copies.insert_one({"_id": "locked"})

    @shop.bridge.on_change(shop.orders.full_name, transactional=True)
    def copy(change: Change) -> None:
        tokens.append(change.fencing_token)
        into = shop.bridge.collection(copies.full_name)
        into.insert_one({"_id": "an effect"}, session=change.session)
        if len(tokens) > 1:
            raise Ignore
        with ThreadPoolExecutor() as others:
            others.submit(copies.update_one, {"_id": "locked"}, {"$set": {"by": "another"}}).result()
        into.update_one({"_id": "locked"}, {"$set": {"by": "the handler"}}, session=change.session)

    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        assert runner.deliver().standing == ()
        assert runner.deliver().calls == ()
    assert tokens == tokens[:1] * 2
    assert list(copies.find()) == [{"_id": "locked", "by": "another"}]


def test_what_a_called_handler_would_retry_is_judged_by_its_callers(shop: Shop) -> None:
    """Its own `autoretry_for` decides nothing: an outage that it meets is waited for, and counted against no change."""
    shop.failing = [AutoReconnect("away")]
    shop.handle(autoretry_for=(AutoReconnect,), max_retries=0, operations={"delete"})
    inner = shop.app.tasks[shop.bridge.handlers[0].task_name]

    @shop.bridge.on_change(shop.orders.full_name, failure_policy="dead_letter")
    def outer(change: Change) -> None:
        inner(change)

    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        delivered = runner.deliver()
    assert (shop.seen, delivered.standing) == ([("insert", 1)], ())


def test_an_outage_counts_where_the_handler_asks_for_a_retry_itself_and_not_where_autoretry_does(shop: Shop) -> None:
    """P14: `autoretry_for=(Exception,)` does not name the outage, so the change waits for its end."""
    retries: dict[str, list[int]] = {"auto": [], "own": []}
    register = partial(shop.bridge.on_change, shop.orders.full_name, bind=True, max_retries=3, default_retry_delay=0)

    @register(autoretry_for=(Exception,))
    def auto(task: Any, _change: Change) -> None:
        retries["auto"].append(task.request.retries)
        if len(retries["auto"]) == 1:
            raise AutoReconnect("away")

    @register()
    def own(task: Any, _change: Change) -> None:
        retries["own"].append(task.request.retries)
        if len(retries["own"]) == 1:
            raise task.retry(exc=AutoReconnect("away"))

    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        assert runner.deliver().standing == ()
    assert retries == {"auto": [0, 0], "own": [0, 1]}


def test_sent_tasks_can_be_looked_at_and_run(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler sends, what an outbox sends, and what these send; a task's own error is raised."""
    monkeypatch.setattr("mongo_celery.testing.runner._SENT_SECONDS", 60.0)
    ran: list[Any] = []

    @shop.app.task(name="shop.mail", bind=True, max_retries=3, shared=False)
    def mail(self: Any, key: int, subject: str = "") -> None:
        ran.append((key, subject, self.request.retries))
        if key == 1 and self.request.retries == 0:
            raise self.retry(countdown=3600)
        if key == 9:
            raise KeyError("no address")

    @shop.bridge.on_change(shop.orders.full_name)
    def send(change: Change) -> None:
        mail.delay(change.document_key["_id"])

    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1})
        runner.deliver()
        runner.assert_enqueued("shop.mail", args=[1])
        runner.assert_enqueued("shop.mail", args=[2], times=0)
        Outbox(shop.app, shop.orders.database["parcels"]).insert_one({"_id": 2}, tasks=[mail.si(2, subject="hi")])
        runner.assert_enqueued("shop.mail", args=[2], kwargs={"subject": "hi"})
        with pytest.raises(AssertionError, match="2"):
            runner.assert_enqueued("shop.mail")
        assert [task.name for task in runner.run_tasks()] == ["shop.mail"] * 3
        assert sorted(ran) == [(1, "", 0), (1, "", 1), (2, "hi", 0)]
        mail.delay(9)
        with pytest.raises(KeyError):
            runner.run_tasks()
        assert runner.sent() == []


def test_several_bridges_run_together(database: Database[Document], mongo_url: str) -> None:
    shop, stock = (Shop(database, mongo_url, name=name) for name in ("shop", "stock"))
    stock.orders = database["copies"]
    stock.handle()

    @shop.bridge.on_change(shop.orders.full_name)
    def copy(change: Change) -> None:
        database["copies"].insert_one({"_id": change.document_key["_id"]})

    with BridgeRunner(shop.bridge, stock.bridge, url=mongo_url) as runner:
        shop.orders.insert_one({"_id": 1})
        runner.deliver()
    assert stock.seen == [("insert", 1)]


def test_draining_waits_for_whoever_works(database: Database[Document], mongo_url: str) -> None:
    """Until another thread has handled all that was written before; else it says who is behind."""
    shop, began, ended = Shop(database, mongo_url, mongo_url), threading.Event(), threading.Event()
    shop.handle()

    def serve() -> None:
        with BridgeRunner(shop.bridge) as runner:
            began.set()
            while not ended.is_set():
                runner.deliver(raises=False)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            assert began.wait(PATIENCE_SECONDS)
            shop.orders.insert_many([{"_id": number} for number in range(20)])
            drain(shop.bridge, timeout=PATIENCE_SECONDS)
            assert len(shop.seen) == 20
        finally:
            ended.set()
        serving.result(PATIENCE_SECONDS)
    shop.orders.insert_one({"_id": 20})
    with pytest.raises(TimeoutError, match="note"):
        drain(shop.bridge, timeout=0.1)
    shop.bridge.client.close()


@pytest.fixture
def passed(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    """Give a bridge whose watermark lies an hour ahead of everything that is written."""
    with staged(mongo_url, database, state_database) as made:
        ahead = Timestamp(operation_time(made.bridge.client).time + 3600, 1)
        token = earliest_token(ahead)
        made.store.subscriptions.advance_all([Advance(made.handler, made.version, token, ahead)], "f")
        drain(made.bridge, timeout=PATIENCE_SECONDS)
        yield made


@pytest.mark.parametrize("state", ["flowing", "paused"])
def test_draining_waits_for_a_change_that_is_stored(passed: PositionsRig, state: str) -> None:
    """The watermark has passed it, because it is safe. It is not handled, whatever holds it up."""
    index, last = passed.index(passed.events[-1]), passed.events[-1]
    stored, later = f"{last['_id']['_data']}0", place_at_time(Timestamp(last["clusterTime"].time + 1800, 1))
    place = passed.partition_id(index)
    passed.store.backlog.insert(place, [StoredChange(each, b"x") for each in (stored, later)], passed.version)
    assert passed.store.partitions.mark_stored(place, passed.version, later, "paused")
    passed.state["partitions"].update_one({"_id": place}, {"$set": {"state": state}})
    with pytest.raises(TimeoutError):
        drain(passed.bridge, timeout=0.1)
    passed.state["partitions"].update_one({"_id": place}, {"$set": {"state": "flowing"}})
    assert passed.handle({**last, "_id": {"_data": stored}})
    drain(passed.bridge, timeout=PATIENCE_SECONDS)


def test_draining_waits_for_a_change_that_halted(passed: PositionsRig) -> None:
    last = passed.events[-1]
    change = {**last, "_id": {"_data": f"{last['_id']['_data']}0"}}
    claim = passed.claims_at(change)
    assert passed.store.claims.halt(claim, change["_id"], "orders insert 1", "ValueError: no")
    with pytest.raises(TimeoutError):
        drain(passed.bridge, timeout=0.1)
    passed.bridge.operations.skip(passed.handler, passed.index(last), discard=True).run()
    drain(passed.bridge, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("feeds", [True, False], ids=["itself", "by a user"])
def test_a_handler_that_writes_to_what_it_watches_is_seen(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, feeds: bool
) -> None:
    """P16: by the server's own times of claims, commits and writes; a user's writes between the runs are none of it."""
    monkeypatch.setattr(feedback, "ROUNDS", 8)

    def count(change: Change) -> None:
        found = shop.orders.find_one(change.document_key) or {}
        if feeds and found["n"] < 12:
            shop.orders.update_one(change.document_key, {"$inc": {"n": 1}})

    shop.bridge.on_change(shop.orders.full_name)(count)
    with shop.run() as runner:
        shop.orders.insert_one({"_id": 1, "n": 0})
        runner.deliver()
        for _ in range(0 if feeds else 12):
            shop.orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
            runner.deliver()
        (led,) = runner._terms[0].leader.subscriptions.values()
        found = led.feedback.report()
    assert (found is not None) is feeds


def test_a_worker_that_ends_is_said_with_its_words(shop: Shop, mongo_url: str, tmp_path: Path) -> None:
    """Nobody waits a minute for an app that cannot be imported; the bridge is as it was afterwards."""
    shop.handle()
    with BridgeWorkers([shop.bridge], mongo_url, "memory://", tmp_path) as workers:
        assert shop.bridge.url != NOWHERE
        with pytest.raises(ChildProcessError, match="nowhere"):
            workers.start("nowhere.celery")
        assert "nowhere" in workers.output
    assert shop.bridge.url == NOWHERE


UUID_ = UUID("12345678123456781234567812345678")
VALUES: Document = {
    "decimal": Decimal128("1.10"), "object_id": ObjectId(), "naive": datetime.fromisoformat("2026-11-30T12:00:00.123"),
    "old": datetime.fromisoformat("1900-01-01"), "bytes": b"\0\xff",
    "binary": Binary(b"x", 5), "uuid": Binary.from_uuid(UUID_),
    "int": 7, "long": Int64(7), "large": Int64(1 << 60), "double": 7.0, "nan": float("inf"), "time": Timestamp(9, 2),
    "regex": Regex("^a.b$", "im"), "code": Code("f()"), "scoped": Code("f()", {"a": Int64(1)}), "min": MinKey(),
    "max": MaxKey(), "ref": DBRef("orders", 1, "shop"), "none": None, "true": True, "text": "é\u2028$",
    "nested": [{"a": [Int64(1), 1, 1.0]}],
}  # fmt: skip


def typed(value: Any) -> Any:
    """Return a value with the types of all parts."""
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    return [typed(each) for each in value] if isinstance(value, list) else (type(value), value)


@pytest.mark.needs_mongodb(6, 0)
def test_a_case_is_the_change_that_the_worker_gave(
    database: Database[Document], mongo_url: str, tmp_path: Path
) -> None:
    """With all types of BSON; from a file, its name, its text or its object, as `dead-letters list` prints it."""
    orders = database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    options: Document = {"autodiscover": False, "full_document_before_change": "whenAvailable"}
    app, given = Celery("shop", broker="memory://", set_as_current=False), list[Change]()
    bridge = Bridge(app, mongo_url, name="shop", **options)

    @bridge.on_change(orders.full_name, failure_policy="dead_letter")
    def fail(change: Change) -> None:
        given.append(change)
        raise RuntimeError

    with BridgeRunner(bridge) as runner:
        orders.insert_one({"_id": {"shop": 1, "number": Int64(7)}, **VALUES})
        orders.update_one({}, {"$set": {"nested.0.a.0": Int64(2)}, "$unset": {"min": 1}})
        orders.replace_one({}, {"double": 2.0})
        orders.delete_one({})
        runner.deliver(raises=False)
        done = CliRunner().invoke(list_dead_letters, ["--full", "--json"], obj=SimpleNamespace(app=app))
    printed = json.loads(done.stdout)
    cases = [{**printed, "count": 1, "dead_letters": [each]} for each in printed["dead_letters"]]
    assert [each.operation_type for each in given] == ["insert", "update", "replace", "delete"]
    for change, case in zip(given, cases, strict=True):
        file = tmp_path / "case.json"
        file.write_text(json.dumps(case))
        for found in map(load_change, (file, str(file), json.dumps(case), case, case["dead_letters"][0])):
            assert typed(found.raw) == typed(change.raw)
        for name in ("namespace", "document_key", "wall_time", "full_document", "resume_token"):
            assert getattr(found, name) == getattr(change, name)
    with pytest.raises(RuntimeError):
        app.tasks["tests.integration.test_bridge_runner.fail"](found)


def test_the_codec_of_a_client_decodes_a_case(make_client: MakeClient) -> None:
    case = {"event": {"_id": {"_data": "82"}, "operationType": "insert", "at": {"$date": "2026-11-30T12:00:00Z"}}}
    assert load_change(case)["at"] == datetime(2026, 11, 30, 12)  # noqa: DTZ001 - by default times are naive
    assert load_change(case, client=make_client(tz_aware=True))["at"] == datetime(2026, 11, 30, 12, tzinfo=UTC)


UNREADABLE: list[Any] = [
    *({"dead_letters": []}, {"dead_letters": None}, {"dead_letters": [{"event": {}}] * 2}),
    *({"dead_letters": [{"event": None, "raw": "AAAA"}]}, {"event": [1]}, {"event": {"_id": {"_data": "82"}}}),
    {"event": {"operationType": "insert", "at": {"$date": {"$numberLong": "253402300800000"}}}},
    {"event": {"operationType": "insert", "at": {"$date": "a user's text"}}},
    *({"handler": "orders"}, "[]", "[null]", '{"dead_letters": [{"event": {"operationType": "ins'),
]


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_case_without_one_readable_change_is_refused(case: str | Document) -> None:
    with pytest.raises(HandlerUsageError):
        load_change(case)


def test_a_file_in_the_encoding_of_powershell_is_read_and_one_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"event": {"operationType": "insert", "note": "é"}}), "utf-16")
    assert load_change(file)["note"] == "é"
    file.write_text("orders/3 is halted at change 7")
    with pytest.raises(HandlerUsageError):
        load_change(file)
