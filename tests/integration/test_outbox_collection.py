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
from bson import ObjectId
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
from mongo_celery.outbox import dispatcher
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.health import read_health
from mongo_celery.outbox.pending import LONG_AGO, NOBODY, UNCLAIMED
from mongo_celery.outbox.replay import dead_letters, replay
from tests.fixtures.process import wait_for
from tests.integration.outbox_rig import Rig, damage, hold

Document = dict[str, Any]


class CollectionRig(Rig):
    """The rig with outboxes in a collection `outbox`."""

    def __init__(self, database: Database[Document], broker: str, **conf: Any) -> None:
        super().__init__(database, broker, **conf)
        self._made: list[OutboxCollection] = []
        self.run = transactional(database.client).run

    def messages(self, **options: Any) -> OutboxCollection:
        made = OutboxCollection(
            self.app,
            self.database["outbox"],
            **{"sweep_every": None, "at_once": False, "name": str(len(self._made)), **options},
        )
        self._made.append(made)
        return made

    @property
    def stored(self) -> list[Document]:
        """The documents: those of keys first."""
        return list(self.database["outbox"].find().sort("_id", 1))

    def close(self) -> None:
        for outbox in self._made:
            outbox.backing.close()
        super().close()


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[CollectionRig]:
    made = CollectionRig(database, redis_url)
    yield made
    made.close()
    database.client["mongo_celery"]["outbox_dead_letters"].delete_many({"outbox": {"$regex": f"^{database.name}"}})


def test_what_a_transaction_sends_is_stored_with_it_and_dispatched_after_the_commit(rig: CollectionRig) -> None:
    """Gathered in the body, in one document; nothing stays."""
    outbox, seats = rig.messages(), rig.database["seats"]

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
    assert isinstance(parcel["_id"], ObjectId)
    assert outbox.status().pending == 3
    assert outbox.sweep(older_than=0).dispatched == 3
    messages = rig.drain()
    assert [message.args for message in messages] == [[7, 1], [7, 2]]
    assert messages[0].id == id
    assert rig.stored == []
    assert outbox.status().pending == 0


def test_a_body_that_fails_or_is_repeated_leaves_one_set_of_tasks_or_none(rig: CollectionRig) -> None:
    outbox, seats, attempts = rig.messages(), rig.database["seats"], list[int]()
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


def test_groups_are_gathered_and_a_chord_is_refused(rig: CollectionRig) -> None:
    """A chord asks the result backend when it is sent: a task has to start it."""
    outbox = rig.messages()

    def body(session: Any) -> None:
        with outbox.collect(session) as box:
            group(rig.add.s(0, each) for each in range(2)).delay()
            box.add([group(rig.add.s(1, 1), rig.add.s(2, 2))])
            with pytest.raises(OutboxRefusedError, match="start the chord"):
                box.add([chord([rig.add.s(1, 1), rig.add.s(2, 2)], rig.total.s())])

    rig.run(body)
    assert [entry["name"] for entry in rig.stored[0]["pendingEvents"]["events"]] == ["add"] * 4
    outbox.sweep(older_than=0)
    assert rig.sent() == [[0, 0], [0, 1], [1, 1], [2, 2]]


def test_what_can_be_gone_through_once_only_is_stored_as_a_whole(rig: CollectionRig) -> None:
    """A generator, given to the outbox or to a box."""
    outbox = rig.messages()
    outbox.add((rig.add.s(1, each) for each in range(2)), (Event("told", each) for each in range(2)))  # type: ignore[arg-type]
    rig.run(lambda session: _add_generator(rig, outbox, session))
    assert sorted(parcel["pendingEvents"]["count"] for parcel in rig.stored) == [2, 4]


def _add_generator(rig: CollectionRig, outbox: OutboxCollection, session: Any) -> None:
    with outbox.collect(session) as box:
        box.add(rig.add.s(2, each) for each in range(2))  # type: ignore[arg-type]


def test_the_order_of_a_key_is_that_of_transactions_that_follow_each_other(rig: CollectionRig) -> None:
    """One document for each key, and for each transaction without one."""
    outbox = rig.messages()
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

    assert [str(each["_id"]) for each in rig.stored if isinstance(each["_id"], str)] == ["2", "a", "c"]
    assert len(rig.stored) == 6
    assert outbox.sweep(older_than=0).dispatched == 15
    sent = rig.sent()
    assert [n for key, n in sent if key == 1] == [0, 10, 1, 11, 2, 12]
    assert [n for key, n in sent if key == 2] == [0, 1, 2]
    assert [n for key, n in sent if key == 3] == [0, 1, 2]
    assert sorted(n for key, n in sent if key == 4) == [0, 1, 2]


