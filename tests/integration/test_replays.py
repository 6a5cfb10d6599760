"""Dead letters on a real replica set: what may be replayed, what a start records, and whose outcome counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pymongo
import pytest
from bson import ObjectId
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery import Bridge
from mongo_celery.bridge.existing import LETTER
from mongo_celery.bridge.listener.replaying import Replaying
from mongo_celery.bridge.operations import dead_letter_commands
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.dead_letters import (
    CHANGE_BYTES,
    REPLAYS_MAX,
    SKIPPED,
    DeadChange,
    ReplayRequest,
    Selection,
)
from mongo_celery.errors import CommandRefusedError
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.rig.changes import BRIDGE, HANDLER, TERM, Document, event_of_key, letter_of, token
from tests.rig.commands import CommandRecorder
from tests.rig.partition import PartitionRig, make_partition
from tests.rig.term import TermRig, begin_term


class Aside(PartitionRig):
    def set_aside(self, number: int, **options: Any) -> DeadChange:
        claim = self.claim(number)
        assert self.claims.set_aside(claim, token(number), letter_of(number, claim.fencing_token, **options))
        (found,) = self.found(ids=[options.get("name") or token(number)["_data"]])
        return found

    def found(self, **selection: Any) -> list[DeadChange]:
        return self.store.dead_letters.find(Selection(**selection), [HANDLER], 0)

    def request(self, letter: DeadChange, partition: int = 0, **options: Any) -> str:
        place = {"partitioning": 0, "hash_": letter.place.hash if letter.place else None, "over_newer": False}
        return self.store.replays.request(letter.document_id, partition=partition, **{**place, **options})

    def take(self, letter: DeadChange, owner: str = "me") -> Claim:
        found = self.claims.take_for_replay(self.where, letter.document_id, owner=owner, term=TERM)
        assert found is not None, "the partition is free"
        return found

    def start(self, letter: DeadChange, starts: int = 0, owner: str = "me") -> tuple[Claim, ReplayRequest]:
        claim = self.take(letter, owner)
        replay = self.store.replays.start(claim, letter.document_id, starts)
        assert replay is not None, "nobody has started it"
        return claim, replay


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> Aside:
    made = make_partition(mongo_client, state_database)
    return Aside(made.store, made.where, made.documents, made.letters)


def test_a_process_that_dies_at_the_end_of_a_replay_keeps_nothing_locked(
    rig: Aside, make_client: MakeClient, failpoint: Failpoint, state_database: str
) -> None:
    """P7: its transaction stays open; who claims next need not wait until the server ends that."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim = rig.claims.take_for_replay(rig.where, letter.document_id, owner="dead", term=TERM, ttl=1)
    assert claim is not None
    assert rig.store.replays.start(claim, letter.document_id, 0) is not None
    dying = make_partition(make_client(appname="dies"), state_database)
    with failpoint(failCommands=["commitTransaction"], errorCode=8000, appName="dies"), pytest.raises(OperationFailure):
        dying.store.replays.succeed(claim, letter.document_id)
    with pymongo.timeout(0.5), pytest.raises(PyMongoError):  # it is locked
        rig.documents.update_one({"_id": rig.where}, {"$set": {"note": 1}})
    assert wait_for(lambda: rig.claims.end_transactions([rig.where])) == [rig.where]
    assert rig.claim(2, owner="next").crashes == 0
    assert rig.found() != []


def test_tokens_of_replays_lie_between_the_change_and_all_that_follow(rig: Aside) -> None:
    rig.spoil(fencingToken=rig.document["fencingToken"] + (1 << 40))
    first = rig.set_aside(1)
    follower = rig.claim(2)
    assert first.place is not None
    assert follower.fencing_token > first.place.fencing_token + REPLAYS_MAX

    assert rig.claims.halt(follower, token(2), "key", "e")
    image = rig.image
    letter = {**letter_of(2, image.fencing_token), "cause": SKIPPED}
    assert rig.partitions.set_aside(image, letter, rig.store.dead_letters.collection)
    second = rig.found()[1]
    assert (second.cause, rig.image.committed, rig.image.state) == (SKIPPED, 2, "flowing")
    assert second.place is not None
    assert rig.claim(3).fencing_token > second.place.fencing_token + REPLAYS_MAX


def test_a_replay_is_asked_for_once_and_of_two_messages_of_one_attempt_only_the_first_starts(rig: Aside) -> None:
    """P8: each start has its number, which is written before the handler begins. Not for a letter that is gone."""
    letter = rig.set_aside(1)
    assert [rig.request(letter), rig.request(letter)] == ["done", "requested"]
    claim, replay = rig.start(letter)
    assert (replay.starts, replay.crashes, replay.fencing_token) == (1, 0, claim.fencing_token)
    assert rig.store.replays.start(claim, letter.document_id, 0) is None
    assert rig.store.replays.succeed(claim, letter.document_id)
    assert (rig.found(), rig.store.replays.read(), rig.image.claim) == ([], [], None)
    assert rig.image.committed == 1, "no position moves"
    assert (rig.request(letter), rig.store.replays.discard(letter.document_id)) == ("gone", "gone")


