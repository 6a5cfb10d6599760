"""An outbox in a collection of its own: both or neither with a transaction, order per key, and what stops a key."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery, chord, group
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError, OperationFailure

from mongo_celery import STORED_ID, Event, OutboxCollection, transactional
from mongo_celery.cli.outbox_view import plain_health
from mongo_celery.errors import (
    CommandRefusedError,
    ConfigurationError,
    OutboxRefusedError,
    TransactionError,
    TransactionRequiredError,
)
from mongo_celery.outbox import dispatcher, parcel_relay
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.health import read_health
from mongo_celery.outbox.pending import LONG_AGO, NOBODY, UNCLAIMED
from mongo_celery.outbox.replay import dead_letters, replay
from tests.fixtures.process import wait_for
from tests.integration.outbox_rig import Rig, damage, hold

Document = dict[str, Any]

pytestmark = pytest.mark.needs_mongodb(5, 0)


class ParcelRig(Rig):
    """The rig with outboxes in a collection `outbox`."""

    def __init__(self, database: Database[Document], broker: str, **conf: Any) -> None:
        super().__init__(database, broker, **conf)
        self._made: list[OutboxCollection] = []
        self.run = transactional(database.client).run

    def parcels(self, **options: Any) -> OutboxCollection:
        made = OutboxCollection(
            self.app,
            self.database["outbox"],
            **{"sweep_every": None, "at_once": False, "name": str(len(self._made)), **options},
        )
        self._made.append(made)
        return made

    @property
    def stored(self) -> list[Document]:
        """The parcels, in order."""
        return list(self.database["outbox"].find().sort([("seq", 1), ("_id", 1)]))

    def close(self) -> None:
        for outbox in self._made:
            outbox.backing.close()
        super().close()


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[ParcelRig]:
    made = ParcelRig(database, redis_url)
    yield made
    made.close()
    database.client["mongo_celery"]["outbox_dead_letters"].delete_many({"outbox": {"$regex": f"^{database.name}"}})


def test_what_a_transaction_sends_is_stored_with_it_and_dispatched_after_the_commit(rig: ParcelRig) -> None:
    """Gathered in the body; the parcel has a place in the order that the server has given it; nothing stays."""
    outbox, seats = rig.parcels(), rig.database["seats"]

    @transactional(rig.database.client, outbox=outbox)
    def book(seat: int, *, session: Any) -> str:
        result = rig.add.delay(seat, 1)
        seats.insert_one({"_id": seat}, session=session)
        outbox.add(events=[Event("seat.booked", {"seat": seat})], session=session)
        rig.app.send_task("add", args=(seat, 2))
        assert rig.sent() == []
        return str(result.id)

    id = book(7)  # noqa: A001
    (parcel,) = rig.stored
    assert [entry["name"] for entry in parcel["pendingEvents"]["events"]] == ["add", "seat.booked", "add"]
    assert parcel["pendingEvents"]["count"] == 3
    assert isinstance(parcel["seq"], Timestamp)
    assert parcel["seq"].time > 0
    assert outbox.status().pending == 3
    assert outbox.sweep(older_than=0).dispatched == 3
    messages = rig.drain()
    assert [message.args for message in messages] == [[7, 1], [7, 2]]
    assert messages[0].id == id
    assert rig.stored == []
    assert outbox.status().pending == 0


def test_a_body_that_fails_or_is_repeated_leaves_one_set_of_tasks_or_none(rig: ParcelRig) -> None:
    outbox, seats, attempts = rig.parcels(), rig.database["seats"], list[int]()
    seats.insert_one({"_id": 1, "free": 2})

    @transactional(rig.database.client, outbox=outbox)
    def book(*, session: Any, fails: bool = False) -> None:
        attempts.append(1)
        rig.add.delay(1, len(attempts))
        if len(attempts) == 1:
            with rig.database.client.start_session() as other:
                seats.find_one({"_id": 1}, session=session)
                seats.update_one({"_id": 1}, {"$inc": {"free": -1}}, session=other)
        seats.update_one({"_id": 1}, {"$inc": {"free": -1}}, session=session)
        if fails:
            raise KeyError

    book()
    with pytest.raises(KeyError):
        book(fails=True)
    with pytest.raises(ValueError, match="invalid literal"), transactional(rig.database.client, outbox=outbox):
        int(rig.add.delay(1, 99).id)
    with transactional(rig.database.client, outbox=outbox):
        rig.add.delay(1, 4)

    assert len(attempts) == 3
    assert outbox.sweep(older_than=0).dispatched == 2
    assert rig.sent() == [[1, 2], [1, 4]]


def test_groups_are_gathered_and_a_chord_is_added_as_a_whole(rig: ParcelRig) -> None:
    """A chord asks the result backend when it is sent; in the box it is frozen, and asks when it is dispatched."""
    outbox = rig.parcels()

    def body(session: Any) -> None:
        with outbox.collect(session) as box:
            group(rig.add.s(0, each) for each in range(2)).delay()
            box.add([chord([rig.add.s(1, 1), rig.add.s(2, 2)], rig.total.s())])

    rig.run(body)
    assert [entry["name"] for entry in rig.stored[0]["pendingEvents"]["events"]] == ["add", "add", "celery.chord"]
    outbox.sweep(older_than=0)
    assert [args for args in rig.sent() if isinstance(args[0], int)] == [[0, 0], [0, 1], [1, 1], [2, 2]]


def test_what_can_be_gone_through_once_only_is_stored_as_a_whole(rig: ParcelRig) -> None:
    """A generator, given to the outbox or to a box."""
    outbox = rig.parcels()
    outbox.add((rig.add.s(1, each) for each in range(2)), (Event("told", each) for each in range(2)))  # type: ignore[arg-type]
    rig.run(lambda session: _add_generator(rig, outbox, session))
    assert [parcel["pendingEvents"]["count"] for parcel in rig.stored] == [4, 2]


def _add_generator(rig: ParcelRig, outbox: OutboxCollection, session: Any) -> None:
    with outbox.collect(session) as box:
        box.add(rig.add.s(2, each) for each in range(2))  # type: ignore[arg-type]


def test_the_order_of_a_key_is_that_of_transactions_that_follow_each_other(rig: ParcelRig) -> None:
    """One parcel for each transaction and key; other keys, and what has none, do not wait for each other."""
    outbox = rig.parcels()
    for number in range(3):

        def body(session: Any, number: int = number) -> None:
            with outbox.collect(session, key="a") as box:
                rig.add.delay(1, number)
                box.add([rig.add.s(2, number)], key=2)
                with outbox.collect(session, key="c"):
                    rig.add.delay(3, number)
                rig.add.delay(1, number + 10)
            outbox.add([rig.add.s(4, number)], session=session)

        rig.run(body)

    assert len(rig.stored) == 12
    assert sorted({str(parcel["key"]) for parcel in rig.stored}) == ["2", "None", "a", "c"]
    assert outbox.sweep(older_than=0).dispatched == 15
    sent = rig.sent()
    assert [n for key, n in sent if key == 1] == [0, 10, 1, 11, 2, 12]
    assert [n for key, n in sent if key == 2] == [0, 1, 2]
    assert [n for key, n in sent if key == 3] == [0, 1, 2]
    assert sorted(n for key, n in sent if key == 4) == [0, 1, 2]


def test_transactions_that_write_a_document_in_common_keep_their_order_whenever_they_send(rig: ParcelRig) -> None:
    """Each adds to one document and sends the number that it has found; all at once, repeated by conflicts."""
    outbox, counters = rig.parcels(), rig.database["counters"]
    counters.insert_one({"_id": 1, "n": 0})

    def body(session: Any) -> None:
        counter: Any = counters.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        outbox.add([rig.add.s(1, counter["n"])], key="k", session=session)

    def early(session: Any) -> None:
        """The parcel first, so that its place is given before the conflict is met."""
        (n,) = (counter["n"] for counter in counters.find({"_id": 1}, session=session))
        outbox.add([rig.add.s(1, n)], key="k", session=session)
        counters.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

    def many(body: Any) -> None:
        for _ in range(10):
            transactional(rig.database.client).run(body)

    threads = [threading.Thread(target=many, args=(each,)) for each in (body, early, body, early)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outbox.sweep(older_than=0)
    assert [n for _, n in rig.sent()] == list(range(40))


def test_serialize_makes_transactions_of_a_key_follow_each_other(rig: ParcelRig) -> None:
    """Two at once that have nothing else in common: the second fails as after a conflict; other keys are free."""
    outbox = rig.parcels()
    outbox.sweep()
    client = rig.database.client
    with client.start_session() as first, client.start_session() as second:
        first.start_transaction()
        second.start_transaction()
        rig.database["seats"].find_one(session=first)
        rig.database["seats"].find_one(session=second)
        outbox.add([rig.add.s(1, 1)], key="a", serialize=True, session=first)
        outbox.add([rig.add.s(2, 1)], key="b", serialize=True, session=second)
        with pytest.raises(OperationFailure) as raised:
            outbox.add([rig.add.s(1, 2)], key="a", serialize=True, session=second)
        assert raised.value.has_error_label("TransientTransactionError")
        first.commit_transaction()
    assert [parcel["key"] for parcel in rig.stored] == ["a"]
    assert rig.database["outbox_keys"].count_documents({}) == 1
    with pytest.raises(OutboxRefusedError, match="key="):
        outbox.add([rig.add.s(1, 1)], serialize=True)


def test_a_parcel_with_an_earlier_head_waits_for_it(rig: ParcelRig) -> None:
    """Whoever is asked to deliver the second delivers the first before; one that another relay holds stops both."""
    outbox = rig.parcels(claim_ttl=600)
    for number in range(3):
        outbox.add([rig.add.s(1, number)], key="k")
    first, second, _ = (parcel["_id"] for parcel in rig.stored)
    relay = outbox.backing.relay

    hold(rig.database["outbox"], first)
    assert relay.deliver(second).dispatched == 0
    assert outbox.sweep(older_than=0).dispatched == 0
    hold(rig.database["outbox"], first, -1)
    assert relay.deliver(second).dispatched == 3
    assert [n for _, n in rig.sent()] == [0, 1, 2]


# -- the transaction ---------------------------------------------------------------------------------


def test_what_was_committed_is_dispatched_by_the_same_process(rig: ParcelRig) -> None:
    """Under `transactional`, in a transaction of the driver's own, which nobody tells of, and without one."""
    outbox = rig.parcels(at_once=True)

    @transactional(rig.database.client, outbox=outbox)
    def book(*, session: Any) -> None:
        del session
        rig.add.delay(1, 1)
        outbox.sweep(older_than=0)
        assert rig.sent() == []

    book()
    wait_for(lambda: rig.sent() == [[1, 1]])
    with rig.database.client.start_session() as session:
        session.with_transaction(lambda session: outbox.add([rig.add.s(2, 2)], session=session))
    wait_for(lambda: rig.sent() == [[2, 2]])
    rig.parcels(at_once="wait").add([rig.add.s(3, 3)], key="k")
    assert rig.sent() == [[3, 3]]
    wait_for(lambda: not rig.stored)


