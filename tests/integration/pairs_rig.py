"""A shop whose bridge has a handler for each effect that users combine. It writes, sends, replays and rewinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from bson import Timestamp
from celery import Celery
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery import (
    Bridge,
    Change,
    Changes,
    Outbox,
    OutboxCollection,
    TwoPhaseCommit,
    once,
    select_for_update,
    transactional,
)
from mongo_celery.bridge.existing import place_at_time
from mongo_celery.bridge.operations import dead_letter_commands
from mongo_celery.mongo.oplog import operation_time, time_of_token
from mongo_celery.testing import BridgeRunner, pending_entries
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import beside

Document = dict[str, Any]
Effect = Callable[["Shop", str], Callable[[Change], object]]


class Shop:
    """
    An app with one bridge, orders to watch, and a client of its own beside the bridge's.

    Attributes:
        failing: how often each effect is still to fail for an order, by `_id`.
        resumed: labels of changes whose handler has continued after its step.
    """

    def __init__(self, url: str, database: Database[Document]) -> None:
        self.client, self.db = database.client, database
        self.orders = self.db["orders"]
        self.app = Celery(self.db.name, broker="memory://", set_as_current=False)
        self.bridge = Bridge(self.app, url, name="shop", autodiscover=False, partitions=1)
        self.failing: Counter[Any] = Counter()
        self.resumed: set[str] = set()
        self.count = self._consumer()
        self._failed: Counter[tuple[str, Any]] = Counter()
        self._boxes: list[Outbox | OutboxCollection] = []
        self._conflicts = 1

    def box(self, kind: type[Outbox | OutboxCollection], collection: str) -> Any:
        """An outbox; nothing but `send` dispatches what is in it."""
        made = kind(self.app, lambda: self.db[collection], name=collection, at_once=False, sweep_every=None)
        self._boxes.append(made)
        return made

    def bank(self) -> TwoPhaseCommit:
        self.db["accounts"].insert_many([{"_id": name, "balance": 100} for name in "AB"])
        return TwoPhaseCommit(self.app, lambda: self.db["transactions"], recover_every=None)

    def _consumer(self) -> Any:
        """A task that counts each key once, whatever message it comes with."""

        @self.app.task(name="count", shared=False)
        @once(lambda: self.db["counted"], key=lambda key: key)
        def count(key: str, *, session: ClientSession) -> None:
            self.add(key, session)

        return count

    # -- what happens --------------------------------------------------------------------------------

    def add(self, key: str, session: ClientSession | None = None) -> None:
        client = self.client if session is None else session.client
        client[self.db.name]["done"].update_one({"_id": key}, {"$inc": {"n": 1}}, upsert=True, session=session)

    def fail(self, effect: str, key: Any) -> None:
        if self._failed[effect, key] < self.failing[key]:
            self._failed[effect, key] += 1
            raise OSError("a service is away")

    def conflict(self, session: ClientSession) -> None:
        hot = session.client[self.db.name]["hot"]
        hot.find_one({"_id": 1}, session=session)  # from here on it sees what was there
        if self._conflicts:
            self._conflicts -= 1
            with beside(lambda: self.db["hot"].update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)) as other:
                other.result()
        hot.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True, session=session)

    def put(self, *places: Any, n: int = 0) -> None:
        for place in places:
            self.orders.replace_one({"_id": place}, {"n": n}, upsert=True)

    def register(self, kind: str, **options: Any) -> None:
        """Give each effect a handler of a kind: `single`, `lists` or `coalesce`."""
        for name, effect in EFFECTS.items():
            make, on = (_by_change, self.bridge.on_change) if kind == "single" else (_by_list, self.bridge.on_changes)
            handler = make(effect(self, name))
            handler.__name__ = name
            given: Document = {"coalesce": True} if kind == "coalesce" else {}
            on(self.orders.full_name, transactional=name == "handler", **given, **options)(handler)

    def arrive(self, runner: BridgeRunner) -> None:
        """Wait until all that was written is read, so that it comes together."""
        (term,), aim = runner._terms, operation_time(self.client)
        reader = term.leader.intake._reader
        assert reader is not None, "it is led"
        wait_for(lambda: reader.read_to is not None and reader.read_to >= aim)

    def send(self, runner: BridgeRunner) -> None:
        for box in self._boxes:
            box.sweep(older_than=0)
        wait_for(lambda: not any(map(pending_entries, self._boxes)))  # a dispatcher may have had some in hand
        runner.run_tasks()

    def letters(self) -> Counter[str]:
        return Counter(letter.cause for letter in dead_letter_commands.find(self.bridge.wiring).letters)

    def replay(self, runner: BridgeRunner) -> None:
        """Replay all dead letters, as the command does, and so release parked keys."""
        asked = self.bridge.operations.replay_dead_letters().run()
        assert asked.fields["done"], asked

        def is_done() -> bool:
            for term in runner._terms:
                term.leader._replaying.due_at = 0.0  # now, and not within a second
            runner.deliver(raises=False)
            return not self.letters()

        wait_for(is_done, message=lambda: str(self.letters()))

    def rewind(self, runner: BridgeRunner, place: Change) -> None:
        """Send all handlers back to behind a change, as the command does while no listener runs."""
        runner._leading.close()
        time = time_of_token(place.resume_token, None)
        assert time is not None, "a change has a time"
        for name in EFFECTS:
            self.bridge.operations.reset(name, place_at_time(Timestamp(time.time, time.inc + 1))).run()
        for term in runner._terms:
            runner._leading.enter_context(term.led())
        runner.deliver(raises=False)

    # -- what was done -------------------------------------------------------------------------------

    def counted(self) -> dict[str, int]:
        return {each["_id"]: each["n"] for each in self.db["done"].find()}

    def documents(self, collection: str) -> list[Document]:
        """Return documents in the order of their `_id`, without stamps of a fence."""
        return list(self.db[collection].find({}, {"_fence": 0}, sort=[("_id", 1)]))

    def balances(self) -> dict[str, int]:
        return {each["_id"]: each["balance"] for each in self.db["accounts"].find()}


def _by_change(body: Callable[[Change], object]) -> Any:
    def handle(change: Change) -> None:
        if change.document_key["_id"]:  # order 0 marks a place
            body(change)

    return handle


def _by_list(body: Callable[[Change], object]) -> Any:
    handle = _by_change(body)

    def handle_all(changes: Changes) -> None:
        for change in changes:
            try:
                handle(change)
            except OSError as error:
                raise changes.failed_at(change) from error

    return handle_all


def label(change: Change) -> str:
    return f"{change.document_key['_id']}.{(change.full_document or {}).get('n')}"


def _fenced(shop: Shop, name: str) -> Callable[[Change], None]:
    def mirror(change: Change) -> None:
        copy = {"n": (change.full_document or {})["n"]}
        change.fenced(f"{shop.db.name}.mirror").replace_one({"_id": change.document_key["_id"]}, copy, upsert=True)
        shop.fail(name, change.document_key["_id"])

    return mirror


def _in_handler(shop: Shop, name: str) -> Callable[[Change], None]:
    def add(change: Change) -> None:
        shop.add(f"{name} {label(change)}", change.session)
        shop.fail(name, change.document_key["_id"])

    return add


def _in_transaction(shop: Shop, name: str) -> Callable[[Change], None]:
    @transactional(lambda: shop.client)
    def add(change: Change, *, session: ClientSession) -> None:
        shop.add(f"{name} {label(change)}", session)
        shop.fail(name, change.document_key["_id"])

    return add


def _once(shop: Shop, name: str) -> Callable[[Change], None]:
    @once(lambda: shop.db["marks"], key=label)
    def charge(change: Change) -> Any:
        shop.add(f"{name} {label(change)}")
        return shop.db["charges"].insert_one({})  # nothing that Celery could keep

    def handle(change: Change) -> None:
        charge(change)
        shop.fail(name, change.document_key["_id"])
        shop.resumed.add(label(change))

    return handle


def _outbox(shop: Shop, name: str) -> Callable[[Change], None]:
    box = shop.box(Outbox, "summaries")

    def summarise(change: Change) -> None:
        entry = box.with_tasks({"$set": {"n": 1}}, [shop.count.s(f"{name} {label(change)}")])
        shop.db["summaries"].update_one({"_id": change.document_key["_id"]}, entry, upsert=True)
        shop.fail(name, change.document_key["_id"])

    return summarise


def _collection(shop: Shop, name: str) -> Callable[[Change], None]:
    @shop.app.task(name="note", shared=False)
    def note(key: str) -> None:
        shop.add(key)

    @transactional(lambda: shop.client, outbox=shop.box(OutboxCollection, "leaving"))
    def leave(change: Change, *, session: ClientSession) -> None:
        shop.db["left"].insert_one({}, session=session)
        note.delay(f"{name} {label(change)}")
        shop.fail(name, change.document_key["_id"])

    return leave


def _locks(shop: Shop, name: str) -> Callable[[Change], None]:
    shop.db["sums"].insert_one({"_id": "all", "n": 0})

    @transactional(lambda: shop.client)
    def add(change: Change, *, session: ClientSession) -> None:
        found = select_for_update(shop.db["sums"], {"_id": "all"}, session=session)
        shop.db["sums"].update_one({"_id": "all"}, {"$set": {"n": found["n"] + 1}}, session=session)
        shop.fail(name, change.document_key["_id"])

    return add


def _twophase(shop: Shop, name: str) -> Callable[[Change], None]:
    bank = shop.bank()

    def pay(change: Change) -> None:
        bank.transfer("A", "B", 1, id=label(change))
        shop.fail(name, change.document_key["_id"])

    return pay


EFFECTS: dict[str, Effect] = {
    "fenced": _fenced,
    "handler": _in_handler,
    "transactional": _in_transaction,
    "once": _once,
    "outbox": _outbox,
    "collection": _collection,
    "locks": _locks,
    "twophase": _twophase,
}
"""`handler` has `transactional=True`, `collection` an `OutboxCollection`."""
FORGETFUL = {"handler", "transactional", "collection", "locks"}
"""Effects that do not remember what they were done for: what comes again after a success counts again."""
