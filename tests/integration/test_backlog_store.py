"""
Stored changes against a real replica set: what is there by majority, in which order, and who may remove it.

P6, P12 and P13 are the invariants of the design: no change is lost, and what stands costs its own partition alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.change import read_token
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.state.backlog import EVERYTHING, Backlog, StoredChange
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.window import Refusal
from mongo_celery.embedded import MongoReplicaSet
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import Document, MakeClient
from tests.fixtures.proxy import Proxy
from tests.fixtures.samples import raw_event, token_data
from tests.rig.commands import CommandRecorder
from tests.rig.partition import PartitionRig, make_partition

BRIDGE = "shop"
PARTITION = f"{BRIDGE}/record/7/3"
VERSION = 100
LATER = VERSION + 1
LAST = token_data(9999)
PATIENT_TTL = 300.0
"""Calls may take longer than this machine stalls."""


def backlog_of(client: MongoClient[Document], database: str) -> Backlog:
    return Store(client, BridgeOptions(name=BRIDGE, database=database, lease_ttl=PATIENT_TTL)).backlog


@pytest.fixture
def backlog(mongo_client: MongoClient[Document], state_database: str) -> Backlog:
    """Give the stored changes of a bridge that has none."""
    return backlog_of(mongo_client, state_database)


@pytest.fixture
def documents(mongo_client: MongoClient[Document], state_database: str) -> Collection[Document]:
    return mongo_client[state_database]["backlog"]


def change(number: int, key: Any = None, padding: bytes = b"", **fields: Any) -> StoredChange:
    """The change with this number, of the key of that number unless it has another one."""
    token = {"_data": token_data(number)}
    raw = raw_event(_id=token, padding=Binary(padding))
    return StoredChange(token["_data"], raw, partition_hash(number if key is None else key), **fields)


def numbers(changes: list[StoredChange]) -> list[int]:
    """Which ones these are."""
    return [int(each.data[10:18], 16) for each in changes]


def read(backlog: Backlog, partition_id: str = PARTITION) -> list[int]:
    """The numbers of the changes that are stored of a partition."""
    return numbers(backlog.read(partition_id, "", LAST, 1000))


def remove(backlog: Backlog, where: str, committed: str, version: int, passed: str | None = None) -> int:
    """Remove what is done of a partition; how many documents."""
    return sum(backlog.remove(where, committed, committed if passed is None else passed, version))


def noise(seed: int, size: int) -> bytes:
    """Bytes that cannot be compressed."""
    return random.Random(seed).randbytes(size)


def seen(backlog: Backlog) -> list[StoredChange]:
    return backlog.read(PARTITION, "", LAST, 1000)


def test_what_was_inserted_is_read_in_the_streams_order(backlog: Backlog, documents: Collection[Document]) -> None:
    """P5: whatever was inserted first; and with its bytes, whether they were worth compressing or not."""
    changes = [change(n, padding=noise(n, 3000) if n % 2 else bytes(3000)) for n in range(1, 6)]
    backlog.insert(PARTITION, changes[3:], VERSION)
    backlog.insert(PARTITION, changes[:3], VERSION)
    stored = seen(backlog)
    assert [(each.raw, each.hash, each.data) for each in stored] == [
        (each.raw, each.hash, each.data) for each in changes
    ]
    assert {each["_id"][-4:] for each in documents.find({"zip": True})} == {each.data[-4:] for each in changes[1::2]}
    assert backlog.count(PARTITION, "", LAST) == 5
    assert backlog.outline(PARTITION, "", LAST, 1000) == [replace(each, raw=b"") for each in stored]


def test_an_insert_that_finds_its_document_makes_it_the_terms_own(
    backlog: Backlog, documents: Collection[Document]
) -> None:
    """P6: an older term that wakes up late removes nothing that a later one relies on; nor does it take it back."""
    backlog.insert(PARTITION, [change(1), change(2)], VERSION)
    backlog.insert(PARTITION, [change(2), change(3)], LATER)
    backlog.insert(PARTITION, [change(3)], VERSION)
    assert [each["term"] for each in documents.find().sort("_id", 1)] == [VERSION, LATER, LATER]
    assert remove(backlog, PARTITION, LAST, VERSION) == 1
    assert read(backlog) == [2, 3]
    assert remove(backlog, PARTITION, token_data(2), LATER) == 1
    assert read(backlog) == [3]


def test_an_undeliverable_change_stays_until_no_term_reads_it_again(backlog: Backlog) -> None:
    """P6: it says in which partition the change is done. An older term that wakes up late does not replace it."""
    refused = change(2, refusal=Refusal("no key"), token={"_data": token_data(2)})
    backlog.insert(PARTITION, [change(1), refused, change(3)], VERSION)
    with pytest.raises(OperationFailure):
        backlog.insert(PARTITION, [change(2)], VERSION - 1)
    assert seen(backlog)[1] == replace(refused, size=len(refused.raw))
    assert remove(backlog, PARTITION, token_data(3), VERSION, passed=token_data(1)) == 2
    assert read(backlog) == [2]
    assert remove(backlog, PARTITION, token_data(3), VERSION, passed=token_data(2)) == 1


def test_partitions_whose_names_begin_alike_are_kept_apart(backlog: Backlog) -> None:
    """A partition 1 is not 10 nor 100, a bridge `shop` is not `shop-2`, `shop0` or `shop_x`."""
    mine = [f"shop/record/7/{index}" for index in (1, 10, 100, 2)] + ["shop/record-2/7/1", "shop/record/70/1"]
    foreign = [f"{name}/record/7/1" for name in ("shop-2", "shop.", "shop0", "shop_x", "shopé")]
    for where in mine + foreign:
        backlog.insert(where, [change(1), change(2, padding=noise(2, 20))], VERSION)
    found: list[str] = []
    while (after := backlog.next_partition(found[-1] if found else None)) is not None:
        found.append(after)
    assert sorted(found) == sorted(mine)
    for where in mine + foreign:
        assert read(backlog, where) == [1, 2]
        assert (backlog.count(where, "", LAST), backlog.last(where)) == (2, token_data(2))
        assert remove(backlog, where, token_data(1), VERSION) == 1
        assert remove(backlog, where, EVERYTHING, VERSION) == 1
        assert (backlog.count(where, "", LAST), backlog.last(where)) == (0, "")
        others = (mine + foreign)[(mine + foreign).index(where) + 1 :]
        assert all(backlog.count(other, "", LAST) == 2 for other in others)
    assert backlog.next_partition() is None


@pytest.mark.parametrize("beyond", [-40_000, -16_700, pytest.param(12 << 20, marks=pytest.mark.slow)])
def test_an_event_of_any_size_is_stored(backlog: Backlog, beyond: int) -> None:
    """P12: also one that is larger than a document, as far as it can be compressed."""
    size = (16 << 20) + beyond
    padding = noise(beyond, size - len(change(2).raw) - 5000) if beyond < 0 else bytes(size)
    large = change(2, padding=padding)
    refused = replace(large, data=token_data(3), token={"_data": token_data(3), "_typeBits": noise(1, 4000)})
    backlog.insert(PARTITION, [change(1), large, refused, change(4)], VERSION)
    assert read(backlog) == [1, 2, 3, 4]
    stored = backlog.fetch(PARTITION, [large.data, refused.data])
    assert stored[large.data].raw == stored[refused.data].raw == large.raw
    assert stored[refused.data].token == refused.token
    assert stored[large.data].size == len(large.raw)


@pytest.mark.parametrize("beyond", [-16_000, 1 << 20])
def test_an_event_that_fits_into_no_document_is_refused_and_holds_no_other(backlog: Backlog, beyond: int) -> None:
    """P9, P12: its policy decides about it; what keeps its place is stored."""
    large = change(2, padding=noise(2, (16 << 20) + beyond))
    backlog.insert(PARTITION, [change(1), large, change(3)], VERSION)
    backlog.insert(PARTITION, [large], LATER)
    stored = seen(backlog)
    assert numbers(stored) == [1, 2, 3]
    assert [each.refusal is None for each in stored] == [True, False, True]
    refusal: Any = stored[1].refusal
    assert (refusal.halts, refusal.lasts, stored[1].raw, stored[1].token) == (False, True, b"", {"_data": large.data})


DAMAGE: list[Document] = [
    *({"$unset": {"hash": 1}}, {"$unset": {"raw": 1}}, {"$unset": {"size": 1}, "$set": {"zip": True}}),
    *({"$set": {"raw": 7}}, {"$set": {"hash": "x"}}, {"$set": {"refusal": "x"}}),
]


def test_a_document_that_is_damaged_is_that_changes_affair(backlog: Backlog, documents: Collection[Document]) -> None:
    """P12: whatever somebody has done to it; the others are read."""
    backlog.insert(PARTITION, [change(number) for number in range(1, 14)], VERSION)
    for number, damage in enumerate(DAMAGE, 1):
        documents.update_one({"_id": f"{PARTITION}/{token_data(2 * number)}"}, damage)
    stored = seen(backlog)
    assert numbers(stored) == [*range(1, 14)]
    assert [each.refusal is not None for each in stored] == [False, True] * len(DAMAGE) + [False]


ODD = {
    "no UTF-8": raw_event(fullDocument={"_id": "XXXX"}).replace(b"XXXX", b"\xff\xfe\xc0\x80"),
    "far future": raw_event(fullDocument={"_id": 1, "at": DatetimeMS(1 << 62)}),
    "other token": raw_event(_id={"_data": "82AA"}),
    "no token": bson.encode({"a": 1}),
    "no BSON": b"\x00\x01\x02",
    "nothing": b"",
}


def test_events_that_nobody_can_decode_are_stored_as_they_are(backlog: Backlog) -> None:
    """P12: nothing looks into them; and where their bytes do not tell the token, it is stored beside them."""
    given = [replace(change(number), raw=raw) for number, raw in enumerate(ODD.values())]
    backlog.insert(PARTITION, [*given, change(len(given))], VERSION)
    stored = seen(backlog)
    assert numbers(stored) == [*range(len(given) + 1)]
    assert [each.raw for each in stored[:-1]] == [*ODD.values()]
    assert all((each.token or read_token(each.raw))["_data"] == each.data for each in stored)


def test_long_tokens_keep_their_order_and_bound_like_others(backlog: Backlog) -> None:
    """P5: a token carries the document's `_id`, which may have megabytes."""
    tails = ["", "46" * 300, "46" * 600 + "04", "46" * 600 + "0404", "46" * (1 << 19)]
    data = [token_data(n) + tails[n % len(tails)] for n in range(1, 12)]
    changes = [StoredChange(each, raw_event(_id={"_data": each}), n) for n, each in enumerate(data)]
    backlog.insert(PARTITION, random.Random(1).sample(changes, len(changes)), VERSION)
    assert [each.data for each in seen(backlog)] == data
    for first in range(len(data)):
        for last in range(first, len(data)):
            found = backlog.read(PARTITION, data[first], data[last], 99)
            assert [each.data for each in found] == data[first + 1 : last + 1]
    assert set(backlog.fetch(PARTITION, data)) == set(data)
    assert all((each.token or read_token(each.raw))["_data"] == each.data for each in seen(backlog))
    assert remove(backlog, PARTITION, data[4], VERSION) == 5
    assert [each.data for each in seen(backlog)] == data[5:]