def test_transactions_that_write_a_document_in_common_keep_their_order_whenever_they_send(rig: CollectionRig) -> None:
    """Each adds to one document and sends the number that it has found; all at once, repeated by conflicts."""
    outbox, counters = rig.messages(), rig.database["counters"]
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


def test_transactions_of_a_key_follow_each_other(rig: CollectionRig) -> None:
    """Two at once that have nothing else in common: the second fails as after a conflict; other keys are free."""
    outbox = rig.messages()
    outbox.sweep()
    client = rig.database.client
    with client.start_session() as first, client.start_session() as second:
        first.start_transaction()
        second.start_transaction()
        rig.database["seats"].find_one(session=first)
        rig.database["seats"].find_one(session=second)
        outbox.add([rig.add.s(1, 1)], key="a", session=first)
        outbox.add([rig.add.s(2, 1)], key="b", session=second)
        with pytest.raises(OperationFailure) as raised:
            outbox.add([rig.add.s(1, 2)], key="a", session=second)
        assert raised.value.has_error_label("TransientTransactionError")
        first.commit_transaction()
    assert [each["_id"] for each in rig.stored] == ["a"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_key_that_a_later_commit_has_written_or_removed_repeats_the_transaction(
    rig: CollectionRig, is_there: bool
) -> None:
    """Its snapshot knows nothing of that: no duplicate key, and no entry in a document that is gone."""
    outbox, attempts = rig.messages(), list[int]()
    outbox.sweep()
    rig.database["seats"].insert_one({"_id": 1})
    if is_there:
        outbox.add([rig.add.s(1, 0)], key="a")

    def body(session: Any) -> None:
        attempts.append(1)
        rig.database["seats"].find_one(session=session)
        if len(attempts) == 1:
            outbox.add([rig.add.s(1, 1)], key="a")
            assert outbox.sweep(older_than=0).dispatched == 1 + is_there if is_there else True
        outbox.add([rig.add.s(1, 2)], key="a", session=session)

    rig.run(body)
    assert len(attempts) == 2
    outbox.sweep(older_than=0)
    assert [n for _, n in rig.sent()] == [*([0] if is_there else []), 1, 2]
    assert rig.stored == []


# -- the transaction ---------------------------------------------------------------------------------


def test_what_was_committed_is_dispatched_by_the_same_process(rig: CollectionRig) -> None:
    """Under `transactional`, in a transaction of the driver's own, which nobody tells of, and without one."""
    outbox = rig.messages(at_once=True)

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
    rig.messages(at_once="wait").add([rig.add.s(3, 3)], key="k")
    assert rig.sent() == [[3, 3]]
    wait_for(lambda: not rig.stored)


def test_a_block_needs_a_transaction_and_ends_before_it(rig: CollectionRig) -> None:
    outbox = rig.messages()
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


def test_functions_that_join_a_transaction_gather_into_its_box(rig: CollectionRig) -> None:
    outbox = rig.messages()
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
    rig: CollectionRig, outer_has_a_box: bool
) -> None:
    """A function joins a transaction and fails: it dooms one of transactional's; a driver's own may be committed."""
    outbox, seats = rig.messages(), rig.database["seats"]

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


def test_an_error_that_ends_a_transaction_passes_a_box_unchanged(rig: CollectionRig) -> None:
    """What the server has aborted takes nothing; what cannot be stored is said instead of the error."""
    outbox, seats = rig.messages(), rig.database["seats"]
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
def test_what_cannot_be_stored_is_refused_by_one_sentence(
    rig: CollectionRig, tasks: Any, key: Any, sentence: str
) -> None:
    with pytest.raises(OutboxRefusedError, match=sentence):
        rig.messages().add(tasks, key=key)
    assert rig.stored == []


def test_stored_ids_and_documents_beyond_the_limit_are_refused(rig: CollectionRig) -> None:
    """All entries of a key, and of a transaction without one, have to fit into a document."""
    outbox = rig.messages()
    for wrong in ([rig.add.s(STORED_ID, 1)], [rig.add.s(1, "x" * 17_000_000)]):
        with pytest.raises(OutboxRefusedError, match=r"the id itself|16 MB"):
            outbox.add(wrong)
    with pytest.raises(OutboxRefusedError, match="the id itself"):
        outbox.add(events=[Event("seat.booked", {"seat": STORED_ID})])
    assert rig.stored == []
    outbox.add([rig.add.s(1, "x" * 3_000_000) for _ in range(3)], key="k")
    outbox.add([rig.add.s(2, each) for each in range(700)], key="k")
    assert len(rig.stored) == 1
    dispatched = [outbox.sweep(older_than=0).dispatched]
    while rig.stored and dispatched[-1]:  # a turn ends by time
        dispatched.append(outbox.sweep(older_than=0).dispatched)
    assert sum(dispatched) == 703
    assert [n for key, n in rig.sent() if key == 2] == list(range(700))


