"""Heartbeats on a real server: hundreds of claims in one process at slow calls, and crashes withdrawn late."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from pymongo import MongoClient

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.worker.heartbeat import Heartbeats
from tests.fixtures.process import wait_for
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, layouts, rig_of, token

Document = dict[str, Any]
Failpoint = Callable[..., AbstractContextManager[None]]

CLAIMS = 500
TTL_SECONDS = 6.0
SLOW_MILLIS = 100


def _slow_store(make_client: Callable[..., MongoClient[Document]], database: str, name: str) -> Store:
    return Store(make_client(appname=name), BridgeOptions(name=BRIDGE, database=database, claim_ttl=TTL_SECONDS))


def _all_claims(store: Store) -> list[Claim]:
    store.partitions.prepare({SUBSCRIPTION: None}, layouts(SUBSCRIPTION, partitions=CLAIMS), VERSION)

    def take(index: int) -> Claim:
        where = store.partitions.partition_id(SUBSCRIPTION, 0, index)
        found = store.claims.take(
            where, owner=f"o{index}", term=VERSION, first=1, last=1, token=token(1)["_data"], ttl=60.0
        )
        assert found is not None
        return found

    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(take, range(CLAIMS)))


def test_hundreds_of_claims_of_a_process_stay_alive_at_a_tenth_of_a_second_a_call(
    make_client: Callable[..., MongoClient[Document]], state_database: str, failpoint: Failpoint
) -> None:
    """P14, I12: one call after the other, a round would take 50 seconds, eight times as long as a claim lives."""
    store = _slow_store(make_client, state_database, "many_heartbeats")
    claims = _all_claims(store)
    documents = make_client()[state_database]["partitions"]
    ends = {"$add": ["$$NOW", int(TTL_SECONDS * 1000)]}
    beats = Heartbeats(store.claims, TTL_SECONDS)
    with failpoint(failCommands=["update"], appName="many_heartbeats", blockConnection=True, blockTimeMS=SLOW_MILLIS):
        documents.update_many({}, [{"$set": {"claim.until": ends, "claim.ttl": int(TTL_SECONDS * 1000)}}])
        started = time.monotonic()
        with ThreadPoolExecutor(16) as threads:
            held = list(threads.map(lambda claim: beats.begin(claim, started), claims))
        first_end = max(image.claim["until"] for image in store.partitions.of({SUBSCRIPTION: 0}) if image.claim)
        lapsed, least = set(), first_end
        while least <= first_end + timedelta(seconds=TTL_SECONDS / 2):  # each was renewed more than once
            images = store.partitions.of({SUBSCRIPTION: 0})
            lapsed |= {image.index for image in images if not image.live}
            least = min(image.claim["until"] for image in images if image.claim)
            assert time.monotonic() - started < 120
        assert lapsed == set()
    for beat in held:
        beats.end(beat)
    assert not any(beat.lost for beat in held)


def test_the_claims_that_were_taken_over_are_found_among_hundreds(
    make_client: Callable[..., MongoClient[Document]], state_database: str
) -> None:
    """P3: the others are renewed by the same write."""
    store = _slow_store(make_client, state_database, "some_lost")
    claims = _all_claims(store)
    documents = make_client()[state_database]["partitions"]
    gone = {claim.partition_id for claim in claims[::50]}
    documents.update_many(
        {"_id": {"$in": sorted(gone)}}, {"$set": {"claim.owner": "successor"}, "$inc": {"fencingToken": 1}}
    )
    assert {claim.partition_id for claim in store.claims.extend(claims)} == gone


def test_a_crash_is_withdrawn_when_the_server_answers_again(
    make_client: Callable[..., MongoClient[Document]], state_database: str, failpoint: Failpoint
) -> None:
    """P14: the execution ended during the outage, and its claim had been replaced by then."""
    client = make_client(appname="withdrawing")
    rig = rig_of(client, state_database)
    beats = Heartbeats(rig.claims, 1.5)
    beat = beats.begin(rig.claim(ttl=3600.0), time.monotonic() - 60, renew=False)
    rig.lapse()
    assert rig.claim(owner="next", ttl=3600.0).crashes == 1
    with failpoint(failCommands=["update"], appName="withdrawing", closeConnection=True, mode={"times": 2}):
        beats.end(beat)
        wait_for(lambda: rig.document["retry"]["crashes"] == 0)


def test_a_process_that_replaces_its_own_claim_charges_nothing(
    mongo_client: MongoClient[Document], state_database: str
) -> None:
    """P14: an outage is over, and a message that was delivered again comes before the heartbeat."""
    rig = rig_of(mongo_client, state_database)
    beats = Heartbeats(rig.claims, 3600.0)
    beat = beats.begin(rig.claim(owner="of this process", ttl=3600.0), time.monotonic())
    rig.lapse()
    assert rig.claim(owner="next", living=beats.living(rig.where), ttl=3600.0).crashes == 0
    assert not rig.document["retry"]["lapsed"]
    assert rig.document["single"] == 1, "its change is still run alone"
    beats.end(beat)
    rig.lapse()
    assert rig.claim(owner="last", living=beats.living(rig.where), ttl=3600.0).crashes == 1, "of another process"
