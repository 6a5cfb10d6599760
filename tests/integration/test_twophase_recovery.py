"""Recovery of two-phase transactions: whose turn it is, what it says of itself; and what is removed for good."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from prometheus_client import CollectorRegistry
from pymongo import MongoClient
from pymongo.errors import PyMongoError
from redis import Redis

from mongo_celery import Outbox, TwoPhaseCommit
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.periodic_requests import PeriodicRequests
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import TransactionCanceledError, TransactionStateError, TransactionTimeoutError
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.twophase import recovery
from mongo_celery.twophase.prometheus import TransactionCollector
from mongo_celery.twophase.recoveries import recovery_watch
from mongo_celery.twophase.tasks import RECOVER_TASK
from mongo_celery.twophase.twophase import get_engine, get_recoveries
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.integration.clusters_rig import START, Clusters
from tests.integration.twophase_rig import LONG_AGO, Db, Document, Tutorial, advance, balances, make_accounts


@pytest.fixture
def bank(database: Db) -> TwoPhaseCommit:
    make_accounts(database, A=1000, B=1000)
    return TwoPhaseCommit(Celery("bank", broker="memory://"), database["transactions"])


def test_those_of_a_cluster_that_is_away_keep_nobody_from_the_turn(
    clusters: Clusters, other_cluster: MongoReplicaSet
) -> None:
    """They are older, and more than recovery takes or reads at once. None is tried, and they stay as they are."""
    across = clusters.begin("own", "east", value=1)
    template = clusters.log.find_one({"_id": across})
    clusters.log.insert_many([{**template, "_id": number, "queuedAt": LONG_AGO} for number in range(450)])
    clusters.log.update_many({}, {"$set": {"lastModified": LONG_AGO}})
    near = [clusters.begin("own", "west", value=1) for _ in range(3)]
    clusters.log.update_many({"_id": {"$in": near}}, {"$set": {"queuedAt": LONG_AGO}})
    clients = {**clusters.clients, "east": MongoClient[Document](other_cluster.url)}
    other_cluster.pause()
    try:
        report = clusters.coordinator(clients).recover(0, limit=100)
        last = get_recoveries(clusters.bank).last()
    finally:
        other_cluster.resume()
        clients["east"].close()

    assert {each.id for each in report if each.error is None} == set(near)
    assert len(report) < 250, "once that is known they are not even read"
    assert clusters.log.count_documents({"state": "initial", "lastModified": LONG_AGO}) == 451
    assert last is not None
    assert (last.silent, last.outcomes["done"], last.stopped) == (("east",), 3, 0)
    assert clusters.balances() == {"own": START - 3, "east": START, "west": START + 3}


def test_looking_ends_with_the_time_too(other_cluster: MongoReplicaSet) -> None:
    with MongoClient[Document](other_cluster.url) as client:
        bank = TwoPhaseCommit(None, client["looks"]["transactions"], application="bank", timeout=0.5)
        client.admin.command("ping")  # connected before the short times begin
        other_cluster.pause()
        try:
            for look in (bank.find, partial(bank.read, 1)):
                with pytest.raises((PyMongoError, TransactionTimeoutError)):
                    look()
        finally:
            other_cluster.resume()


def test_what_has_passed_its_deadline_need_not_be_old(clusters: Clusters) -> None:
    """Nobody's money is kept for as long as a coordinator might sleep."""
    identity = clusters.begin("own", "west")
    advance(clusters.bank, identity)
    moment = datetime.now(UTC) - timedelta(minutes=2)
    clusters.log.update_one({"_id": identity}, {"$set": {"lastModified": moment}})
    assert clusters.bank.recover() == []
    clusters.log.update_one({"_id": identity}, {"$set": {"deadline": moment + timedelta(minutes=1)}})
    (became,) = clusters.bank.recover()

    assert became.outcome == "canceled"
    assert clusters.balances()["own"] == START
    last = get_recoveries(clusters.bank).last()
    assert last is not None
    assert last.outcomes == {"done": 0, "canceled": 1}


