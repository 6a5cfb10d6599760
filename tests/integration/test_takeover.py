"""
A take-over in a constant number of calls, and around partitions that an open transaction has locked.

P1 to P12 are the design's invariants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from bson import Timestamp
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from mongo_celery.bridge.listener.poller import LockedPartitions
from mongo_celery.bridge.listener.takeover import Takeover
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.bridge.state.claims import record_session
from mongo_celery.mongo.table import Table
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.repartitioning import NAME, Document, TermsOfShop
from tests.rig.term import BRIDGE, TTL, TermRig, begin_term, mark_at, open_transaction

_FEW, _MANY = 2, 60
SLOW = "slow"
_PLACE = mark_at(Timestamp(1000, 5))
_LATER = mark_at(Timestamp(1000, 9))
_PARTITIONS = 4


def names_of(count: int) -> list[str]:
    return [f"handler_{number}" for number in range(count)]


def trackers_of(takeover: Takeover) -> dict[str, Partition]:
    found = {}
    for image in [image for images in takeover.images.values() for image in images]:
        where = f"{BRIDGE}/{image.subscription}/{takeover.layouts[image.subscription].term}/{image.index}"
        found[where] = Partition(where, image, takeover.version, GracePeriods(1, 1), time.monotonic())
    return found


def test_the_number_of_calls_does_not_depend_on_the_number_of_handlers(
    make_client: MakeClient, state_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7, P12: a take-over, watermarks and the end of a term cost as many round trips for 60 handlers as for 2."""
    monkeypatch.setattr("mongo_celery.mongo.locked._PATIENCE_SECONDS", TTL)

    def count(handlers: int) -> list[int]:
        commands = CommandRecorder()
        client, names = make_client(event_listeners=[commands]), names_of(handlers)
        database, sent = f"{state_database}_{handlers}", list[int]()
        begin_term(client, database, 4, names).take_over()
        sent.append(len(commands.names))
        second = begin_term(client, database, 4, names)
        led = second.led(second.take_over(), dict.fromkeys(names))
        sent.append(len(commands.names))
        for subscription in led:
            subscription.window.pass_over(_PLACE)
        watermarks = Watermarks(second.store, second.renewal, "f", dict)
        watermarks.store(led, 0.0)
        sent.append(len(commands.names))
        assert second.database["handlers"].count_documents({"resumeToken": _PLACE.token}) == handlers
        for subscription in led:
            subscription.window.pass_over(_LATER)
        watermarks.store_last(led, TTL)
        assert second.store.leases.release(second.renewal.term)
        sent.append(len(commands.names))
        begin_term(client, database, 8, names[: handlers // 2]).take_over()
        sent.append(len(commands.names))
        client.drop_database(database)
        return sent

    assert count(_MANY) == count(_FEW)


@pytest.fixture
def begin(mongo_client: MongoClient[Document], state_database: str) -> Callable[[], TermRig]:
    return lambda: begin_term(mongo_client, state_database, _PARTITIONS, ("record", "audit"))


def test_many_locked_partitions_are_found_among_very_many(
    mongo_client: MongoClient[Document], state_database: str
) -> None:
    """P12: as after the death of a machine with many workers; each lock keeps its own partition only."""
    begin_term(mongo_client, state_database, _PARTITIONS, names_of(_MANY)).take_over()
    rig = begin_term(mongo_client, state_database, _PARTITIONS, names_of(_MANY))
    locked = {rig.partition_id(f"handler_{number}", number % _PARTITIONS) for number in range(0, _MANY, 3)}
    with open_transaction(mongo_client, state_database, *locked):
        rig.take_over()

        def all_others_are_won() -> bool:
            rig.store.partitions.win(_left(rig), rig.version)  # a slow machine may not have found all at once
            return _left(rig) <= locked  # on a very slow one the server has ended the transaction by now

        wait_for(all_others_are_won)
    wait_for(lambda: rig.store.partitions.win(locked, rig.version) and not _left(rig))


@pytest.fixture
def slow(failpoint: Failpoint, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[int]]:
    """Give what makes every write longer than the short times, and far shorter than a call may take."""
    monkeypatch.setattr("mongo_celery.mongo.locked._PATIENCE_SECONDS", 0.2)
    writes = {"failCommands": ["update", "commitTransaction"], "blockConnection": True, "blockTimeMS": 300}
    return lambda: failpoint(appName=SLOW, **writes)


def test_a_slow_server_is_not_mistaken_for_locks(
    make_client: MakeClient, state_database: str, slow: Callable[[], AbstractContextManager[int]]
) -> None:
    """P12: no write is as quick as one that meets no lock should be; all partitions are won by the take-over."""
    client = make_client(appName=SLOW)
    begin_term(client, state_database, _PARTITIONS, names_of(_MANY)).take_over()
    rig = begin_term(client, state_database, _PARTITIONS, names_of(_MANY))
    with slow():
        rig.take_over()
    assert not _left(rig)


def _left(rig: TermRig) -> set[str]:
    return {name for name, document in rig.documents().items() if document["term"] < rig.version}


def test_a_locked_partition_is_taken_over_when_its_transaction_has_ended(begin: Callable[[], TermRig]) -> None:
    """P3, P12: until then a message of the older term may claim there, and none of mine; afterwards only mine."""
    before = begin()
    before.take_over()
    rig = begin()
    with open_transaction(rig.database.client, rig.database.name, rig.partition_id("record", 0)):
        takeover = rig.take_over()
        partitions = trackers_of(takeover)
        locked = LockedPartitions(rig.store, rig.version, partitions.values())
        assert locked.names == [rig.partition_id("record", 0)]
        assert [each for each in partitions.values() if each.in_flight] == [partitions[rig.partition_id("record", 0)]]
        wait_for(lambda: locked.win(time.monotonic()))
        assert locked.names == [rig.partition_id("record", 0)]

    def take(version: int) -> object:
        return rig.store.claims.take(
            rig.partition_id("record", 0), owner="a", term=version, first=1, last=1, token=_LATER.data
        )

    assert take(rig.version) is None, "it is not mine yet"
    (image,) = wait_for(lambda: [each for each in locked.win(time.monotonic()) if each.term == rig.version])
    partitions[rig.partition_id("record", 0)].observe(image, time.monotonic())
    assert partitions[rig.partition_id("record", 0)].won
    assert partitions[rig.partition_id("record", 0)].in_flight is None
    assert take(before.version) is None
    assert take(rig.version) is not None
    assert not locked.win(time.monotonic() + 10)
    assert not locked.names


def test_a_partition_that_a_dead_worker_has_locked_is_taken_over_once_its_claim_has_lapsed(
    begin: Callable[[], TermRig],
) -> None:
    """P7: the claim names the session, so nobody waits until the server ends its transaction."""
    before = begin()
    before.take_over()
    where = before.partition_id("record", 0)
    claim = before.store.claims.take(
        where, owner="dead", term=before.version, first=1, last=1, token=_LATER.data, ttl=0.1
    )
    assert claim is not None
    rig = begin()
    with rig.database.client.start_session() as session:
        assert record_session(Table(rig.partitions, TTL), claim, session)
        session.start_transaction()
        rig.partitions.update_one({"_id": where}, {"$set": {"note": 1}}, session=session)
        locked = LockedPartitions(rig.store, rig.version, trackers_of(rig.take_over()).values())
        assert locked.names == [where]
        won = wait_for(lambda: [each for each in locked.win(time.monotonic()) if each.term == rig.version], 30)
        assert won, "half of the time after which the server would have ended it"
        with pytest.raises(OperationFailure):
            session.commit_transaction()


def test_what_an_older_term_commits_in_a_locked_partition_counts(begin: Callable[[], TermRig]) -> None:
    """P1, P5: the transaction was alive after all; its outcome is taken in, and committed when the partition is won."""
    before = begin()
    before.take_over()
    rig = begin()
    handled = {"owner": "a", "last": Int64(1), "resumeToken": _PLACE.token}
    client, partitions = rig.database.client, rig.partitions
    with client.start_session() as session:
        with session.start_transaction():
            partitions.update_one(
                {"_id": rig.partition_id("record", 0)}, {"$set": {"handled": handled}}, session=session
            )
            takeover = rig.take_over()
        partition = trackers_of(takeover)[rig.partition_id("record", 0)]
        assert partition.image.handled is None
        assert not partition.won
    (image,) = rig.store.partitions.win([rig.partition_id("record", 0)], rig.version)
    assert (image.term, image.committed, image.data, image.handled) == (rig.version, 1, _PLACE.data, None)
    partition.observe(image, time.monotonic())
    assert partition.next_sequence == 2


def test_repartitioning_waits_for_a_locked_partition(mongo_client: MongoClient[Document], state_database: str) -> None:
    """P2, P16: what an older term may still commit there lies before the place at which the new partitions begin."""
    shop = TermsOfShop(mongo_client, state_database)
    before = shop.begin(_PARTITIONS)
    with open_transaction(mongo_client, state_database, before.rig.partition_id(NAME, 0)):
        term = shop.begin(_PARTITIONS + 1)
        term.turn()
        shop.write(*range(1, 21))
        term.turn()
        term.work()
        assert term.waits.keys() == {NAME}
        assert shop.numbers(), "the other old ones serve"
    assert term.rig.store.partitions.win([before.rig.partition_id(NAME, 0)], term.rig.version)
    term.finish()
    assert shop.in_force(term).partitions == _PARTITIONS + 1
    shop.check()
