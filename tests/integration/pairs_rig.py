"""The rig of the pairs: the table of rows, and the shop whose small programs they are."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from bson import Timestamp
from celery import Celery
from pymongo import AsyncMongoClient, MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery import Bridge, Change, Outbox, OutboxCollection, TwoPhaseCommit, once
from mongo_celery.bridge.existing import place_at_time
from mongo_celery.bridge.operations import dead_letter_commands
from mongo_celery.mongo.oplog import operation_time, time_of_token
from mongo_celery.testing import BridgeRunner, pending_entries
from tests.fixtures.process import wait_for

Document = dict[str, Any]
Program = Callable[["Shop"], None]

FEATURES = (
    "fenced", "handler", "transactional", "once", "outbox", "collection", "locks", "twophase",
    "lists", "coalesce", "parked", "snapshot", "rewind", "replay", "atomic", "asyncio",
)  # fmt: skip
"""`handler` is `transactional=True`; `collection` an `OutboxCollection`; `atomic` is Django's; `parked` are keys."""


@dataclass(frozen=True, slots=True)
class Row:
    """
    One row of the table.

    Attributes:
        id: `"fenced-outbox"`, or `"fenced-outbox.source"` where a pair has several; in the order of `FEATURES`.
        promise: what holds at the end.
        program: tries it in a shop.
        options: of the shop's bridge.
    """

    id: str
    promise: str
    program: Program
    options: dict[str, Any]

    @property
    def needs_django(self) -> bool:
        """Return True if it runs in a process that has Django's settings."""
        return "atomic" in self.id.partition(".")[0].split("-")


@dataclass
class Table:
    """Rows by id."""

    rows: dict[str, Row] = field(default_factory=dict)

    def row(self, row_id: str, promise: str, **options: Any) -> Callable[[Program], Program]:
        """Decorate the program of a row; options are those of its bridge."""

        def add(program: Program) -> Program:
            assert row_id not in self.rows, row_id
            self.rows[row_id] = Row(row_id, promise, program, options)
            return program

        return add

    def fate(
        self, row_id: str, promise: str, *counted: str, moved: int = 0, **options: Any
    ) -> Callable[[Callable[[Shop], Callable[[str], object]]], object]:
        """
        Decorate what makes a body, as of a transaction, that is run for "1" and for "2".

        The first is repeated by a conflict (`Shop.meet`) and committed, the second is aborted. So these effects count
        once for "1", and not for "2"; and so much has moved from account A to B.
        """

        def add(make: Callable[[Shop], Callable[[str], object]]) -> object:
            def program(shop: Shop) -> None:
                body = make(shop)
                shop.failing["2"] = 1
                with shop.run() as runner:
                    body("1")
                    with pytest.raises(OSError, match="away"):
                        body("2")
                    shop.send(runner)
                assert shop.counted() == {f"{name} 1": 1 for name in counted}
                assert shop.balances() in ({}, {"A": 100 - moved, "B": 100 + moved, "C": 100})

            return self.row(row_id, promise, **options)(program)

        return add

    def uncovered(self) -> list[str]:
        """Pairs without a row, each feature with itself included."""
        pairs = [f"{one}-{other}" for place, one in enumerate(FEATURES) for other in FEATURES[place:]]
        covered = {row_id.partition(".")[0] for row_id in self.rows}
        assert covered <= set(pairs), covered - set(pairs)
        return [pair for pair in pairs if pair not in covered]


TABLE = Table()