def test_what_is_owed_beside_a_dead_cluster_comes_back_at_once(
    clusters: Clusters, other_cluster: MongoReplicaSet
) -> None:
    """All of it, and nobody waits for the cluster: of that nothing is asked."""
    count = 6
    owed = [clusters.begin("west", "own", "east", value=1) for _ in range(count)]
    for identity in owed:
        clusters.advance(identity)
        marker = {"$push": {"pendingTransactions": identity}}
        clusters.accounts("west").update_one({}, {"$inc": {"balance": -2}, **marker})
    paid = {"own": START, "east": START, "west": START - 2 * count}
    assert clusters.balances() == paid
    clusters.log.update_many({}, {"$set": {"deadline": LONG_AGO, "lastModified": LONG_AGO}})
    clients = {**clusters.clients, "east": MongoClient[Document](other_cluster.url)}
    blind = clusters.coordinator(clients)
    other_cluster.pause()
    try:
        report = blind.recover()
    finally:
        other_cluster.resume()
        clients["east"].close()

    assert {each.id: (each.before, each.after) for each in report} == dict.fromkeys(owed, ("pending", "canceling"))
    assert clusters.balances() == {"own": START, "east": START, "west": START}
    assert {each.after for each in clusters.bank.recover(0)} == {"canceled"}
    assert clusters.balances() == {"own": START, "east": START, "west": START}


def test_a_take_over_whose_answer_is_lost_is_finished_by_the_same_recovery(
    bank: TwoPhaseCommit, database: Db, failpoint: Failpoint
) -> None:
    """P17, P18: otherwise its money would wait until it counts as abandoned once more."""
    advance(bank, bank.transfer("A", "B", 10, run=False))
    bank.transactions.update_many({}, {"$set": {"lastModified": LONG_AGO}})
    lost = {"writeConcernError": {"code": 11601, "errmsg": "operation was interrupted"}}
    get_recoveries(bank).note_running()  # a note of its own is no step of the transaction
    with failpoint(mode={"times": 1}, failCommands=["findAndModify"], **lost):
        report = bank.recover(60)
    assert [each.after for each in report] == ["done"]
    assert balances(database) == {"A": 990, "B": 1010}


def test_a_step_under_a_clock_that_was_ahead_is_recovered(bank: TwoPhaseCommit, database: Db) -> None:
    """P17: an election has ended that clock. What nobody has begun waits for as long as it may."""
    waiting = bank.transfer("A", "B", 5, run=False)
    begun = bank.transfer("A", "B", 10, run=False)
    ahead = datetime.now(UTC) + timedelta(hours=5)
    database["transactions"].update_many({}, {"$set": {"lastModified": ahead}})
    database["transactions"].update_one({"_id": begun}, {"$set": {"state": "pending", "application": "bank"}})
    [recovered] = bank.recover()
    assert (recovered.id, recovered.after) == (begun, "done")
    assert database["transactions"].distinct("state", {"_id": waiting}) == ["initial"]
    assert balances(database) == {"A": 990, "B": 1010}


def test_many_steps_of_one_moment_are_all_read(bank: TwoPhaseCommit) -> None:
    """More than a page of them, some without a time, and behind them the next moment; what is no good is passed by."""
    many = [{"_id": number, "state": "pending", "lastModified": LONG_AGO} for number in range(205)]
    many += [{"_id": number, "state": "pending", "lastModified": None} for number in range(300, 510)]
    bank.transactions.insert_many(many)
    last = bank.transfer("A", "B", 1, run=False)
    later = LONG_AGO + timedelta(days=1)
    bank.transactions.update_one({"_id": last}, {"$set": {"queuedAt": later, "lastModified": later}})
    report = bank.recover(3600, limit=1)

    assert [each.id for each in report if each.error is None] == [last]
    assert sorted(each.id for each in report if each.stopped) == [each["_id"] for each in many]


