"""
What happens inside an open transaction: the calls and effects that `docs/transactional.md` lists.

Each row acts in the body of `transactional`, and in a handler with `transactional=True`: where the first attempt is
aborted and the second committed, and where all is aborted. Its effects are documents of `effects` and messages at the
broker, unless it counts them itself.

| expected | effects after a repeated body | after an aborted one |
|---|---|---|
| JOINS | 1 | 0 |
| ALONE | 2 | 1 |
| REFUSED, an error's class | 0 | 0 |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from celery import Celery
from pymongo import AsyncMongoClient, MongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import InvalidOperation

from mongo_celery import (
    Bridge,
    Change,
    Outbox,
    OutboxCollection,
    Participant,
    TwoPhaseCommit,
    once,
    select_for_update,
    transactional,
)
from mongo_celery.errors import ConfigurationError, TransactionCanceledError
from mongo_celery.locking import after_commit, current
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.testing import BridgeRunner
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS
from tests.fixtures.process import wait_for
from tests.rig.outbox import settled

Document = dict[str, Any]

JOINS, ALONE, REFUSED = "joins", "alone", ConfigurationError
EFFECTS = {JOINS: (1, 0), ALONE: (2, 1)}


def _note() -> None:
    """A task that is sent, and never run."""


class Rig:
    """
    An app whose bridge has one transactional handler, and what a row needs.

    Attributes:
        bridge: its client is that of the open transaction.
        other: another client of the same cluster.
        database: of the data, by neither of both clients.
        session: of the open transaction.
        change: the handler's.
    """

    session: ClientSession
    change: Change
    runner: BridgeRunner

    def __init__(self, database: Database[Document], url: str) -> None:
        self.database = database
        for name in ("effects", "hot", "orders"):
            database.create_collection(name)
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.note = self.app.task(name="note", shared=False)(_note)
        self.bridge = Bridge(self.app, url, name="inside", autodiscover=False, failure_policy="dead_letter")

        @self.bridge.on_change(f"{database.name}.orders", transactional=True, autoretry_for=(OSError,))
        def handle(change: Change) -> None:
            self.handle(change)

        self.other: MongoClient[Document] = MongoClient(url)
        self.act: Callable[[Rig], object] = lambda _: None
        self.failing: list[Exception] = []

    @property
    def client(self) -> MongoClient[Document]:
        return self.bridge.client

    def effects(self, client: MongoClient[Document] | None = None) -> Collection[Document]:
        """The collection of effects, by the client of the open transaction unless another is given."""
        return (client or self.client)[self.database.name]["effects"]

    def count(self) -> int:
        return self.database["effects"].count_documents({}) + len(self.runner.sent())

    def handle(self, change: Change) -> None:
        """Act, and fail as planned."""
        assert change.session is not None
        self.session, self.change = change.session, change
        self.act(self)
        if self.failing:
            raise self.failing.pop(0)

    def run_in_handler(self, failure: Exception) -> None:
        self.failing = [failure]
        self.database["orders"].insert_one({})
        self.runner.deliver(raises=False)

    def run_in_transactional(self, failure: Exception) -> None:
        """Run a body; an OSError stands for a write conflict, which repeats it."""
        failing, hot = [failure], self.client[self.database.name]["hot"]
        self.database["hot"].update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)

        def body(session: ClientSession) -> None:
            self.session = session
            hot.find_one({"_id": 1}, session=session)
            self.act(self)
            if failing and not isinstance(failing[0], OSError):
                raise failing.pop()
            if failing and failing.pop():
                self.database["hot"].update_one({"_id": 1}, {"$inc": {"n": 1}})
            hot.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

        try:
            transactional(self.client).run(body)
        except KeyError:
            assert isinstance(failure, KeyError)


@pytest.fixture
def rig(database: Database[Document], mongo_url: str) -> Iterator[Rig]:
    made = Rig(database, mongo_url)
    with made.other, BridgeRunner(made.bridge, url=mongo_url) as made.runner:
        yield made
        for each in OUTBOXES.of(made.app):
            each.runtime.close()


@dataclass(frozen=True)
class Row:
    """
    A row of the table: what is done inside, in a body of `transactional` or in a handler.

    Attributes:
        expected: JOINS, ALONE, or the class of the error that it is refused with.
        count: how many effects there are.
        prepare: what has to be there before.
    """

    name: str
    act: Callable[[Rig], object]
    expected: Any
    around: tuple[str, ...] = ("transactional", "handler")
    count: Callable[[Rig], int] = Rig.count
    prepare: Callable[[Rig], object] = lambda _: None


def _insert(rig: Rig, session: Any) -> None:
    rig.effects().insert_one({}, session=session)


def _lock(rig: Rig) -> None:
    """Lock what the transaction has written itself: any other session would wait for it."""
    made = rig.effects().insert_one({}, session=rig.session).inserted_id
    assert select_for_update(rig.effects(), {"_id": made}, session=rig.session)["_lock"]


def _increase(rig: Rig, client: Any = None) -> None:
    fenced = rig.change.fenced(rig.effects(client))
    fenced.update_one({"_id": 1}, {"$inc": {"one": 1}}, upsert=True)
    fenced.bulk_write([UpdateOne({"_id": 2}, {"$inc": {"bulk": 1}}, upsert=True)])
    fenced.find_one_and_update({"_id": 2}, {"$inc": {"found": 1}})
    fenced.update_many({"_id": {"$gte": 1}}, {"$inc": {"many": 1}})
    fenced.replace_one({"_id": 3}, {"replaced": 1}, upsert=True)
    assert fenced.delete_one({"_id": 3}).deleted_count == 1


def _sum(rig: Rig) -> int:
    """How often documents of fenced writes were increased, if all were as often; else none of the expected numbers."""
    found = list(rig.database["effects"].find({}, {"_fence": 0}))
    numbers = [value for document in found for name, value in document.items() if name != "_id"]
    return sum(numbers) // 5 if sum(numbers) % 5 == 0 else -1


def _run_async(rig: Rig) -> None:
    async def run() -> None:
        client: AsyncMongoClient[Document] = AsyncMongoClient(rig.bridge.url)
        try:
            effects = client[rig.database.name]["effects"]
            await transactional(client).arun(lambda session: effects.insert_one({}, session=session))
        finally:
            await client.close()

    asyncio.run(run())


TRANSACTION_ROWS = [
    Row("a write with session=", lambda rig: _insert(rig, rig.session), JOINS),
    Row("a write without session=", lambda rig: _insert(rig, None), ALONE),
    Row("current(client)", lambda rig: _insert(rig, current(rig.client)), JOINS),
    Row("transactional", lambda rig: transactional(rig.client).run(lambda session: _insert(rig, session)), JOINS),
    Row("transactional(other client)", lambda rig: transactional(rig.other).run(lambda s: _insert(rig, s)), REFUSED),
    Row("transactional(AsyncMongoClient)", _run_async, REFUSED),
    Row(
        "transactional(independent=True)",
        lambda rig: transactional(rig.client, independent=True).run(lambda session: _insert(rig, session)),
        ALONE,
    ),
    Row("transactional(durable=True)", lambda rig: transactional(rig.client, durable=True).run(print), REFUSED),
    Row("after_commit", lambda rig: after_commit(lambda: _insert(rig, None)), JOINS),
    Row("delay()", lambda rig: rig.note.delay(), ALONE),
    Row("select_for_update", _lock, JOINS),
    Row(
        "select_for_update of another client",
        lambda rig: select_for_update(rig.effects(rig.other), {"_id": 1}, session=rig.session),
        InvalidOperation,
    ),
    Row("change.fenced", _increase, JOINS, ("handler",), _sum),
    Row("change.fenced of another client", lambda rig: _increase(rig, rig.other), REFUSED, ("handler",)),
]


class Bank(TwoPhaseCommit):
    """Two accounts in the database of a rig, and two transfers of each kind that calls are about."""

    def __init__(
        self, rig: Rig, name: str = "default", client: MongoClient[Document] | None = None, **options: Any
    ) -> None:
        database = rig.database.name
        super().__init__(
            rig.app, lambda: (client or rig.client)[database]["transactions"], name=name, recover_every=None, **options
        )

    @staticmethod
    def of(rig: Rig, name: str = "default") -> TwoPhaseCommit:
        found = TWO_PHASE_COMMITS.find(rig.app, name)
        assert found is not None
        return found

    @classmethod
    def prepare(cls, rig: Rig) -> None:
        rig.database["accounts"].insert_many([{"_id": each, "balance": 1000} for each in "AB"])
        bank = cls(rig)
        cls(rig, "other", rig.other)
        cls(rig, "documents", protocol="documents")
        cls(rig, "clusters", clients={"far": rig.other})
        for number in range(2):
            bank.transfer("A", "B", 100, id=f"done {number}")
            bank.transfer("A", "B", 1, id=f"initial {number}", run=False)

    @staticmethod
    def next(rig: Rig, kind: str) -> str:
        """Return the id of the first one that nobody has done anything about."""
        state = kind.partition(" ")[0]
        found = rig.database["transactions"].find_one(
            {"_id": {"$regex": f"^{kind}"}, "state": state, "compensatedBy": None, "queuedAt": None}
        )
        assert found is not None
        return str(found["_id"])

    @staticmethod
    def count(rig: Rig, state: str) -> int:
        """How many transactions of a state there are beside the prepared ones. Money and messages fit all of them."""
        log = list(rig.database["transactions"].find())
        moved = sum(
            each["value"] * (1 if each["destination"] == "B" else -1) for each in log if each["state"] == "done"
        )
        balances = {each["_id"]: each["balance"] for each in rig.database["accounts"].find()}
        assert balances == {"A": 1000 - moved, "B": 1000 + moved}
        assert len(rig.runner.sent()) == sum(each["state"] == "initial" and "queuedAt" in each for each in log)
        prepared = [f"{state} {number}" for number in range(2)]
        return sum(each["state"] == state and each["_id"] not in prepared for each in log)


def _transfer(rig: Rig, name: str = "default", **options: Any) -> Any:
    return Bank.of(rig, name).transfer("A", "B", 10, **options)


def _pay_too_much(rig: Rig) -> None:
    with pytest.raises(TransactionCanceledError):
        Bank.of(rig).transfer("A", "B", 5000)


def _parts_elsewhere(rig: Rig) -> list[Participant]:
    accounts = rig.other[rig.database.name]["accounts"]
    return [Participant(accounts, each, {"$inc": {"balance": sign * 10}}) for each, sign in (("A", -1), ("B", 1))]


def _paying(name: str, act: Callable[[Rig], object], expected: Any, state: str = "done") -> Row:
    return Row(name, act, expected, count=partial(Bank.count, state=state), prepare=Bank.prepare)


def _begin_elsewhere(rig: Rig, *, run: bool) -> Any:
    return Bank.of(rig, "clusters").begin(_parts_elsewhere(rig), run=run)


TRANSFER_ROWS = [
    _paying("transfer", _transfer, JOINS),
    _paying("transfer(session=)", lambda rig: _transfer(rig, session=rig.session), JOINS),
    _paying("run", lambda rig: Bank.of(rig).run(_transfer(rig, run=False)), JOINS),
    _paying("a transfer that cannot be paid", _pay_too_much, JOINS, "canceled"),
    _paying("transfer(run=False)", lambda rig: _transfer(rig, run=False), JOINS, "initial"),
    _paying("delay", lambda rig: Bank.of(rig).delay(_transfer(rig, run=False)), JOINS, "initial"),
    _paying("cancel", lambda rig: Bank.of(rig).cancel(Bank.next(rig, "initial")), JOINS, "canceled"),
    _paying("compensate", lambda rig: Bank.of(rig).compensate(Bank.next(rig, "done")), JOINS),
    _paying("transfer, independent=True", lambda rig: _alone(rig, _transfer), ALONE),
    _paying("transfer of another client", lambda rig: _transfer(rig, "other"), REFUSED),
    _paying("transfer(session=) of another client", lambda rig: _transfer(rig, "other", session=rig.session), REFUSED),
    _paying("transfer with markers", lambda rig: _transfer(rig, "documents"), REFUSED),
    _paying("begin(run=True) across clusters", lambda rig: _begin_elsewhere(rig, run=True), REFUSED),
    _paying(
        "begin and delay across clusters",
        lambda rig: Bank.of(rig, "clusters").delay(_begin_elsewhere(rig, run=False)),
        JOINS,
        "initial",
    ),
]


def _alone(rig: Rig, act: Callable[[Rig], object]) -> None:
    transactional(rig.client, independent=True).run(lambda _: act(rig))


def _step(rig: Rig, records: Any = None) -> None:
    """Call a step without a parameter `session`, with the number of effects as its key."""

    @once((records or rig.client)[rig.database.name]["done"], key=rig.count)
    def step() -> None:
        _insert(rig, current(rig.client))

    step()


def _step_with_session(rig: Rig, **given: Any) -> None:
    @once(rig.client[rig.database.name]["done"], key=rig.count)
    def step(*, session: Any) -> None:
        _insert(rig, session)

    step(**given)


def _step_with_a_foreign_session(rig: Rig) -> None:
    with rig.other.start_session() as session:
        _step_with_session(rig, session=session)


def _step_elsewhere(rig: Rig) -> None:
    """Call a step whose records are in another cluster, which nobody has to ask."""
    with MongoClient[Document]("mongodb://127.0.0.1:1", connect=False) as client:
        _step(rig, client)


ONCE_ROWS = [
    Row("once", _step, JOINS),
    Row("once(session)", _step_with_session, JOINS),
    Row("once(session) with session=", lambda rig: _step_with_session(rig, session=rig.session), JOINS),
    Row("once in after_commit", lambda rig: after_commit(lambda: _step(rig)), JOINS),
    Row("once of another client", lambda rig: _step(rig, rig.other), REFUSED),
    Row("once of another cluster", _step_elsewhere, REFUSED),
    Row("once(session) with session= of another client", _step_with_a_foreign_session, REFUSED),
]


def _outbox(rig: Rig, client: Any = None) -> Outbox:
    name = "in the document" if client is None else "of the other client"
    found = OUTBOXES.find(rig.app, name)
    made = found or Outbox(rig.app, lambda: rig.effects(client), name=name, sweep_every=None)
    assert isinstance(made, Outbox)
    return made


def _leaving(rig: Rig) -> OutboxCollection:
    found = OUTBOXES.find(rig.app, "leaving")
    made = found or OutboxCollection(
        rig.app, lambda: rig.client[rig.database.name].leaving, sweep_every=None, name="leaving"
    )
    assert isinstance(made, OutboxCollection)
    return made


def _take_all(rig: Rig, prepare: Callable[[Rig], object] = lambda _: None) -> None:
    """Make an outbox that takes all, by another client of the cluster."""
    prepare(rig)
    collection = rig.other[rig.database.name].all
    OutboxCollection(rig.app, collection, every_transaction=True, sweep_every=None).prepare()


def _insert_with_task(rig: Rig, session: Any) -> None:
    _outbox(rig).insert_one({}, tasks=[rig.note.s()], session=session)


def _write_plain_values(rig: Rig) -> None:
    done = rig.effects().insert_one(_outbox(rig).with_tasks({}, [rig.note.s()]), session=rig.session)
    _outbox(rig).dispatch(done.inserted_id)


def _collect(rig: Rig) -> None:
    with _leaving(rig).collect(rig.session):
        rig.note.delay()
    _insert(rig, rig.session)


def _sent(rig: Rig) -> int:
    """How many tasks were sent, if a document was written with each; else none of the expected numbers."""
    sent = len(rig.runner.sent())
    return sent if rig.database["effects"].count_documents({}) == sent else -1


def _sent_alone(rig: Rig) -> int:
    return len(rig.runner.sent())


OUTBOX_ROWS: list[Row] = [
    Row("Outbox with session=", lambda rig: _insert_with_task(rig, rig.session), JOINS, count=_sent),
    Row("Outbox without session=", lambda rig: _insert_with_task(rig, None), ALONE, count=_sent),
    Row(
        "Outbox of another client",
        lambda rig: _outbox(rig, rig.other).insert_one({}, tasks=[rig.note.s()], session=rig.session),
        InvalidOperation,
    ),
    Row("with_tasks and dispatch", _write_plain_values, JOINS, count=_sent),
    Row(
        "OutboxCollection.add with session=",
        lambda rig: _leaving(rig).add([rig.note.s()], session=rig.session),
        JOINS,
        count=_sent_alone,
    ),
    Row(
        "OutboxCollection.add without session=", lambda rig: _leaving(rig).add([rig.note.s()]), ALONE, count=_sent_alone
    ),
    Row("OutboxCollection.collect", _collect, JOINS, count=_sent),
    Row("delay() with every_transaction", lambda rig: rig.note.delay(), JOINS, prepare=_take_all),
    Row(
        "TwoPhaseCommit.delay with every_transaction",
        lambda rig: Bank.of(rig).delay(_transfer(rig, run=False)),
        JOINS,
        count=partial(Bank.count, state="initial"),
        prepare=lambda rig: _take_all(rig, Bank.prepare),
    ),
]

ROWS = [*TRANSACTION_ROWS, *TRANSFER_ROWS, *ONCE_ROWS, *OUTBOX_ROWS]


@pytest.mark.mongo_celery_sessionless
@pytest.mark.parametrize(
    ("row", "around"), [pytest.param(row, around, id=f"{row.name}-{around}") for row in ROWS for around in row.around]
)
def test_what_happens_inside(rig: Rig, row: Row, around: str) -> None:
    """P18: part of the transaction, beside it, or refused."""
    run = rig.run_in_handler if around == "handler" else rig.run_in_transactional
    repeated, aborted = EFFECTS.get(row.expected, (0, 0))
    acted: list[Row] = []

    def act(_: Rig) -> None:
        if isinstance(row.expected, type):
            with pytest.raises(row.expected):
                row.act(rig)
        else:
            row.act(rig)
        acted.append(row)

    def check(effects: int) -> None:
        wait_for(lambda: row.count(rig) >= effects and all(map(settled, OUTBOXES.of(rig.app))))
        assert row.count(rig) == effects

    rig.act = act
    row.prepare(rig)
    run(OSError())
    check(repeated)
    run(KeyError())
    check(repeated + aborted)
    assert len(acted) >= 3, "an attempt has failed before its end"
