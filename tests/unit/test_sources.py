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


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("shop.orders", ORDERS),
        ("shop.orders.old", Source("shop", "orders.old")),
        ("shop.*", Source("shop", None)),
        ("*", Source(None, None)),
        ("orders", Source("main", "orders")),
    ],
)
def test_a_source_is_written_as_a_namespace(text: str, source: Source) -> None:
    """A bare collection belongs to the database in the URL."""
    assert parse_source(text, "main") == source


@pytest.mark.parametrize(
    ("source", "text"), [(ORDERS, "shop.orders"), (Source("shop", None), "shop.*"), (Source(None, None), "*")]
)
def test_a_source_reads_as_it_is_written(source: Source, text: str) -> None:
    """Messages show what the user wrote."""
    assert str(source) == text
    assert parse_source(text, None) == source


def summarise(change: Change) -> None:
    """A handler."""


class DerivedCollection(Collection[dict[str, Any]]):
    """As Flask-PyMongo derives one."""


def test_a_collection_of_a_derived_class_is_a_source() -> None:
    """It is callable only to say that it is not, as PyMongo's own: no decorator without parentheses."""
    with MongoClient[dict[str, Any]]("mongodb://localhost:1", connect=False) as client:
        collection = DerivedCollection(client["shop"], "orders")
        bridge = Bridge(name="derived", autodiscover=False)
        bridge.on_change(collection, name="summarise")(summarise)
        assert bridge.handlers[0].targets == (collection,)
        assert parse_source(collection, None) == ORDERS


def test_a_bare_collection_needs_a_database_in_the_url() -> None:
    """P9: the message writes out both readings."""
    with pytest.raises(ConfigurationError, match=r"write 'db\.orders' or 'orders\.\*'"):
        parse_source("orders", None)


@pytest.mark.parametrize(
    "text",
    ["", ".", "shop.", ".orders", "*.orders", "sh*op.orders", "shop.ord*", "$shop.orders", "shop.$x", "shop.a\0b"],
)
def test_a_source_of_another_form_is_refused(text: str) -> None:
    """P9: a pattern that the server would take literally would never match."""
    with pytest.raises(ConfigurationError, match="source"):
        parse_source(text, None)


@pytest.mark.parametrize("database", ["admin", "config", "local"])
def test_mongodbs_own_databases_cannot_be_watched(database: str) -> None:
    """P9: the server refuses such streams."""
    for collection in ("*", "x"):
        with pytest.raises(ConfigurationError, match=f"MongoDB's own database '{database}'"):
            parse_source(f"{database}.{collection}", None)


def test_collections_and_databases_of_the_driver_are_sources() -> None:
    """Only their names count: the bridge opens clients of its own."""
    with MongoClient[dict[str, Any]]("mongodb://127.0.0.1:1", connect=False) as client:
        assert parse_source(client["shop"]["orders"], None) == ORDERS
        assert parse_source(client["shop"], None) == Source("shop", None)


@pytest.mark.parametrize(
    "target", [None, 7, b"shop.orders", ["shop.orders"], pytest.param(object(), id="object"), int, dict], ids=repr
)
def test_anything_else_is_no_source(target: object) -> None:
    """P9: the message says what is one."""
    with pytest.raises(ConfigurationError, match=r"is not a source|neither a Django model nor a MongoEngine document"):
        parse_source(target, "main")


def test_a_django_model_is_the_table_of_its_concrete_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django says the database and the table; a proxy model has the table of the model behind it."""
    _pretend_django(monkeypatch)
    assert parse_source(Proxy, None) == Source("shop", "shop_order")


def test_a_django_model_of_a_relational_database_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a collection that bears the table's name nothing would ever come, without a word."""
    _pretend_django(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"Order is stored in 'default', a database of SQLite, and only"):
        parse_source(Order, None)


def _pretend_django(monkeypatch: pytest.MonkeyPatch) -> None:
    database = ModuleType("django.db")
    vars(database).update(
        connections={
            "orders": SimpleNamespace(settings_dict={"NAME": "shop"}, vendor="mongodb"),
            "default": SimpleNamespace(settings_dict={"NAME": "shop"}, vendor="sqlite", display_name="SQLite"),
        },
        router=SimpleNamespace(db_for_write=lambda model: "orders" if model is Proxy else "default"),
    )
    monkeypatch.setitem(sys.modules, "django", ModuleType("django"))
    monkeypatch.setitem(sys.modules, "django.db", database)


