"""Two-phase commit across clusters and a standalone server, whatever is held, refused, late or away."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
from pymongo import MongoClient

from mongo_celery import Participant, TwoPhaseCommit, transactional
from mongo_celery.errors import (
    ConfigurationError,
    TransactionCanceledError,
    TransactionStateError,
    TransactionTimeoutError,
)
from mongo_celery.twophase.participants import MARKERS
from tests.fixtures.process import wait_for
from tests.integration.clusters_rig import START, Clusters
from tests.integration.twophase_rig import LONG_AGO, Document, Gate

WAYS = [("own", "east"), ("east", "own"), ("east", "west"), ("west", "own"), ("own", "west", "east")]
"""`east` is another replica set, `west` a standalone server."""

APPLIED = 11
"""The command of a coordinator of two participants that records that all is applied."""

UNTOUCHED = {"own": START, "east": START, "west": START}


def expected(way: tuple[str, ...], value: int = 100) -> dict[str, int]:
    """Balances after it is done."""
    paid = {way[0]: START - value * (len(way) - 1), **dict.fromkeys(way[1:], START + value)}
    return {cluster: paid.get(cluster, START) for cluster in ("own", "east", "west")}


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_all_is_done_in_every_order_of_clusters_and_can_be_compensated_or_nothing(
    clusters: Clusters, way: tuple[str, ...]
) -> None:
    identity = clusters.begin(*way, run=True)

    assert clusters.log.find_one({"_id": identity})["state"] == "done"
    assert clusters.balances() == expected(way)
    for cluster in way:
        found = clusters.accounts(cluster).find_one()
        assert set(found) == {"_id", "balance", "pendingTransactions", "transactionFence"}
        assert found["pendingTransactions"] == []
    assert clusters.bank.run(identity).state == "done"
    assert clusters.balances() == expected(way)
    clusters.bank.compensate(identity)
    assert clusters.balances() == UNTOUCHED

    clusters.accounts(way[-1]).delete_one({})
    with pytest.raises(TransactionCanceledError):
        clusters.begin(*way, id="refused", run=True)
    assert clusters.balances() == {**UNTOUCHED, way[-1]: 0}
    assert clusters.log.find_one({"_id": "refused"})["state"] == "canceled"


@pytest.mark.parametrize("held", range(1, 9))
def test_the_same_id_gives_the_same_outcome_wherever_the_first_one_stands(clusters: Clusters, held: int) -> None:
    """Stored, begun, applied or settled; and the one that was overtaken ends with it, too."""
    gate = Gate(hold_before=held)
    identity = clusters.begin("own", "east", id="payment")
    with clusters.held(identity, gate) as errors:
        assert gate.held.wait(60)
        assert clusters.begin("own", "east", id="payment", run=True) == identity
    assert errors == []
    assert clusters.balances() == expected(("own", "east"))


def test_a_revert_that_a_server_refuses_keeps_nobody_else_from_having_its_share_back(clusters: Clusters) -> None:
    """A validator that was tightened meanwhile; the transaction says so and stays, until it is loosened."""
    clusters.begin("own", "west", "east", value=0, run=True)  # gives versions, which the validator would refuse
    identity = clusters.begin("own", "west", "east")
    clusters.accounts("east").delete_one({})
    west = clusters.accounts("west").database
    west.command("collMod", "accounts", validator={"balance": {"$gt": START}})

    with pytest.raises(TransactionStateError) as stuck:
        clusters.bank.run(identity)
    assert vars(stuck.value)["state"] == "canceling"
    assert clusters.balances() == {"own": START, "east": 0, "west": START + 100}
    west.command("collMod", "accounts", validator={})
    with pytest.raises(TransactionCanceledError):
        clusters.bank.run(identity)
    assert clusters.balances() == {"own": START, "east": 0, "west": START}


def test_a_server_that_refuses_the_first_touch_gives_all_others_back(clusters: Clusters) -> None:
    """A validator refuses the version that a participant gets before its change."""
    west = clusters.accounts("west").database
    west.command("collMod", "accounts", validator={"transactionFence": {"$exists": False}})
    with pytest.raises(TransactionCanceledError):
        clusters.begin("own", "east", "west", id="refused", run=True)
    assert clusters.balances() == UNTOUCHED
    assert clusters.log.find_one({"_id": "refused"})["state"] == "canceled"
    west.command("collMod", "accounts", validator={})
    clusters.begin("own", "east", "west", run=True)
    assert clusters.balances() == expected(("own", "east", "west"))


def test_a_cluster_that_is_away_keeps_nothing_that_others_have_paid(clusters: Clusters) -> None:
    """What was paid in the first cluster is back though the second does not answer."""
    identity = clusters.begin("east", "west", "own")
    clusters.advance(identity)
    clusters.accounts("own").delete_one({})
    assert (clusters.step(identity).state, clusters.balances()["east"]) == ("canceling", START - 200)

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


@pytest.mark.parametrize("is_stale", [True, False], ids=["written back from a stale copy", "made anew"])
def test_a_participant_that_is_replaced_stops_it_until_a_person_has_put_it_right(
    clusters: Clusters, is_stale: bool
) -> None:
    """Before all is recorded as applied. What the person writes says whether its successor has the change."""
    east, gate = clusters.accounts("east"), Gate(hold_before=APPLIED)
    identity, stale = clusters.begin("own", "east"), east.find_one()
    with clusters.held(identity, gate) as errors:
        assert gate.held.wait(60)
        assert clusters.balances() == expected(("own", "east"))
        if is_stale:
            east.replace_one({"_id": "A"}, stale)
        else:
            found = east.find_one_and_delete({"_id": "A"})
            east.insert_one({"_id": "A", "balance": found["balance"]})
        left = clusters.balances()
        assert [(each.id, each.stopped) for each in clusters.bank.recover(0)] == [(identity, True)]
        assert clusters.balances() == left
        if is_stale:
            clusters.log.update_one({"_id": identity}, {"$set": {"incarnations.1": None}})
        else:
            east.update_one({"_id": "A"}, {"$push": {MARKERS: identity}})
        assert [each.after for each in clusters.bank.recover(0)] == ["canceled" if is_stale else "done"]
    assert [type(error) for error in errors] == [TransactionCanceledError] * is_stale
    assert clusters.balances() == (UNTOUCHED if is_stale else expected(("own", "east")))


def test_a_validator_in_another_cluster_that_refuses_the_version_cancels_it(clusters: Clusters) -> None:
    """P9: the answer says what the validator has to allow."""
    accounts = clusters.accounts("east")
    accounts.database.command("collMod", accounts.name, validator={"transactionFence": {"$exists": False}})
    with pytest.raises(TransactionCanceledError, match="validator"):
        clusters.begin("own", "east", run=True)
    assert clusters.balances() == UNTOUCHED


def test_one_that_cannot_be_settled_keeps_no_other_from_being_done(clusters: Clusters) -> None:
    """A validator that came meanwhile refuses one document: it stays applied, and says why."""
    west = clusters.accounts("west")
    west.insert_one({"_id": "refused", "balance": START})
    begun = [
        clusters.bank.begin(
            [
                Participant(clusters.accounts("own"), "A", {"$inc": {"balance": -1}}),
                Participant(west, each, {"$inc": {"balance": 1}}),
            ]
        )
        for each in ("refused", "A")
    ]
    for each in begun:
        clusters.advance(each)
        assert clusters.step(each).state == "applied"
    west.database.command("collMod", west.name, validator={"_id": {"$ne": "refused"}}, validationLevel="strict")
    assert {each.id: (each.after, each.stopped) for each in clusters.bank.recover(0)} == {
        begun[0]: ("applied", True),
        begun[1]: ("done", False),
    }
    with pytest.raises(TransactionStateError):
        clusters.bank.run(begun[0])
    assert clusters.log.find_one({"_id": begun[0]})["stoppedBy"]
    west.database.command("collMod", west.name, validator={})
    assert clusters.bank.run(begun[0]).state == "done"


def test_accounts_in_another_cluster_are_no_accounts_of_the_same_name_beside_the_transactions(
    clusters: Clusters,
) -> None:
    log, east = clusters.log, clusters.accounts("east")
    beside = clusters.clients["own"][east.database.name]["accounts"]
    for accounts in (east, beside):
        accounts.insert_many([{"_id": each, "balance": START} for each in ("P", "Q")])
    for clients in ({}, {"east": clusters.clients["east"]}):
        bank = TwoPhaseCommit(None, log, application="bank", accounts=east, clients=clients)
        for around in (nullcontext(), transactional(log.database.client)):
            with around, pytest.raises(ConfigurationError):
                bank.transfer("P", "Q", 100)
    assert [each["balance"] for each in [*beside.find({"_id": "P"}), *east.find({"_id": "P"})]] == [START, START]


@pytest.mark.parametrize("application", ["bank", "App2"])
def test_who_does_not_know_a_cluster_leaves_its_transactions_alone(
    clusters: Clusters, caplog: pytest.LogCaptureFixture, application: str
) -> None:
    """Whatever is asked, and of whatever application it may be. Whoever knows the cluster finishes them."""
    stored, begun, other = (clusters.begin("own", "east", value=1) for _ in range(3))
    clusters.log.update_many({}, {"$set": {"queuedAt": LONG_AGO, "lastModified": LONG_AGO}})
    clusters.advance(begun)
    clusters.advance(other)
    clusters.log.update_many({"state": "pending"}, {"$set": {"lastModified": LONG_AGO}})
    blind = clusters.coordinator({"own": clusters.clients["own"]}, application=application)
    before = list(clusters.log.find({}, {"application": 1, "state": 1}))

    assert {begun, other} <= {each.id for each in blind.recover(0, all=True) if each.stopped} <= {stored, begun, other}
    assert [each.__dict__["event"] for each in caplog.records] == ["recovery_failed"], "one record for all"
    for call in (blind.run, partial(blind.cancel, all=True)):
        with pytest.raises((ConfigurationError, TransactionStateError)):
            call(begun)
    assert list(clusters.log.find({}, {"application": 1, "state": 1})) == before
    assert clusters.balances() == UNTOUCHED
    assert {each.after for each in clusters.bank.recover(0)} == {"done"}