def test_a_block_needs_a_transaction_and_ends_before_it(rig: ParcelRig) -> None:
    outbox = rig.parcels()
    with rig.database.client.start_session() as session:
        with pytest.raises(TransactionRequiredError, match="in progress"), outbox.collect(session):
            pass

        def ended(end: Any) -> None:
            session.start_transaction()
            with outbox.collect(session):
                rig.add.delay(1, 1)
                end()

        for end in (session.commit_transaction, session.abort_transaction):
            with pytest.raises(OutboxRefusedError, match="ended inside"):
                ended(end)
        session.start_transaction()
        with outbox.collect(session):
            session.abort_transaction()
    assert rig.stored == []
    with pytest.raises(ConfigurationError, match="OutboxCollection"):
        transactional(rig.database.client, outbox=rig.outbox())  # type: ignore[arg-type]


def test_functions_that_join_a_transaction_gather_into_its_box(rig: ParcelRig) -> None:
    outbox = rig.parcels()
    decorated = transactional(rig.database.client, outbox=outbox)

    @decorated
    def inner(*, session: Any) -> None:
        del session
        rig.add.delay(1, 2)

    @decorated
    def outer(*, session: Any) -> None:
        rig.add.delay(1, 1)
        inner(session=session)
        rig.add.delay(1, 3)

    outer()
    assert len(rig.stored) == 1
    outbox.sweep(older_than=0)
    assert rig.sent() == [[1, 1], [1, 2], [1, 3]]


