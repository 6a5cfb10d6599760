"""Changes that are too large for a message: stored before it is sent, read where they run, stored before they halt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Any

import bson
import pytest
from celery import Celery
from celery.exceptions import Ignore
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery import Bridge, Change
from mongo_celery.bridge.listener.claim_check import ClaimCheck
from mongo_celery.bridge.listener.dispatcher import Dispatch, Dispatcher
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from mongo_celery.bridge.listener.publishing import Publishing, rejections
from mongo_celery.bridge.refusal import Refusal
from mongo_celery.bridge.state.signing import Sealing
from mongo_celery.bridge.state.spill import StoredChange
from mongo_celery.bridge.window import Mark, PendingChange
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.execution import Execution
from mongo_celery.embedded import RedisServer
from mongo_celery.errors import RefusedChangeError
from tests.fixtures.process import wait_for
from tests.fixtures.samples import event, image
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, Document, Rig, rig_of, token

Failpoint = Callable[..., AbstractContextManager[None]]

_KILOBYTE, _MEGABYTE = 1 << 10, 1 << 20
_LIMIT = 100 * _KILOBYTE
QUEUE = f"{BRIDGE}.0"
_HASH = 2**64 - 5
_APPNAME = "claim_check"


@dataclass(frozen=True, slots=True)
class Bench:
    """A bridge with one partition, and both ends of its claim check."""

    rig: Rig
    bridge: Bridge
    check: ClaimCheck

    @property
    def documents(self) -> Collection[Document]:
        """The stored changes as they are stored."""
        return self.rig.documents.database["backlog"]

    def later_term(self) -> ClaimCheck:
        """The claim check of a listener that knows nothing of the first."""
        return ClaimCheck(self.rig.store.spill, _LIMIT)

    def run(self, run: Run, handle: Callable[[Change], object] = bool) -> list[Change]:
        """Let a worker run a run; the changes that the handler got."""
        got: list[Change] = []

        def call(change: Change, _retries: int) -> None:
            got.append(change)
            handle(change)

        (handler,) = self.bridge.wiring.handlers
        Execution(self.bridge.wiring, handler, run, patience=1).execute(call)
        return got

    def rest(self) -> Document | None:
        """The partition, once nobody has claimed it."""
        state = self.rig.document
        return state if state["claim"] is None else None

    def due_now(self) -> None:
        """Let what is parked be due."""
        self.rig.spoil(**{"retry.notBefore": None})


@pytest.fixture
def bench(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[Bench]:
    """Give a partition with nothing done, a listener's claim check, and a worker whose handler may skip nothing."""
    rig = rig_of(mongo_client, state_database)
    url = f"{mongo_url}{'&' if '?' in mongo_url else '?'}appName={_APPNAME}"
    bridge = Bridge(Celery(broker="memory://"), url, name=BRIDGE, database=state_database, autodiscover=False)

    @bridge.on_change("shop.orders", name=SUBSCRIPTION)
    def record(_change: Change) -> None:
        """Is not called."""

    with closing(bridge.client):
        yield Bench(rig, bridge, ClaimCheck(rig.store.spill, _LIMIT))


def large(number: int = 1, size: int = 2 * _LIMIT, **fields: Any) -> bytes:
    """A change that is too large for a message; its bytes can hardly be compressed."""
    return bson.encode(event(_id=token(number), fullDocument={"_id": 1, "bytes": os.urandom(size)}, **fields))


def dispatch(*changes: bytes, first: int = 1, refusal: Refusal | None = None, attempt: int = 0) -> Dispatch:
    """A run of these changes, as the listener has them in its buffer."""
    marks = [Mark(token(first + place), token(first + place)["_data"], None) for place in range(len(changes))]
    pending = [PendingChange(mark, 0, raw, refusal, _HASH) for mark, raw in zip(marks, changes, strict=True)]
    run = Run(
        BRIDGE,
        SUBSCRIPTION,
        0,
        0,
        VERSION,
        first,
        first + len(changes) - 1,
        changes,
        refusal=refusal,
        token=token(first) if refusal else None,
        hash=_HASH,
    )
    return Dispatch(run, "shop.record", attempt, f"({first})", QUEUE, pending)


def sender_on(server: RedisServer, bench: Bench) -> Dispatcher:
    """What publishes to this broker."""
    options = bench.bridge.wiring.options
    return Dispatcher(Celery(BRIDGE, broker=server.url), options, lambda: Sealing(b"k" * 32, "here"), [QUEUE])


def trackers_of(count: int) -> list[Partition]:
    """So many partitions, with nothing done."""
    graces = GracePeriods(5, 3)
    ids = [f"{BRIDGE}/{SUBSCRIPTION}/0/{index}" for index in range(count)]
    return [Partition(each, image(index=index), 1, graces, 0.0) for index, each in enumerate(ids)]


