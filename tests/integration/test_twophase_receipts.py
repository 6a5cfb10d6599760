"""Two-phase commit over two clusters: receipts on the real servers, whatever is held, refused, late or purged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from bson import Decimal128
from pymongo import MongoClient, monitoring

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import (
    ConfigurationError,
    TransactionCanceledError,
    TransactionStateError,
    TransactionTimeoutError,
)
from mongo_celery.twophase.log import LOG_INDEXES
from mongo_celery.twophase.states import read_transaction
from tests.fixtures.process import wait_for
from tests.integration.receipts_rig import START, Clusters, StepGate
from tests.integration.twophase_rig import Counting

Document = dict[str, Any]
WAYS = [("own", "east"), ("east", "own"), ("east", "west"), ("own", "east", "west"), ("east", "own", "west")]
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[MongoReplicaSet]:
    with MongoReplicaSet(parameters=["enableTestCommands=1"]) as started:
        yield started


@pytest.fixture
def clusters(mongo_url: str, other_cluster: MongoReplicaSet) -> Iterator[Clusters]:
    made = Clusters(f"c{uuid4().hex[:10]}", {"own": mongo_url, "east": other_cluster.url, "west": other_cluster.url})
    yield made
    made.close()


def expected(way: tuple[str, ...], value: int = 100) -> dict[str, int]:
    """Balances after it is done."""
    paid = {way[0]: START - value * (len(way) - 1), **dict.fromkeys(way[1:], START + value)}
    return {cluster: paid.get(cluster, START) for cluster in ("own", "east", "west")}


UNTOUCHED = {"own": START, "east": START, "west": START}


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_all_is_done_and_nothing_of_ours_stands_in_the_documents(clusters: Clusters, way: tuple[str, ...]) -> None:
    """Whichever cluster comes first or last; receipts expire once all is in the log."""
    identity = clusters.begin(*way, run=True)

    stored = clusters.log.find_one({"_id": identity})
    assert stored["state"] == "done"
    assert stored["protocol"] == "receipts"
    assert "participants" not in stored
    assert clusters.balances() == expected(way)
    for cluster in {*way} - {"own"}:
        assert set(clusters.accounts(cluster).find_one()) == {"_id", "balance"}
        (receipt,) = clusters.receipts(cluster)
        assert receipt["_id"] == {"t": stored["key"], "b": cluster}
        assert receipt["state"] == "applied"
        assert receipt["expiresAt"] > stored["deadline"].replace(tzinfo=None)
    assert clusters.bank.run(identity).state == "done"
    assert clusters.balances() == expected(way)


@contextmanager
def listened(clusters: Clusters, listener: Any) -> Iterator[tuple[TwoPhaseCommit, list[Participant]]]:
    """A coordinator whose commands are listened to, and what it is to move from "own" to "east"."""
    clients = {
        cluster: MongoClient[Document](url, event_listeners=[listener]) for cluster, url in clusters.urls.items()
    }
    yield (
        clusters.coordinator(clients),
        [
            Participant(clusters.accounts(cluster, clients), "A", {"$inc": {"balance": share}})
            for cluster, share in (("own", -1), ("east", 1))
        ],
    )
    for client in clients.values():
        client.close()


def test_the_caller_waits_for_six_round_trips_and_the_log_follows(clusters: Clusters) -> None:
    """What is paid with the entry, what is received with its receipt; four where only another cluster is changed."""
    own, receipt = ["findAndModify", "update", "commitTransaction"], ["insert", "update", "commitTransaction"]
    counting = Counting()
    with listened(clusters, counting) as (bank, parts):
        for those, trips in ((parts, [*own, *receipt]), (parts[1:], ["findAndModify", *receipt])):
            bank.begin(those, run=True)
            assert bank.flush()
            counting.names.clear()
            bank.begin(those, run=True)
            assert counting.names[: len(trips)] == trips
            assert bank.flush()
            assert counting.names[len(trips) :] == ["update", "update", "update"]


def test_the_log_follows_many_at_once(clusters: Clusters) -> None:
    """Applied, settled and done are said of all that came together."""
    counting = Counting()
    with listened(clusters, counting) as (bank, parts):
        for _ in range(20):
            bank.begin(parts, run=True)
        assert bank.flush()
    assert counting.names.count("insert") == 20
    assert 2 * counting.names.count("commitTransaction") + 6 > counting.names.count("update")
    assert {each["state"] for each in clusters.log.find()} == {"done"}
    assert all("expiresAt" in each for each in clusters.receipts("east"))
    assert clusters.balances() == expected(("own", "east"), 20)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("held", [3, 4, 5])
def test_what_is_decided_is_done_for_everybody_before_the_log_says_so(
    clusters: Clusters, held: int, late: bool
) -> None:
    """Its process stands or is dead: cancel is refused, compensate goes back, recovery finishes, also very late."""
    gate = StepGate(hold_before=held)
    with listened(clusters, gate) as (bank, parts):
        identity = bank.begin(parts, run=True)
        assert gate.held.wait(60)
        assert clusters.log.find_one({"_id": identity})["state"] == ("pending" if held == 3 else "applied")
        assert clusters.balances() == expected(("own", "east"), 1)
        if late:
            clusters.log.update_one({"_id": identity}, {"$set": {"deadline": LONG_AGO}})
            assert [(each.after, each.error) for each in clusters.bank.recover(0)] == [("done", None)]
        else:
            with pytest.raises(TransactionStateError, match="can no longer be canceled"):
                clusters.bank.cancel(identity)
            clusters.bank.compensate(identity)
        gate.released.set()
        assert bank.flush()

    stored = clusters.log.find_one({"_id": identity})
    assert (stored["state"], stored.get("reason")) == ("done", None)
    assert clusters.balances() == expected(("own", "east"), 1 if late else 0)
    assert all("expiresAt" in each for each in clusters.receipts("east"))


@pytest.mark.parametrize("held", range(1, 6))
def test_the_same_id_gives_the_same_outcome_wherever_the_first_one_stands(clusters: Clusters, held: int) -> None:
    """Its coordinator is held before each of its steps; whoever asks again finishes it, and other parts are refused."""
    gate = StepGate(hold_before=held)
    with listened(clusters, gate) as (bank, parts):
        first = threading.Thread(target=lambda: bank.begin(parts, id="order", run=True), daemon=True)
        first.start()
        assert gate.held.wait(60)
        with listened(clusters, Counting()) as (again, the_same):
            assert again.begin(the_same, id="order", run=True) == "order"
            assert clusters.balances() == expected(("own", "east"), 1)
            with pytest.raises(TransactionStateError, match="already"):
                again.begin(the_same[:1], id="order", run=True)
            again.flush()
        gate.released.set()
        first.join(60)
        assert not first.is_alive()
        bank.flush()
    assert clusters.balances() == expected(("own", "east"), 1)
    assert clusters.log.count_documents({}) == 1


def test_one_whose_log_has_not_followed_can_be_compensated_at_once(clusters: Clusters) -> None:
    """Nobody has to wait for it, in whatever process."""
    gate = StepGate(hold_before=3)
    with listened(clusters, gate) as (bank, parts):
        identity = bank.begin(parts, run=True)
        assert gate.held.wait(60)
        clusters.bank.compensate(identity)
        gate.released.set()
    assert clusters.balances() == UNTOUCHED


def test_a_log_that_cannot_follow_is_left_to_recovery(clusters: Clusters, caplog: pytest.LogCaptureFixture) -> None:
    """The caller was told that it is done, and so it is; a record says that the log does not say so."""
    clusters.begin("own", "east", value=1, run=True)
    for cluster, left in (("own", "pending"), ("east", "applied")):
        caplog.clear()
        admin = clusters.clients[cluster].admin
        data = {"failCommands": ["update"], "errorCode": 13}
        admin.command({"configureFailPoint": "failCommand", "mode": {"skip": 1}, "data": data})  # all but the change
        identity = clusters.begin("own", "east", value=1, run=True)
        admin.command({"configureFailPoint": "failCommand", "mode": "off"})

        assert clusters.log.find_one({"_id": identity})["state"] == left
        assert [vars(each)["event"] for each in caplog.records] == ["log_behind"]
        assert [each.after for each in clusters.bank.recover(0)] == ["done"]
    assert clusters.balances() == expected(("own", "east"), 3)


@pytest.mark.parametrize(
    "lost",
    [
        {"closeConnection": True},
        {"writeConcernError": {"code": 262, "errmsg": "too long"}},
        {"writeConcernError": {"code": 11601, "errmsg": "somebody has ended the session"}},
    ],
)
def test_an_answer_that_is_lost_is_found_in_the_receipt(clusters: Clusters, lost: Document) -> None:
    """In either cluster, at any kind of command: it is done once."""
    for command in ("commitTransaction", "insert", "findAndModify", "update"):
        for target in ("own", "east"):
            with armed(clusters.clients[target], command, lost):
                clusters.begin("own", "east", value=1, run=True)
    assert clusters.balances() == expected(("own", "east"), 8)


def test_an_answer_that_is_lost_twice_makes_no_stranger_of_it(clusters: Clusters) -> None:
    """It was stored, and told otherwise so often that the driver gives up: it is known again by its key."""
    with armed(clusters.clients["own"], "findAndModify", {"writeConcernError": {"code": 262, "errmsg": "too long"}}, 2):
        clusters.begin("east", "west", value=1, run=True, id="order-1")
    clusters.begin("east", "west", value=1, run=True, id="order-1")
    assert clusters.balances() == expected(("east", "west"), 1)


@contextmanager
def armed(client: MongoClient[Document], command: str, failure: Document, times: int = 1) -> Iterator[None]:
    """Let the next commands of a kind fail in a cluster."""
    data = {"failCommands": [command], **failure}
    client.admin.command({"configureFailPoint": "failCommand", "mode": {"times": times}, "data": data})
    yield
    client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_participant_that_refuses_gives_all_others_back(clusters: Clusters, way: tuple[str, ...]) -> None:
    """The last one cannot be found."""
    clusters.accounts(way[-1]).delete_one({})
    with pytest.raises(TransactionCanceledError, match="does not exist"):
        clusters.begin(*way, run=True)
    assert clusters.balances() == {**UNTOUCHED, way[-1]: 0}
    assert {each["state"] for each in clusters.log.find()} == {"canceled"}


def test_a_rule_that_fails_in_any_cluster_cancels(clusters: Clusters) -> None:
    for way in (("own", "east"), ("east", "own"), ("east", "west")):
        with pytest.raises(TransactionCanceledError, match="does not meet"):
            clusters.begin(*way, value=START + 1, run=True)
    assert clusters.balances() == UNTOUCHED


def steps_of(clusters: Clusters, way: tuple[str, ...]) -> int:
    """How many steps a coordinator takes; another one has made the indexes before."""
    clusters.begin(*way, value=0, run=True)
    gate = StepGate()
    with clusters.held(clusters.begin(*way, value=0), gate):
        pass
    return gate.count


@pytest.mark.parametrize("way", [("own", "east"), ("east", "own"), ("east", "west")], ids="-".join)
def test_one_that_was_overtaken_anywhere_applies_nothing_again(clusters: Clusters, way: tuple[str, ...]) -> None:
    """Held before each step and after it; recovery finishes; somebody writes all documents back; it wakes up."""
    done = 0
    for number in range(1, steps_of(clusters, way) + 1):
        for when in ("hold_before", "hold_after"):
            gate = StepGate(**{when: number})
            identity = clusters.begin(*way, value=1)
            with clusters.held(identity, gate) as errors:
                assert gate.held.wait(60)
                clusters.bank.recover(0)
                for cluster in way:
                    found = clusters.accounts(cluster).find_one()
                    clusters.accounts(cluster).replace_one({"_id": "A"}, {"balance": found["balance"]})
            done += 1
            assert errors == []
            assert clusters.bank.run(identity).state == "done"
            assert clusters.balances() == expected(way, done), f"{when} {number}"


@pytest.mark.parametrize("way", [("own", "east"), ("east", "own"), ("east", "west")], ids="-".join)
def test_one_that_was_canceled_anywhere_is_all_or_nothing(clusters: Clusters, way: tuple[str, ...]) -> None:
    """A cancel either succeeds and nothing is left, or is refused and all is done; whoever drives hears the same."""
    done = 0
    for number in range(1, steps_of(clusters, way) + 1):
        gate = StepGate(hold_before=number)
        identity = clusters.begin(*way, value=1)
        with clusters.held(identity, gate) as errors:
            assert gate.held.wait(60)
            try:
                clusters.bank.cancel(identity)
                canceled = True
            except TransactionStateError:
                canceled = False
        assert [type(each) for each in errors] == ([TransactionCanceledError] if canceled else [])
        assert clusters.log.find_one({"_id": identity})["state"] == ("canceled" if canceled else "done")
        done += not canceled
        assert clusters.balances() == expected(way, done), number


def test_whoever_wakes_up_after_the_receipts_were_purged_is_too_late(clusters: Clusters) -> None:
    """The deadline refuses what no receipt refuses any more, by the clock of the branch's own cluster."""
    gate = StepGate(hold_before=3)
    quick = clusters.coordinator(clusters.clients, deadline=0.5)
    clusters.begin("own", "east", run=True)  # makes the indexes
    identity = clusters.begin("own", "east")
    assert quick.step(identity, None) is not None
    with clusters.held(identity, gate):
        assert gate.held.wait(60)
        quick.recover(0)
        state = clusters.log.find_one({"_id": identity})["state"]
        now = clusters.clients["east"].admin
        deadline = clusters.log.find_one({"_id": identity})["deadline"]
        wait_for(lambda: now.command("hello")["localTime"] > deadline)
        clusters.clients["east"][f"{clusters.name}_east"]["transactionReceipts"].delete_many({})

    assert clusters.log.find_one({"_id": identity})["state"] == state
    assert clusters.balances() == expected(("own", "east"), 200 if state == "done" else 100)


