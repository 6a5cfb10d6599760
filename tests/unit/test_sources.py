"""What a handler listens to: sources, filters, and the one stream that serves them all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.bridge.change import FLAGS
from mongo_celery.bridge.stream.filter import find_objection, make_filter
from mongo_celery.bridge.stream.source import Scope, Selector, Source, make_scope, parse_source, strip_flags
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


CLIENT = MongoClient[dict[str, Any]]("mongodb://127.0.0.1:1", connect=False)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("shop.orders", ORDERS),
        ("shop.orders.old", Source("shop", "orders.old")),
        ("shop.*", Source("shop", None)),
        ('shop-1_x.or ders/\\"é-1', Source("shop-1_x", 'or ders/\\"é-1')),
        ("*", Source(None, None)),
        ("orders", Source("main", "orders")),
        (CLIENT["shop"]["orders"], ORDERS),
        (CLIENT["shop"], Source("shop", None)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_source_is_a_namespace_or_what_has_one(target: Any, source: Source) -> None:
    assert parse_source(target, "main") == source


@pytest.mark.parametrize(
    "target",
    [
        "orders",
        *("admin.*", "config.x", "local.x", "", ".", "shop.", ".orders", "*.orders", "sh*op.orders", "shop.ord*"),
        *("shop .orders", 'sh"op.orders', "sh/op.orders", "sh\\op.orders", "sh$op.*", "sh\0op.*"),
        *("shop.or..ders", "shop..orders", "shop.orders.", "shop.or$ders", "shop.a*b", f"{'é' * 32}.orders"),
        *("$shop.orders", "shop.$x", "shop.a\0b", None, 7, b"shop.orders", ["shop.orders"], object(), int),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_anything_else_is_no_source(target: Any) -> None:
    """P9: nothing would ever come from a pattern or a database that the server does not watch."""
    with pytest.raises(ConfigurationError):
        parse_source(target, None)


DOCUMENTS = ("insert", "update", "replace", "delete")
RENAMED = event("rename", "shop.new_orders", to={"db": "shop", "coll": "orders"})


OTHERS = ("drop", "rename", "create", "createIndexes", "shardCollection", "newInALaterServer")


@pytest.mark.parametrize(
    ("targets", "operations", "given", "wanted"),
    [
        *((["shop.orders"], None, event(operation), True) for operation in DOCUMENTS),
        (["shop.orders"], {"insert", "update"}, event("delete"), False),
        *((["shop.orders"], None, event("insert", ns), False) for ns in ("shop.invoices", "other.orders")),
        (["shop.*"], None, event("insert", "shop.anything"), True),
        (["shop.*"], None, event("insert", "other.orders"), False),
        (["shop.*"], None, event("insert", "shop.orders.fence_tombstones"), False),
        (["*"], None, event("insert", "other.orders"), True),
        (["shop.a", "other.*"], None, event("insert", "other.x"), True),
        (["shop.a", "other.*"], None, event("insert", "shop.b"), False),
        *((["*"], None, event(operation), False) for operation in OTHERS),
        *((["shop.orders"], {operation}, event(operation), True) for operation in OTHERS),
        (["shop.orders"], None, event("dropDatabase", "shop"), False),
        (["shop.orders"], {"dropDatabase"}, event("dropDatabase", "shop"), True),
        (["other.orders"], {"dropDatabase"}, event("dropDatabase", "shop"), False),
        (["shop.orders"], {"invalidate"}, event("invalidate", ""), True),
        (["shop.orders"], "*", event("newInALaterServer"), True),
        (["shop.invoices"], "*", event("newInALaterServer"), False),
        (["shop.orders"], "*", event("newInALaterServer", ""), True),
        *((targets, {"rename"}, RENAMED, True) for targets in (["shop.orders"], ["shop.new_orders"], ["shop.*"])),
        (["shop.invoices"], {"rename"}, RENAMED, False),
    ],
)
def test_an_event_is_wanted_by_its_namespace_and_operation(
    targets: list[str], operations: Any, given: dict[str, Any], wanted: bool
) -> None:
    assert selector(*targets, operations=operations).selects(given) is wanted


@pytest.mark.parametrize(
    ("description", "wanted"),
    [
        ({"updatedFields": {"customer": 1}}, True),
        ({"updatedFields": {"customer.name.first": 1}}, True),
        ({"removedFields": ["customer.name"]}, True),
        ({"truncatedArrays": [{"field": "customer.orders", "newSize": 1}]}, True),
        ({"updatedFields": {"customers": 1}}, False),
        ({"updatedFields": {"old.customer": 1}}, False),
        ({"removedFields": ["customer_id"]}, False),
        ({"updatedFields": {"total": 1}, "truncatedArrays": None}, False),
        ({"updatedFields": {"place": {"city": "x"}}}, True),
        ({"updatedFields": {"place.street": "x"}}, False),
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
    assert strip_flags(event(**{FLAGS: {"summarise": True}})) == event(), "a handler does not see them"


def test_an_operation_may_be_of_a_later_server_but_not_misspelt() -> None:
    assert make_filter({"vacuum", "insert"}, None, None).operations == {"vacuum", "insert"}
    assert make_filter("*", None, None) == make_filter({"*"}, None, None)
    for wrong, word in (({"insert", "updated"}, "'update'"), ({"a b"}, "a b"), ({"*", "insert"}, r"\*")):
        with pytest.raises(ConfigurationError, match=word):
            make_filter(wrong, None, None)


@pytest.mark.parametrize(
    ("targets", "database", "collection"),
    [
        (["shop.orders", "shop.orders"], "shop", "orders"),
        (["shop.orders", "shop.invoices"], "shop", None),
        (["shop.*", "shop.orders"], "shop", None),
        (["shop.orders", "other.orders"], None, None),
        (["*", "shop.orders"], None, None),
    ],
)
def test_the_stream_is_the_narrowest_that_serves_all(
    targets: list[str], database: str | None, collection: str | None
) -> None:
    """Narrow streams need fewer rights. P9: a source in the state would feed the bridge with its own writes."""
    each = (selector(target, name=f"h{number}") for number, target in enumerate(targets))
    found = scope(*each, full_document="default", before_change="off")
    assert (found.database, found.collection) == (database, collection)
    assert found.options == {}, "older servers refuse options that they do not know"
    for target in ("mongo_celery.partitions", "mongo_celery.*"):
        with pytest.raises(ConfigurationError, match="mongo_celery"):
            scope(selector("shop.orders"), selector(target, name="b"))


def test_no_filter_of_ours_reads_what_the_oplog_does_not_fix() -> None:
    """P1: a filter on a looked-up field makes a token unresumable as soon as the document changes."""
    looked_up = selector("shop.orders", fields={"total"}, match={"$gt": ["$fullDocument.total", 100]})
    assert "fullDocument" not in repr(scope(looked_up, selector("other.*", name="b")).pipeline[0])


def test_the_fingerprint_names_the_stream() -> None:
    """P1: a token goes back only to a stream with the fingerprint it came from."""
    one = scope(selector("shop.orders"), full_document="updateLookup")
    assert one.fingerprint == scope(selector("shop.orders", name="renamed"), full_document="updateLookup").fingerprint
    others = [
        scope(selector("shop.orders")),
        *(
            scope(each, full_document="updateLookup")
            for each in (
                *(selector("shop.invoices"), selector("shop.*"), selector("shop.orders", operations={"insert"})),
                selector("shop.orders", match={"$eq": [1, 1]}),
            )
        ),
        scope(selector("shop.orders"), full_document="updateLookup", before_change="required"),
        scope(selector("shop.orders"), full_document="updateLookup", expanded=True),
    ]
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
    assert find_objection(match) is None
