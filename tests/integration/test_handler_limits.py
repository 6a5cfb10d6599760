"""Limits of a handler over all workers: who may be sent, what an old message can still do, and the tokens of a rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import bson
import pytest
from bson import Timestamp
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change, Changes
from mongo_celery.bridge.handlers import make_handler
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.rig.changes import Document, event_of_key
from tests.rig.partition import claim_run
from tests.rig.term import begin_term, handle

PARTITIONS = 4
CHANGES = 40
"""So many documents that each partition has several."""


class LimitedTerm:
    """A term of a handler with limits. Its messages are kept here, and claimed as often as the test likes."""

    def __init__(self, client: MongoClient[Document], database: str, **limits: Any) -> None:
        rig = begin_term(client, database, PARTITIONS)
        handler = make_handler(
            handle, ("shop.orders",), rig.options, task_name="shop.record", given={"name": "record", **limits}
        )
        self.rig = replace(rig, handlers=[handler])
        self.store = rig.store
        takeover = self.rig.take_over()
        self.layout = takeover.layouts["record"].term
        (self.led,) = self.rig.led(takeover, {"record": None})
        for number in range(1, CHANGES + 1):
            event = event_of_key(number, number)
            mark = Mark(event["_id"], event["_id"]["_data"], Timestamp(1000, number))
            self.led.ingest_item(ChangeEvent(mark, event, bson.encode(event)))

    def send(self) -> list[Run]:
        now, runs = time.monotonic(), []
        for each in self.led.due(now):
            each.partition.note_sending()
            each.partition.note_sent(now)
            runs.append(each.run)
        return runs

    def look(self) -> None:
        self.store.partitions.flush()
        for image in self.images():
            self.led.observe(image, time.monotonic())

    def images(self) -> list[Image]:
        return self.store.partitions.of({"record": self.layout})

    def void(self) -> None:
        """Do what a sweep does first."""
        orphans = {each.partition_id: each.image.fencing_token for each in self.led.list_orphans()}
        self.store.claims.void(self.rig.version, orphans)
        self.look()

    def claim(self, run: Run) -> Claim:
        claim = claim_run(self.store, run)
        assert claim is not None, "the message is the newest of its partition"
        return claim

    def finish(self, run: Run, claim: Claim) -> bool:
        return self.store.claims.finish(claim, run.last, bson.decode(run.changes[-1])["_id"])


MakeTerm = Callable[..., LimitedTerm]


@pytest.fixture
def begin(mongo_client: MongoClient[Document], state_database: str) -> MakeTerm:
    return lambda **limits: LimitedTerm(mongo_client, state_database, **limits)


def test_each_partition_has_its_turn_and_never_more_than_may_run_are_sent(begin: MakeTerm) -> None:
    """The one that was served longest ago is next."""
    term = begin(max_running=2)
    running, served = term.send(), list[int]()
    for _ in range(2 * PARTITIONS):
        assert (len(running), term.send(), term.led.waiting_for_limit) == (2, [], PARTITIONS - 2)
        run, *running = running
        assert term.finish(run, term.claim(run))
        served.append(run.index)
        term.look()
        running += term.send()
    assert served[:PARTITIONS] == served[PARTITIONS:]
    assert sorted(served[:PARTITIONS]) == [*range(PARTITIONS)]


def test_runs_of_an_earlier_term_count(begin: MakeTerm) -> None:
    """Its messages without a claim do not: they cannot claim any more."""
    first = begin(max_running=3)
    one, two, unclaimed = first.send()
    claim = first.claim(one)
    first.claim(two)
    second = begin(max_running=2)
    assert second.send() == []
    assert first.finish(one, claim)
    second.look()
    assert len(second.send()) == 1
    assert claim_run(first.store, unclaimed) is None


def test_a_pause_before_a_retry_frees_the_slot_and_ends_the_message(begin: MakeTerm) -> None:
    """P8: so the broker may deliver it again at any time."""
    term = begin(max_running=1)
    (run,) = term.send()
    assert term.store.claims.park(term.claim(run), delay=-1, not_before=None, error="later")
    term.look()
    (other,) = term.send()
    assert other.index != run.index
    assert claim_run(term.store, run) is None


@pytest.mark.parametrize("claims", [False, True], ids=["a message", "a lapsed claim"])
def test_a_paused_partition_keeps_no_slot(begin: MakeTerm, claims: bool) -> None:
    """P17: what is left there is ended by the next sweep, so a late execution cannot come back when it is resumed."""
    term = begin(max_running=1)
    (run,) = term.send()
    claim = term.claim(run) if claims else None
    lapsed = {"claim.until": {"$subtract": ["$$NOW", 1]}}
    update = {"$set": {"state": "paused", **(lapsed if claims else {})}}
    term.rig.partitions.update_one({"_id": run.partition_id}, [update])
    term.look()
    assert term.send() == []
    if not term.led.list_orphans():
        term.led.repeat(term.led.partitions[run.index], 0.0)  # its grace is over
    term.void()
    assert [each.index for each in term.send()] != [run.index]
    assert term.store.partitions.resume(next(each for each in term.images() if each.index == run.index))
    assert claim_run(term.store, run) is None
    if claim is not None:
        assert not term.finish(run, claim)
        assert term.rig.documents()[run.partition_id]["retry"]["crashes"] == 1
        assert term.store.claims.withdraw(run.partition_id, claim.owner)


def test_tokens_are_those_of_the_handler_whatever_the_term(begin: MakeTerm) -> None:
    """A term that has ended takes none, and a bucket that is full stays so."""
    one = begin(rate="1/h")
    take = one.store.subscriptions.take_tokens
    assert take("record", one.rig.version, 5, 0.001, 2.5)[0] == 2
    two = begin(rate="1/h")
    assert take("record", one.rig.version, 1, 0.001, 2.5)[0] == 0
    assert take("record", two.rig.version, 1, 0.001, 2.5)[0] == 0
    handlers = two.rig.database["handlers"]
    handlers.update_one({}, [{"$set": {"tokens.at": {"$subtract": ["$$NOW", 3_600_000]}}}])
    assert take("record", two.rig.version, 9, 0.001, 2.5) == (2, 0.5)


def test_a_bucket_of_a_clock_that_was_ahead_fills_from_now_on(begin: MakeTerm) -> None:
    """P17: a primary's clock was ahead. The bucket neither waits for that time, nor is it full."""
    term = begin(rate="1/h")
    take, handlers = term.store.subscriptions.take_tokens, term.rig.database["handlers"]
    assert take("record", term.rig.version, 5, 0.001, 2.5) == (2, 0.5)
    for move, tokens in ((3_600_000, (0, 0.5)), (-1_000_000, (1, 0.5))):
        handlers.update_one({}, [{"$set": {"tokens.at": {"$add": ["$tokens.at", move]}}}])
        granted, left = take("record", term.rig.version, 9, 0.001, 2.5)
        assert (granted, round(left, 1)) == tokens