@pytest.mark.parametrize("outer_has_a_box", [False, True])
def test_what_was_sent_before_an_error_that_is_caught_has_the_fate_of_the_writes(
    rig: ParcelRig, outer_has_a_box: bool
) -> None:
    """A function joins a transaction and fails: it dooms one of transactional's; a driver's own may be committed."""
    outbox, seats = rig.parcels(), rig.database["seats"]

    @transactional(rig.database.client, outbox=outbox)
    def leave(seat: int, *, session: Any) -> None:
        seats.insert_one({"_id": seat}, session=session)
        rig.add.delay(1, seat)
        raise ValueError

    def outer(seat: int, session: Any, end: type[Exception] | None = None) -> None:
        with contextlib.suppress(ValueError):
            leave(seat, session=session)
        if end is not None:
            raise end

    run = transactional(rig.database.client, outbox=outbox if outer_has_a_box else None).run
    with pytest.raises(TransactionError, match="ValueError"):
        run(lambda session: outer(1, session))
    with pytest.raises(KeyError):
        run(lambda session: outer(2, session, KeyError))
    with rig.database.client.start_session() as session:
        session.with_transaction(lambda session: outer(3, session))
    with pytest.raises(ValueError), transactional(rig.database.client) as session:  # noqa: PT011
        leave(4, session=session)
    assert [seat["_id"] for seat in seats.find()] == [3]
    outbox.sweep(older_than=0)
    assert rig.sent() == [[1, 3]]