def test_what_cannot_be_written_is_canceled_after_its_deadline(clusters: Clusters) -> None:
    """Until then it says so and stays, for the reason may be put right; whoever has paid gets it back."""
    refused = Participant(clusters.clients["east"]["admin"]["system.version"], "x", {"$inc": {"n": 1}})
    paying = Participant(clusters.accounts("own"), "A", {"$inc": {"balance": -100}})
    identity = clusters.bank.begin([paying, refused])

    with pytest.raises(TransactionStateError, match=r"cannot be written .* after 20"):
        clusters.bank.run(identity)
    assert clusters.log.find_one({"_id": identity})["state"] == "pending"
    assert clusters.balances()["own"] == START - 100

    clusters.log.update_one({"_id": identity}, {"$set": {"deadline": LONG_AGO}})
    (became,) = clusters.bank.recover(0)
    assert (became.after, became.error) == ("canceled", None)
    assert "deadline" in clusters.log.find_one({"_id": identity})["reason"]
    assert clusters.balances() == UNTOUCHED


def test_a_participant_that_spent_it_keeps_the_transaction_canceling_until_it_can(clusters: Clusters) -> None:
    """Three clusters, so that one is paid before the last decides; the others have their share back already."""
    paid = Participant(
        clusters.accounts("east"), "A", {"$inc": {"balance": 100}}, revert_require={"balance": {"$gte": 100}}
    )
    paying = Participant(clusters.accounts("own"), "A", {"$inc": {"balance": -100}})
    missing = Participant(clusters.accounts("west"), "Z", {"$inc": {"balance": 1}})
    clusters.accounts("east").update_one({}, {"$set": {"balance": -50}})
    identity = clusters.bank.begin([paying, paid, missing])

    with pytest.raises(TransactionStateError, match="does not meet"):
        clusters.bank.run(identity)
    stored = clusters.log.find_one({"_id": identity})
    assert (stored["state"], "cannot be undone" in stored["stoppedBy"]) == ("canceling", True)
    assert not clusters.bank.log.note_stopped(clusters.bank.read(identity), stored["stoppedBy"])
    clusters.accounts("east").update_one({}, {"$inc": {"balance": 500}})
    with pytest.raises(TransactionCanceledError, match="does not exist"):
        clusters.bank.run(identity)
    assert "stoppedBy" not in clusters.log.find_one({"_id": identity})
    assert clusters.balances() == {"own": START, "east": 450, "west": START}