def _fail(_change: Change) -> None:
    raise ValueError("no")


def _never(change: Change) -> None:
    pytest.fail(f"the handler was called with {change}")


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, by name."""
    return [getattr(record, "event", "") for record in caplog.records]


# -- the listener's end ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_too_large_for_a_message_is_stored_and_referred_to(bench: Bench, count: int) -> None:
    """P13: it is there, whole and unmarked, before there is a message."""
    given = dispatch(*map(large, range(1, count + 1)))
    assert bench.check.needs(given)
    sent = bench.check.check_in(given)
    reference = sent.run.reference
    assert (sent.size, sent.run.changes, sent.buffered) == (0, (), ())
    assert reference is not None
    found = bench.rig.store.spill.fetch(bench.rig.where, reference.tokens)
    assert reference.fits([found[each].raw for each in reference.tokens])
    assert {each.hash for each in found.values()} == {_HASH}
    assert bench.rig.image.spilled is None
    assert bench.check.stored == {bench.rig.where}


def test_what_a_message_can_hold_is_not_stored(bench: Bench) -> None:
    """Nothing is done for it, up to the last byte."""
    raw = large(size=_KILOBYTE)
    assert not bench.check.needs(dispatch(raw))
    assert not ClaimCheck(bench.rig.store.spill, len(raw)).needs(dispatch(raw))
    assert ClaimCheck(bench.rig.store.spill, len(raw) - 1).needs(dispatch(raw))


def test_what_another_term_has_stored_is_what_is_referred_to(bench: Bench) -> None:
    """P13: the event may have another look-up when it is read again; the worker must find what it was told."""
    before, now = large(), large()
    bench.check.check_in(dispatch(before))
    sent = bench.later_term().check_in(dispatch(now))
    assert sent.run.reference is not None
    assert sent.run.reference.fits([before])
    (change,) = bench.run(sent.run)
    assert bson.encode(change.raw) == before


def test_what_was_refused_when_it_was_stored_is_read_anew_once_its_cause_is_cured(bench: Bench) -> None:
    """P12: what was stored of a refused change is less than its handler has asked for."""
    refusal = Refusal.because("an image was missing")
    bench.check.check_in(dispatch(large(), refusal=refusal))
    bench.documents.update_one({}, {"$set": {"standing": {"state": "halted"}}})
    whole = large()
    sent = bench.later_term().check_in(dispatch(whole))
    assert sent.run.reference is not None
    assert sent.run.reference.fits([whole])
    (document,) = bench.documents.find()
    assert (document["standing"], "refusal" in document, "token" in document) == ({"state": "halted"}, False, False)


def test_what_is_damaged_is_replaced_by_what_was_read(bench: Bench) -> None:
    """P12, P13: a reference to no bytes would be a change that cannot be decoded, and a policy would pass it."""
    raw = large()
    bench.check.check_in(dispatch(raw))
    bench.documents.update_one({}, {"$set": {"raw": b"xx", "zip": True}})
    sent = bench.later_term().check_in(dispatch(raw))
    assert sent.run.reference is not None
    assert sent.run.reference.fits([raw])
    (change,) = bench.run(sent.run)
    assert bson.encode(change.raw) == raw


def test_what_a_later_term_has_stored_is_not_renewed_by_an_older_one(bench: Bench) -> None:
    """P6: a listener that wakes up late changes nothing that its successor refers to."""
    spill, where = bench.rig.store.spill, bench.rig.where
    refused = StoredChange(token(1)["_data"], large(), _HASH, Refusal.because("no"), token(1))
    spill.insert(where, [refused], VERSION + 1)
    with pytest.raises(OperationFailure, match="a later term's"):
        spill.insert(where, [replace(refused, raw=large(), refusal=None, token=None)], VERSION)
    assert spill.fetch(where, [refused.data])[refused.data].raw == refused.raw


def test_a_run_that_comes_from_the_collection_is_not_stored_again(bench: Bench) -> None:
    """It is referred to as it is: another insert would send all its bytes for nothing."""
    raw = large()
    sent = bench.check.check_in(replace(dispatch(raw), buffered=()))
    assert sent.run.reference is not None
    assert sent.run.reference.fits([raw])
    assert (bench.documents.count_documents({}), bench.check.stored) == (0, set())


def test_a_message_that_was_never_sent_costs_one_insert(bench: Bench) -> None:
    """While the broker is away the run is tried again and again; once it was sent, it is stored again."""
    raw = large()
    sent = bench.check.check_in(dispatch(raw))
    bench.documents.delete_many({})
    assert bench.check.check_in(dispatch(raw)) is sent
    assert bench.documents.count_documents({}) == 0
    assert bench.check.check_in(dispatch(raw, attempt=1)).run == sent.run
    assert bench.documents.count_documents({}) == 1


def test_an_insert_that_fails_keeps_its_own_partition_waiting(
    bench: Bench, make_redis: Callable[..., RedisServer], failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """P12, P16: it is named with its reason, others are sent in the same turn, and it goes out when there is room."""
    sender = sender_on(make_redis(), bench)
    publishing = Publishing(sender, ClaimCheck(bench.bridge.wiring.store.spill, _LIMIT))
    partitions = trackers_of(3)
    runs = [dispatch(large()), dispatch(large()), dispatch(large(size=_KILOBYTE))]
    due = [
        (partition, replace(each, run=replace(each.run, index=place)))
        for place, (partition, each) in enumerate(zip(partitions, runs, strict=True))
    ]
    with failpoint(failCommands=["insert"], appName=_APPNAME, errorCode=13), closing(sender):
        assert publishing.publish(due)
        assert [partition.in_flight is not None for partition in partitions] == [False, False, True]
        assert partitions[1].rejection is None, "it was not even tried: it has its own turn"
        assert not publishing.publish(due[1:2])
    reported = rejections(partitions)
    assert (reported["rejectedCount"], reported["notStoredCount"]) == (0, 2)
    assert reported["notStored"][0].keys() == {"partition", "key", "bytes", "error", "since"}
    assert reported["notStored"][0]["partition"] == partitions[0].partition_id
    assert events(caplog).count("change_not_stored") == 2
    with closing(sender):
        assert publishing.publish(due[:2])
    assert rejections(partitions)["notStoredCount"] == 0
    assert all(partition.in_flight is not None for partition in partitions)


def test_a_turn_in_which_nothing_can_be_stored_says_nothing_of_the_broker(
    bench: Bench, make_redis: Callable[..., RedisServer], failpoint: Failpoint
) -> None:
    """P16: a broker that is away stays away until it has answered."""
    server = make_redis()
    spill = bench.bridge.wiring.store.spill
    publishing = Publishing(sender_on(server, bench), ClaimCheck(spill, _LIMIT))
    (partition,) = trackers_of(1)
    server.kill()
    assert not publishing.publish([(partition, dispatch(large(size=_KILOBYTE)))])
    with failpoint(failCommands=["insert"], appName=_APPNAME, errorCode=13):
        assert not publishing.publish([(partition, dispatch(large()))])
    assert publishing.is_down
    publishing.close()


def test_what_cannot_be_compared_with_what_is_stored_is_not_sent(bench: Bench, failpoint: Failpoint) -> None:
    """P13: it was there before, by a message that nobody knows; what is to be removed is remembered."""
    bench.check.check_in(dispatch(large()))
    check = ClaimCheck(bench.bridge.wiring.store.spill, _LIMIT)
    with failpoint(failCommands=["find"], appName=_APPNAME, errorCode=13), pytest.raises(OperationFailure):
        check.check_in(dispatch(large()))
    assert check.stored == {bench.rig.where}


# -- the worker's end --------------------------------------------------------------------------------


def test_a_worker_reads_what_its_message_refers_to(bench: Bench) -> None:
    """P11: byte for byte, also an event in parts, and the position is that of the last change."""
    changes = [large(1, 17 * _MEGABYTE), large(2)]
    got = bench.run(bench.check.check_in(dispatch(*changes)).run)
    assert [bson.encode(each.raw) for each in got] == changes
    handled = bench.rig.document["handled"]
    assert (handled["last"], handled["resumeToken"]) == (2, token(2))
    assert bench.documents.count_documents({"part": {"$ne": None}}) > 0
    bench.rig.store.spill.remove(bench.rig.where, token(2)["_data"], VERSION)
    assert bench.documents.count_documents({}) == 0, "what is committed takes all of it away"


def _remove(documents: Collection[Document]) -> None:
    documents.delete_many({})


def _exchange(documents: Collection[Document]) -> None:
    documents.update_one({}, {"$set": {"raw": large()}, "$unset": {"zip": 1}})


def _remove_parts(documents: Collection[Document]) -> None:
    documents.update_one({}, {"$set": {"raw": b"", "parts": 2, "digest": "00"}, "$unset": {"zip": 1}})


def _garble(documents: Collection[Document]) -> None:
    documents.update_one({}, {"$set": {"raw": b"\xff" * 9, "zip": True}})


@pytest.mark.parametrize("spoil", [_remove, _exchange, _remove_parts, _garble])
def test_a_change_whose_bytes_are_missing_waits_uncharged_until_it_is_stored_again(
    bench: Bench, caplog: pytest.LogCaptureFixture, spoil: Callable[[Collection[Document]], None]
) -> None:
    """P12, P14: whoever has removed or exchanged them; it waits longer each time, and is handled once."""
    raw = large()
    sent = bench.check.check_in(dispatch(raw))
    spoil(bench.documents)
    for attempt in range(2):
        with pytest.raises(Ignore):
            bench.run(sent.run, _never)
        state = bench.rig.document
        assert (state["claim"], state["handled"], state["state"]) == (None, None, "flowing")
        retry = state["retry"]
        assert (retry["count"], retry["crashes"], retry["waiting"]["count"]) == (0, 0, attempt + 1)
        assert "missing" in retry["waiting"]["cause"]
        assert retry["notBefore"] is not None, "no hot loop"
        bench.due_now()
    named = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "stored_change_missing"]
    assert len(named) == 2
    assert all(bench.rig.where in each and token(1)["_data"] in each and "`backlog`" in each for each in named)

    bench.documents.delete_many({})  # as a person would cure what was exchanged
    assert len(bench.run(bench.check.check_in(dispatch(raw, attempt=1)).run)) == 1


def test_a_change_waits_uncharged_while_its_bytes_cannot_be_read(bench: Bench, failpoint: Failpoint) -> None:
    """P14: MongoDB was away between the claim and the reading; the policy of the handler has no part in it."""
    sent = bench.check.check_in(dispatch(large()))
    away = {"failCommands": ["find"], "namespace": bench.documents.full_name, "closeConnection": True}
    with failpoint(appName=_APPNAME, **away), pytest.raises(Ignore):
        bench.run(sent.run, _never)
    state = wait_for(bench.rest)
    assert (state["state"], state["retry"]["count"], state["retry"]["crashes"]) == ("flowing", 0, 0)
    assert state["retry"]["waiting"]["count"] == 1
    assert "missing" not in state["retry"]["waiting"]["cause"]
    bench.due_now()
    assert len(bench.run(sent.run)) == 1


# -- what halts --------------------------------------------------------------------------------------


def test_a_change_that_halts_is_stored_before(bench: Bench) -> None:
    """P13: a command has its bytes whatever becomes of the oplog; unmarked, so that nothing else changes."""
    raw = large(size=_KILOBYTE)
    with pytest.raises(ValueError, match="no"):
        bench.run(dispatch(raw).run, _fail)
    state = bench.rig.document
    assert (state["state"], state["spilled"]) == ("halted", None)
    data = state["halted"]["resumeToken"]["_data"]
    stored = bench.rig.store.spill.fetch(bench.rig.where, [data])[data]
    assert (stored.raw, stored.hash, stored.refusal, stored.token) == (raw, _HASH, None, None)
    (document,) = bench.documents.find()
    assert document["term"] == VERSION


def test_an_undeliverable_change_is_not_stored_again_when_it_halts(bench: Bench) -> None:
    """P13: the listener has stored it before it sent it, and says more of its reason."""
    with pytest.raises(RefusedChangeError):
        bench.run(dispatch(b"\xff" * 9, refusal=Refusal.because("unreadable", halts=True)).run, _never)
    assert (bench.rig.document["state"], bench.documents.count_documents({})) == ("halted", 0)


def test_what_travels_by_reference_is_not_stored_again_when_it_halts(bench: Bench, failpoint: Failpoint) -> None:
    """It was there a moment ago."""
    sent = bench.check.check_in(dispatch(large()))
    with failpoint(failCommands=["insert"], appName=_APPNAME, errorCode=13), pytest.raises(ValueError, match="no"):
        bench.run(sent.run, _fail)
    assert bench.rig.document["state"] == "halted"
    assert bench.documents.count_documents({}) == 1


@pytest.mark.parametrize("trouble", [{"errorCode": 13}, {"closeConnection": True}], ids=["refused", "unanswered"])
def test_a_change_halts_all_the_same_where_it_cannot_be_stored(
    bench: Bench, failpoint: Failpoint, caplog: pytest.LogCaptureFixture, trouble: Document
) -> None:
    """P12: the halt is what must not be lost; the log says that the bytes are not there."""
    with failpoint(failCommands=["insert"], appName=_APPNAME, **trouble), pytest.raises(ValueError, match="no"):
        bench.run(dispatch(large(size=_KILOBYTE)).run, _fail)
    assert bench.rig.document["state"] == "halted"
    assert bench.documents.count_documents({}) == 0
    assert "halted_change_not_stored" in events(caplog)