class Order:
    """What is used of a Django model."""

    _meta: Any = SimpleNamespace(db_table="shop_order")


Order._meta.concrete_model = Order


class Proxy(Order):
    """A proxy model."""

    _meta = SimpleNamespace(db_table="nobody asks", concrete_model=Order)


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


def test_a_mongoengine_class_is_its_collection() -> None:
    """Whatever class-level settings say: the library itself is asked."""
    assert parse_source(Invoice, None) == Source("shop", "invoices")


def test_a_class_without_a_collection_is_refused() -> None:
    """P9: an abstract document names no collection."""
    with pytest.raises(ConfigurationError, match="class Abstract is neither"):
        parse_source(Abstract, None)


# Which events a handler wants


@pytest.mark.parametrize(
    ("targets", "ns", "wanted"),
    [
        (["shop.orders"], "shop.orders", True),
        (["shop.orders"], "shop.invoices", False),
        (["shop.orders"], "other.orders", False),
        (["shop.*"], "shop.anything", True),
        (["shop.*"], "other.orders", False),
        (["*"], "other.orders", True),
        (["shop.a", "other.*"], "other.x", True),
        (["shop.a", "other.*"], "shop.b", False),
    ],
)
def test_an_event_is_wanted_by_its_namespace(targets: list[str], ns: str, wanted: bool) -> None:
    """Any of the sources may cover it."""
    assert selector(*targets).selects(event("insert", ns)) is wanted


@pytest.mark.parametrize("operation", ["insert", "update", "replace", "delete"])
def test_changes_of_documents_are_wanted_by_default(operation: str) -> None:
    """And only those that were named, where some were."""
    assert selector("shop.orders").selects(event(operation))
    assert selector("shop.orders", operations=[operation]).selects(event(operation))
    others = {"insert", "update", "replace", "delete"} - {operation}
    assert not selector("shop.orders", operations=others).selects(event(operation))


@pytest.mark.parametrize(
    ("operation", "ns"),
    [("drop", "shop.orders"), ("rename", "shop.orders"), ("dropDatabase", "shop"), ("invalidate", "")],
)
def test_other_events_come_only_to_those_who_ask(operation: str, ns: str) -> None:
    """A handler that reads `full_document` should not meet a `drop` unprepared."""
    for target in ("shop.orders", "shop.*", "*"):
        assert not selector(target).selects(event(operation, ns))
        assert selector(target, operations={operation}).selects(event(operation, ns))
    if ns:
        assert not selector("other.orders", operations={operation}).selects(event(operation, ns))


@pytest.mark.parametrize("operation", ["create", "createIndexes", "shardCollection", "newInALaterServer"])
def test_an_event_of_another_kind_comes_to_those_who_ask(operation: str) -> None:
    """A newer server may send more than it does today: by its name, or with everything."""
    assert not selector("*").selects(event(operation))
    assert selector("shop.orders", operations={operation}).selects(event(operation))
    for every in ("*", {"*"}):
        assert selector("shop.orders", operations=every).selects(event(operation))
        assert not selector("shop.invoices", operations=every).selects(event(operation))


def test_an_event_of_an_unknown_kind_may_belong_to_nobodys_namespace() -> None:
    """It comes to those who ask for it; to pass over it would be a silent loss."""
    assert selector("shop.orders", operations="*").selects(event("newInALaterServer", ""))
    assert not selector("shop.orders").selects(event("newInALaterServer", ""))


def test_a_rename_concerns_both_names() -> None:
    """The collection that is taken away, and the one that is put in its place."""
    renamed = event("rename", "shop.new_orders", to={"db": "shop", "coll": "orders"})
    assert selector("shop.orders", operations={"rename"}).selects(renamed)
    assert selector("shop.new_orders", operations={"rename"}).selects(renamed)
    assert selector("shop.*", operations={"rename"}).selects(renamed)
    assert not selector("shop.invoices", operations={"rename"}).selects(renamed)


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
    ],
)
def test_an_update_counts_when_it_touches_a_field_or_a_part_of_it(description: dict[str, Any], wanted: bool) -> None:
    """Names that merely begin alike are other fields."""
    assert selector("shop.orders", fields={"customer"}).selects(update(**description)) is wanted


