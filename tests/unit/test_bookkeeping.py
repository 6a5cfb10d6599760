"""Which updates touch nothing but what this package keeps in documents, and who is given them all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import ObjectId
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Changes, Outbox, OutboxCollection
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.stream.bookkeeping import Bookkeeping
from mongo_celery.bridge.stream.filter import Filter, make_filter
from mongo_celery.bridge.stream.source import Selector, Source, parse_source, resolve_selectors
from mongo_celery.bridge.view import AppOutboxes, HandlerView
from mongo_celery.testing.change import inserted
from tests.fixtures.samples import event

ORDERS = Source("shop", "orders")
KNOWN = Bookkeeping({"shop.orders": frozenset({"pendingEvents"}), "shop.bills": frozenset({"pendingEvents"})})
LOCKED = {"at": datetime(2026, 1, 1, tzinfo=UTC), "id": ObjectId()}
VERSION = {"of": ObjectId(), "at": ObjectId()}
STAMPS = {"shop/summarise": {"g": 3, "p": {"0": 812}}}

OURS: dict[str, dict[str, Any]] = {
    "an outbox claims": {"updatedFields": {"pendingEvents.claim.owner": ObjectId(), "pendingEvents.claim.ttl": 7}},
    "an outbox removes": {"updatedFields": {"pendingEvents.count": 1, "pendingEvents.events": [{}]}},
    "an outbox removes from the end": {"truncatedArrays": [{"field": "pendingEvents.events", "newSize": 1}]},
    "the first lock": {"updatedFields": {"_lock": LOCKED}},
    "a version is given": {"updatedFields": {"transactionFence": VERSION}},
    "a transaction of several is settled": {
        "updatedFields": {"transactionFence.at": ObjectId(), "pendingTransactions.0": 7},
        "truncatedArrays": [{"field": "pendingTransactions", "newSize": 1}],
    },
    "the first stamp": {"updatedFields": {"_fence": STAMPS}},
    "a newer stamp": {"updatedFields": {"_fence.shop/summarise.p.0": 813}},
    "stamps of a new partitioning": {"updatedFields": {"_fence.shop/bill.g": 4, "_fence.shop/bill.p": {"1": 2}}},
    "a lock and a removal": {"updatedFields": {"_lock.id": ObjectId()}, "removedFields": ["pendingEvents"]},
}
THEIRS: dict[str, dict[str, Any]] = {
    "a field beside an outbox's": {"updatedFields": {"paid": True, "pendingEvents.count": 1}},
    "a field is removed beside it": {"updatedFields": {"pendingEvents.count": 1}, "removedFields": ["paid"]},
    "a field with a longer name": {"updatedFields": {"pendingEventsOf": 1}},
    "a field of that name elsewhere": {"updatedFields": {"order.pendingEvents": 1}},
    "a change beside a lock": {"updatedFields": {"_lock": LOCKED, "seat": 7}},
    "a user's own lock": {"updatedFields": {"_lock": "Ann"}},
    "a part of a user's own lock": {"updatedFields": {"_lock.by": "Ann", "_lock.at": LOCKED["at"]}},
    "a part of it that is called so": {"updatedFields": {"_lock.id": 7}},
    "a lock is removed": {"removedFields": ["_lock"]},
    "a lock's id is removed": {"removedFields": ["_lock.id"]},
    "a transaction is applied": {"updatedFields": {"balance": 7, "pendingTransactions": [1]}},
    "markers of the tutorial": {"updatedFields": {"pendingTransactions": []}},
    "a user's own fence": {"updatedFields": {"transactionFence": 7}},
    "a user's own fence of parts": {"updatedFields": {"transactionFence": {"of": 1, "at": 2}}},
    "a fence is removed": {"removedFields": ["transactionFence"], "updatedFields": {"pendingTransactions": []}},
    "a fenced write": {"updatedFields": {"total": 7, "_fence.shop/summarise.p.0": 813}},
    "a user's own _fence": {"updatedFields": {"_fence": {"height": 2}}},
    "a _fence of routes": {"updatedFields": {"_fence": {"north/south": {"height": 2}}}},
    "a part of one": {"updatedFields": {"_fence.north/south.height": 2}},
    "a number of one": {"updatedFields": {"_fence": {"north/south": 2}}},
    "a part of a stamp is removed": {"removedFields": ["_fence.shop/summarise.p.0"]},
    "null in the place of stamps": {"updatedFields": {"_fence": None}},
    "nothing": {},
}


def updated(description: Mapping[str, Any], ns: str = "shop.orders", **fields: Any) -> dict[str, Any]:
    whole = {"updatedFields": {}, "removedFields": [], "truncatedArrays": [], **description}
    return event("update", ns, updateDescription=whole, **fields)


def raw(document: Mapping[str, Any]) -> RawEvent:
    return RawEvent(bson.encode(document))


def filter_of(**conditions: Any) -> Filter:
    return make_filter(**{"operations": None, "fields": None, "match": None, **conditions})


def selector(*, bookkeeping: Bookkeeping | None = KNOWN, **conditions: Any) -> Selector:
    return Selector("summarise", (ORDERS,), filter_of(**conditions), bookkeeping)


@pytest.mark.parametrize("description", OURS.values(), ids=OURS.keys())
def test_what_nobody_else_has_written_is_bookkeeping(description: dict[str, Any]) -> None:
    for form in (updated(description), raw(updated(description))):
        assert not selector().selects(form)
        assert not selector().may_select(form)
        assert selector(bookkeeping=None).selects(form)


@pytest.mark.parametrize("description", THEIRS.values(), ids=THEIRS.keys())
def test_what_may_be_a_users_is_given(description: dict[str, Any]) -> None:
    """A name alone says nothing but in a collection with an outbox; to leave a change out would be a silent loss."""
    for form in (updated(description), raw(updated(description))):
        assert selector().selects(form)


def test_an_outboxs_field_is_bookkeeping_in_updates_of_its_own_collection_only() -> None:
    removal = {"removedFields": ["pendingEvents"]}
    assert KNOWN.covers_event(updated(removal, "shop.bills"))
    assert not KNOWN.covers_event(updated(removal, "shop.visits"))
    assert not KNOWN.covers_event(raw({**updated(removal), "operationType": "replace"}))


@pytest.mark.parametrize("description", [None, 7, [], {"updatedFields": 7}, {"removedFields": [7]}], ids=repr)
def test_a_description_of_another_form_is_given(description: Any) -> None:
    """P12: nothing is raised, and nothing is taken for bookkeeping that cannot be judged."""
    odd = event("update", updateDescription=description, fullDocument={"pendingEvents": 1})
    assert selector().selects(odd)
    assert selector().selects(raw(odd))


@pytest.mark.parametrize(
    ("conditions", "is_given"),
    [
        ({"bookkeeping": True}, True),
        ({"fields": {"pendingEvents.count"}}, True),
        ({"fields": {"customer"}}, False),
        ({"operations": {"update"}}, False),
    ],
)
def test_who_asks_for_it_is_given_it(conditions: dict[str, Any], is_given: bool) -> None:
    one = Selector("summarise", (ORDERS,), filter_of(**conditions))
    [one] = resolve_selectors([one], KNOWN)
    assert one.selects(updated({"updatedFields": {"pendingEvents.count": 1}})) is is_given


def test_a_bridge_knows_the_outboxes_of_its_app(caplog: pytest.LogCaptureFixture) -> None:
    """One that cannot be opened keeps no listener from leading; its entries are given, and that is said."""
    with (
        Celery("shop", broker="memory://", set_as_current=False) as app,
        MongoClient[Any]("mongodb://127.0.0.1:1", connect=False) as client,
    ):
        bridge = Bridge(app, "mongodb://127.0.0.1:1/shop", autodiscover=False)
        bridge.on_change("orders", "bills", "visits")(summarise)
        Outbox(app, client.shop.orders)
        Outbox(app, lambda: client.shop.bills)
        OutboxCollection(app, client.shop.visits)
        Outbox(app, not_there, name="gone")

        [one], _ = bridge.wiring.stream()

        assert one.bookkeeping == Bookkeeping(KNOWN.outboxes, frozenset({"shop.visits"}))
    assert [vars(each).get("event") for each in caplog.records].count("bookkeeping_unknown") == 1


def not_there() -> Any:
    raise LookupError("no connection")


def summarise(change: Any) -> None:
    """A handler."""


COLLECTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "an outbox's own": (event("insert", "shop.visits"), True),
    "its keys": (event("update", "shop.visits_keys"), True),
    "one of that name in another database": (event("insert", "store.visits"), False),
}


@pytest.mark.parametrize(("change", "is_ours"), COLLECTIONS.values(), ids=COLLECTIONS.keys())
def test_who_watches_a_whole_database_gets_no_collection_of_ours(change: dict[str, Any], is_ours: bool) -> None:
    """Unless it is named, or bookkeeping is asked for; `fields` decide about updates alone."""
    known = Bookkeeping({}, frozenset({"shop.visits", "shop.visits_keys"}))
    database = change["ns"]["db"]
    name = f"{database}.{change['ns']['coll']}"

    def is_given(*sources: str, **conditions: Any) -> bool:
        wanted = filter_of(**{"operations": "*", **conditions})
        one = Selector("all", tuple(parse_source(each, None) for each in sources), wanted)
        [one] = resolve_selectors([one], known)
        assert one.selects(raw(change)) is one.selects(change) is one.may_select(change)
        return one.selects(change)

    assert is_given(f"{database}.*") is is_given("*") is not is_ours
    assert is_given(f"{database}.*", "other.orders") is not is_ours
    assert is_given(f"{database}.*", bookkeeping=True)
    assert is_given(name)
    assert is_given("*", name)
    if change["operationType"] != "update":
        assert is_given("*", fields={"total"}) is not is_ours


PENDING = {"count": 1, "events": [{}]}
KEPT: dict[str, dict[str, Any]] = {
    "entries of an outbox": {"pendingEvents": PENDING},
    "a lock": {"_lock": LOCKED},
    "a version, with markers": {"transactionFence": VERSION, "pendingTransactions": [7]},
    "stamps": {"_fence": STAMPS},
    "a stamp with its last write": {"_fence": {"shop/bill": {"g": 1, "p": {"0": 1}, "l": {"i": 0}}}},
    "all of them": {"pendingEvents": PENDING, "_lock": LOCKED, "transactionFence": VERSION, "_fence": STAMPS},
}
OF_USERS: dict[str, dict[str, Any]] = {
    "a lock with an id alone": {"_lock": {"id": ObjectId()}},
    "a fence of another kind": {"_fence": {"height": 2}},
    "a fence of routes": {"_fence": {"north/south": {"height": 2}, "shop/bill": {"g": 1, "p": {"0": 1}}}},
    "markers without a version": {"pendingTransactions": [7]},
    "another version": {"transactionFence": 7, "pendingTransactions": [7]},
}


Seen = Callable[..., Change]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Give an event as a handler sees it, in an app whose outboxes are `KNOWN`."""
    with (
        Celery("shop", broker="memory://", set_as_current=False) as app,
        MongoClient[Any]("mongodb://127.0.0.1:1", connect=False) as client,
    ):
        Outbox(app, client.shop.orders)
        Outbox(app, lambda: client.shop.bills, name="bills")

        def change(raw: Mapping[str, Any], **conditions: Any) -> Change:
            return Change(raw, _view=HandlerView(AppOutboxes(app), filter_of(**conditions)))

        yield change