def test_a_revert_that_a_server_refuses_keeps_nobody_else_from_having_its_share_back(clusters: Clusters) -> None:
    """A validator that was tightened meanwhile; the transaction says so and stays, until it is loosened."""
    identity = clusters.begin("east", "west", "own")
    clusters.accounts("own").delete_one({})
    west = clusters.accounts("west").database
    west.command("collMod", "accounts", validator={"balance": {"$gt": START}})

    with pytest.raises(TransactionStateError, match=r"stays canceling.*refuses the change"):
        clusters.bank.run(identity)
    assert clusters.balances() == {"own": 0, "east": START, "west": START + 100}
    west.command("collMod", "accounts", validator={})
    with pytest.raises(TransactionCanceledError, match="does not exist"):
        clusters.bank.run(identity)
    assert clusters.balances() == {"own": 0, "east": START, "west": START}


def test_a_cluster_that_is_away_keeps_nothing_that_others_have_paid(clusters: Clusters) -> None:
    """What was paid in the first cluster is back though the second does not answer."""
    identity = clusters.begin("east", "west", "own")
    clusters.accounts("own").delete_one({})
    assert (clusters.stepped(identity, 2).state, clusters.balances()["east"]) == ("canceling", START - 200)

    with MongoClient[Document]("127.0.0.1:1", serverSelectionTimeoutMS=60_000) as away:
        impatient = clusters.coordinator({**clusters.clients, "west": away}, timeout=4)

        def is_given_back() -> bool:  # a busy machine may need more than one share of the time
            with pytest.raises(TransactionTimeoutError):
                impatient.run(identity)
            return clusters.balances()["east"] == START

        wait_for(is_given_back)
    assert clusters.balances() == {"own": 0, "east": START, "west": START + 100}
    with pytest.raises(TransactionCanceledError):
        clusters.bank.run(identity)
    assert clusters.balances() == {"own": 0, "east": START, "west": START}


