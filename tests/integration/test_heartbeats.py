"""Heartbeats on a real server: hundreds of claims in one process at slow calls, and crashes withdrawn late."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast

import pytest

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.worker import heartbeat
from mongo_celery.bridge.worker.heartbeat import Heartbeats
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.rig.changes import BRIDGE, HANDLER, TERM, token
from tests.rig.commands import CommandRecorder
from tests.rig.partition import PartitionRig, layouts, make_partition

APP = "heartbeats"
CLAIMS = 500
TTL_SECONDS = 6.0
SLOW_MILLIS = 100


@pytest.fixture
def rig(make_client: MakeClient, state_database: str) -> PartitionRig:
    return make_partition(make_client(appname=APP), state_database)


def test_hundreds_of_claims_of_a_process_stay_alive_at_a_tenth_of_a_second_a_call(
    make_client: MakeClient, state_database: str, failpoint: Failpoint
) -> None:
    """P3, P14: one call after the other, a round would take 50 seconds, eight times as long as a claim lives."""
    options = BridgeOptions(name=BRIDGE, database=state_database, claim_ttl=60.0)  # a call may take a part of it
    store = Store(make_client(appname="many_heartbeats"), options)
    store.partitions.prepare({HANDLER: None}, layouts(HANDLER, partitions=CLAIMS), TERM)
    run: Any = {"term": TERM, "first": 1, "last": 1, "token": token(1)["_data"], "ttl": 60.0}

    def take(index: int) -> Claim:
        found = store.claims.take(store.partitions.partition_id(HANDLER, 0, index), owner=f"o{index}", **run)
        assert found is not None
        return found

    with ThreadPoolExecutor(16) as threads:
        claims = list(threads.map(take, range(CLAIMS)))
    documents = make_client()[state_database]["partitions"]
    ends = {"$add": ["$$NOW", int(TTL_SECONDS * 1000)]}
    beats = Heartbeats(store.claims, TTL_SECONDS)
    with failpoint(failCommands=["update"], appName="many_heartbeats", blockConnection=True, blockTimeMS=SLOW_MILLIS):
        documents.update_many({}, [{"$set": {"claim.until": ends, "claim.ttl": int(TTL_SECONDS * 1000)}}])
        started = time.monotonic()
        with ThreadPoolExecutor(16) as threads:
            held = list(threads.map(lambda claim: beats.begin(claim, started), claims))
        first_end = max(image.claim["until"] for image in store.partitions.of({HANDLER: 0}) if image.claim)
        lapsed, least = set(), first_end
        while least <= first_end + timedelta(seconds=TTL_SECONDS / 2):  # each was renewed more than once
            images = store.partitions.of({HANDLER: 0})
            lapsed |= {image.index for image in images if not image.live}
            least = min(image.claim["until"] for image in images if image.claim)
            assert time.monotonic() - started < 120
        assert lapsed == set()
    for beat in held:
        beats.end(beat)
    assert not any(beat.lost for beat in held)
    gone = {claim.partition_id for claim in claims[::50]}
    taken_over = {"$set": {"claim.owner": "successor"}, "$inc": {"fencingToken": 1}}
    documents.update_many({"_id": {"$in": sorted(gone)}}, taken_over)
    assert {claim.partition_id for claim in store.claims.extend(claims)} == gone


def test_a_crash_is_withdrawn_when_the_server_answers_again(rig: PartitionRig, failpoint: Failpoint) -> None:
    """P14: the execution ended during the outage, and its claim had been replaced by then."""
    beats = Heartbeats(rig.claims, 1.5)
    beat = beats.begin(rig.claim(ttl=3600.0), time.monotonic() - 60, renew=False)
    rig.lapse()
    assert rig.claim(owner="next", ttl=3600.0).crashes == 1
    # An error that the driver does not retry, as while a user is dropped and made again.
    with failpoint(failCommands=["update"], appName=APP, errorCode=13, mode={"times": 2}):
        beats.end(beat)
        wait_for(lambda: rig.document["retry"]["crashes"] == 0)


def test_heartbeats_continue_after_any_error(
    rig: PartitionRig, failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """P14: one that passes, one that the driver does not repeat, and one that nobody foresaw: all claims stay alive."""
    beats, claim = Heartbeats(rig.claims, 1.5), rig.claim(ttl=3600.0)
    beat = beats.begin(claim, time.monotonic())
    for code in (13, 11601):
        caplog.clear()
        with failpoint(failCommands=["update"], appName=APP, errorCode=code, mode={"times": 2}):
            wait_for(lambda: "heartbeat_failed" in [vars(each).get("event") for each in caplog.records])
            wait_for(partial(_lives_longer, rig, rig.document["claim"]["until"]))
    odd = beats.begin(replace(claim, owner=cast("str", object())), time.monotonic())
    wait_for(lambda: "heartbeat_crashed" in [vars(each).get("event") for each in caplog.records])
    beats.end(odd)
    wait_for(partial(_lives_longer, rig, rig.document["claim"]["until"]))
    beats.end(beat)
    assert not beat.lost


def test_a_write_that_takes_too_long_is_followed_by_a_smaller_one(
    make_client: MakeClient, state_database: str, failpoint: Failpoint
) -> None:
    """P14: one locked document must not let all claims of a process lapse."""
    heard = CommandRecorder()
    rig = make_partition(make_client(appname=APP, event_listeners=[heard]), state_database)
    claim, beats = rig.claim(ttl=3600.0), Heartbeats(rig.claims, 1.5)

    def sizes() -> list[int]:
        return [len(each["updates"]) for each in heard.named("update")]

    with failpoint(failCommands=["update"], appName=APP, errorCode=50):
        started = time.monotonic()  # all are due together
        held = [beats.begin(replace(claim, owner=f"o{number}"), started) for number in range(60)]
        wait_for(lambda: max(sizes(), default=0) == 60)
        wait_for(lambda: sizes()[-1] < 60)
        for beat in held:
            beats.end(beat)


def test_a_claim_of_a_change_that_replaces_others_is_renewed_and_lost_like_any_other(rig: PartitionRig) -> None:
    """P14: with `coalesce`, a claim names the changes that its first one replaces."""
    claim = replace(rig.claim(ttl=3600.0), passed_over={"count": 1, "tokens": ["one"]})
    beats = Heartbeats(rig.claims, 1.5)
    beat = beats.begin(claim, time.monotonic())
    before = beat.renewed
    wait_for(lambda: beat.renewed > before)
    rig.spoil(fencingToken=claim.fencing_token + 1)
    wait_for(lambda: beat.lost)
    beats.end(beat)


def _lives_longer(rig: PartitionRig, before: datetime) -> bool:
    return bool(rig.document["claim"]["until"] > before)


def _make_hog() -> Callable[[], object]:
    """Return a match that holds the interpreter 1.5 s by the processor's clock. Each letter doubles its time."""
    pattern, length, took = re.compile("(a+)+b"), 16, 0.0
    while took < 1.5 / 8:
        length += 1
        before = time.process_time()
        pattern.match("a" * length)
        took = time.process_time() - before
    return lambda: pattern.match("a" * (length + 3))