def test_an_error_that_ends_a_transaction_passes_a_box_unchanged(rig: ParcelRig) -> None:
    """What the server has aborted takes nothing; what cannot be stored is said instead of the error."""
    outbox, seats = rig.parcels(), rig.database["seats"]
    seats.insert_one({"_id": 1})

    def body(session: Any, value: Any) -> None:
        with outbox.collect(session):
            rig.add.delay(1, value)
            seats.insert_one({"_id": len(value)}, session=session)
            raise ValueError

    with pytest.raises(DuplicateKeyError):
        rig.run(lambda session: body(session, "x"))
    with pytest.raises(OutboxRefusedError, match="16 MB"):
        rig.run(lambda session: body(session, "x" * 17_000_000))
    assert rig.stored == []


@pytest.mark.parametrize(
    ("tasks", "key", "sentence"),
    [
        ("add", None, "lists"),
        ([object()], None, "no Celery signature"),
        ([lambda stored: stored], None, "the id itself"),
        ([], [1], "must be text"),
        ([], True, "must be text"),
        ([], "", "1 to 1024 bytes"),
        ([], "\ud800", "1 to 1024 bytes"),
        ([], "x" * 1025, "1 to 1024 bytes"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_one_sentence(rig: ParcelRig, tasks: Any, key: Any, sentence: str) -> None:
    with pytest.raises(OutboxRefusedError, match=sentence):
        rig.parcels().add(tasks, key=key)
    assert rig.stored == []


def test_stored_ids_and_documents_beyond_the_limit_are_refused(rig: ParcelRig) -> None:
    """Large transactions have several parcels, in their order; one entry has to fit into a document."""
    outbox = rig.parcels()
    for wrong in ([rig.add.s(STORED_ID, 1)], [rig.add.s(1, "x" * 17_000_000)]):
        with pytest.raises(OutboxRefusedError, match=r"the id itself|16 MB"):
            outbox.add(wrong)
    with pytest.raises(OutboxRefusedError, match="the id itself"):
        outbox.add(events=[Event("seat.booked", {"seat": STORED_ID})])
    assert rig.stored == []
    outbox.add([rig.add.s(1, "x" * 3_000_000) for _ in range(3)], key="k")
    outbox.add([rig.add.s(2, each) for each in range(700)], key="k")
    assert len(rig.stored) == 5
    dispatched = [outbox.sweep(older_than=0).dispatched]
    while rig.stored and dispatched[-1]:  # a turn ends by time
        dispatched.append(outbox.sweep(older_than=0).dispatched)
    assert sum(dispatched) == 703
    assert [n for key, n in rig.sent() if key == 2] == list(range(700))


# -- delivery ----------------------------------------------------------------------------------------


def test_a_key_with_many_parcels_keeps_no_other_waiting(rig: ParcelRig) -> None:
    """One turn for a parcel behind a head that somebody holds, and for the first of another key."""
    outbox = rig.parcels(claim_ttl=600)
    for number in range(101):
        outbox.add([rig.add.s(1, number)], key="a")
    outbox.add([rig.add.s(2, 0)], key="b")
    first, *_, last, other = (parcel["_id"] for parcel in rig.stored)
    hold(rig.database["outbox"], first)
    assert outbox.backing.relay.deliver_all([last, other]).dispatched == 1
    assert rig.sent() == [[2, 0]]


def test_a_look_reads_what_is_due_and_no_parcel_that_is_held_back(rig: ParcelRig) -> None:
    """With keys and without: 60 of each are there, and 5 of each are due."""
    outbox, parcels = rig.parcels(), rig.database["outbox"]
    for number in range(60):
        outbox.add([rig.add.s(1, number)])
        outbox.add([rig.add.s(2, number)], key=number)
    for each in parcels.find({}, {"_id": 1}).limit(110):
        hold(parcels, each["_id"], owner=NOBODY)
    rig.database.command({"profile": 2})
    assert len(outbox.backing.due(0.0, 100)) == 10
    rig.database.command({"profile": 0})
    looks = list(rig.database["system.profile"].find({"ns": parcels.full_name}))
    assert sum(each["docsExamined"] for each in looks) <= 30
    assert outbox.sweep(older_than=0).dispatched == 10


def test_relays_at_the_same_time_send_each_entry_once_and_in_order(rig: ParcelRig) -> None:
    """Four relays on five keys with twenty parcels each, and forty without a key."""
    outbox = rig.parcels()
    for step in range(20):
        for key in range(5):
            outbox.add([rig.add.s(key, step)], key=key)
        outbox.add([rig.add.s(9, step)])
        outbox.add([rig.add.s(9, step + 20)])
    relays = [rig.parcels() for _ in range(4)]
    threads = [threading.Thread(target=each.sweep, kwargs={"older_than": 0}) for each in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outbox.sweep(older_than=0)

    sent = rig.sent()
    assert len(sent) == 140
    for key in range(5):
        assert [step for each, step in sent if each == key] == list(range(20))
    assert sorted(step for each, step in sent if each == 9) == list(range(40))
    assert rig.stored == []


def test_relays_beside_the_writer_keep_the_order_of_transactions_that_follow_each_other(rig: ParcelRig) -> None:
    """Nothing in common but the key: only the commits say what comes first, and relays look all the time."""
    writer, relays, ended = rig.parcels(), [rig.parcels() for _ in range(3)], threading.Event()

    def sweep(outbox: OutboxCollection) -> None:
        while not ended.is_set():
            outbox.sweep(older_than=0)

    threads = [threading.Thread(target=sweep, args=(each,)) for each in relays]
    for thread in threads:
        thread.start()
    for step in range(30):
        for key in range(3):

            def body(session: Any, key: int = key, step: int = step) -> None:
                writer.add([rig.add.s(key, step)], key=key, session=session)

            rig.run(body)
    wait_for(lambda: not rig.stored)
    ended.set()
    for thread in threads:
        thread.join()

    sent = rig.sent()
    for key in range(3):
        assert list(dict.fromkeys(step for each, step in sent if each == key)) == list(range(30))


def test_a_key_with_a_long_backlog_gives_way_and_goes_on(rig: ParcelRig) -> None:
    """It has its share of a sweep's turn; the dispatcher comes back to it by itself."""
    outbox = rig.parcels()
    outbox.add([rig.add.s(1, 0)], key="long")
    (model,) = rig.stored
    later = [{**model, "_id": each, "seq": Timestamp(2**32 - 1, each + 1)} for each in range(1100)]
    rig.database["outbox"].insert_many(later)

    delivery = outbox.sweep(older_than=0)
    assert 0 < delivery.dispatched <= 500  # a turn ends by time, too
    assert delivery.left
    eager = rig.parcels(at_once=True)
    eager.add([rig.add.s(2, 0)], key="short")
    eager.add([rig.add.s(1, 1)], key="long")
    wait_for(lambda: not rig.stored)
    assert len(rig.sent()) == 1103


def test_a_relay_that_sleeps_past_its_claim_repeats_but_never_overtakes(rig: ParcelRig) -> None:
    """Paused before its first publish; another delivers all and more; what it has read comes late, again."""
    writer, sleeper = rig.parcels(), rig.parcels(claim_ttl=3.0)
    for step in range(3):
        writer.add([rig.add.s(1, step)], key="k")
    asleep, wake = threading.Event(), threading.Event()
    publish = sleeper.publisher.publish

    def slow(*given: Any) -> None:
        asleep.set()
        assert wake.wait(60)
        publish(*given)

    sleeper.publisher.publish = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=sleeper.sweep, kwargs={"older_than": 0})
    thread.start()
    assert asleep.wait(60)
    wait_for(lambda: writer.sweep(older_than=0).dispatched == 3)
    writer.add([rig.add.s(1, 3)], key="k")
    assert writer.sweep(older_than=0).dispatched == 1
    wake.set()
    thread.join()

    steps = [step for _, step in rig.sent()]
    assert steps == [0, 1, 2, 3, 0]
    assert rig.stored == []


def test_an_entry_with_a_fault_of_its_own_stops_its_key_only(rig: ParcelRig) -> None:
    """In the middle of a parcel behind the head: what stood before it is gone, it alone is counted, others go on."""
    outbox = rig.parcels()
    outbox.add([rig.add.s(1, 0)], key="k")
    outbox.add([rig.add.s(1, 1), rig.add.s(1, 2), rig.add.s(1, 3)], key="k")
    outbox.add([rig.add.s(1, 4)], key="k")
    outbox.add([rig.add.s(2, 0)], key="other")
    spoil(outbox, entry=2)

    delivery = outbox.sweep(older_than=0)
    assert delivery.dispatched == 3
    assert delivery.error is not None
    assert sorted(rig.sent()) == [[1, 0], [1, 1], [2, 0]]
    first, _ = (parcel["pendingEvents"] for parcel in rig.stored)
    assert [entry["attempts"] for entry in first["events"]] == [1, 0]
    assert first["count"] == 2
    assert outbox.status().failing == 1
    assert outbox.sweep(older_than=0).dispatched == 0
    rig.database["outbox"].update_many({}, {"$set": {"pendingEvents.claim": UNCLAIMED}})
    mend(outbox)
    assert outbox.sweep(older_than=0).dispatched == 3
    assert rig.sent() == [[1, 2], [1, 3], [1, 4]]


def test_a_dead_letter_lets_its_key_go_on_and_is_put_back_under_it(rig: ParcelRig) -> None:
    outbox = rig.parcels(failure_policy="dead_letter")
    for number in range(3):
        outbox.add([rig.add.s(1, number)], key="k")
    spoil(outbox, entry=1)
    ripe = {"pendingEvents.events.0.attempts": 99, "pendingEvents.events.0.at": LONG_AGO}
    rig.database["outbox"].update_many({"pendingEvents.events.contentType": "nonsense"}, {"$set": ripe})

    delivery = outbox.sweep(older_than=0)
    assert (delivery.dispatched, delivery.dead) == (2, 1)
    assert rig.sent() == [[1, 0], [1, 2]]
    (letter,) = dead_letters(outbox, 0)
    assert letter.document == "k"
    stored = Entry.from_document(outbox.dead_letters.get(letter.id)["entry"])  # type: ignore[index]
    sound = outbox.backing.signer.sign(replace(stored, content_type="application/json"))
    rig.database.client["mongo_celery"]["outbox_dead_letters"].update_one(
        {"_id": {"$regex": letter.id}}, {"$set": {"entry": sound.to_document()}}
    )
    assert replay(outbox, letter.id).result == "pending"
    (parcel,) = rig.stored
    assert (parcel["key"], parcel["pendingEvents"]["events"][0]["attempts"]) == ("k", 0)
    assert isinstance(parcel["seq"], Timestamp)
    assert outbox.sweep(older_than=0).dispatched == 1
    assert rig.sent() == [[1, 1]]
    with pytest.raises(CommandRefusedError, match="no dead letter"):
        replay(outbox, letter.id)


def test_keys_that_stand_keep_no_other_from_its_turn(rig: ParcelRig) -> None:
    """More parcels behind one stuck head than a sweep looks through at once, and keys on both sides of it."""
    outbox = rig.parcels()
    for number in range(2):
        outbox.add([rig.add.s(1, number)], key=f"a{number}")
    outbox.add([rig.add.s(2, 0)], key="m")
    (model,) = (parcel for parcel in rig.stored if parcel["key"] == "m")
    rig.database["outbox"].insert_many(
        {**model, "_id": each, "seq": Timestamp(2**32 - 1, each + 1)} for each in range(1500)
    )
    hold(rig.database["outbox"], model["_id"], owner=NOBODY)
    for number in range(2):
        outbox.add([rig.add.s(3, number)], key=f"z{number}")

    assert outbox.sweep(older_than=0, limit=1).dispatched == 1
    assert outbox.sweep(older_than=0, limit=2).dispatched == 2
    assert outbox.sweep(older_than=0).dispatched == 1
    assert sorted(rig.sent()) == [[1, 0], [1, 1], [3, 0], [3, 1]]


def test_a_broker_that_is_away_costs_nobody_anything(rig: ParcelRig) -> None:
    """Neither the writer nor the entry: it waits, without a claim, and is sent when the broker is back."""
    outbox = rig.parcels(at_once=True)
    url = rig.app.conf.broker_url
    rig.app.conf.update(broker_url="redis://127.0.0.1:9/0")
    outbox.add([rig.add.s(1, 1)], key="k")
    wait_for(lambda: outbox.status().dispatcher.broker_down)
    outbox.add([rig.add.s(1, 2)], key="k")
    assert [parcel["pendingEvents"]["events"][0]["attempts"] for parcel in rig.stored] == [0, 0]
    outbox.backing.close()
    rig.app.conf.update(broker_url=url)
    wait_for(lambda: outbox.sweep(older_than=0).dispatched == 2)
    assert rig.sent() == [[1, 1], [1, 2]]


def test_any_id_of_a_parcel_will_do(rig: ParcelRig) -> None:
    """Somebody has restored some with names of his own."""
    outbox = rig.parcels()
    for number, key in enumerate((None, None, "k", "k")):
        outbox.add([rig.add.s(1, number)], key=key)
    stored = rig.stored
    rig.database["outbox"].delete_many({})
    rig.database["outbox"].insert_many({**parcel, "_id": {"n": number}} for number, parcel in enumerate(stored))
    assert outbox.sweep(older_than=0).dispatched == 4
    assert [n for _, n in rig.sent()] == [0, 1, 2, 3]


@pytest.mark.parametrize("written", [None, 5, [1], {"count": 1}, {"count": 1, "events": []}, {"count": 1, "events": 7}])
def test_what_somebody_else_has_written_over_a_head_stops_nobody(rig: ParcelRig, written: Any) -> None:
    """It is set aside, and its key goes on."""
    outbox = rig.parcels()
    for number in range(2):
        outbox.add([rig.add.s(1, number)], key="k")
    rig.database["outbox"].update_one({"_id": rig.stored[0]["_id"]}, {"$set": {"pendingEvents": written}})

    outbox.sweep(older_than=0)
    assert rig.sent() == [[1, 1]]
    assert rig.stored == []
    assert outbox.dead_letters.count() == 1


def spoil(outbox: OutboxCollection, *, entry: int) -> None:
    """Have the entry that sends (1, entry) stored in a way that nobody can read."""
    damage(outbox, *place_of(outbox, "argsrepr", rf"\b1, {entry}\b"), content_type="nonsense")


def mend(outbox: OutboxCollection) -> None:
    """Take the damage back."""
    damage(outbox, *place_of(outbox, "contentType", "nonsense"), content_type="application/json")


def place_of(outbox: OutboxCollection, field: str, pattern: str) -> tuple[Document, int]:
    """Which parcel has an entry in which a field matches, and where in it that is."""
    (found,) = (
        ({"_id": parcel["_id"]}, place)
        for parcel in outbox.collection.find()
        for place, entry in enumerate(parcel["pendingEvents"]["events"])
        if re.search(pattern, entry[field])
    )
    return found


def test_an_entry_of_another_app_stops_its_key_and_is_told(rig: ParcelRig) -> None:
    """Passing over it would send what is behind it first; an app that delivers for the other goes on."""
    other = Celery("other", broker=rig.app.conf.broker_url, set_as_current=False)
    theirs = OutboxCollection(other, rig.database["outbox"], sweep_every=None, at_once=False, foreign_tasks=True)
    ours = rig.parcels()
    ours.add([rig.add.s(1, 0)], key="k")
    theirs.add([other.signature("add", (1, 1))], key="k")
    ours.add([rig.add.s(1, 2)], key="k")
    ours.add([rig.add.s(2, 0)], key="other")

    ours.sweep(older_than=0)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    assert ours.status().other_apps == 1
    assert rig.parcels(delivers=("other",)).sweep(older_than=0).dispatched == 2
    assert rig.sent() == [[1, 1], [1, 2]]
    theirs.backing.close()


def test_commands_see_it_as_any_outbox(rig: ParcelRig) -> None:
    outbox = rig.parcels(name="leaving")
    outbox.add([rig.add.s(1, 0), rig.add.s(1, 1)], key="k")

    ((health,), _) = read_health(rig.app, [outbox])
    plain = plain_health(health)
    assert (plain["outbox"], plain["documents"], plain["pending"], plain["indexed"]) == ("leaving", 1, 2, True)
    assert plain["broker"]["answers"]
    rig.database["outbox"].drop_index(outbox.backing.index_name)
    ((health,), _) = read_health(rig.app, [outbox])
    assert any("index parcels is missing" in sentence for sentence in health.advice())


def test_each_index_is_made_where_none_is_like_it(rig: ParcelRig) -> None:
    """One that somebody has made under another name is as good; the one of the keys does not depend on it."""
    rig.database["outbox"].create_index([("key", 1), ("seq", 1), ("_id", 1)], name="made by hand")
    outbox = rig.parcels()
    outbox.sweep()
    assert set(rig.database["outbox"].index_information()) == {"_id_", "due", "made by hand"}
    expiry = rig.database["outbox_keys"].index_information()["expiry"]
    assert expiry["expireAfterSeconds"] == 86_400
    assert expiry["partialFilterExpression"] == {"transactions": {"$exists": True}}, "others' documents stay"
    assert outbox.backing.is_indexed()


def test_what_was_published_is_removed_while_others_have_their_turn(
    rig: ParcelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first of a key of which more is still to come: until then it keeps other relays from what follows."""
    monkeypatch.setattr(parcel_relay, "SETTLE_SECONDS", 0)
    outbox = rig.parcels()
    for number in range(2):
        outbox.add([rig.add.s(9, number)])
    for key, number in (("a", 0), ("b", 0), ("a", 1), ("a", 2)):
        outbox.add([rig.add.s(1, number)], key=key)
    left: list[list[Any]] = []
    publish = outbox.publisher.publish

    def noted(*given: Any) -> None:
        left.append([parcel["key"] for parcel in rig.stored])
        publish(*given)

    outbox.publisher.publish = noted  # type: ignore[method-assign]
    assert outbox.sweep(older_than=0).dispatched == 6
    assert left == [
        [None, None, "a", "b", "a", "a"],
        [None, "a", "b", "a", "a"],
        ["a", "b", "a", "a"],
        ["a", "b", "a", "a"],
        ["a", "a", "a"],
        ["a", "a"],
    ]
    assert rig.stored == []


def test_a_forked_child_collects_and_delivers_for_itself(rig: ParcelRig, mongo_url: str) -> None:
    """Prefork workers make their clients after the fork; what the parent has queued is the parent's."""
    made: dict[int, Any] = {}

    def collection() -> Any:
        return made.setdefault(os.getpid(), MongoClient(mongo_url))[rig.database.name]["outbox"]

    outbox = OutboxCollection(rig.app, collection, name="forked", sweep_every=None)
    outbox.add([rig.add.s(1, 1)], key="k")
    wait_for(lambda: rig.sent() == [[1, 1]])

    child = multiprocessing.get_context("fork").Process(target=outbox.add, args=([rig.add.s(2, 2)],))
    child.start()
    child.join()
    assert child.exitcode == 0
    wait_for(lambda: rig.sent() == [[2, 2]])
    outbox.backing.close()
    made[os.getpid()].close()


def test_looks_go_on_until_nothing_waits(rig: ParcelRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage: the sweep need not deliver what the dispatcher can."""
    monkeypatch.setattr(dispatcher, "_LOOK", 2)
    elsewhere, outbox = rig.parcels(), rig.parcels(at_once=True)
    for number in range(9):
        elsewhere.add([rig.add.s(number, 0)])
    outbox.backing.dispatcher.hint()
    wait_for(lambda: not rig.stored)
    assert sorted(rig.sent()) == [[number, 0] for number in range(9)]


def test_what_this_process_cannot_send_is_not_looked_at_again_for_a_while(rig: ParcelRig) -> None:
    """With a key and without one; what stands behind it under its key waits for a process that can send it."""
    outbox, unknown = rig.parcels(at_once=True), rig.app.signature("shop.new", args=(1, 1))
    outbox.add([unknown])
    outbox.add([unknown], key="k")
    outbox.add([rig.add.s(1, 1)], key="k")
    here = outbox.backing.dispatcher
    wait_for(lambda: len(here._refused) == 2)
    refused = [each for _, each in here._refused.values()]
    assert len(outbox.backing.due(0.0, 100)) == 2
    assert outbox.backing.due(0.0, 100, passing_over=refused) == []
    outbox.add([rig.add.s(2, 2)])
    wait_for(lambda: len(rig.stored) == 3)
    assert rig.sent() == [[2, 2]]


def test_parcels_that_cannot_be_sent_keep_no_others_waiting(rig: ParcelRig) -> None:
    """With a key and without one they have their turn one after the other, and neither kind takes all places."""
    outbox, unknown = rig.parcels(at_once=False), rig.app.signature("shop.new", args=(1, 1))
    for _ in range(5):
        outbox.add([unknown])
    outbox.add([unknown], key="k")
    single = [each["_id"] for each in rig.database["outbox"].find({"key": None}).sort("seq")]
    keyed = rig.database["outbox"].find_one({"key": "k"})
    assert keyed is not None
    assert len(outbox.backing.due(0.0, 100)) == 6
    assert outbox.backing.due(0.0, 4) == [*single[:3], keyed["_id"]]
    outbox.sweep(older_than=0, limit=4)  # they are held back
    assert outbox.backing.due(0.0, 4) == single[3:]