@pytest.mark.parametrize("fields", KEPT.values(), ids=KEPT.keys())
def test_documents_lack_what_this_package_keeps(seen: Seen, fields: dict[str, Any]) -> None:
    """Copied elsewhere it would count there. The event itself has all of it, and so has who asks for it."""
    whole = {"_id": 1, "n": 2, **fields, "last": 3}
    change = seen(event("replace", fullDocument=whole, fullDocumentBeforeChange=whole))
    for found in (change.full_document, change.full_document_before_change, change["fullDocument"]):
        assert found == {"_id": 1, "n": 2, "last": 3}
    assert change.raw["fullDocument"] == whole
    assert seen(change.raw, bookkeeping=True, fields={"n"}).full_document == whole
    one = next(iter(fields))
    named = seen(change.raw, fields={f"{one}.count"}).full_document
    assert named is not None
    assert named.keys() == {"_id", "n", "last", one}


@pytest.mark.parametrize("fields", OF_USERS.values(), ids=OF_USERS.keys())
def test_documents_have_all_that_may_be_a_users(seen: Seen, fields: dict[str, Any]) -> None:
    assert seen(event("insert", fullDocument={"_id": 1, **fields})).full_document == {"_id": 1, **fields}


@pytest.mark.parametrize("description", OURS.values(), ids=OURS.keys())
def test_descriptions_lack_what_this_package_keeps(seen: Seen, description: Mapping[str, Any]) -> None:
    """Of an update that changes something else as well. The document's version tells what the markers are."""
    paid = updated({"updatedFields": {"paid": True}})["updateDescription"]
    ours = {**description, "updatedFields": {"paid": True, **description.get("updatedFields", {})}}
    change = seen(updated(ours, disambiguatedPaths={}))
    assert change.update_description == paid
    assert seen(change.raw, bookkeeping=True).update_description == change.raw["updateDescription"]
    marked = updated({"updatedFields": {"paid": True, "pendingTransactions": [1]}})
    assert seen(marked).update_description == marked["updateDescription"]
    marked["fullDocument"] = {"_id": 1, "pendingTransactions": [1], "transactionFence": VERSION}
    assert seen(marked).update_description == paid


def test_a_handler_that_is_called_sees_what_it_sees_in_a_worker() -> None:
    """A unit test finds out, with changes made by hand; so does a handler that is called by another one."""
    document = {"_id": 1, "n": 2, "_fence": STAMPS}
    given: list[Any] = []
    bridge = Bridge(Celery("shop", set_as_current=False), "mongodb://127.0.0.1:1/shop", autodiscover=False)

    @bridge.on_changes("shop.orders")
    def lists(changes: Changes) -> None:
        given.append(changes[0].full_document)

    @bridge.on_change("shop.orders", bookkeeping=True)
    def whole(change: Change) -> None:
        given.append(change.full_document)
        lists([change])

    one = inserted("shop.orders", document)
    whole(one)
    assert given == [document, {"_id": 1, "n": 2}]
    assert one.full_document == document