@pytest.mark.parametrize("cluster", ["own", "east"])
def test_one_document_that_cannot_bear_both_of_its_changes_cancels(clusters: Clusters, cluster: str) -> None:
    """Only the server knows that two participants are one document; each alone it would bear."""
    accounts = clusters.accounts(cluster)
    accounts.insert_one({"_id": 1, "balance": 150})
    both = [
        Participant(accounts, each, {"$inc": {"balance": -100}}, require={"balance": {"$gte": 100}})
        for each in (1, Decimal128("1"))
    ]
    with pytest.raises(TransactionCanceledError, match="are one document"):
        clusters.bank.begin(both, run=True)
    assert accounts.find_one({"_id": 1})["balance"] == 150


def test_one_document_that_cannot_bear_both_reverts_says_so(clusters: Clusters) -> None:
    """What it was given was spent meanwhile, but each of both alone could be taken back."""
    accounts = clusters.accounts("east")
    accounts.insert_one({"_id": 1, "balance": 0})
    both = [
        Participant(accounts, each, {"$inc": {"balance": 60}}, revert_require={"balance": {"$gte": 60}})
        for each in (1, Decimal128("1"))
    ]
    missing = Participant(clusters.accounts("own"), "Z", {"$inc": {"balance": 1}})
    identity = clusters.bank.begin([*both, missing])
    clusters.stepped(identity, 2)
    assert accounts.find_one({"_id": 1})["balance"] == 120
    accounts.update_one({"_id": 1}, {"$set": {"balance": 70}})
    with pytest.raises(TransactionStateError, match="are one document"):
        clusters.bank.run(identity)
    accounts.update_one({"_id": 1}, {"$set": {"balance": 120}})
    with pytest.raises(TransactionCanceledError):
        clusters.bank.run(identity)
    assert accounts.find_one({"_id": 1})["balance"] == 0


