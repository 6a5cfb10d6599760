"""Two-phase commit over clusters and a standalone server: receipts in these, markers in that, and all or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from mongo_celery import Participant
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import TransactionCanceledError, TransactionStateError
from mongo_celery.twophase import follower
from mongo_celery.twophase.states import read_transaction
from tests.integration.receipts_rig import START, Clusters, StepGate

Document = dict[str, Any]
WAYS = [("own", "west"), ("west", "own"), ("east", "west"), ("west", "east"), ("own", "west", "east")]
"""`west` stands alone: as the only other one, first, last and between."""

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
UNTOUCHED = {"own": START, "east": START, "west": START}


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[MongoReplicaSet]:
    with MongoReplicaSet() as started:
        yield started


@pytest.fixture
def clusters(mongo_url: str, other_cluster: MongoReplicaSet, standalone_url: str) -> Iterator[Clusters]:
    made = Clusters(f"m{uuid4().hex[:10]}", {"own": mongo_url, "east": other_cluster.url, "west": standalone_url})
    yield made
    made.close()


def expected(way: tuple[str, ...], value: int = 100) -> dict[str, int]:
    paid = {way[0]: START - value * (len(way) - 1), **dict.fromkeys(way[1:], START + value)}
    return {cluster: paid.get(cluster, START) for cluster in ("own", "east", "west")}


def markers(clusters: Clusters) -> list[Any]:
    return list(clusters.accounts("west").find_one().get("pendingTransactions", []))


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_only_the_documents_of_the_standalone_server_have_anything_of_ours(
    clusters: Clusters, way: tuple[str, ...]
) -> None:
    """Its documents have a version, and no marker any more; the others have a receipt beside them."""
    identity = clusters.begin(*way, run=True)

    stored = clusters.log.find_one({"_id": identity})
    assert (stored["state"], stored["protocol"], stored["marked"]) == ("done", "receipts", ["west"])
    assert clusters.balances() == expected(way)
    assert markers(clusters) == []
    assert set(clusters.accounts("west").find_one()) == {"_id", "balance", "pendingTransactions", "transactionFence"}
    for cluster in {*way} - {"west"}:
        assert set(clusters.accounts(cluster).find_one()) == {"_id", "balance"}
    assert clusters.receipts("west") == []
    assert all("expiresAt" in each for each in clusters.receipts("east"))
    assert clusters.bank.compensate(identity) == {"compensates": identity}
    assert clusters.balances() == UNTOUCHED


def steps_of(clusters: Clusters, way: tuple[str, ...]) -> int:
    clusters.begin(*way, value=0, run=True)
    gate = StepGate()
    with clusters.held(clusters.begin(*way, value=0), gate):
        pass
    return gate.count


@pytest.mark.parametrize("way", [("own", "west"), ("west", "own"), ("east", "west"), ("west", "east")], ids="-".join)
def test_one_that_was_overtaken_anywhere_applies_nothing_again(clusters: Clusters, way: tuple[str, ...]) -> None:
    """Held before each step; recovery finishes; it wakes up."""
    for number in range(1, steps_of(clusters, way) + 1):
        gate = StepGate(hold_before=number)
        identity = clusters.begin(*way, value=1)
        with clusters.held(identity, gate) as errors:
            assert gate.held.wait(60)
            clusters.bank.recover(0)
        assert errors == []
        assert clusters.bank.run(identity).state == "done"
        assert clusters.balances() == expected(way, number), number
        assert markers(clusters) == []


@pytest.mark.parametrize("way", [("own", "west"), ("west", "own"), ("east", "west"), ("west", "east")], ids="-".join)
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
        assert markers(clusters) == []


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_participant_that_is_missing_gives_all_others_back(clusters: Clusters, way: tuple[str, ...]) -> None:
    clusters.accounts(way[-1]).delete_one({})
    with pytest.raises(TransactionCanceledError, match="exist"):
        clusters.begin(*way, run=True)
    assert clusters.balances() == {**UNTOUCHED, way[-1]: 0}


def test_a_document_that_is_written_back_as_a_whole_stops_it_before_anything_is_doubled(clusters: Clusters) -> None:
    """With a marker nobody can know whether it has its change; the other cluster's is not touched by that."""
    identity = clusters.begin("own", "west", "east")
    applied = clusters.stepped(identity, 1)
    clusters.accounts("east").delete_one({})
    found = clusters.accounts("west").find_one()
    clusters.accounts("west").replace_one({}, {"balance": found["balance"]})
    with pytest.raises(TransactionStateError, match="written back as a whole"):
        clusters.bank.run(identity)
    assert applied.state == clusters.log.find_one({"_id": identity})["state"] == "pending"
    assert clusters.balances()["west"] == START


def test_one_that_is_decided_goes_on_whatever_becomes_of_its_documents(clusters: Clusters) -> None:
    """Its process dies before the log says so, and somebody writes the document with the marker back as a whole."""
    way = ("west", "east")
    gate = StepGate(hold_before=steps_of(clusters, way) - 3)  # applied, settled in two clusters, done
    identity = clusters.begin(*way, value=1)
    with clusters.held(identity, gate) as errors:
        assert gate.held.wait(60)
        stored = clusters.log.find_one({"_id": identity})
        assert stored["state"] == "pending"
        assert markers(clusters) == [stored["key"]]  # an id may be used again
        assert clusters.balances() == expected(way, 1)
        found = clusters.accounts("west").find_one()
        clusters.accounts("west").replace_one({}, {"balance": found["balance"]})
        assert [each.error for each in clusters.bank.recover(0)] == [None]
    assert errors == []
    assert clusters.bank.run(identity).state == "done"
    assert clusters.balances() == expected(way, 1)


def test_several_are_recovered_and_what_is_late_is_canceled(clusters: Clusters) -> None:
    """One by one: markers cannot be shared."""
    begun = [clusters.begin("own", "west", value=1) for _ in range(4)]
    for identity in begun:
        clusters.stepped(identity, 1)
    clusters.log.update_one({"_id": begun[0]}, {"$set": {"deadline": LONG_AGO}})
    report = {each.id: each.after for each in clusters.bank.recover(0)}
    assert report == {begun[0]: "canceled", **dict.fromkeys(begun[1:], "done")}
    assert clusters.balances() == expected(("own", "west"), 3)


def test_clusters_that_nobody_can_read_are_refused(clusters: Clusters) -> None:
    stored = {**clusters.log.find_one({"_id": clusters.begin("own", "west", run=True)}), "marked": [7]}
    with pytest.raises(TransactionStateError, match="marked"):
        read_transaction(stored, "a.b")


def test_one_that_cannot_be_settled_keeps_no_other_from_being_done(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validator that came meanwhile refuses one document; it is left to recovery."""
    monkeypatch.setattr(follower, "LINGER_SECONDS", 60.0)  # until both are there
    west = clusters.accounts("west")
    west.insert_one({"_id": "refused", "balance": START})
    begun = [
        clusters.bank.begin(
            [
                Participant(clusters.accounts("own"), "A", {"$inc": {"balance": -1}}),
                Participant(west, each, {"$inc": {"balance": 1}}),
            ],
            run=True,
        )
        for each in ("refused", "A")
    ]
    west.database.command("collMod", west.name, validator={"_id": {"$ne": "refused"}}, validationLevel="strict")
    assert clusters.bank.flush()
    assert [clusters.log.find_one({"_id": each})["state"] for each in begun] == ["applied", "done"]
    west.database.command("collMod", west.name, validator={})
    assert clusters.bank.run(begun[0]).state == "done"