def test_an_update_of_a_whole_document_touches_a_field_inside_it() -> None:
    """`$set: {customer: {...}}` may change `customer.name`; array positions are parts of a path."""
    named = selector("shop.orders", fields={"customer.name", "lines.0.price"})
    assert named.selects(update(updatedFields={"customer": {"name": "x"}}))
    assert named.selects(update(updatedFields={"lines": []}))
    assert named.selects(update(updatedFields={"lines.0": {}}))
    assert not named.selects(update(updatedFields={"lines.1": {}}))
    assert not named.selects(update(updatedFields={"customer.mail": "x"}))


@pytest.mark.parametrize("operation", ["insert", "replace", "delete"])
def test_fields_say_nothing_about_other_operations(operation: str) -> None:
    """A replaced document may differ anywhere."""
    assert selector("shop.orders", fields={"customer"}).selects(event(operation))


def test_an_update_without_a_description_touches_nothing() -> None:
    """As that of a pipeline that has changed nothing."""
    assert not selector("shop.orders", fields={"customer"}).selects(event("update"))


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("inserts", "insert"), ("createindexes", "createIndexes"), ("Drop", "drop"), ("dropdatabse", "dropDatabase")],
)
def test_a_name_that_is_nearly_known_is_a_misspelt_one(name: str, meant: str) -> None:
    """P9: in capitals or not."""
    with pytest.raises(ConfigurationError, match=rf"did you mean '{meant}'\?\).*operations='\*'"):
        make_filter({name}, None, None)


def test_a_name_of_a_later_server_is_taken() -> None:
    """What cannot be a misspelt one may be one that this version has never heard of; what is no name cannot."""
    assert make_filter({"vacuum", "insert"}, None, None).operations == {"vacuum", "insert"}
    with pytest.raises(ConfigurationError, match="operation 'a b' is unknown"):
        make_filter({"a b"}, None, None)


def test_all_operations_stand_alone() -> None:
    """P9: `"*"` and `{"*"}` are the same; beside a name it would make the name mean nothing."""
    assert make_filter("*", None, None) == make_filter({"*"}, None, None)
    with pytest.raises(ConfigurationError, match="give it alone"):
        make_filter({"*", "insert"}, None, None)


@pytest.mark.parametrize("match", ["$x", [], 5, True, ["$gt", 1]])
def test_a_match_is_an_expression(match: object) -> None:
    """P9: with an example."""
    with pytest.raises(ConfigurationError, match="is no condition"):
        make_filter(None, None, match)


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


MOVING = ["drop", "dropDatabase", "invalidate", "rename"]
DOCUMENTS = ["delete", "insert", "replace", "update"]


def passing(found: Scope) -> list[dict[str, Any]]:
    """What our first stage lets pass: events of whole collections, then those of documents."""
    clauses: list[dict[str, Any]] = found.pipeline[0]["$match"]["$or"]
    return clauses


def listed(found: Scope) -> list[Any]:
    """The lists in which the server looks up the namespace of a document's change."""
    expression = passing(found)[-1]["$expr"]
    return [each["$in"] for each in expression.get("$or", [expression])]


def test_one_collection_is_filtered_by_operation_alone() -> None:
    """The scope says the rest; what moves a collection always passes: an invalidate, and a drop while it is read."""
    found = scope(
        selector("shop.orders", operations={"insert"}), selector("shop.orders", name="b", operations={"delete"})
    )
    assert passing(found) == [
        {"operationType": {"$in": MOVING}},
        {"operationType": {"$in": ["delete", "insert"]}},
    ]
    assert len(found.pipeline) == 1


def test_several_collections_are_one_list() -> None:
    """And several databases are the same list: there is no clause a collection, nor one a database."""
    found = scope(selector("shop.orders"), selector("shop.invoices", name="b"), selector("other.x", name="c"))
    name = {"$concat": ["$ns.db", ".", "$ns.coll"]}
    assert passing(found)[1]["operationType"] == {"$in": DOCUMENTS}
    assert listed(found) == [[name, ["other.x", "shop.invoices", "shop.orders"]]]