def test_what_others_have_arranged_otherwise_is_left_alone(clusters: Clusters) -> None:
    """Which branch is changed with the log is stored, so that nobody ever takes another for it."""
    identity = clusters.begin("own", "east", run=True)
    stored = {**clusters.log.find_one({"_id": identity}), "own": "last"}
    with pytest.raises(TransactionStateError, match="own"):
        read_transaction(stored, "a.b")


def test_a_dead_cluster_costs_the_others_nothing(clusters: Clusters, other_cluster: MongoReplicaSet) -> None:
    """What shares it is tried once and then left; every call ends though the server still stands."""
    within = [clusters.bank.begin([Participant(clusters.accounts("own"), "A", {"$inc": {"balance": 1}})])]
    across = [clusters.begin("own", "east", value=1) for _ in range(12)]
    clusters.log.update_many(
        {"_id": {"$in": within + across}}, {"$set": {"queuedAt": LONG_AGO, "lastModified": LONG_AGO}}
    )
    clients = {
        "own": clusters.clients["own"],
        "east": MongoClient[Document](other_cluster.url),
        "west": clusters.clients["west"],
    }
    impatient = clusters.coordinator(clients, timeout=3)
    other_cluster.pause()
    try:
        report = {each.id: each for each in impatient.recover(0)}
        with pytest.raises(TransactionTimeoutError, match="in cluster 'east'"):
            impatient.run(across[0])
    finally:
        other_cluster.resume()
        clients["east"].close()

    assert report[within[0]].after == "done"
    assert sum("not tried" in (each.error or "") for each in report.values()) >= 4
    # What no driver has in its hands any more is finished, once the cluster answers.
    wait_for(lambda: all(each.error is None for each in clusters.bank.recover(0)))
    for identity in across:
        assert clusters.bank.run(identity).state == "done"
    assert clusters.balances() == {"own": START - 12 + 1, "east": START + 12, "west": START}