APP = "spilling"
FAULTS: dict[str, Document] = {
    "a write concern": {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
    "a full disk": {"errorCode": 14031},
    "no answer": {"closeConnection": True},
    "a late answer": {"blockConnection": True, "blockTimeMS": 3600},
}


@pytest.mark.parametrize("command", ["insert", "update"])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_was_not_acknowledged_is_an_error(
    backlog: Backlog, make_client: MakeClient, state_database: str, failpoint: Failpoint, fault: str, command: str
) -> None:
    """P6: no mark may rest on it; and made again it is harmless."""
    watched = Store(make_client(appName=APP), BridgeOptions(name=BRIDGE, database=state_database)).backlog
    watched.count(PARTITION, "", LAST)
    if command != "insert":
        backlog.insert(PARTITION, [change(1), change(2)], VERSION)
    changes = [change(n) for n in (1, 2, 3)]
    with failpoint(failCommands=[command], appName=APP, **FAULTS[fault]), pytest.raises(PyMongoError):
        watched.insert(PARTITION, changes, LATER)
    backlog.insert(PARTITION, changes, LATER)
    assert read(backlog) == [1, 2, 3]


def test_what_is_removed_between_insert_and_raise_is_inserted_again(
    backlog: Backlog,
    replica_set: MongoReplicaSet,
    make_proxy: Callable[[int], Proxy],
    make_client: MakeClient,
    state_database: str,
) -> None:
    """P6: an older term's late removal; the document was there, and is not any more."""
    backlog.insert(PARTITION, [change(1), change(2)], VERSION)
    proxy = make_proxy(replica_set.primary.port)
    client = make_client(proxy.mongo_url)
    held = backlog_of(client, state_database)
    client.admin.command("ping")
    with ThreadPoolExecutor(1) as pool:
        proxy.hold(b"\x02update\x00")
        inserting = pool.submit(held.insert, PARTITION, [change(1), change(2), change(3)], LATER)
        proxy.wait_until_held()
        assert remove(backlog, PARTITION, token_data(1), VERSION) == 1
        proxy.release()
        inserting.result(60)
    assert read(backlog) == [1, 2, 3]
    assert remove(backlog, PARTITION, LAST, VERSION) == 0, "all are the later term's"


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> PartitionRig:
    return make_partition(mongo_client, state_database)


def test_a_mark_only_grows(rig: PartitionRig) -> None:
    """P6: a write of the same term whose answer was lost may land last; the watermark has passed on."""
    for to, reason in [(3, "first"), (7, "$$NOW"), (7, "again"), (5, "late")]:
        assert rig.partitions.mark_stored(rig.where, VERSION, token_data(to), reason), "harmless"
    stored: Any = rig.image.stored
    assert (stored["to"], stored["reason"]) == (token_data(7), "first")
    assert rig.partitions.mark_stored(rig.where, VERSION, token_data(8), "later")
    assert rig.document["stored"] == {"to": token_data(8), "reason": "first", "since": stored["since"]}


def test_a_term_that_is_over_marks_and_clears_nothing(rig: PartitionRig) -> None:
    """P1: the next one decides what may be read."""
    assert rig.partitions.mark_stored(rig.where, VERSION, token_data(3), "hot")
    rig.take_over(LATER)
    before = rig.document
    assert not rig.partitions.mark_stored(rig.where, VERSION, token_data(9), "hot")
    rig.spoil(resumeToken={"_data": token_data(3)})
    rig.partitions.clear_stored([rig.where], VERSION)
    assert rig.document["stored"] == before["stored"]
    rig.partitions.clear_stored([rig.where], LATER)
    assert rig.document["stored"] is None


def test_a_mark_is_cleared_only_where_all_is_committed(rig: PartitionRig) -> None:
    """P6: by what the server holds, not by what was seen."""

    def is_cleared() -> bool:
        rig.partitions.clear_stored([rig.where], VERSION)
        return rig.image.stored is None

    rig.partitions.mark_stored(rig.where, VERSION, token_data(5), "hot")
    assert not is_cleared(), "nothing is committed"
    rig.spoil(resumeToken={"_data": token_data(4)})
    assert not is_cleared(), "not enough"
    rig.partitions.mark_stored(rig.where, VERSION, token_data(8), "hot")
    rig.spoil(resumeToken={"_data": token_data(6)})
    assert not is_cleared(), "the mark has grown"
    rig.spoil(resumeToken={"_data": token_data(8)})
    assert [is_cleared(), is_cleared()] == [True, True]
    assert rig.partitions.mark_stored(rig.where, VERSION, token_data(2), "again"), "as if never before"


def test_what_a_watermark_rests_on_is_written_by_a_majority_and_read_behind_it(
    make_client: MakeClient, state_database: str
) -> None:
    """
    P5, P13: what a failover may take back is not stored: the insert, the raise of what is there, and the mark.

    A deposed primary does not say that nothing is stored: what is read in a session waits for what that has seen.
    """
    sent = CommandRecorder()
    client = make_client(event_listeners=[sent])
    rig = make_partition(client, state_database)
    sent.sent.clear()
    with client.start_session(causal_consistency=True) as session:
        for _ in range(2):
            rig.store.backlog.insert(rig.where, [change(1), change(2, refusal=Refusal("no"))], VERSION, session)
        assert rig.partitions.mark_stored(rig.where, VERSION, token_data(2), "hot", session)
        writes = [each for name in ("insert", "update") for each in sent.named(name)]
        assert {next(iter(each.values())) for each in writes} == {"backlog", "partitions"}
        assert {each["writeConcern"]["w"] for each in writes} == {"majority"}
        sent.sent.clear()
        assert rig.partitions.look([rig.where], session)[0].stored is not None
        assert numbers(rig.store.backlog.outline(rig.where, "", LAST, 1000, session)) == [1, 2]
        concerns = [command["readConcern"] for _, command in sent.sent]
        assert concerns
        assert all(each["level"] == "majority" and "afterClusterTime" in each for each in concerns)
