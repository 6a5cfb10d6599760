"""An outbox in a collection of its own: both or neither with a transaction, order per key, and what stops a key."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from bson import ObjectId
from pymongo.errors import DuplicateKeyError, OperationFailure

from mongo_celery import STORED_ID, Event, OutboxCollection, transactional
from mongo_celery.errors import ConfigurationError, OutboxRefusedError, TransactionError, TransactionRequiredError
from mongo_celery.outbox import dispatcher
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.rig.outbox import Document, Rig, run_together


def test_what_a_transaction_sends_is_stored_with_it_and_dispatched_after_the_commit(rig: Rig) -> None:
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


def test_the_order_of_a_key_is_that_of_transactions_that_follow_each_other(rig: Rig) -> None:
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


def test_transactions_that_write_a_document_in_common_keep_their_order_whenever_they_send(rig: Rig) -> None:
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

    run_together(*(partial(many, each) for each in (body, early, body, early)))
    outbox.sweep(older_than=0)
    assert [n for _, n in rig.sent()] == list(range(40))


def test_transactions_of_a_key_follow_each_other(rig: Rig) -> None:
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
def test_a_key_that_a_later_commit_has_written_or_removed_repeats_the_transaction(rig: Rig, is_there: bool) -> None:
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


def test_what_was_committed_is_dispatched_by_the_same_process(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `transactional`, in a transaction of the driver's own, which nobody tells of, and without one."""
    monkeypatch.setattr(dispatcher, "_POLLS_AFTER", (0.1, 0.5, 2.0, 60.0))  # a commit may take some seconds
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
    outbox.add([rig.add.s(3, 3)], key="k")
    wait_for(lambda: rig.sent() == [[3, 3]])
    wait_for(lambda: not rig.stored)


def test_a_block_needs_a_transaction_and_ends_before_it(rig: Rig) -> None:
    outbox = rig.messages()
    with rig.database.client.start_session() as session:
        with pytest.raises(TransactionRequiredError), outbox.collect(session):
            pass

        def ended(end: Any) -> None:
            session.start_transaction()
            with outbox.collect(session):
                rig.add.delay(1, 1)
                end()

        for end in (session.commit_transaction, session.abort_transaction):
            with pytest.raises(OutboxRefusedError):
                ended(end)
        session.start_transaction()
        with outbox.collect(session):
            session.abort_transaction()
    assert rig.stored == []
    with pytest.raises(ConfigurationError):
        transactional(rig.database.client, outbox=rig.outbox())  # type: ignore[arg-type]


@pytest.mark.parametrize("outer_has_a_box", [False, True])
def test_what_was_sent_before_an_error_that_is_caught_has_the_fate_of_the_writes(
    rig: Rig, outer_has_a_box: bool
) -> None:
    """A function joins a transaction and fails: it dooms one of transactional's; a driver's own may be committed."""
    outbox, seats = rig.messages(), rig.database["seats"]

    @transactional(rig.database.client, outbox=outbox)
    def leave(seat: int, *, session: Any) -> None:
        seats.insert_one({"_id": seat}, session=session)
        rig.add.delay(1, seat)
        raise ValueError

    def outer(seat: int, session: Any, end: type[Exception] | None = None) -> None:
        with suppress(ValueError):
            leave(seat, session=session)
        if end is not None:
            raise end

    run = transactional(rig.database.client, outbox=outbox if outer_has_a_box else None).run
    with pytest.raises(TransactionError):
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


def test_an_error_that_ends_a_transaction_passes_a_box_unchanged(rig: Rig) -> None:
    outbox, seats = rig.messages(), rig.database["seats"]
    seats.insert_one({"_id": 1})

    def body(session: Any, value: Any) -> None:
        with outbox.collect(session):
            rig.add.delay(1, value)
            seats.insert_one({"_id": len(value)}, session=session)
            raise ValueError

    with pytest.raises(DuplicateKeyError):
        rig.run(lambda session: body(session, "x"))
    with pytest.raises(OutboxRefusedError):
        rig.run(lambda session: body(session, "x" * 17_000_000))
    assert rig.stored == []


def test_an_error_passes_though_what_was_sent_cannot_be_stored(
    rig: Rig, make_client: MakeClient, failpoint: Failpoint
) -> None:
    """A lost connection there is transient: the body would be repeated for an error that is not."""
    client = make_client(appName="lost")
    outbox = rig.messages(client[rig.database.name]["outbox"])
    outbox.add([rig.add.s(1, 1)])  # which makes what it needs

    def part(_session: Any) -> None:
        rig.add.delay(2, 2)
        raise ZeroDivisionError

    def body(session: Any) -> None:
        client[rig.database.name]["seats"].find_one({}, session=session)
        transactional(client, outbox=outbox).run(part)

    lost: Document = {"failCommands": ["insert", "update"], "appName": "lost", "closeConnection": True}
    with failpoint(**lost), pytest.raises(ZeroDivisionError):
        transactional(client).run(body)


def test_what_cannot_be_stored_is_refused(rig: Rig) -> None:
    outbox, add, accepted = rig.messages(), rig.add, []
    refused: list[Document] = [
        *({"tasks": tasks} for tasks in ("add", [object()], [add.s(STORED_ID, 1)], [add.s(1, "x" * 17_000_000)])),
        {"events": [Event("seat.booked", {"seat": STORED_ID})]},
        *({"key": key} for key in ([1], True, "", "\ud800", "x" * 1025)),
    ]
    for given in refused:
        with suppress(OutboxRefusedError):
            outbox.add(**{"tasks": [], **given})
            accepted.append(given)
    assert accepted == []
    assert rig.stored == []


def test_relays_beside_the_writer_keep_the_order_of_transactions_that_follow_each_other(rig: Rig) -> None:
    """Nothing in common but the key: only the commits say what comes first, and relays look all the time."""
    writer, relays, ended = rig.messages(), [rig.messages() for _ in range(3)], threading.Event()

    def sweep(outbox: OutboxCollection) -> None:
        while not ended.is_set():
            outbox.sweep(older_than=0)

    def write() -> None:
        for step, key in itertools.product(range(30), range(3)):
            rig.run(lambda session, key=key, step=step: writer.add([rig.add.s(key, step)], key=key, session=session))  # type: ignore[misc]
        wait_for(lambda: not rig.stored)
        ended.set()

    run_together(write, *(partial(sweep, each) for each in relays))
    sent = rig.sent()
    for key in range(3):
        assert list(dict.fromkeys(step for each, step in sent if each == key)) == list(range(30))


def test_a_relay_that_wakes_up_late_removes_nothing_that_it_has_not_published(rig: Rig) -> None:
    """It sleeps between publishing and removing: others have delivered meanwhile, and its key has another document."""
    writer, sleeper = rig.messages(), rig.messages()
    writer.add([rig.add.s(1, step) for step in range(3)], key="k")
    removals = sleeper.runtime.relay.removals
    settle = removals.settle

    def settle_late(*given: Any) -> None:
        rig.database["outbox"].delete_many({})
        writer.add([rig.add.s(1, 3)], key="k")
        settle(*given)

    removals.settle = settle_late  # type: ignore[method-assign, assignment]
    sleeper.runtime.relay.deliver("k")
    assert writer.sweep(older_than=0).dispatched == 1
    assert rig.sent() == [[1, step] for step in range(4)]
    assert rig.stored == []