@pytest.mark.parametrize("way", [("own", "east"), ("east", "own"), ("east", "west")], ids="-".join)
def test_many_are_recovered_together_and_one_that_cannot_be_stops_no_other(
    clusters: Clusters, way: tuple[str, ...]
) -> None:
    """Some have only begun, some were applied in one cluster, one refuses, one is late, one was canceled meanwhile."""
    open_ones = [clusters.begin(*way, value=1) for _ in range(9)]
    refusing, late = clusters.begin(*way, value=START + 1), clusters.begin(*way, value=1)
    is_refused_later = way[0] != "own"  # the own branch would refuse when it is begun
    for identity in [*open_ones, late, *([refusing] if is_refused_later else [])]:
        clusters.bank.step(identity, None)
    clusters.log.update_one({"_id": late}, {"$set": {"deadline": LONG_AGO}})
    clusters.bank.cancel(open_ones[0])
    gate = StepGate(hold_before=5)
    with clusters.held(open_ones[1], gate):
        assert gate.held.wait(60)
        report = {each.id: each for each in clusters.bank.recover(0)}

    assert {report[each].after for each in open_ones[1:]} == {"done"}
    assert report[late].after == "canceled"
    assert not is_refused_later or report[refusing].after == "canceled"
    assert clusters.balances() == expected(way, 8)
    for cluster in {*way} - {"own"}:
        assert all("expiresAt" in each for each in clusters.receipts(cluster))


def test_the_log_reads_only_what_is_open_and_forgets_what_is_old(clusters: Clusters) -> None:
    """An index for each open state, made at the first use; what is final expires, and compensate refuses to guess."""
    keeping = clusters.coordinator(clusters.clients, retention=3600)
    part = Participant(clusters.accounts("own"), "A", {"$inc": {"balance": -1}})
    for _ in range(30):
        keeping.begin([part], run=True)
    clusters.begin("own", "east", value=1)
    wait_for(lambda: {each.document["name"] for each in LOG_INDEXES} <= set(clusters.log.index_information()))
    for state in ("initial", "pending", "applied", "canceling"):
        plan = clusters.log.find({"state": state}).sort("lastModified", 1).limit(9).explain()["executionStats"]
        assert plan["totalDocsExamined"] <= 1, state

    done = clusters.log.find_one({"state": "done"})
    assert done["expiresAt"] > done["lastModified"]
    compensation = keeping.compensate(done["_id"])
    assert keeping.compensate(done["_id"]) == compensation
    clusters.log.delete_one({"_id": compensation})
    with pytest.raises(TransactionStateError, match="not compensated again"):
        keeping.compensate(done["_id"])


