"""Signing keys are announced, put in force by the lease's own writes, and accepted for a while afterwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.drops import FOREIGN, FORGED
from mongo_celery.bridge.state.leases import Term
from mongo_celery.bridge.state.signing import sealing_of
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.worker.dropping import Dropper, named_by_itself
from tests.fixtures.samples import IDENTITY

Document = dict[str, Any]

BRIDGE = "shop"


@pytest.fixture
def store(mongo_client: MongoClient[Document], state_database: str) -> Store:
    """Give the state of a bridge whose lease was just created."""
    found = Store(mongo_client, BridgeOptions(name=BRIDGE, database=state_database, lease_ttl=60))
    found.leases.ensure()
    return found


@pytest.fixture
def documents(mongo_client: MongoClient[Document], state_database: str) -> Collection[Document]:
    """Give the collection itself, to move what is stored in time."""
    return mongo_client[state_database].get_collection("leases", write_concern=WriteConcern("majority"))


def _led(store: Store) -> Term:
    term = store.leases.acquire(IDENTITY)
    assert term is not None
    return term


def _renewed(store: Store, term: Term) -> Term:
    renewed = store.leases.renew(term, {})
    assert renewed is not None
    return renewed


def _ring(store: Store) -> tuple[bytes, ...]:
    ring = store.signing.read()
    assert ring is not None
    return ring.keys


def _come(documents: Collection[Document]) -> None:
    """The announced key's time has come."""
    lease = documents.find_one({"_id": BRIDGE})
    assert lease is not None
    documents.update_one({"_id": BRIDGE}, {"$set": {"nextKey.from": lease["nextKey"]["from"] - timedelta(minutes=1)}})


def test_a_new_key_is_known_before_it_is_used_and_the_old_one_accepted_afterwards(
    store: Store, documents: Collection[Document]
) -> None:
    """No message carries a key that a worker cannot know."""
    term = _led(store)
    old = sealing_of(term.document).key
    assert _ring(store) == (old,)
    assert store.signing.announce(60) is not None
    assert store.signing.announce(60) is None, "one at a time"
    assert sealing_of(_renewed(store, term).document).key == old, "its time has not come"
    assert _ring(store)[0] == old
    new = _ring(store)[1]
    _come(documents)
    assert sealing_of(_renewed(store, term).document).key == new
    assert _ring(store) == (new, old)
    documents.update_one({"_id": BRIDGE}, {"$set": {"previousKeys.0.until": term.document["renewedAt"]}})
    assert _ring(store) == (new,), "the overlap has passed"
    assert _renewed(store, term).document["previousKeys"] == [], "and it is kept no longer"


def test_a_key_comes_into_force_with_the_next_term_where_nobody_leads(
    store: Store, documents: Collection[Document]
) -> None:
    """The command needs no listener."""
    old = _ring(store)[0]
    store.signing.announce(60)
    new = _ring(store)[1]
    _come(documents)
    assert sealing_of(_led(store).document).key == new
    assert _ring(store) == (new, old)


def test_without_overlap_the_old_key_is_shut_out_at_the_exchange(store: Store, documents: Collection[Document]) -> None:
    """For a key that others know."""
    term = _led(store)
    store.signing.announce(0)
    _come(documents)
    new = sealing_of(_renewed(store, term).document).key
    assert _ring(store) == (new,)


def test_dropped_messages_are_counted_once_each_and_their_senders_cannot_spoil_the_state(
    store: Store, documents: Collection[Document]
) -> None:
    """What a message says of itself is anything."""
    dropper = Dropper(BRIDGE, store.drops)
    dropper.foreign("listener\n\ud800.shop.7@host" + "x" * 5000)
    lease = documents.find_one({"_id": BRIDGE})
    assert lease is not None
    assert lease["dropped"] == {FOREIGN: 1}
    assert lease["foreignSender"].startswith("listener.shop.7@hostx")
    assert named_by_itself({"a": 1}) == "{'a': 1}"
    store.drops.count({FORGED: 3, FOREIGN: 2})
    lease = documents.find_one({"_id": BRIDGE})
    assert lease is not None
    assert lease["dropped"] == {FOREIGN: 3, FORGED: 3}
    assert set(lease["droppedAt"]) == {FOREIGN, FORGED}
