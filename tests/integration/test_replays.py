"""Dead letters on a real replica set: what may be replayed, what a start records, and whose outcome counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any

import bson
import pymongo
import pytest
from bson import ObjectId
from celery import Celery
from pymongo import IndexModel, MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery import Bridge
from mongo_celery.bridge.existing import LETTER
from mongo_celery.bridge.http.server import Response
from mongo_celery.bridge.http.service import HttpService
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.replaying import Replaying
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.operations import letter_commands
from mongo_celery.bridge.operations.keys import keys_of
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.dead_letters import (
    CHANGE_BYTES,
    FAILED,
    REPLAY_FAILED,
    REPLAYS_MAX,
    SKIPPED,
    Letter,
    Place,
    ReplayRequest,
    Selection,
    dead_letter,
    keep_change,
)
from mongo_celery.errors import CommandRefusedError
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, Rig, rig_of, token
from tests.integration.term_rig import TermRig, begin_term

Document = dict[str, Any]

SORTED_BYTES = 50_000


def event(number: int, key: object = None) -> bytes:
    """The bytes of one event, whose document has this number, or this key."""
    return bson.encode(
        {
            "_id": token(number),
            "operationType": "insert",
            "ns": {"db": "shop", "coll": "orders"},
            "documentKey": {"_id": number if key is None else key},
            "fullDocument": {"_id": number if key is None else key},
        }
    )


def letter_of(
    number: int,
    fence: int,
    *,
    key: object = None,
    hash_: int = 7,
    partition: int = 0,
    name: str | None = None,
    raw: bytes = b"",
) -> Document:
    """A dead letter as an execution with this fence leaves it."""
    found = keep_change(raw or event(number, key))
    return dead_letter(
        bridge=BRIDGE,
        subscription=SUBSCRIPTION,
        token=token(number),
        key=f"shop.orders insert {key or number}",
        kept=found,
        error="ValueError: no",
        traceback="Traceback",
        attempts=1,
        place=Place(0, partition, number, fence, hash_),
        cause=FAILED,
        name=name,
    )


class Aside(Rig):
    """A partition, some changes of which were set aside."""

    def set_aside(self, number: int, **options: Any) -> Letter:
        """Let one change fail for good."""
        claim = self.claim(number)
        assert self.claims.set_aside(claim, token(number), letter_of(number, claim.fencing_token, **options))
        (found,) = self.found(ids=[options.get("name") or token(number)["_data"]])
        return found

    def found(self, **selection: Any) -> list[Letter]:
        """Letters of a selection."""
        return self.store.dead_letters.find(Selection(**selection), [SUBSCRIPTION], 0)

    def request(self, letter: Letter, partition: int = 0, **options: Any) -> str:
        """Ask for a replay."""
        place = {"generation": 0, "hash_": letter.place.hash if letter.place else None, "over_newer": False}
        return self.store.replays.request(letter.document_id, partition=partition, **{**place, **options})

    def take(self, letter: Letter, owner: str = "me") -> Claim:
        """Claim the partition for a replay."""
        found = self.claims.take_for_replay(self.where, letter.document_id, owner=owner, term=VERSION)
        assert found is not None, "the partition is free"
        return found

    def start(self, letter: Letter, starts: int = 0, owner: str = "me") -> tuple[Claim, ReplayRequest]:
        """Claim the partition, and record a start."""
        claim = self.take(letter, owner)
        replay = self.store.replays.start(claim, letter.document_id, starts)
        assert replay is not None, "nobody has started it"
        return claim, replay


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> Aside:
    """Give one partition that flows and that nobody has claimed."""
    made = rig_of(mongo_client, state_database)
    return Aside(made.store, made.where, made.documents, made.letters)


def test_a_process_that_dies_at_the_end_of_a_replay_keeps_nothing_locked(
    rig: Aside, make_client: MakeClient, failpoint: Failpoint, state_database: str
) -> None:
    """P7: its transaction stays open; who claims next need not wait until the server ends that."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim = rig.claims.take_for_replay(rig.where, letter.document_id, owner="dead", term=VERSION, ttl=1)
    assert claim is not None
    assert rig.store.replays.start(claim, letter.document_id, 0) is not None
    dying = rig_of(make_client(appname="dies"), state_database)
    with failpoint(failCommands=["commitTransaction"], errorCode=8000, appName="dies"), pytest.raises(OperationFailure):
        dying.store.replays.succeed(claim, letter.document_id)
    with pymongo.timeout(0.5), pytest.raises(PyMongoError):  # it is locked
        rig.documents.update_one({"_id": rig.where}, {"$set": {"note": 1}})
    assert wait_for(lambda: rig.claims.end_transactions([rig.where])) == [rig.where]
    assert rig.claim(2, owner="next").crashes == 0
    assert rig.found() != []