@pytest.mark.parametrize("way", [("own", "east"), ("east", "west")], ids="-".join)
def test_a_compensation_goes_the_way_back(clusters: Clusters, way: tuple[str, ...]) -> None:
    identity = clusters.begin(*way, run=True)
    clusters.bank.compensate(identity)
    assert clusters.balances() == UNTOUCHED


def test_a_log_that_was_put_back_to_an_earlier_time_ends_in_a_sentence(clusters: Clusters) -> None:
    """A receipt says undone where the log says pending, which no run of the protocol leaves; nothing is changed."""
    clusters.accounts("west").delete_one({})
    with pytest.raises(TransactionCanceledError):
        clusters.begin("east", "west", run=True, id=1)
    clusters.log.update_one({"_id": 1}, {"$set": {"state": "pending"}})
    with pytest.raises(TransactionTimeoutError, match="put back to an earlier time"):
        clusters.coordinator(clusters.clients, timeout=4).run(1)
    assert clusters.balances()["east"] == START


def test_who_does_not_know_a_cluster_begins_nothing_in_the_others(clusters: Clusters) -> None:
    """Recovery of a process with fewer clients leaves it to one that can finish it."""
    identity = clusters.begin("own", "east")
    clusters.log.update_one({"_id": identity}, {"$set": {"queuedAt": LONG_AGO, "lastModified": LONG_AGO}})
    blind = clusters.coordinator({"own": clusters.clients["own"]})

    assert "which this process does not know" in (blind.recover(0)[0].error or "")
    assert clusters.log.find_one({"_id": identity})["state"] == "initial"
    assert clusters.balances() == UNTOUCHED
    assert [each.after for each in clusters.bank.recover(0)] == ["done"]


def test_accounts_in_another_cluster_are_no_accounts_of_the_same_name_beside_the_transactions(
    clusters: Clusters, mongo_url: str
) -> None:
    """Also where that one has an alias. Another client of the transactions' cluster may be written otherwise."""
    log, east = clusters.log, clusters.accounts("east")
    beside = clusters.clients["own"][east.database.name]["accounts"]
    for accounts in (east, beside):
        accounts.insert_many([{"_id": each, "balance": START} for each in ("P", "Q")])
    for clients in ({}, {"east": clusters.clients["east"]}):
        with pytest.raises(ConfigurationError, match=r"accounts .* in another cluster"):
            TwoPhaseCommit(None, log, application="bank", accounts=east, clients=clients).transfer("P", "Q", 100)
    assert [each["balance"] for each in [*beside.find({"_id": "P"}), *east.find({"_id": "P"})]] == [START, START]

    with MongoClient[Document](mongo_url.replace("127.0.0.1", "localhost")) as written_otherwise:
        assert written_otherwise != clusters.clients["own"]
        seen = written_otherwise[east.database.name]["accounts"]
        TwoPhaseCommit(None, log, application="bank", accounts=seen).transfer("P", "Q", 100)
    assert {each["_id"]: each["balance"] for each in beside.find()} == {"P": START - 100, "Q": START + 100}


def test_who_does_not_know_a_cluster_any_more_says_which(clusters: Clusters) -> None:
    """Whatever is asked of one that was begun, nothing is done to it; and whoever knows it finishes it."""
    identity = clusters.begin("own", "east")
    clusters.stepped(identity, 1)
    blind = clusters.coordinator({"own": clusters.clients["own"]})

    with pytest.raises(ConfigurationError, match="cluster 'east', which this process does not know"):
        blind.run(identity)
    (became,) = blind.recover(0)
    assert "cluster 'east', which this process does not know" in (became.error or "")
    assert became.stopped
    with pytest.raises(ConfigurationError, match="cluster 'east', which this process does not know"):
        blind.cancel(identity)
    assert clusters.bank.run(identity).state == "done"