def test_a_lapse_that_the_handler_itself_has_caused_stays_counted(
    rig: PartitionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: a pattern that holds the interpreter for longer than the claim is what `max_crashes` is for."""
    # A machine with twenty processes for each core gives this one less than the tenth that counts as work of its own.
    monkeypatch.setattr(heartbeat, "_OWN_WORK", 0.01)
    hold_interpreter, beats = _make_hog(), Heartbeats(rig.claims, 1.5)
    beat = beats.begin(rig.claim(ttl=3600.0), time.monotonic(), renew=False)
    rig.lapse()
    assert rig.claim(owner="next", ttl=3600.0).crashes == 1
    hold_interpreter()
    beat.due = 0.0
    wait_for(lambda: beat.lost)
    assert (beat.charged, rig.document["retry"]["crashes"]) == (True, 1)


def test_a_process_that_replaces_its_own_claim_charges_nothing(rig: PartitionRig) -> None:
    """P14: an outage is over, and a message that was delivered again comes before the heartbeat."""
    beats = Heartbeats(rig.claims, 3600.0)
    beat = beats.begin(rig.claim(owner="of this process", ttl=3600.0), time.monotonic())
    rig.lapse()
    assert rig.claim(owner="next", living=beats.living(rig.where), ttl=3600.0).crashes == 0
    assert not rig.document["retry"]["lapsed"]
    assert rig.document["oneByOneUntil"] == 1, "its change is still run alone"
    beats.end(beat)
    rig.lapse()
    assert rig.claim(owner="last", living=beats.living(rig.where), ttl=3600.0).crashes == 1, "of another process"