def test_whoever_leads_a_bridge_asks_for_it_too(database: Db, redis_url: str, redis_client: Redis) -> None:
    """Again and again, and for sweeps of outboxes; of what says that something else sees to it, nothing."""
    app = Celery("shop", broker=redis_url)
    Outbox(app, database["orders"], sweep_every=600)
    TwoPhaseCommit(app, database["transactions"], name="asked", recover_every=0.2)
    TwoPhaseCommit(app, database["others"], name="not-asked", recover_every=None)
    app.finalize()
    requests = PeriodicRequests(app)
    housekeeping = Housekeeping()
    housekeeping.add(requests.send_due)
    housekeeping.start()
    try:
        wait_for(lambda: redis_client.llen("celery") >= 3)
    finally:
        housekeeping.stop()

    messages = b" ".join(redis_client.lrange("celery", 0, -1))  # type: ignore[arg-type]
    assert messages.count(b'"task": "' + RECOVER_TASK.encode()) >= 2
    assert SWEEP_TASK.encode() in messages
    assert b"not-asked" not in messages
    assert b'"expires": null' not in messages
    assert PeriodicRequests(Celery("idle", broker="memory://")).send_due() == math.inf


def test_transactions_that_nobody_recovers_say_so_until_somebody_does(
    clusters: Clusters, caplog: pytest.LogCaptureFixture
) -> None:
    """What is one MongoDB transaction needs no recovery, and asks for none."""
    clusters.bank._watch = recovery_watch("bank", lambda: get_recoveries(clusters.bank), 0.0)

    def errors() -> list[str]:
        return [each.__dict__["event"] for each in caplog.records if each.levelname == "ERROR"]

    for _ in range(2):
        clusters.begin("own", run=True)
    assert not errors()
    clusters.begin("own", "east", run=True)
    clusters.bank.run(clusters.begin("own", "east"))
    wait_for(errors)

    clusters.bank.recover()
    patient = recovery_watch("bank", lambda: get_recoveries(clusters.bank), 600.0)
    assert patient.look() is True
    assert errors() == ["nobody_recovers"]


def test_a_scrape_says_what_is_open_and_what_recovery_has_done(bank: TwoPhaseCommit) -> None:
    """From notes that recovery leaves, so it does not matter which process is scraped."""
    registry = CollectorRegistry()
    registry.register(TransactionCollector(bank.app))  # type: ignore[arg-type]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"mongo_celery_transactions_{name}", {"transactions": "default", **labels})

    assert (value("up"), value("recovery_age_seconds"), value("recovered_total", outcome="done")) == (1, None, None)
    left = bank.transfer("A", "B", 1, run=False)
    stuck = {"_id": "x", "state": "pending", "source": "A", "lastModified": LONG_AGO}
    bank.transactions.insert_one(stuck)
    bank.transactions.update_one({"_id": left}, {"$set": {"queuedAt": LONG_AGO, "lastModified": LONG_AGO}})
    assert (value("unfinished", state="pending"), value("abandoned", state="pending")) == (1, 1)
    assert value("unfinished", state="initial") == 1

    bank.recover()
    assert value("recovered_total", outcome="done") == 1
    assert value("stopped") == 1
    assert (value("recovery_age_seconds") or 0) < 600


