"""
The lease against a real replica set: who may lead, for how long, and under which version.

Rules 1 to 4 are those of `mongo_celery/bridge/state/leases.py`; P4 and P10 those of the design.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import Timestamp, json_util
from pymongo import MongoClient, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.leases import Leases, Term
from mongo_celery.bridge.state.schema import SCHEMA, check_schema, migrate
from mongo_celery.bridge.state.store import Store
from mongo_celery.errors import DeploymentError
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import Document, MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.samples import IDENTITY
from tests.rig.partition import layouts

TTL = 60.0
"""Seconds. A call may take a part of it, and no lease lapses by itself."""
DELAY = 0.4
BRIDGE = "shop"
RACES = 50
BARRIER_SECONDS_MAX = 60


def store_of(client: MongoClient[Document], database: str) -> Store:
    return Store(client, BridgeOptions(name=BRIDGE, database=database, lease_ttl=TTL))


@pytest.fixture
def leases(mongo_client: MongoClient[Document], state_database: str) -> Leases:
    """Give the lease of a bridge whose document was just created."""
    found = store_of(mongo_client, state_database).leases
    found.ensure()
    return found


@pytest.fixture
def documents(mongo_client: MongoClient[Document], state_database: str) -> Collection[Document]:
    return mongo_client[state_database].get_collection("leases", write_concern=WriteConcern("majority"))


def acquired(leases: Leases) -> Term:
    term = leases.acquire(IDENTITY)
    assert term is not None, "the lease was free"
    return term


def stored(documents: Collection[Document]) -> Document:
    return documents.find_one({"_id": BRIDGE}) or {}


def test_an_expired_lease_can_be_acquired_and_not_a_moment_before(leases: Leases) -> None:
    """P10: the server's clock decides: refused while a ttl has not passed since the acquisition was answered."""
    leases._ttl = 2.0  # its calls may take longer
    started = time.monotonic()
    first = acquired(leases)
    second = wait_for(lambda: leases.acquire(IDENTITY))
    assert time.monotonic() - started >= 1.9
    assert second.number > first.number
    assert second.listener_id != first.listener_id


def test_terms_and_fences_do_not_start_again_after_the_database_was_dropped(
    mongo_client: MongoClient[Document], state_database: str
) -> None:
    """P4: also within the same second. The old holder can neither renew nor release."""
    store = store_of(mongo_client, state_database)
    terms, fences, old = list[int](), list[int](), None
    for _ in range(3):
        store.leases.ensure()
        term = acquired(store.leases)
        terms.append(term.number)
        assert old is None or not (store.leases.renew(old) or store.leases.release(old))
        store.partitions.prepare({"record": None}, layouts("record"), term.number)
        store.partitions.take_over({"record": 0}, term.number)
        where = store.partitions.partition_id("record", 0, 0)
        for number in range(5):
            claim = store.claims.take(where, owner=f"o{number}", term=term.number, first=1, last=1, token="82")
            assert claim is not None
            fences.append(claim.fencing_token)
            store.claims.relinquish(where, claim.owner)
        mongo_client.drop_database(state_database)
        old = term
    assert terms == sorted(set(terms))
    assert fences == sorted(set(fences))


def test_release_keeps_the_document_and_everything_in_it(leases: Leases, documents: Collection[Document]) -> None:
    """Rule 3, P11: only the holder and the expiry are removed; whose bridge it is, and its installation, stay known."""
    term = acquired(leases)
    before = stored(documents)
    assert before["installation"]
    assert leases.release(term, "history_lost", "the oplog is too short")
    after = stored(documents)
    assert (after["identity"], after["installation"]) == (IDENTITY, before["installation"])
    assert (after["state"], after["error"]) == ("history_lost", "the oplog is too short")
    assert acquired(leases).number > term.number
    assert stored(documents)["installation"] == before["installation"]


def test_an_identity_that_was_not_compared_is_not_replaced(leases: Leases, documents: Collection[Document]) -> None:
    """P1: two environments begin at the same moment. Only what was read may be replaced."""
    other = {**IDENTITY, "app": "billing"}
    assert leases.release(acquired(leases))
    assert leases.acquire(other) is None
    assert leases.acquire(other, {**IDENTITY, "app": "third"}) is None
    assert stored(documents)["identity"] == IDENTITY
    assert leases.acquire(other, IDENTITY) is not None
    assert stored(documents)["identity"] == other


def test_what_an_old_term_sends_late_changes_nothing(leases: Leases, documents: Collection[Document]) -> None:
    """Rule 2, P3: renewal, release, pin, report, version and gap of a term that has ended."""
    old = acquired(leases)
    assert leases.release(old)
    acquired(leases)
    before = stored(documents)
    assert leases.renew(old) is None
    assert not leases.release(old)
    assert leases.raise_version(old, 1 << 60) is None
    assert leases.pin_start(old, Timestamp(1, 1)) is None
    assert not leases.record_report(old, {"inFlight": 1})
    assert stored(documents) == before


def test_an_expired_lease_that_nobody_took_can_still_be_renewed(
    leases: Leases, documents: Collection[Document]
) -> None:
    """Rule 2: renewal asks who holds it, not how late it is: the version has not moved, so nobody led meanwhile."""
    term = acquired(leases)
    documents.update_one({}, [{"$set": {"expiresAt": {"$subtract": ["$$NOW", 1]}}}])
    assert (leases.read() or {})["live"] is False
    assert leases.renew(term) is not None
    assert leases.acquire(IDENTITY) is None