# -- the order of what targets see -------------------------------------------------------------------


def test_tokens_of_replays_lie_between_the_change_and_all_that_follow(rig: Aside) -> None:
    """P3: set aside by an execution, and by a person; whatever the cluster's clock says."""
    rig.spoil(fencingToken=rig.document["fencingToken"] + (1 << 40))
    first = rig.set_aside(1)
    follower = rig.claim(2)
    assert first.place is not None
    assert follower.fencing_token > first.place.fencing_token + REPLAYS_MAX

    assert rig.claims.halt(follower, token(2), "key", "e")
    image = rig.image
    letter = {**letter_of(2, image.fencing_token), "cause": SKIPPED}
    assert rig.partitions.set_aside(image, 0, letter, rig.store.dead_letters.collection)
    second = rig.found()[1]
    assert (second.cause, rig.image.committed, rig.image.state) == (SKIPPED, 2, "flowing")
    assert second.place is not None
    assert rig.claim(3).fencing_token > second.place.fencing_token + REPLAYS_MAX


def test_a_command_that_has_seen_another_partition_sets_nothing_aside(rig: Aside) -> None:
    """The letter and the position are one: neither is written."""
    assert rig.claims.halt(rig.claim(), token(1), "key", "e")
    image = rig.image
    assert rig.partitions.retry(image, 0)
    assert not rig.partitions.set_aside(image, 0, letter_of(1, image.fencing_token), rig.store.dead_letters.collection)
    assert (rig.found(), rig.image.committed) == ([], 0)


# -- one replay --------------------------------------------------------------------------------------


def test_a_replay_is_asked_for_once(rig: Aside) -> None:
    """Two people at once; and not for a letter that is gone."""
    letter = rig.set_aside(1)
    assert [rig.request(letter), rig.request(letter)] == ["done", "requested"]
    assert rig.store.replays.discard(letter.document_id) == "done"
    assert (rig.request(letter), rig.store.replays.read()) == ("gone", [])
    assert rig.store.replays.discard(letter.document_id) == "gone"


def test_of_two_messages_of_one_attempt_only_the_first_starts(rig: Aside) -> None:
    """P8: each start has its number, which is written before the handler begins."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim, replay = rig.start(letter)
    assert (replay.starts, replay.crashes, replay.fencing_token) == (1, 0, claim.fencing_token)
    assert rig.store.replays.start(claim, letter.document_id, 0) is None
    assert rig.store.replays.succeed(claim, letter.document_id)
    assert (rig.found(), rig.store.replays.read(), rig.image.claim) == ([], [], None)
    assert rig.image.committed == 1, "no position moves"


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
    assert (live.crashes, rig.image.single) == (0, 1)
    rig.lapse()
    _, replay = rig.start(letter, starts=1, owner="again")
    assert replay.crashes == 1
    rig.lapse()
    assert rig.claim(2, owner="later").crashes == 1


def test_a_failure_leaves_the_letter_with_error_and_counts(rig: Aside) -> None:
    """And its number is not used again by the next replay."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim, replay = rig.start(letter)
    assert rig.store.replays.fail(claim, replay, "TypeError: worse", "trace", 1)
    (left,) = rig.found()
    assert (left.error, left.traceback, left.attempts, left.replays) == ("TypeError: worse", "trace", 2, 1)
    assert rig.store.replays.read()[0].failed
    assert rig.request(left) == "done", "a person may ask again at once"
    assert [(each.starts, each.failed) for each in rig.store.replays.read()] == [(1, False)]