def test_a_recovery_is_noted_while_it_lasts_and_when_a_time_limit_ends_it(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = recovery_watch("bank", lambda: get_recoveries(clusters.bank), 600.0)
    read_pages = recovery.Recoverer._read_pages

    def first_page(recoverer: recovery.Recoverer, limit: int) -> Iterator[Any]:
        yield next(iter(read_pages(recoverer, limit)))
        assert watch.look()
        raise SoftTimeLimitExceeded

    identity = clusters.begin("own", "west", value=1)
    clusters.log.update_one({"_id": identity}, {"$set": {"queuedAt": LONG_AGO, "lastModified": LONG_AGO}})
    monkeypatch.setattr(recovery.Recoverer, "_read_pages", first_page)
    with pytest.raises(SoftTimeLimitExceeded):
        clusters.bank.recover()
    last = get_recoveries(clusters.bank).last()
    assert last is not None
    assert last.outcomes == {"done": 1, "canceled": 0}


def test_a_successor_of_the_same_id_is_not_noted_as_compensated(
    bank: TwoPhaseCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction expires in the middle of the call, and its id is used again."""
    bank.transfer("A", "B", 100, id="order")
    log = get_engine(bank).log

    def replace() -> None:
        monkeypatch.undo()
        bank.transactions.delete_one({"_id": "order"})
        bank.transfer("A", "B", 7, id="order")

    monkeypatch.setattr(log, "prepare", replace)
    assert bank.compensate("order")["of"] == bank.read("order").coordinator
    assert balances(bank.transactions.database) == {"A": 900, "B": 1100}


@pytest.mark.parametrize("is_run", [True, False])
def test_an_id_that_is_used_again_has_a_compensation_of_its_own(bank: TwoPhaseCommit, is_run: bool) -> None:
    """That of its predecessor takes back what the predecessor did, whether that has been done or not."""
    bank.transfer("A", "B", 100, id="order")
    first = bank.compensate("order", run=is_run)
    bank.transactions.delete_one({"_id": "order"})  # as it expires

    bank.transfer("B", "A", 7, id="order")
    second = bank.compensate("order")
    assert second == bank.compensate("order") != first
    bank.run(first)
    assert balances(bank.transactions.database) == {"A": 1000, "B": 1000}


def test_a_compensation_that_was_removed_is_not_made_again(bank: TwoPhaseCommit) -> None:
    done = bank.transfer("A", "B", 100)
    bank.transactions.delete_one({"_id": bank.compensate(done)})
    with pytest.raises(TransactionStateError):
        bank.compensate(done)
    assert balances(bank.transactions.database) == {"A": 1000, "B": 1000}


@pytest.mark.parametrize("options", [{"retention": 3600}, {}, {"retention": None}])
def test_what_is_final_expires_by_default_and_a_compensation_after_what_it_takes_back(
    database: Db, options: dict[str, Any]
) -> None:
    """It must not be done again when it is gone. What is not final has no end."""
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", **options)
    done, canceled = bank.transfer("A", "B", 100), bank.transfer("A", "B", 1, run=False)
    bank.compensate(done)
    bank.transfer("A", "B", 1, run=False)
    bank.cancel(canceled)

    kept = {
        str(each["state"]): each["expiresAt"] - each["lastModified"]
        for each in database["transactions"].find({"expiresAt": {"$exists": True}})
    }
    wanted = timedelta(seconds=options["retention"]) if options.get("retention") else timedelta(days=90)
    assert kept == ({} if options == {"retention": None} else {"done": wanted, "canceled": wanted})
    first, second = database["transactions"].find({"state": "done"}).sort("lastModified", 1)
    assert (first["_id"], second["_id"]["compensates"]) == (done, done)
    assert first.get("expiresAt", 0) <= second.get("expiresAt", 0)


def test_what_nobody_begins_expires(bank: TwoPhaseCommit, database: Db) -> None:
    """Recovery cancels it after the retention of who has stored it; what was queued, or is younger, is somebody's."""
    keeping = TwoPhaseCommit(
        Celery("bank", broker="memory://"), database["transactions"], retention=3600, older_than=0.001
    )
    for identity in ("old", "queued", "young"):
        bank.transfer("A", "B", 1, id=identity, run=False)
    Tutorial(database).begin("tutorial", "A", "B", 1)
    forever = TwoPhaseCommit(None, database["transactions"], application="long", retention=None)
    forever.transfer("A", "B", 1, id="kept", run=False)
    keeping.delay("queued")
    aged = datetime.now(UTC) - timedelta(hours=2)
    database["transactions"].update_many({}, {"$set": {"lastModified": aged}})  # the others' retention is 90 days
    database["transactions"].update_many({"_id": {"$in": ["old", "queued"]}}, {"$set": {"beginBy": aged}})

    assert {each.id: (each.before, each.after) for each in keeping.recover()} == {
        "old": ("initial", "canceled"),
        "tutorial": ("initial", "canceled"),
        "queued": ("initial", "done"),
    }
    with pytest.raises(TransactionCanceledError):
        bank.transfer("A", "B", 1, id="old")
    expired = database["transactions"].find_one({"_id": "old"}) or {}
    assert expired["expiresAt"].replace(tzinfo=UTC) > datetime.now(UTC)
    assert bank.run("young").state == "done"
    assert balances(bank.transactions.database) == {"A": 998, "B": 1002}