def test_the_next_run_is_due_when_its_token_is(begin: MakeTerm) -> None:
    """So no poll delays it, and no turn is in vain."""
    term = begin(rate="1/h")
    before, limit = time.monotonic(), term.led.limit
    assert len(term.send()) == 1
    assert limit.reserve(term.store.subscriptions, "record", term.rig.version, 1) == 1
    assert (term.send(), term.led.waiting_for_limit) == ([], PARTITIONS - 1)
    assert before + 3500 < term.led.next_due() < time.monotonic() + 3600


@pytest.mark.parametrize(
    "limits", [{"max_running": 1}, {"rate": "1/h"}, {"max_running": 2, "rate": 0.001}], ids=["slots", "tokens", "both"]
)
def test_a_runner_delivers_everything_under_a_limit(
    database: Database[Document], mongo_url: str, limits: Mapping[str, Any]
) -> None:
    """P1: with crashes, retries and replays; a rate takes no time there."""
    bridge = Bridge(Celery("shop", broker="redis://localhost:1/0", set_as_current=False), autodiscover=False)
    orders, failing = database["orders"], [ValueError("no")]
    seen, lists = list[int](), list[int]()

    @bridge.on_change(orders.full_name, failure_policy="dead_letter", **limits)
    def note(change: Change) -> None:
        if failing:
            raise failing.pop()
        seen.append(change.document_key["_id"])

    @bridge.on_changes(orders.full_name, **limits)
    def note_all(changes: Changes) -> None:
        lists.extend(change.document_key["_id"] for change in changes)

    with BridgeRunner(bridge, url=mongo_url) as runner:
        orders.insert_many([{"_id": number} for number in range(12)])
        runner.crash("called", "note")
        runner.crash("claimed", "note_all")
        runner.deliver(duplicates=True, raises=False)
        bridge.operations.replay_dead_letters("note").run()
        wait_for(lambda: runner.deliver() and 0 in seen)
    assert set(seen) == {*range(12)}
    assert sorted(lists) == [*range(12)]