def test_an_attempt_that_was_replaced_has_no_outcome(rig: Aside) -> None:
    """P3: the letter stays, whatever the zombie writes; and its successor is another start, charged to the letter."""
    letter = rig.set_aside(1)
    rig.request(letter)
    stale, replay = rig.start(letter)
    rig.lapse()
    claim, again = rig.start(letter, starts=1, owner="successor")
    assert (again.starts, again.crashes) == (2, 1)
    replays, id_ = rig.store.replays, letter.document_id
    assert not replays.succeed(stale, id_)
    assert not replays.fail(stale, replay, "e", "t", 1)
    assert not replays.retry_later(stale, id_, "e", delay=1.0, not_before=None)
    assert not replays.wait(stale, id_, "c", delay=1.0, doubtful=False)
    assert [each.id for each in rig.found()] == [letter.id]
    assert replays.find(id_) == again
    assert replays.succeed(claim, id_)


def test_a_replay_that_lapses_charges_no_change_and_a_change_that_lapses_is_charged(rig: Aside) -> None:
    """P14: the counts of the partition are those of its first change."""
    letter = rig.set_aside(1)
    rig.request(letter)
    rig.start(letter)
    rig.lapse()
    live = rig.claim(2, owner="live")
    assert (live.crashes, rig.image.one_by_one_until) == (0, 1)
    rig.lapse()
    _, replay = rig.start(letter, starts=1, owner="again")
    assert replay.crashes == 1
    rig.lapse()
    assert rig.claim(2, owner="later").crashes == 1


def test_a_failure_leaves_the_letter_with_error_and_counts(rig: Aside) -> None:
    """P2: later requests of its key are withdrawn with its own, and none of another key."""
    letter, behind, other = rig.set_aside(1), rig.set_aside(2), rig.set_aside(3, hash_=8)
    for each in (letter, behind, other):
        rig.request(each)
    claim, replay = rig.start(letter)
    assert rig.store.replays.fail(claim, replay, "TypeError: worse", "trace", 1)
    left = rig.found()[0]
    assert (left.error, left.traceback, left.attempts, left.replays) == ("TypeError: worse", "trace", 2, 1)
    assert [each.letter for each in rig.store.replays.read()] == [other.document_id]
    assert rig.request(left) == "done", "a person may ask again at once"
    assert [each.starts for each in rig.store.replays.read()] == [1, 0]