# -- delivery ----------------------------------------------------------------------------------------


@pytest.mark.needs_mongodb(5, 0)
def test_a_look_reads_what_is_due_and_no_document_that_is_held_back(rig: CollectionRig) -> None:
    """With keys and without: 60 of each are there, and 10 are due."""
    outbox, parcels = rig.messages(), rig.database["outbox"]
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


def test_relays_at_the_same_time_send_each_entry_once_and_in_order(rig: CollectionRig) -> None:
    """Four relays on five keys with twenty parcels each, and forty without a key."""
    outbox = rig.messages()
    for step in range(20):
        for key in range(5):
            outbox.add([rig.add.s(key, step)], key=key)
        outbox.add([rig.add.s(9, step)])
        outbox.add([rig.add.s(9, step + 20)])
    relays = [rig.messages() for _ in range(4)]
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


def test_relays_beside_the_writer_keep_the_order_of_transactions_that_follow_each_other(rig: CollectionRig) -> None:
    """Nothing in common but the key: only the commits say what comes first, and relays look all the time."""
    writer, relays, ended = rig.messages(), [rig.messages() for _ in range(3)], threading.Event()

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


def test_a_key_with_a_long_backlog_gives_way_and_continues(rig: CollectionRig) -> None:
    """The dispatcher comes back to it."""
    outbox = rig.messages()
    outbox.add([rig.add.s(1, number) for number in range(1100)], key="long")
    eager = rig.messages(at_once=True)
    eager.add([rig.add.s(2, 0)], key="short")
    eager.add([rig.add.s(1, 1100)], key="long")
    wait_for(lambda: not rig.stored)
    sent = rig.sent()
    assert [number for key, number in sent if key == 1] == list(range(1101))
    assert sent.index([2, 0]) < 200


def test_a_relay_that_sleeps_past_its_claim_repeats_but_never_overtakes(rig: CollectionRig) -> None:
    """Paused before its first publish; another delivers all and more; what it has read comes late, again."""
    writer, sleeper = rig.messages(), rig.messages(claim_ttl=3.0)
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


def test_an_entry_with_a_fault_of_its_own_stops_its_key_only(rig: CollectionRig) -> None:
    """What stood before it is gone, it alone is counted, other keys continue."""
    outbox = rig.messages()
    outbox.add([rig.add.s(1, 0)], key="k")
    outbox.add([rig.add.s(1, 1), rig.add.s(1, 2), rig.add.s(1, 3)], key="k")
    outbox.add([rig.add.s(1, 4)], key="k")
    outbox.add([rig.add.s(2, 0)], key="other")
    spoil(outbox, entry=2)

    delivery = outbox.sweep(older_than=0)
    assert delivery.dispatched == 3
    assert delivery.error is not None
    assert sorted(rig.sent()) == [[1, 0], [1, 1], [2, 0]]
    (first,) = (parcel["pendingEvents"] for parcel in rig.stored)
    assert [entry["attempts"] for entry in first["events"]] == [1, 0, 0]
    assert first["count"] == 3
    assert outbox.status().failing == 1
    assert outbox.sweep(older_than=0).dispatched == 0
    rig.database["outbox"].update_many({}, {"$set": {"pendingEvents.claim": UNCLAIMED}})
    mend(outbox)
    assert outbox.sweep(older_than=0).dispatched == 3
    assert rig.sent() == [[1, 2], [1, 3], [1, 4]]


def test_a_dead_letter_lets_its_key_go_on_and_is_put_back_under_it(rig: CollectionRig) -> None:
    outbox = rig.messages(failure_policy="dead_letter")
    for number in range(3):
        outbox.add([rig.add.s(1, number)], key="k")
    spoil(outbox, entry=1)
    ripe = {"pendingEvents.events.0.attempts": 99, "pendingEvents.events.0.at": LONG_AGO}
    ripe = {name.replace(".0.", ".1."): value for name, value in ripe.items()}
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
    assert (parcel["_id"], parcel["pendingEvents"]["events"][0]["attempts"]) == ("k", 0)
    assert outbox.sweep(older_than=0).dispatched == 1
    assert rig.sent() == [[1, 1]]
    with pytest.raises(CommandRefusedError, match="no dead letter"):
        replay(outbox, letter.id)


def test_a_broker_that_is_away_costs_nobody_anything(rig: CollectionRig) -> None:
    """Neither the writer nor the entry: it waits, without a claim, and is sent when the broker is back."""
    outbox = rig.messages(at_once=True)
    url = rig.app.conf.broker_url
    rig.app.conf.update(broker_url="redis://127.0.0.1:9/0")
    outbox.add([rig.add.s(1, 1)], key="k")
    wait_for(lambda: outbox.status().dispatcher.broker_down)
    outbox.add([rig.add.s(1, 2)], key="k")
    assert [entry["attempts"] for entry in rig.stored[0]["pendingEvents"]["events"]] == [0, 0]
    outbox.backing.close()
    rig.app.conf.update(broker_url=url)
    wait_for(lambda: outbox.sweep(older_than=0).dispatched == 2)
    assert rig.sent() == [[1, 1], [1, 2]]