def test_what_a_newer_version_has_stored_is_left_alone(clusters: Clusters) -> None:
    identity = clusters.begin("own", "east", run=True)
    stored = {**clusters.log.find_one({"_id": identity}), "protocol": "telepathy"}
    with pytest.raises(TransactionStateError, match="newer version"):
        read_transaction(stored, "a.b")


class HeldInside(monitoring.CommandListener):
    """Holds a coordinator in the middle of a MongoDB transaction: after the receipt, before anything else."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self.released = threading.Event()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Nothing."""

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if event.command_name == "insert" and not self.held.is_set():
            self.held.set()
            assert self.released.wait(60)

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""


@pytest.mark.parametrize("way", [("own", "east"), ("east", "own")], ids="-".join)
@pytest.mark.parametrize("call", ["cancel", "recover", "run"])
def test_what_a_frozen_coordinator_keeps_open_is_ended_by_whoever_takes_over(
    clusters: Clusters, way: tuple[str, ...], call: str
) -> None:
    """Else they would wait for it in vain until the server ends it; when it wakes up, it finds what was decided."""
    identity = clusters.begin(*way)
    gate = HeldInside()
    with clusters.held(identity, gate):  # type: ignore[arg-type]
        assert gate.held.wait(60)
        other = clusters.coordinator(clusters.clients, timeout=20)
        if call == "cancel":
            assert other.cancel(identity).state == "canceled"
        elif call == "run":
            assert other.run(identity).state == "done"
        else:
            assert [each.after for each in other.recover(0)] == ["done"]
    assert clusters.balances() == (UNTOUCHED if call == "cancel" else expected(way))
    assert {each["cluster"] for each in clusters.log.find_one({"_id": identity})["sessions"]} == {None, "east"}


def test_what_the_same_process_does_next_is_ended_by_nobody(clusters: Clusters) -> None:
    """Whoever takes a transaction over ends what its coordinator keeps open, and nothing else of that process."""
    identity = clusters.begin("own", "east")
    clusters.stepped(identity, 1)
    with ExitStack() as stack:
        sessions = {each: stack.enter_context(clusters.clients[each].start_session()) for each in ("own", "east")}
        for cluster, session in sessions.items():
            session.start_transaction()
            clusters.clients[cluster][f"{clusters.name}_{cluster}"]["notes"].insert_one({"_id": 1}, session=session)
        with MongoClient[Document](clusters.urls["own"]) as own, MongoClient[Document](clusters.urls["east"]) as east:
            other = clusters.coordinator({"own": own, "east": east, "west": clusters.clients["west"]})
            assert other.cancel(identity).state == "canceled"
        for session in sessions.values():
            session.commit_transaction()
    assert clusters.balances() == UNTOUCHED


def test_of_many_each_is_judged_by_its_own_age(clusters: Clusters) -> None:
    """One was stepped just now; what others' coordinators have open is of later transactions of theirs."""
    young, old, stepped = (clusters.begin("own", "east", value=1) for _ in range(3))
    for identity in (young, old, stepped):
        clusters.stepped(identity, 1)
    with clusters.clients["own"].start_session() as session, session.start_transaction():
        named = {"sessions": [{"cluster": None, "id": session.session_id["id"]}], "lastModified": LONG_AGO}
        clusters.log.update_many({"_id": {"$in": [old, stepped]}}, {"$set": named})
        seen = [clusters.bank.read(identity) for identity in (young, old, stepped)]
        clusters.log.update_one({"_id": stepped}, {"$currentDate": {"lastModified": True}})
        clusters.accounts("own").update_one({}, {"$set": {"noted": True}}, session=session)
        clusters.bank._completion.prepare_taking(seen)
    assert clusters.accounts("own").find_one()["noted"]


def test_sessions_of_coordinators_serve_other_coordinators(clusters: Clusters) -> None:
    """A server keeps each for half an hour: there are as many as calls at once."""
    named = [clusters.log.find_one({"_id": clusters.begin("own", "east", value=1, run=True)}) for _ in range(5)]
    assert len({each["id"] for entry in named for each in entry["sessions"]}) <= 4