def test_what_waits_for_its_time_keeps_its_counts(rig: Aside) -> None:
    """Retries count, waiting does not; the partition is free meanwhile, and its own counts are as they were."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim, _ = rig.start(letter)
    replays, id_ = rig.store.replays, letter.document_id
    assert replays.retry_later(claim, id_, "ConnectionError: $x", delay=60.0, not_before=None)
    found = replays.find(id_)
    assert found is not None
    assert (found.retries, found.fencing_token, found.error, 55 < found.due_in <= 60) == (
        1,
        None,
        "ConnectionError: $x",
        True,
    )
    claim, replay = rig.start(letter, starts=1)
    assert (replay.retries, replay.crashes) == (1, 0)
    assert replays.wait(claim, id_, "primary away", delay=0.0, doubtful=True)
    found = replays.find(id_)
    assert found is not None
    assert (found.waits, found.doubts, found.retries) == (1, 1, 1)
    assert (rig.image.retry, rig.image.claim) == (None, None)


def test_a_letter_whose_replay_runs_is_not_discarded_and_one_that_has_lapsed_is(rig: Aside) -> None:
    """A process that wakes up later has no outcome."""
    letter = rig.set_aside(1)
    rig.request(letter)
    claim, _ = rig.start(letter)
    assert rig.store.replays.discard(letter.document_id) == "running"
    rig.lapse()
    assert rig.store.replays.discard(letter.document_id) == "done"
    assert not rig.store.replays.succeed(claim, letter.document_id)
    assert (rig.found(), rig.image.claim) == ([], None)


def test_a_letter_whose_request_was_withdrawn_uses_no_token_a_second_time(rig: Aside) -> None:
    """P3: a start of it may go on somewhere, also where a new layout has ended its claim."""
    letter = rig.set_aside(1)
    rig.request(letter)
    rig.start(letter)
    rig.store.replays.withdraw(rig.store.replays.read(), is_over=True)
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


def test_requests_are_found_by_their_index_among_any_number_of_dead_letters(rig: Aside) -> None:
    """The listener looks for them every second."""
    rig.store.replays.ensure_index()
    letters = [rig.set_aside(number) for number in range(1, 6)]
    rig.request(letters[2])
    rig.store.dead_letters.collection.update_one({"_id": letters[3].document_id}, {"$set": {"replay": "damaged"}})
    database = rig.letters.database
    database.command({"profile": 2})
    found = rig.store.replays.read()
    database.command({"profile": 0})
    assert [each.letter for each in found] == [letters[2].document_id]
    (read,) = database["system.profile"].find({"op": "query", "ns": rig.letters.full_name})
    assert (read["docsExamined"], read["planSummary"][:6]) == (1, "IXSCAN")


@pytest.mark.parametrize("spoiled", [{"state": "halted"}, {"state": "paused"}, {"term": VERSION + 1}])
def test_a_partition_that_stands_or_belongs_to_another_term_replays_nothing(rig: Aside, spoiled: Document) -> None:
    """Nor one in which something runs."""
    letter = rig.set_aside(1)
    rig.claim(2)
    assert rig.claims.take_for_replay(rig.where, letter.document_id, owner="me", term=VERSION) is None
    rig.spoil(claim=None, **spoiled)
    assert rig.claims.take_for_replay(rig.where, letter.document_id, owner="me", term=VERSION) is None


# -- which is next -----------------------------------------------------------------------------------


@pytest.fixture
def term(mongo_client: MongoClient[Document], state_database: str) -> TermRig:
    """Give a term of a subscription with two partitions."""
    return begin_term(mongo_client, state_database, 2)


class Asked:
    """A term, and letters whose replay is asked for."""

    def __init__(self, term: TermRig) -> None:
        (self.subscription,) = term.led(term.take_over(), {})
        self.led: Mapping[str, Subscription] = {self.subscription.name: self.subscription}
        self.replays = term.store.replays
        self.replaying = Replaying(term.wiring)
        self._term = term
        self._now = 0.0

    def ask(
        self, number: int, key: int, partition: int = 0, generation: int | None = None, name: str | None = None
    ) -> str:
        """A letter of a key, in stream order by its number; its id."""
        document = letter_of(number, 5, hash_=key, partition=partition, name=name)
        letters = self._term.store.dead_letters
        letters.collection.insert_one(document)
        (letter,) = letters.find(Selection(ids=[name or token(number)["_data"]]), [SUBSCRIPTION], 0)
        in_force = self.subscription.plan.layout.term
        self.replays.request(
            letter.document_id,
            generation=in_force if generation is None else generation,
            partition=partition,
            hash_=key,
            over_newer=False,
        )
        return letter.document_id

    def next(self) -> dict[int, str]:
        """The letters that are next, by partition."""
        self._now += 10.0
        self.replaying.turn(self.led, self._now)
        replays = {index: each.replay for index, each in self.subscription.partitions.items()}
        return {index: each.letter for index, each in replays.items() if each is not None}

    def change(self, letter: str, **changes: Any) -> None:
        """Change a request as an execution would."""
        changed = {f"replay.{name}": value for name, value in changes.items()}
        self._term.database["dead_letters"].update_one({"_id": letter}, {"$set": changed})


def test_letters_come_in_the_order_of_the_stream_by_partition(term: TermRig) -> None:
    """P2, P12: and one that waits for its retry holds back those of its key only."""
    asked = Asked(term)
    second, first, other = asked.ask(2, key=1), asked.ask(1, key=1), asked.ask(4, key=3, partition=1)
    third = asked.ask(3, key=2)
    assert asked.next() == {0: first, 1: other}
    asked.change(first, notBefore=datetime.now(UTC) + timedelta(hours=1))
    assert asked.next() == {0: third, 1: other}
    asked.change(first, notBefore=None)
    assert asked.next() == {0: first, 1: other}
    asked.replays.discard(first)
    assert asked.next() == {0: second, 1: other}


def test_letters_are_replayed_while_their_index_cannot_be_created(
    term: TermRig, caplog: pytest.LogCaptureFixture
) -> None:
    """P9, P12: the server takes 64 indexes of a collection. It is said once."""
    asked = Asked(term)
    letters = term.database["dead_letters"]
    letters.create_indexes([IndexModel([(f"a{number}", 1)]) for number in range(63)])
    first = asked.ask(1, key=1)
    assert [asked.next() for _ in range(2)] == [{0: first}] * 2
    wait_for(lambda: [*map(attrgetter("event"), caplog.records)] == ["replays_unindexed"])


def test_indexes_that_somebody_has_changed_keep_no_other_from_being_made(term: TermRig) -> None:
    """A name, or keys, that are there with other options."""
    letters = term.database["dead_letters"]
    letters.create_index([("replay.state", 1), ("_id", 1)], name="replay", sparse=True)
    letters.create_index([("at", 1), ("_id", 1)], name="theirs")
    term.store.replays.ensure_index()
    assert {"parked", "key", "theirs"} <= letters.index_information().keys()


def test_an_existing_document_is_replayed_at_its_place(term: TermRig) -> None:
    """P2: its letter is named by its key; it neither overtakes a change of before, nor is it left when that fails."""
    asked = Asked(term)
    document, change = asked.ask(2, key=1, name=f"{LETTER}AB"), asked.ask(1, key=1)
    behind = asked.ask(3, key=1)
    assert asked.next() == {0: change}
    asked.change(change, notBefore=datetime.now(UTC) + timedelta(hours=1))
    assert asked.next() == {}
    asked.change(document, state=REPLAY_FAILED)
    asked.change(change, notBefore=None)
    assert asked.next() == {0: change}
    assert [each.letter for each in asked.replays.read()] == [change]
    assert behind not in asked.next().values()


def test_what_waits_behind_a_failure_of_its_key_is_withdrawn(term: TermRig) -> None:
    """And the failure is forgotten after that; also where a listener has ended in between."""
    asked = Asked(term)
    first, second, third = asked.ask(1, key=1), asked.ask(2, key=1), asked.ask(3, key=2)
    asked.change(first, state=REPLAY_FAILED)
    assert asked.next() == {0: third}
    assert [each.letter for each in asked.replays.read()] == [third]
    asked.ask(4, key=9, generation=77)
    assert asked.next() == {0: third}
    assert [each.letter for each in asked.replays.read()] == [third], "what was asked for under another layout"
    assert second not in asked.next().values()


def test_a_partition_in_which_something_is_out_has_to_wait(term: TermRig) -> None:
    """Changes and letters take turns; the letter that was sent is not sent again before it has ended."""
    asked = Asked(term)
    first = asked.ask(1, key=1)
    asked.next()
    ((partition, dispatch),) = asked.subscription.due(1e9)
    assert (dispatch.run.dead_letter, dispatch.run.starts, dispatch.run.changes) == (first, 0, ())
    partition.note_sent(1e9)
    assert list(asked.subscription.due(1e9)) == []
    assert asked.next() == {}, "it may be this one that is out"
    assert not asked.subscription.has_ended_replay


# -- commands ----------------------------------------------------------------------------------------


@pytest.fixture
def bridge(mongo_url: str, state_database: str, term: TermRig) -> Iterator[Bridge]:
    """Give a bridge whose handler is in the app, and whose partitions are there."""
    term.take_over()
    app = Celery("replays", broker="memory://", set_as_current=False)
    made = Bridge(app, mongo_url, name=BRIDGE, database=state_database, partitions=2, autodiscover=False)

    @made.on_change("shop.orders", name=SUBSCRIPTION)
    def handle(change: object) -> None:
        del change

    app.finalize()
    yield made
    made.client.close()


@pytest.fixture
def small_sorts(mongo_client: MongoClient[Document]) -> Iterator[None]:
    """Have the server sort no more in memory than some keys."""
    name = "internalQueryMaxBlockingSortMemoryUsageBytes"
    before = mongo_client.admin.command({"getParameter": 1, name: 1})[name]
    mongo_client.admin.command({"setParameter": 1, name: SORTED_BYTES})
    yield
    mongo_client.admin.command({"setParameter": 1, name: before})


def test_letters_of_existing_documents_are_listed_at_their_places(bridge: Bridge, term: TermRig) -> None:
    """By handler, then in the order of the stream, also where only the first ones are asked for."""
    for number, name in ((1, None), (2, f"{LETTER}AB"), (3, None), (4, f"{LETTER}AA")):
        term.database["dead_letters"].insert_one(letter_of(number, 5, name=name))

    def found(limit: int, **selection: Any) -> list[object]:
        letters = letter_commands.find(bridge.wiring, Selection(**selection), limit).letters
        return [each.place.seq for each in letters if each.place is not None]

    assert found(0) == found(0, subscription=SUBSCRIPTION) == [1, 2, 3, 4]
    assert found(2) == [1, 2]
    assert found(0, ids=[f"{LETTER}AA", token(3)["_data"]]) == [3, 4]


@pytest.mark.usefixtures("small_sorts")
def test_letters_of_existing_documents_are_put_in_order_without_what_is_large_in_them(
    bridge: Bridge, term: TermRig
) -> None:
    """However many a failed snapshot has left: servers before 6.0 do not sort what they cannot hold in memory."""
    wiring = bridge.wiring
    wiring.store.dead_letters.ensure_indexes()
    long = {"traceback": "x" * SORTED_BYTES}
    term.database["dead_letters"].insert_many(
        [{**letter_of(number, 5, name=f"{LETTER}{9 - number}"), **long} for number in range(5)]
    )
    term.database.command({"profile": 2})
    letters = letter_commands.find(wiring, Selection(), 2, skip=1).letters
    term.database.command({"profile": 0})
    assert [each.place.seq for each in letters if each.place is not None] == [1, 2]
    assert not any(each.get("usedDisk") for each in term.database["system.profile"].find())


def _stored(database: Database[Document], number: int, *, name: str | None = None, **changes: Any) -> Document:
    document = {**letter_of(number, 5, name=name), "at": datetime(2026, 1, number, tzinfo=UTC), **changes}
    database["dead_letters"].insert_one(document)
    return document


def test_the_page_groups_the_newest_dead_letters_and_verdict_and_metrics_do_not_read_them(
    bridge: Bridge, term: TermRig
) -> None:
    """P16: verdict and metrics are as quick with many dead letters as without."""
    for number in range(1, 13):
        _stored(term.database, number, error=f"ValueError: {number % 2}")
    service = HttpService(bridge.wiring.app, [Activity(BRIDGE, [], 15.0)], "0", None)
    listing = {"command.find": "dead_letters", "command.projection.at": 1}
    try:
        term.database.command({"profile": 2})
        for path, reads in (("/readyz", 0), ("/verdict", 0), ("/metrics", 0), ("/status", 1)):
            answer = service.answer(path) or Response(b"")
            assert term.database["system.profile"].count_documents(listing) == reads, path
    finally:
        term.database.command({"profile": 0})
        service.server_close()
    (shown,) = json.loads(answer.body)["bridges"]
    assert [(each["error"], each["count"]) for each in shown["dead_letter_groups"]] == [
        ("ValueError: 0", 6),
        ("ValueError: 1", 6),
    ]
    assert shown["dead_letter_groups"][0]["newest_at"] == "2026-01-12T00:00:00+00:00"


def test_letters_are_found_by_handler_id_key_and_time(bridge: Bridge, term: TermRig) -> None:
    """An id is the beginning of a token; a key is what it is as text, as JSON or as an ObjectId."""
    wiring, oid = bridge.wiring, ObjectId()
    for number, key in enumerate((1, "1", oid, {"a": 1}), 1):
        _stored(term.database, number, change=bson.decode(event(number, key)))

    def found(**selection: Any) -> list[str]:
        letters = letter_commands.find(wiring, Selection(**selection), 0).letters
        return [each.id for each in letters]

    every = [token(number)["_data"] for number in range(1, 5)]
    assert found() == found(subscription=SUBSCRIPTION) == every
    assert found(ids=[every[1], every[3]]) == [every[1], every[3]]
    assert found(keys=keys_of("1")) == every[:2]
    assert found(keys=keys_of(str(oid))) == [every[2]]
    assert found(keys=keys_of('{"a": 1}')) == [every[3]]
    with pytest.raises(CommandRefusedError, match="regular expression"):
        keys_of('{"$regularExpression": {"pattern": ".*", "options": ""}}')
    assert found(since=datetime(2026, 1, 2, tzinfo=UTC), until=datetime(2026, 1, 4, tzinfo=UTC)) == every[1:3]
    with pytest.raises(CommandRefusedError, match="begins the ids of several"):
        found(ids=["82"])
    with pytest.raises(CommandRefusedError, match="no dead letter '99'"):
        found(ids=["99"])
    with pytest.raises(CommandRefusedError, match=f"it has {SUBSCRIPTION}"):
        found(subscription="recrod")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"handler": "gone", "_id": f"{BRIDGE}/gone/{token(1)['_data']}"}, "has no handler in this app"),
        ({"kept": "name"}, "too large to be kept"),
        ({"change": 5}, "is damaged"),
        ({"resumeToken": "x"}, "is damaged"),
        ({"fencingToken": None}, "is damaged"),
        ({"replays": REPLAYS_MAX}, "can only be discarded"),
    ],
)
def test_what_cannot_be_replayed_is_said_and_nothing_is_changed(
    bridge: Bridge, term: TermRig, changes: Document, reason: str
) -> None:
    """One sentence for the letter; others are not kept by it, and all can be shown and discarded."""
    _stored(term.database, 1, **changes)
    _stored(term.database, 2)
    wiring = bridge.wiring
    found = letter_commands.find(wiring, Selection(), 0)
    plan = bridge.operations.replay_dead_letters()
    assert term.store.replays.read() == []
    result = plan.run()
    assert plan.fields["letters"] == result.fields["letters"]
    assert sorted(each["result"] for each in result.fields["letters"]) == ["refused", "requested"]
    (refused,) = result.refused
    assert reason in refused
    for letter in found.letters:
        letter_commands.plain(letter)
        letter_commands.change_of(wiring, letter)
    assert bridge.operations.discard_dead_letters().run().fields["discarded"] == 2


@pytest.mark.parametrize("fill", [bytes, os.urandom], ids=["compressed", "as it is"])
def test_an_event_that_is_too_large_to_be_kept_readable_keeps_its_bytes(rig: Rig, fill: Callable[[int], bytes]) -> None:
    """P1: it names its document, and can be replayed."""
    large = bson.encode({**bson.decode(event(1)), "fullDocument": {"_id": 1, "x": fill(CHANGE_BYTES + (1 << 19))}})
    assert rig.claims.set_aside(rig.claim(), token(1), {**letter_of(1, 1, raw=large), "_id": "shop/record/82"})

    found = rig.store.dead_letters.read("shop/record/82")

    assert found is not None
    assert (found[0].kept, found[1]) == ("bytes", large)
    stored = rig.letters.find_one({}, {"raw": 0})
    assert stored is not None
    assert stored["change"]["documentKey"] == {"_id": 1}