def test_any_id_of_a_document_will_do(rig: CollectionRig) -> None:
    """Somebody has restored some with names of his own."""
    outbox = rig.messages()
    for number, key in enumerate((None, None, "k", "k")):
        outbox.add([rig.add.s(1, number)], key=key)
    stored = rig.stored
    rig.database["outbox"].delete_many({})
    rig.database["outbox"].insert_many({**each, "_id": {"n": number}} for number, each in enumerate(stored))
    assert outbox.sweep(older_than=0).dispatched == 4
    assert sorted(n for _, n in rig.sent()) == [0, 1, 2, 3]


@pytest.mark.parametrize("written", [{"count": 1}, {"count": 1, "events": []}, {"count": 1, "events": 7}])
def test_what_somebody_else_has_written_over_a_document_stops_nobody(rig: CollectionRig, written: Any) -> None:
    """It is set aside, and its key continues."""
    outbox = rig.messages()
    outbox.add([rig.add.s(1, 0)], key="k")
    rig.database["outbox"].update_one({"_id": "k"}, {"$set": {"pendingEvents": written}})
    outbox.sweep(older_than=0)
    outbox.add([rig.add.s(1, 1)], key="k")
    outbox.sweep(older_than=0)
    assert rig.sent() == [[1, 1]]
    assert rig.stored == []


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


def test_an_entry_of_another_app_stops_its_key_and_is_told(rig: CollectionRig) -> None:
    """Passing over it would send what is behind it first; an app that delivers for the other goes on."""
    other = Celery("other", broker=rig.app.conf.broker_url, set_as_current=False)
    theirs = OutboxCollection(other, rig.database["outbox"], sweep_every=None, at_once=False, foreign_tasks=True)
    ours = rig.messages()
    ours.add([rig.add.s(1, 0)], key="k")
    theirs.add([other.signature("add", (1, 1))], key="k")
    ours.add([rig.add.s(1, 2)], key="k")
    ours.add([rig.add.s(2, 0)], key="other")

    ours.sweep(older_than=0)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    assert ours.status().other_apps == 1
    assert rig.messages(delivers=("other",)).sweep(older_than=0).dispatched == 2
    assert rig.sent() == [[1, 1], [1, 2]]
    theirs.backing.close()


def test_commands_see_it_as_any_outbox(rig: CollectionRig) -> None:
    outbox = rig.messages(name="leaving")
    outbox.add([rig.add.s(1, 0), rig.add.s(1, 1)], key="k")

    ((health,), _) = read_health(rig.app, [outbox])
    plain = plain_health(health)
    assert (plain["outbox"], plain["documents"], plain["pending"], plain["indexed"]) == ("leaving", 1, 2, True)
    assert plain["broker"]["answers"]
    rig.database["outbox"].drop_index("pendingEvents")
    ((health,), _) = read_health(rig.app, [outbox])
    assert health.indexed is False


def test_a_forked_child_collects_and_delivers_for_itself(rig: CollectionRig, mongo_url: str) -> None:
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


def test_looks_go_on_until_nothing_waits(rig: CollectionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage: the sweep need not deliver what the dispatcher can."""
    monkeypatch.setattr(dispatcher, "_LOOK", 2)
    elsewhere, outbox = rig.messages(), rig.messages(at_once=True)
    for number in range(9):
        elsewhere.add([rig.add.s(number, 0)])
    outbox.backing.dispatcher.hint()
    wait_for(lambda: not rig.stored)
    assert sorted(rig.sent()) == [[number, 0] for number in range(9)]


def test_what_this_process_cannot_send_is_not_looked_at_again_for_a_while(rig: CollectionRig) -> None:
    """With a key and without one; what stands behind it under its key waits for a process that can send it."""
    outbox, unknown = rig.messages(at_once=True), rig.app.signature("shop.new", args=(1, 1))
    outbox.add([unknown])
    outbox.add([unknown], key="k")
    outbox.add([rig.add.s(1, 1)], key="k")
    here = outbox.backing.dispatcher
    wait_for(lambda: len(here._refused) == 2)
    refused = [each for _, each in here._refused.values()]
    assert len(outbox.backing.due(0.0, 100)) == 2
    assert outbox.backing.due(0.0, 100, passing_over=refused) == []
    outbox.add([rig.add.s(2, 2)])
    wait_for(lambda: len(rig.stored) == 2)
    assert rig.sent() == [[2, 2]]