class Shop:
    """
    An app with one bridge, orders to watch, and a client of its own beside the bridge's.

    What was done is counted in `done`, under the change it was done for: `"ID.N"`.

    Args:
        url: of the replica set.
        client: the app's own; `bridge.client` is another one of the same cluster.
        options: of the bridge.

    Attributes:
        failing: how often `fail` is still to raise, by `_id`.
        seen: whatever a program notes.
        counters: of effects that are counted elsewhere than in `done`.
    """

    def __init__(self, url: str, client: MongoClient[Document], **options: Any) -> None:
        self.url, self.client = url, client
        self.db = client[f"pair_{uuid4().hex[:12]}"]
        self.orders, self.done = self.db["orders"], self.db["done"]
        self.app = Celery(self.db.name, broker="memory://", set_as_current=False)
        self.bridge = Bridge(self.app, url, name="shop", autodiscover=False, **{"partitions": 1, **options})
        self.failing: Counter[Any] = Counter()
        self.seen: list[Any] = []
        self.counters: list[Callable[[], dict[str, int]]] = []
        self.count = self._consumer()
        self._boxes: list[Outbox | OutboxCollection] = []
        self._conflicts = 1

    # -- parts -------------------------------------------------------------------------------------

    def name(self, collection: str) -> str:
        """The full name of a collection."""
        return f"{self.db.name}.{collection}"

    def in_bridge(self, collection: str) -> Collection[Document]:
        """A collection, by the bridge's client."""
        return self.bridge.client[self.db.name][collection]

    def outbox(self, collection: str, **options: Any) -> Outbox:
        """An embedded outbox; nothing but `send` dispatches what is in it."""
        source = options.pop("source", lambda: self.db[collection])
        box = Outbox(self.app, source, **self._quiet(collection, options))
        self._boxes.append(box)
        return box

    def outbox_collection(self, collection: str = "leaving", **options: Any) -> OutboxCollection:
        """An outbox of its own collection; nothing but `send` dispatches what is in it."""
        source = options.pop("source", lambda: self.db[collection])
        box = OutboxCollection(self.app, source, **self._quiet(collection, options))
        self._boxes.append(box)
        return box

    def bank(self, source: Callable[[], Collection[Document]] | None = None, **options: Any) -> TwoPhaseCommit:
        """Accounts A, B and C with 100 each."""
        if "accounts" not in options:
            self.db["accounts"].insert_many([{"_id": name, "balance": 100} for name in "ABC"])
        return TwoPhaseCommit(self.app, source or (lambda: self.db["transactions"]), recover_every=None, **options)

    def bank_by_markers(self) -> TwoPhaseCommit:
        """The same accounts, by the tutorial's protocol, which leaves markers in them."""
        options: Any = {"name": "marked", "protocol": "documents", "recover_every": None}
        return TwoPhaseCommit(self.app, lambda: self.db["marked"], accounts=lambda: self.db["accounts"], **options)

    def task(self, name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """Decorate a task of this app alone, as Celery's default would give it to all that come later."""
        return self.app.task(name=name, shared=False, **options)

    def _quiet(self, collection: str, options: Document) -> Any:
        return {"name": self.name(collection), "at_once": False, "sweep_every": None, **options}

    def _consumer(self) -> Any:
        """A task that counts each key once, whatever message it comes with."""

        @self.task("count")
        @once(lambda: self.db["counted"], key=lambda key: key)
        def count(key: str, *, session: ClientSession) -> None:
            self.add(key, session)

        return count

    # -- what happens --------------------------------------------------------------------------------

    def add(self, key: str, session: ClientSession | None = None) -> None:
        """Count an effect, by the client of the session."""
        client = self.client if session is None else session.client
        client[self.db.name]["done"].update_one({"_id": key}, {"$inc": {"n": 1}}, upsert=True, session=session)

    def fail(self, change: Change | Any) -> None:
        """Raise as long as that is asked for."""
        key = change.document_key["_id"] if isinstance(change, Change) else change
        if self.failing[key] > 0:
            self.failing[key] -= 1
            raise OSError("a service is away")

    def conflict(self, session: ClientSession) -> None:
        """Meet a real write conflict, the first time."""
        hot = session.client[self.db.name]["hot"]
        hot.find_one({"_id": 1}, session=session)  # from here on it sees what was there
        if self._conflicts:
            self._conflicts -= 1
            together(self.heat)
        hot.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True, session=session)

    def heat(self) -> None:
        """Write what `conflict` writes, as somebody else."""
        self.db["hot"].update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)

    def meet(self, session: ClientSession, key: Any) -> None:
        """What may happen to a transaction: the first time a conflict, and the failure that is asked for."""
        self.conflict(session)
        self.fail(key)

    def in_asyncio(self, work: Callable[[Any], Any]) -> None:
        """Run a coroutine function of an asynchronous client's database."""

        async def run() -> None:
            async with AsyncMongoClient[Document](self.url) as mongo:
                await work(mongo[self.db.name])

        asyncio.run(run())

    def put(self, *places: Any, n: int = 0) -> None:
        """Write orders as they are then."""
        for place in places:
            self.orders.replace_one({"_id": place}, {"n": n}, upsert=True)

    def mirror(self, source: str, target: str, **options: Any) -> None:
        """Register a handler `to_TARGET` that keeps a fenced copy of a collection, and fails where it is asked to."""

        def copy(change: Change) -> None:
            self.fail(change)
            view, key = change.fenced(self.name(target)), {"_id": change.document_key["_id"]}
            if change.full_document is None:
                view.delete_one(key)
            else:
                view.replace_one(key, change.full_document, upsert=True)

        copy.__name__ = f"to_{target}"
        self.bridge.on_change(self.name(source), **options)(copy)

    @contextmanager
    def run(self) -> Iterator[BridgeRunner]:
        """Deliver what is written inside."""
        if not self.bridge.handlers:
            self.bridge.on_change(self.name("nothing"))(note_nothing)
        with BridgeRunner(self.bridge) as runner:
            yield runner

    def arrive(self, runner: BridgeRunner) -> None:
        """Wait until all that was written is read, so that it comes together."""
        (term,), aim = runner._terms, operation_time(self.client)
        reader = term.leader.intake._reader
        assert reader is not None, "it is led"
        wait_for(lambda: reader.read_to is not None and reader.read_to >= aim)

    def send(self, runner: BridgeRunner, **options: Any) -> list[str]:
        """Dispatch what the outboxes have, run all tasks, and name them."""
        for box in self._boxes:
            box.sweep(older_than=0)
        for box in self._boxes:  # a dispatcher may have had some in hand
            wait_for(functools.partial(_has_sent, box))
        return [f"{task.name}{list(task.args)}" for task in runner.run_tasks(**options)]

    def letters(self) -> list[tuple[Any, str]]:
        """The documents of dead letters and their causes."""
        found = dead_letter_commands.find(self.bridge.wiring).letters
        return [(letter.key, letter.cause) for letter in found]

    def replay(self, runner: BridgeRunner, *, only: str | None = None) -> Any:
        """Replay dead letters, of one cause or all, as the command does; and so release parked keys."""
        found = dead_letter_commands.find(self.bridge.wiring).letters
        letters = [each for each in found if only in (None, each.cause)]
        asked = self.bridge.operations.replay_dead_letters(ids=[each.document_id for each in letters]).run()
        assert asked.fields["done"], asked
        for term in runner._terms:
            term.leader._replaying.due_at = 0.0  # at once, and not within a second
        return runner.deliver(raises=False)

    def end_waits(self, runner: BridgeRunner) -> None:
        """Move the times for which changes wait into the past, and let them run with the next delivery."""
        for term in runner._terms:
            term.end_waits()
            term.look()

    def rewind(self, runner: BridgeRunner, handler: str, place: Any) -> Any:
        """Send a handler back to behind a change, as the command does while no listener runs."""
        runner._leading.close()
        time = time_of_token(place.resume_token, None)
        assert time is not None, "a change has a time"
        self.bridge.operations.reset(handler, place_at_time(Timestamp(time.time, time.inc + 1))).run()
        for term in runner._terms:
            runner._leading.enter_context(term.led())
        return runner.deliver(raises=False)

    # -- what was done -------------------------------------------------------------------------------

    def counted(self) -> dict[str, int]:
        """How often each effect is there."""
        found = {each["_id"]: each["n"] for each in self.done.find()}
        for count in self.counters:
            found |= count()
        return found

    def documents(self, collection: str) -> list[Document]:
        """Documents in the order of their `_id`, without stamps of a fence."""
        return list(self.db[collection].find({}, {"_fence": 0}, sort=[("_id", 1)]))

    def balances(self) -> dict[str, int]:
        """The accounts."""
        return {each["_id"]: each["balance"] for each in self.db["accounts"].find()}

    @contextmanager
    def open(self) -> Iterator[Shop]:
        """Drop at the end what it has written."""
        with closing(self.bridge.client):
            yield self
            for name in self.db.list_collection_names():
                self.db.drop_collection(name)


def label(change: Change) -> str:
    """What a change is counted under."""
    return f"{change.document_key['_id']}.{(change.full_document or {}).get('n')}"


def note_nothing(_change: Change) -> None:
    """A handler for a bridge that needs one."""


def together(*calls: Any) -> None:
    """Run calls in threads of their own, and raise what they raise."""
    errors: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _has_sent(box: Outbox | OutboxCollection) -> bool:
    return not pending_entries(box)