def test_whole_databases_are_a_list_of_their_own() -> None:
    """A collection in one of them needs no mention."""
    found = scope(selector("shop.*", "shop.orders"), selector("other.x", "third.*", name="b"))
    name = {"$concat": ["$ns.db", ".", "$ns.coll"]}
    assert listed(found) == [[name, ["other.x"]], ["$ns.db", ["shop", "third"]]]


@pytest.mark.parametrize("count", [2, 10, 200])
def test_the_filter_has_the_same_shape_for_any_number_of_sources(count: int) -> None:
    """P12: with a clause for each collection, a quiet bridge beside a busy neighbour falls off the oplog."""
    found = scope(*(selector(f"shop.c{number}", name=f"h{number}") for number in range(count)))
    assert len(passing(found)) == 2
    assert len(listed(found)) == 1
    assert len(listed(found)[0][1]) == count


def test_events_of_whole_collections_pass_by_operation_alone() -> None:
    """Their namespace may be a database's, or stand under `to`; whose they are, the selectors say."""
    found = scope(selector("shop.a", operations={"drop", "insert"}), selector("b.b", name="b", operations={"rename"}))
    assert passing(found)[0] == {"operationType": {"$in": MOVING}}
    assert passing(found)[1]["operationType"] == {"$in": ["insert"]}
    assert listed(found)[0][1] == ["shop.a"]


def test_operations_that_are_wanted_of_other_sources_are_clauses_of_their_own() -> None:
    """Four at most: updates that nobody wants would each be looked up."""
    found = scope(
        selector("shop.a", operations={"insert"}),
        selector("shop.b", "b.b", name="b", operations={"update", "insert"}),
        selector("b.*", name="c", operations={"delete", "replace"}),
    )
    name = {"$concat": ["$ns.db", ".", "$ns.coll"]}
    assert passing(found)[1:] == [
        {"operationType": {"$in": ["delete", "replace"]}, "$expr": {"$in": ["$ns.db", ["b"]]}},
        {"operationType": {"$in": ["insert"]}, "$expr": {"$in": [name, ["b.b", "shop.a", "shop.b"]]}},
        {"operationType": {"$in": ["update"]}, "$expr": {"$in": [name, ["b.b", "shop.b"]]}},
    ]


def test_operations_that_are_wanted_of_everything_have_no_list() -> None:
    """Of a whole database, or of the cluster, where the stream is open on it."""
    found = scope(selector("shop.*", operations={"insert"}), selector("shop.a", name="b", operations={"update"}))
    assert "$expr" not in passing(found)[1]
    assert listed(found)[0][1] == ["shop.a"]


def test_handlers_of_nothing_but_collections_need_no_document() -> None:
    """The server then passes over every write."""
    assert passing(scope(selector("a.a", "b.b", operations={"drop"}))) == [{"operationType": {"$in": MOVING}}]


def test_all_operations_let_every_event_pass_that_is_no_documents() -> None:
    """Whatever a later server calls it."""
    kinds, documents = passing(scope(selector("a.a", operations="*"), selector("b.b", name="b")))
    assert kinds == {"operationType": {"$nin": DOCUMENTS}}
    assert documents["operationType"] == {"$in": DOCUMENTS}


def test_a_stream_of_the_cluster_never_sees_the_bridges_own_state() -> None:
    """Else every commit would be a change that leads to a commit. Where databases are named, the state is not one."""
    everything = scope(selector("*", operations="*"), selector("shop.x", name="b"))
    assert everything.pipeline[0]["$match"]["ns.db"] == {"$ne": STATE}
    named = scope(selector("shop.*"), selector("other.x", name="b"))
    assert STATE not in repr(named.pipeline)


@pytest.mark.parametrize("target", ["mongo_celery.partitions", "mongo_celery.*"])
def test_a_source_in_the_bridges_own_state_database_is_refused(target: str) -> None:
    """P9: it would feed the bridge with its own writes."""
    with pytest.raises(ConfigurationError, match="lies in the bridge's state database 'mongo_celery'"):
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


def test_the_fingerprint_does_not_depend_on_the_order_of_registration() -> None:
    """Imports come in another order now and then; the stream stays the same."""
    first, second = selector("shop.a", name="a"), selector("shop.b", name="b")
    assert scope(first, second).fingerprint == scope(second, first).fingerprint


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
