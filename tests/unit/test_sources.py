"""What a handler listens to: sources, filters, and the one stream that serves them all."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Bridge, Change
from mongo_celery.bridge.change import FLAGS
from mongo_celery.bridge.stream.filter import Filter, find_objection, make_filter
from mongo_celery.bridge.stream.source import (
    Scope,
    Selector,
    Source,
    make_scope,
    parse_source,
    strip_flags,
)
from mongo_celery.errors import ConfigurationError
from tests.fixtures.samples import event

STATE = "mongo_celery"
ORDERS = Source("shop", "orders")


def selector(
    *targets: str, name: str = "summarise", operations: Any = None, fields: Any = None, match: Any = None
) -> Selector:
    return Selector(
        name, tuple(parse_source(target, None) for target in targets), make_filter(operations, fields, match)
    )


def scope(*selectors: Selector, **options: Any) -> Scope:
    return make_scope(selectors, state_database=STATE, **options)


def update(**description: Any) -> dict[str, Any]:
    return event("update", updateDescription=description)


# Sources


class DerivedCollection(Collection[dict[str, Any]]):
    """As Flask-PyMongo derives one."""


class Order:
    """What is used of a Django model."""

    _meta: Any = SimpleNamespace(db_table="shop_order")


Order._meta.concrete_model = Order


class Invoice:
    """What is used of a MongoEngine document class."""

    @classmethod
    def _get_collection_name(cls) -> str | None:
        return "invoices"

    @classmethod
    def _get_db(cls) -> Any:
        return SimpleNamespace(name="shop")


class Abstract(Invoice):
    """An abstract document class has no collection."""

    @classmethod
    def _get_collection_name(cls) -> str | None:
        return None


CLIENT = MongoClient[dict[str, Any]]("mongodb://127.0.0.1:1", connect=False)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("shop.orders", ORDERS),
        ("shop.orders.old", Source("shop", "orders.old")),
        ("shop.*", Source("shop", None)),
        ("*", Source(None, None)),
        ("orders", Source("main", "orders")),
        (CLIENT["shop"]["orders"], ORDERS),
        (CLIENT["shop"], Source("shop", None)),
        (DerivedCollection(CLIENT["shop"], "orders"), ORDERS),
        (Invoice, Source("shop", "invoices")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_source_is_a_namespace_or_what_has_one(target: Any, source: Source) -> None:
    """A bare collection belongs to the database in the URL. Of objects of the driver only the names count."""
    assert parse_source(target, "main") == source


def summarise(change: Change) -> None:
    """A handler."""


def test_a_collection_of_a_derived_class_is_a_handlers_source() -> None:
    """It is callable only to say that it is not, as PyMongo's own: no decorator without parentheses."""
    collection = DerivedCollection(CLIENT["shop"], "orders")
    bridge = Bridge(name="derived", autodiscover=False)
    bridge.on_change(collection, name="summarise")(summarise)
    assert bridge.handlers[0].targets == (collection,)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("orders", r"Use 'db\.orders' or 'orders\.\*'"),
        *((f"{name}.{collection}", f"'{name}' is a database of MongoDB itself")
          for name in ("admin", "config", "local") for collection in ("*", "x")),
        *((text, "source") for text in ("", ".", "shop.", ".orders", "*.orders", "sh*op.orders", "shop.ord*",
                                        "$shop.orders", "shop.$x", "shop.a\0b")),
        *((target, "is not a source|neither a Django model nor a MongoEngine document")
          for target in (None, 7, b"shop.orders", ["shop.orders"], object(), int, dict)),
        (Order, r"Order is stored in 'default', a database of SQLite, but only"),
        (Abstract, "class Abstract is neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_anything_else_is_no_source(monkeypatch: pytest.MonkeyPatch, target: Any, said: str) -> None:
    """P9: nothing would ever come from a pattern, a relational table or a database that the server does not watch."""
    if target is Order:
        _pretend_django(monkeypatch)
    with pytest.raises(ConfigurationError, match=said):
        parse_source(target, None)


def _pretend_django(monkeypatch: pytest.MonkeyPatch) -> None:
    database = ModuleType("django.db")
    default = SimpleNamespace(settings_dict={"NAME": "shop"}, vendor="sqlite", display_name="SQLite")
    router = SimpleNamespace(db_for_write=lambda _model: "default")
    vars(database).update(connections={"default": default}, router=router)
    monkeypatch.setitem(sys.modules, "django", ModuleType("django"))
    monkeypatch.setitem(sys.modules, "django.db", database)


# Which events a handler wants


DOCUMENTS = ("insert", "update", "replace", "delete")
RENAMED = event("rename", "shop.new_orders", to={"db": "shop", "coll": "orders"})


@pytest.mark.parametrize(
    ("targets", "operations", "given", "wanted"),
    [
        *((["shop.orders"], None, event(operation), True) for operation in DOCUMENTS),
        *((["shop.orders"], {operation}, event(operation), True) for operation in DOCUMENTS),
        (["shop.orders"], {"insert", "update"}, event("delete"), False),
        (["shop.orders"], None, event("insert", "shop.invoices"), False),
        (["shop.orders"], None, event("insert", "other.orders"), False),
        (["shop.*"], None, event("insert", "shop.anything"), True),
        (["shop.*"], None, event("insert", "other.orders"), False),
        (["*"], None, event("insert", "other.orders"), True),
        (["shop.a", "other.*"], None, event("insert", "other.x"), True),
        (["shop.a", "other.*"], None, event("insert", "shop.b"), False),
        *((["*"], None, event(operation), False)
          for operation in ("drop", "rename", "create", "createIndexes", "shardCollection", "newInALaterServer")),
        *((["shop.orders"], {operation}, event(operation), True)
          for operation in ("drop", "rename", "create", "createIndexes", "shardCollection", "newInALaterServer")),
        (["shop.orders"], None, event("dropDatabase", "shop"), False),
        (["shop.orders"], {"dropDatabase"}, event("dropDatabase", "shop"), True),
        (["other.orders"], {"dropDatabase"}, event("dropDatabase", "shop"), False),
        (["other.orders"], {"drop"}, event("drop"), False),
        (["shop.orders"], None, event("invalidate", ""), False),
        (["shop.orders"], {"invalidate"}, event("invalidate", ""), True),
        (["shop.orders"], "*", event("newInALaterServer"), True),
        (["shop.orders"], {"*"}, event("newInALaterServer"), True),
        (["shop.invoices"], "*", event("newInALaterServer"), False),
        (["shop.orders"], "*", event("newInALaterServer", ""), True),
        (["shop.orders"], None, event("newInALaterServer", ""), False),
        (["shop.orders"], {"rename"}, RENAMED, True),
        (["shop.new_orders"], {"rename"}, RENAMED, True),
        (["shop.*"], {"rename"}, RENAMED, True),
        (["shop.invoices"], {"rename"}, RENAMED, False),
    ],
)  # fmt: skip
def test_an_event_is_wanted_by_its_namespace_and_operation(
    targets: list[str], operations: Any, given: dict[str, Any], wanted: bool
) -> None:
    """Changes of documents unless others are asked for. A rename concerns both names; what is unknown, whoever asks."""
    assert selector(*targets, operations=operations).selects(given) is wanted


@pytest.mark.parametrize(
    ("description", "wanted"),
    [
        ({"updatedFields": {"customer": 1}}, True),
        ({"updatedFields": {"customer.name": 1}}, True),
        ({"updatedFields": {"customer.name.first": 1}}, True),
        ({"removedFields": ["customer"]}, True),
        ({"removedFields": ["customer.name"]}, True),
        ({"truncatedArrays": [{"field": "customer.orders", "newSize": 1}]}, True),
        ({"updatedFields": {"total": 1}}, False),
        ({"updatedFields": {"customers": 1}}, False),
        ({"updatedFields": {"old.customer": 1}}, False),
        ({"removedFields": ["customer_id"]}, False),
        ({"updatedFields": {}, "removedFields": [], "truncatedArrays": []}, False),
        ({"updatedFields": {"total": 1}, "truncatedArrays": None}, False),
        ({"updatedFields": {"place": {"city": "x"}}}, True),
        ({"updatedFields": {"place.street": "x"}}, False),
        ({"updatedFields": {"lines": []}}, True),
        ({"updatedFields": {"lines.0": {}}}, True),
        ({"updatedFields": {"lines.1": {}}}, False),
    ],
)
def test_an_update_counts_when_it_touches_a_field_or_a_part_of_it(description: dict[str, Any], wanted: bool) -> None:
    """Names that merely begin alike are other fields. To set a document may change each field inside it."""
    fields = {"customer", "place.city", "lines.0.price"}
    assert selector("shop.orders", fields=fields).selects(update(**description)) is wanted


def test_a_match_is_the_servers_verdict_under_the_handlers_name() -> None:
    """P1: a filter on a looked-up field would make the token unresumable, so it is a flag and no filter."""
    named = selector("shop.orders", match={"$gt": ["$fullDocument.total", 100]})
    assert named.selects(event(**{FLAGS: {"summarise": True, "other": False}}))
    assert not named.selects(event(**{FLAGS: {"summarise": False, "other": True}}))
    assert not named.selects(event(**{FLAGS: {"other": True}}))


def test_the_flags_are_taken_off_before_a_handler_sees_the_event() -> None:
    """The event is what the server would have sent without them."""
    assert strip_flags(event(**{FLAGS: {"summarise": True}})) == event()
    assert strip_flags(event()) == event()


# Filters


@pytest.mark.parametrize("name", ["operations", "fields"])
@pytest.mark.parametrize(
    "value",
    ["insert", b"insert", [], set(), pytest.param(iter(["insert"]), id="iterator"), {1}, ["insert", None], 5],
    ids=repr,
)
def test_a_filter_of_names_is_a_set_of_names(name: str, value: Any) -> None:
    """P9: `fields="customer"` would be eight fields of one letter each, and an empty set nothing at all."""
    with pytest.raises(ConfigurationError, match=f"{name}=.* must be a set of names"):
        make_filter(**{"operations": None, "fields": None, "match": None, name: value})


def test_an_unknown_operation_names_the_nearest() -> None:
    """P9: a misspelt operation would never come."""
    with pytest.raises(ConfigurationError, match=r"operation 'updated' is unknown \(did you mean 'update'\?\)"):
        make_filter({"insert", "updated"}, None, None)


def test_a_name_of_a_later_server_is_taken() -> None:
    """What cannot be a misspelt one may be one that this version has never heard of; what is no name cannot."""
    assert make_filter({"vacuum", "insert"}, None, None).operations == {"vacuum", "insert"}
    with pytest.raises(ConfigurationError, match="operation 'a b' is unknown"):
        make_filter({"a b"}, None, None)


def test_all_operations_stand_alone() -> None:
    """P9: `"*"` and `{"*"}` are the same; beside a name it would make the name mean nothing."""
    assert make_filter("*", None, None) == make_filter({"*"}, None, None)
    with pytest.raises(ConfigurationError, match="must be the only one"):
        make_filter({"*", "insert"}, None, None)


# The stream


@pytest.mark.parametrize(
    ("targets", "database", "collection"),
    [
        (["shop.orders"], "shop", "orders"),
        (["shop.orders", "shop.orders"], "shop", "orders"),
        (["shop.orders", "shop.invoices"], "shop", None),
        (["shop.*"], "shop", None),
        (["shop.*", "shop.orders"], "shop", None),
        (["shop.orders", "other.orders"], None, None),
        (["*"], None, None),
        (["*", "shop.orders"], None, None),
    ],
)
def test_the_stream_is_the_narrowest_that_serves_all(
    targets: list[str], database: str | None, collection: str | None
) -> None:
    """Narrow streams need fewer rights and cost the server less."""
    found = scope(*(selector(target, name=f"h{number}") for number, target in enumerate(targets)))
    assert (found.database, found.collection) == (database, collection)


@pytest.mark.parametrize("target", ["mongo_celery.partitions", "mongo_celery.*"])
def test_a_source_in_the_bridges_own_state_database_is_refused(target: str) -> None:
    """P9: it would feed the bridge with its own writes."""
    with pytest.raises(ConfigurationError, match="is in the bridge's state database 'mongo_celery'"):
        scope(selector("shop.orders"), selector(target, name="b"))


def test_no_filter_of_ours_reads_what_the_oplog_does_not_fix() -> None:
    """P1: a filter on a looked-up field makes a token unresumable as soon as the document changes."""
    looked_up = selector("shop.orders", fields={"total"}, match={"$gt": ["$fullDocument.total", 100]})
    assert "fullDocument" not in repr(scope(looked_up, selector("other.*", name="b")).pipeline[0])


@pytest.mark.parametrize(
    ("full_document", "before_change", "options"),
    [
        (None, None, {}),
        ("default", "off", {}),
        ("updateLookup", None, {"fullDocument": "updateLookup"}),
        (None, "whenAvailable", {"fullDocumentBeforeChange": "whenAvailable"}),
        ("required", "required", {"fullDocument": "required", "fullDocumentBeforeChange": "required"}),
    ],
)
def test_only_options_that_say_something_are_sent(
    full_document: str | None, before_change: str | None, options: dict[str, str]
) -> None:
    """Older servers refuse options that they do not know."""
    assert scope(selector("shop.orders"), full_document=full_document, before_change=before_change).options == options


def test_the_fingerprint_names_the_stream() -> None:
    """P1: a token goes back only to a stream with the fingerprint it came from."""
    one = scope(selector("shop.orders"), full_document="updateLookup")
    assert one.fingerprint == scope(selector("shop.orders", name="renamed"), full_document="updateLookup").fingerprint
    others = [
        scope(selector("shop.orders")),
        scope(selector("shop.invoices"), full_document="updateLookup"),
        scope(selector("shop.*"), full_document="updateLookup"),
        scope(selector("shop.orders", operations={"insert"}), full_document="updateLookup"),
        scope(selector("shop.orders", match={"$eq": [1, 1]}), full_document="updateLookup"),
        scope(selector("shop.orders"), full_document="updateLookup", before_change="required"),
    ]
    others.append(scope(selector("shop.orders"), full_document="updateLookup", expanded=True))
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1


def test_the_fingerprint_is_the_same_in_whatever_order_handlers_come() -> None:
    """P1: another one has the stream opened at its time; a deploy that changes nothing should not."""
    match = {"$gt": ["$fullDocument.total", 100]}
    handlers = [
        selector("shop.a", "third.*", name="a", match=match, operations={"insert", "drop", "update"}),
        selector("shop.b", "other.*", name="b", match=match),
        selector("other.c", name="c", operations={"rename", "delete"}),
    ]
    assert len({scope(*order).fingerprint for order in itertools.permutations(handlers)}) == 1
    turned = selector("third.*", "shop.a", name="a", match=match, operations=["update", "drop", "insert"])
    assert scope(turned, *handlers[1:]).fingerprint == scope(*handlers).fingerprint


def test_tombstones_of_fenced_deletes_are_no_changes_of_a_database() -> None:
    """A handler on `shop.*` that deletes through a fence must not be fed with its own tombstones."""
    wide = Selector("wide", (Source("shop", None), Source(None, None)), Filter())

    assert not wide.selects(event("insert", "shop.orders.fence_tombstones"))
    assert wide.selects(event("insert", "shop.orders"))


@pytest.mark.parametrize(
    "match",
    [
        {"$eq": ["$fullDocument.status", "paid"]},
        {"$and": [{"$regexMatch": {"input": "$ns.db", "regex": "^tenant_"}}, {"$not": ["$updateDescription.x"]}]},
        {"$anyElementTrue": {"$map": {"input": "$fullDocument.items", "in": {"$gt": ["$$this.price", 5]}}}},
        {"$in": ["$fullDocument.text", [{"$literal": "$status"}, "paid"]]},
        {"$eq": [{"$getField": {"field": "a.b", "input": "$$ROOT"}}, {"a": 1}]},
        {"$literal": True},
    ],
    ids=str,
)
def test_an_expression_over_the_event_is_a_condition(match: dict[str, Any]) -> None:
    """Also one that the event alone cannot tell: the server judges the rest."""
    assert find_objection(match) is None