def test_two_acquisitions_at_the_same_instant_have_one_winner(
    make_client: MakeClient, mongo_client: MongoClient[Document], state_database: str
) -> None:
    """Rule 1: on a document that does not even exist, fifty times."""
    rivals = [store_of(make_client(), state_database).leases for _ in range(2)]
    documents = mongo_client[state_database]["leases"]
    barrier = threading.Barrier(2)

    def race(leases: Leases) -> Term | None:
        barrier.wait(BARRIER_SECONDS_MAX)
        leases.ensure()
        return leases.acquire(IDENTITY)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(RACES):
            winners = [term for term in pool.map(race, rivals) if term is not None]
            assert len(winners) == 1
            assert stored(documents)["listenerId"] == winners[0].listener_id
            documents.delete_one({"_id": BRIDGE})


def test_trust_is_counted_from_the_start_of_the_call(
    make_client: MakeClient, failpoint: Failpoint, state_database: str
) -> None:
    """Rule 4: a slow answer shortens the trusted time; it cannot stretch it."""
    leases = store_of(make_client(appname="slow-lease"), state_database).leases
    leases.ensure()
    delay = {"failCommands": ["findAndModify"], "blockConnection": True, "blockTimeMS": DELAY * 1000}
    with failpoint(appName="slow-lease", **delay):
        started = time.monotonic()
        term = acquired(leases)
        answered = time.monotonic()
        renewal_started = time.monotonic()
        renewed: Any = leases.renew(term)
        renewal_answered = time.monotonic()
    assert started <= term.trusted_until - TTL * 0.9 <= answered - DELAY * 0.95
    assert renewal_started <= renewed.trusted_until - TTL * 0.9 <= renewal_answered - DELAY * 0.95


@pytest.mark.parametrize("version", [SCHEMA + 1, 1, None])
def test_a_state_of_another_schema_is_neither_read_nor_taken(
    leases: Leases, documents: Collection[Document], version: int | None
) -> None:
    """P9: fields of another version would be misread or overlooked. The stored state stays as it is."""
    assert stored(documents)["schemaVersion"] == SCHEMA
    documents.update_one({}, {"$set": {"schemaVersion": version}})
    before = stored(documents)
    with pytest.raises(DeploymentError):
        leases.read()
    assert leases.acquire(IDENTITY) is None
    assert stored(documents) == before


def test_standbys_are_the_others_that_have_waited_lately(leases: Leases, documents: Collection[Document]) -> None:
    """P16: each process once, for 15 s; the one that leads is none, and a term leaves them alone."""
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    documents.update_one({}, {"$set": {"standbys": [{"host": "gone", "pid": 1, "at": long_ago}]}})
    for _ in range(2):
        leases.note_standby()
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    (found,) = (leases.read() or {})["standbys"]
    assert {name: found[name] for name in me} == me
    documents.update_one({}, {"$push": {"standbys": {"host": "two", "pid": 7, "at": datetime.now(UTC)}}})
    acquired(leases)
    assert [each["host"] for each in (leases.read() or {})["standbys"]] == ["two"]


FIXTURE = Path(__file__).parents[1] / "fixtures/state_of_an_older_schema.json"
OLDER = SCHEMA - 1


@pytest.fixture
def state(mongo_client: MongoClient[Document], state_database: str) -> Database[Document]:
    """Give a state as an older version would have left it."""
    database = mongo_client[state_database]
    for name, documents in json_util.loads(FIXTURE.read_text()).items():
        database[name].insert_many(documents)
    database["leases"].update_one({}, {"$set": {"schemaVersion": OLDER}})
    return database


def rename_numbers(state: Database[Document], bridge: str, session: ClientSession) -> None:
    """A step from the version before: one word for the number of a term."""
    state["leases"].update_one({"_id": bridge}, {"$rename": {"version": "term"}}, session=session)
    state["partitions"].update_many({"bridge": bridge}, {"$rename": {"epoch": "term"}}, session=session)


def test_an_older_state_is_brought_up_to_date_once(state: Database[Document]) -> None:
    leases = Leases(state["leases"], "shop", 10.0)
    with pytest.raises(DeploymentError):
        check_schema(state["leases"].find_one({"_id": "shop"}) or {}, {OLDER: rename_numbers})
    calls: list[int] = []

    def step(*given: Any) -> None:
        calls.append(1)
        rename_numbers(*given)

    for _ in range(2):
        migrate(state, "shop", {OLDER: step})

    assert calls == [1]
    assert (leases.read() or {})["schemaVersion"] == SCHEMA
    assert [each["term"] for each in state["partitions"].find({"bridge": "shop"})] == [7, 7]
    assert [each.get("epoch") for each in state["partitions"].find({"bridge": "other"})] == [3], "of another bridge"
    assert acquired(leases).number > 7


def test_a_state_that_is_not_for_its_steps_stays_as_it_is(state: Database[Document]) -> None:
    """P9: also where a step fails, or another listener leads, or the version is newer or unknown."""

    def read() -> list[Document]:
        return [each for name in ("leases", "partitions") for each in state[name].find(sort=[("_id", 1)])]

    def fail(given: Database[Document], bridge: str, session: ClientSession) -> None:
        rename_numbers(given, bridge, session)
        raise KeyError("partition")

    before = read()
    with pytest.raises(KeyError):
        migrate(state, "shop", {OLDER: fail})
    assert read() == before
    for lease in (
        {"expiresAt": {"$add": ["$$NOW", 3_600_000]}},
        {"schemaVersion": SCHEMA + 1},
        {"schemaVersion": None},
    ):
        state["leases"].replace_one({"_id": "shop"}, before[0])
        state["leases"].update_one({"_id": "shop"}, [{"$set": lease}])
        changed = read()
        migrate(state, "shop", {OLDER: rename_numbers})
        assert read() == changed