def test_a_replay_that_waits_counts_no_retry(rig: Aside) -> None:
    """P14: the partition is free meanwhile, and its own counts are as they were."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim, _ = rig.start(letter)
    replays, id_ = rig.store.replays, letter.document_id
    assert replays.retry_later(claim, id_, "ConnectionError: $x", delay=60.0, not_before=None)
    claim, replay = rig.start(letter, starts=1)
    assert (replay.retries, replay.crashes, replay.error) == (1, 0, "ConnectionError: $x")
    assert replays.wait(claim, id_, "primary away", delay=0.0, doubtful=True)
    found = replays.find(id_)
    assert found is not None
    assert (found.waits, found.doubts, found.retries) == (1, 1, 1)
    assert (rig.image.retry, rig.image.claim) == (None, None)


def test_a_letter_whose_replay_runs_is_not_discarded_and_one_that_has_lapsed_is(
    rig: Aside, make_client: MakeClient, state_database: str
) -> None:
    """P2, P8: also where it starts after it was read. A process that wakes up after the lapse has no outcome."""
    letter = rig.set_aside(1)
    rig.request(letter)
    commands, claims = CommandRecorder(), list[Claim]()
    replays = make_partition(make_client(event_listeners=[commands]), state_database).store.replays
    commands.meanwhile[len(commands.sent) + 2] = lambda: claims.append(rig.start(letter)[0])
    assert [replays.discard(letter.document_id) for _ in range(2)] == ["running", "running"]
    assert [each.id for each in rig.found()] == [letter.id]
    rig.lapse()
    assert replays.discard(letter.document_id) == "done"
    assert not replays.succeed(claims[0], letter.document_id)
    assert (rig.found(), rig.image.claim) == ([], None)


def test_a_letter_whose_request_was_withdrawn_uses_no_token_a_second_time(rig: Aside) -> None:
    """P3: a start of it may go on somewhere, also where a new layout has ended its claim."""
    letter = rig.set_aside(1)
    rig.request(letter)
    rig.start(letter)
    rig.store.replays.withdraw_older(HANDLER, 1)
    assert rig.store.replays.read() == []
    (letter,) = rig.found()
    assert letter.replays == 1
    assert rig.request(letter) == "done"
    assert rig.store.replays.read()[0].starts == 1


def test_a_change_that_is_set_aside_once_more_keeps_its_request_and_no_message_of_before_starts_it(rig: Aside) -> None:
    """P2, P8: a snapshot may give a document again; its dead letter then lies at a later place of the stream."""
    letter = rig.set_aside(1, name=f"{LETTER}AB")
    rig.request(letter)
    claim = rig.claim(2)
    assert rig.claims.set_aside(claim, token(2), letter_of(2, claim.fencing_token, name=f"{LETTER}AB"))
    again = rig.take(letter)
    assert rig.store.replays.start(again, letter.document_id, 0) is None, "as the message said"
    (asked,) = rig.store.replays.read()
    assert (asked.starts, asked.state, asked.order[0]) == (1, "requested", token(2)["_data"])
    assert rig.store.replays.start(again, letter.document_id, asked.starts) is not None


@pytest.mark.parametrize("spoiled", [{"state": "halted"}, {"state": "paused"}, {"term": TERM + 1}])
def test_a_partition_that_stands_or_belongs_to_another_term_replays_nothing(rig: Aside, spoiled: Document) -> None:
    letter = rig.set_aside(1)
    rig.claim(2)
    assert rig.claims.take_for_replay(rig.where, letter.document_id, owner="me", term=TERM) is None
    rig.spoil(claim=None, **spoiled)
    assert rig.claims.take_for_replay(rig.where, letter.document_id, owner="me", term=TERM) is None


@pytest.fixture
def term(mongo_client: MongoClient[Document], state_database: str) -> TermRig:
    return begin_term(mongo_client, state_database, 2)


def test_letters_come_in_stream_order_by_partition_and_one_at_a_time(term: TermRig) -> None:
    """P2, P12, P17: one that waits for its retry holds back those of its key only, and one that was sent all others."""
    (subscription,) = term.led(term.take_over(), {})
    letters, replays, replaying = term.store.dead_letters, term.store.replays, Replaying(term.wiring)

    def ask(number: int, key: int, partition: int = 0, partitioning: int = subscription.plan.layout.term) -> str:
        letters.collection.insert_one(letter_of(number, 5, hash_=key, partition=partition))
        (letter,) = letters.find(Selection(ids=[token(number)["_data"]]), [HANDLER], 0)
        place = {"partitioning": partitioning, "partition": partition, "hash_": key}
        replays.request(letter.document_id, **place, over_newer=False)
        return letter.document_id

    def find_next() -> dict[int, str]:
        replaying.turn({HANDLER: subscription}, 0.0)
        found = {index: each.replay for index, each in subscription.partitions.items()}
        return {index: each.letter for index, each in found.items() if each is not None}

    def postpone(letter: str, not_before: datetime | None) -> None:
        letters.collection.update_one({"_id": letter}, {"$set": {"replay.notBefore": not_before}})

    second, first, other = ask(2, key=1), ask(1, key=1), ask(4, key=3, partition=1)
    third = ask(3, key=2)
    assert find_next() == {0: first, 1: other}
    postpone(first, datetime.now(UTC) + timedelta(hours=1))
    assert find_next() == {0: third, 1: other}
    postpone(first, None)
    assert find_next() == {0: first, 1: other}
    replays.discard(first)
    ask(5, key=9, partitioning=77)
    assert find_next() == {0: second, 1: other}
    assert [each.letter for each in replays.read()] == [second, third, other], "none of another layout"
    for dispatch in subscription.due(1e9):
        dispatch.partition.note_sent(1e9)
    assert find_next() == {}


@pytest.fixture
def bridge(mongo_url: str, state_database: str, term: TermRig) -> Iterator[Bridge]:
    term.take_over()
    app = Celery("replays", broker="memory://", set_as_current=False)
    made = Bridge(app, mongo_url, name=BRIDGE, database=state_database, partitions=2, autodiscover=False)

    @made.on_change("shop.orders", name=HANDLER)
    def handle(change: object) -> None:
        del change

    app.finalize()
    yield made
    made.client.close()


def _stored(database: Database[Document], number: int, *, name: str | None = None, **changes: Any) -> Document:
    document = {**letter_of(number, 5, name=name), "at": datetime(2026, 1, number, tzinfo=UTC), **changes}
    database["dead_letters"].insert_one(document)
    return document


def test_dead_letters_are_counted_whatever_is_in_them_and_grouping_has_a_limit(bridge: Bridge, term: TermRig) -> None:
    """P12, P16: somebody has written to one. The verdict is there however many they are, with their number."""
    for number in range(1, 13):
        _stored(term.database, number, error=f"ValueError: {number % 2}")
    for number, damaged in enumerate(("82", 7, {"_typeBits": 1}, [1]), 1):
        at = {"at": datetime(2026, 1, number, tzinfo=UTC)}
        term.database["dead_letters"].update_one(at, {"$set": {"resumeToken": damaged}})
    seen = read_snapshot(bridge.wiring, counting=60.0)
    assert (seen.is_readable, [each.count for each in seen.dead_letter_groups]) == (True, [6, 6])
    assert seen.dead_letter_groups[0].newest_at == datetime(2026, 1, 12, tzinfo=UTC)
    hurried = read_snapshot(bridge.wiring, counting=1e-6)
    assert (hurried.dead_letter_groups, hurried.dead_letters, hurried.is_readable) == ((), 12, True)


def test_letters_are_found_by_handler_id_key_and_time(bridge: Bridge, term: TermRig) -> None:
    wiring, oid = bridge.wiring, ObjectId()
    for number, key in enumerate((1, "1", oid, {"a": 1}), 1):
        _stored(term.database, number, change=event_of_key(number, key))

    def found(handler: str | None = None, **choice: Any) -> list[str]:
        return dead_letter_commands.find(wiring, handler, **choice).ids

    every = [token(number)["_data"] for number in range(1, 5)]
    assert found() == found(HANDLER) == every
    assert found(ids=[every[1], every[3]]) == [every[1], every[3]]
    assert found(key="1") == every[:2]
    assert found(key=str(oid)) == [every[2]]
    assert found(key='{"a": 1}') == [every[3]]
    assert found(since=datetime(2026, 1, 2, tzinfo=UTC), until=datetime(2026, 1, 4, tzinfo=UTC)) == every[1:3]
    pattern = '{"$regularExpression": {"pattern": ".*", "options": ""}}'
    for refused in ({"key": pattern}, {"ids": ["82"]}, {"ids": ["99"]}, {"handler": "recrod"}):
        with pytest.raises(CommandRefusedError):
            found(**refused)


@pytest.mark.parametrize(
    "changes",
    [
        {"handler": "gone", "_id": f"{BRIDGE}/gone/{token(1)['_data']}"},
        {"kept": "name"},
        {"change": 5},
        {"resumeToken": "x"},
        {"fencingToken": None},
        {"replays": REPLAYS_MAX},
    ],
    ids=str,
)
def test_what_cannot_be_replayed_is_refused_alone(bridge: Bridge, term: TermRig, changes: Document) -> None:
    _stored(term.database, 1, **changes)
    _stored(term.database, 2)
    found = dead_letter_commands.find(bridge.wiring)
    result = bridge.operations.replay_dead_letters().run()
    assert sorted(each["result"] for each in result.fields["parts"]) == ["done", "refused"]
    for letter in found.letters:
        dead_letter_commands.plain(letter)
        dead_letter_commands.change_of(bridge.wiring, letter)
    assert bridge.operations.discard_dead_letters().run().fields["done"] == 2


def test_a_replay_that_is_asked_for_without_a_listener_waits_for_one(bridge: Bridge, term: TermRig) -> None:
    """P1, P16: the command says so, and to whoever asks for the same once more."""
    _stored(term.database, 1)
    assert term.store.leases.release(term.renewal.term)
    plan = bridge.operations.replay_dead_letters()
    assert (plan.fields["leads"], plan.run().fields["done"]) == (False, 1)
    second = bridge.operations.replay_dead_letters().run().fields
    assert (second["done"], [each["result"] for each in second["parts"]]) == (0, ["unchanged"])
    assert [each.state for each in term.store.replays.read()] == ["requested"]


@pytest.mark.parametrize("fill", [bytes, os.urandom], ids=["compressed", "as it is"])
def test_an_event_that_is_too_large_to_be_kept_readable_keeps_its_bytes(
    rig: PartitionRig, fill: Callable[[int], bytes]
) -> None:
    large = bson.encode({**event_of_key(1, 1), "fullDocument": {"_id": 1, "x": fill(CHANGE_BYTES + (1 << 19))}})
    assert rig.claims.set_aside(rig.claim(), token(1), {**letter_of(1, 1, raw=large), "_id": "shop/record/82"})

    found = rig.store.dead_letters.read("shop/record/82")

    assert found is not None
    assert (found[0].kept, found[1]) == ("bytes", large)
    stored = rig.letters.find_one({}, {"raw": 0})
    assert stored is not None
    assert stored["change"]["documentKey"] == {"_id": 1}
