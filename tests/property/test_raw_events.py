"""Fields that are read from their own place in the bytes of an event are what a decoder finds there, or its error."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson import Int64, ObjectId, Timestamp
from bson.errors import InvalidDocument
from bson.raw_bson import RawBSONDocument
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.partitioning import document_hash, partitioner
from mongo_celery.bridge.raw_event import EVENT_TYPES, RawEvent, read_plain
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.filter import Filter
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.stream.source import Selector, Source
from tests.fixtures.samples import BSON_VALUES, mark
from tests.property.test_events import documents, names, raws, spoilt, valid, values

FIELDS = ("_id", "operationType", "clusterTime", "ns", "documentKey", "to", "fullDocument", "title", "_data", "")
KEY = ObjectId("0123456789abcdef01234567")


def said(look: Any) -> tuple[str, object]:
    """What a look gives, comparable whatever it is: bytes of the value, or the kind of the error."""
    try:
        found = look()
    except Exception as error:  # noqa: BLE001 - of a decoder, whatever bytes do to it
        return "error", type(error)
    kind = type(found).__name__.replace("RawEvent", "RawBSONDocument")
    try:
        return kind, bson.encode({"": found})
    except InvalidDocument:  # `dict` has made keys of an array's pairs
        return kind, repr(found)


def same(one: RawEvent | RawBSONDocument, other: RawBSONDocument) -> None:
    for name in FIELDS:
        assert said(lambda name=name: one.get(name)) == said(lambda name=name: other.get(name))
        assert said(lambda name=name: one[name]) == said(lambda name=name: other[name])
        assert said(lambda name=name: name in one) == said(lambda name=name: name in other)
    assert said(lambda: list(one)) == said(lambda: list(other))
    assert said(lambda: list(one.keys())) == said(lambda: list(other.keys()))
    assert said(lambda: len(one)) == said(lambda: len(other))
    assert said(lambda: dict(one)) == said(lambda: dict(other))
    assert said(lambda: one.get("absent", 7)) == said(lambda: other.get("absent", 7))
    if isinstance(one, RawEvent):  # a document in one that was odd is not
        assert said(lambda: one.token) == said(lambda: None if other.get("_id") is None else dict(other["_id"]))
        if one.plain is not None:
            assert (one.plain.token, one.plain.cluster_time) == (other["_id"]["_data"], other["clusterTime"])
    assert one.raw == other.raw


@given(valid, st.sampled_from(FIELDS), values, names)
def test_a_value_that_looks_like_our_fields_is_none_of_them(raw: bytes, name: str, value: Any, other: str) -> None:
    """Not at depth, not inside a text, not in binary data: a walk goes by lengths, and searches for nothing."""
    looks = bson.encode({name: value, "_id": {"_data": "forged"}, "operationType": "delete", "ns": {"db": "forged"}})
    around = {"before": looks, "within": bson.decode(looks, EVENT_TYPES), "text": looks.hex() + "\0ns\0_id\0", other: 1}
    whole = bson.encode({**around, "list": [dict(around)], **RawBSONDocument(raw, EVENT_TYPES), "behind": looks})
    same(RawEvent(whole), RawBSONDocument(whole, EVENT_TYPES))


places_of_changes = st.fixed_dictionaries(
    {"db": st.sampled_from(["shop", "other"]), "coll": st.sampled_from(["orders", "lines"])}
)


looked_at = st.fixed_dictionaries(
    {},
    optional={
        "operationType": st.sampled_from(["insert", "update", "delete", "drop", "rename"]) | values,
        "ns": places_of_changes | values,
        "to": places_of_changes | values,
        "documentKey": st.just({"_id": 1}) | values,
        "updateDescription": st.fixed_dictionaries({"updatedFields": st.dictionaries(names, values, max_size=1)}),
    },
)


@settings(max_examples=150)
@given(
    st.lists(looked_at, min_size=2, max_size=6),
    st.sampled_from([Filter(), Filter(operations=frozenset({"insert", "rename"})), Filter(fields=frozenset({"a"}))]),
    st.sampled_from([Source("shop", "orders"), Source("shop", None), Source(None, None)]),
)
def test_who_gets_an_event_does_not_depend_on_those_before_it(
    events: list[dict[str, Any]], chosen: Filter, source: Source
) -> None:
    """P12: a selector is asked once about changes of one operation and namespace, and would say the same of each."""
    selector = Selector("summarise", (source,), chosen)
    admission = Admission(selector, partitioner(None, None, None), Layout(0, 16, "blake2b-64:_id"), {})
    for fields in [*events, *events]:
        raw = bson.encode(fields)
        event = ChangeEvent(mark(1), RawEvent(raw), raw)
        found = admission.admit(event)
        try:
            expected, reason = selector.selects(RawBSONDocument(raw, EVENT_TYPES)), None
        except Exception as error:  # noqa: BLE001 - it is refused then
            expected, reason = True, error
        assert (found is not None) == expected
        assert (found is not None and found.refusal is not None) == (reason is not None)


tokens = st.text("0123456789ABCDEFabcdef", max_size=40) | names
operations = st.sampled_from(["insert", "update", "replace", "delete", "snapshot"]) | names


EXPANDED = [("collectionUUID", BSON_VALUES["uuid"])]
SESSION = {"id": BSON_VALUES["uuid"], "uid": bytes(32)}
LAST = "fullDocumentBeforeChange"
IN_A_TRANSACTION: list[tuple[str, Any]] = [("txnNumber", Int64(7)), ("lsid", SESSION)]


@st.composite
def usual(draw: st.DrawFn) -> bytes:
    """An event of the usual form, or nearly: something left out, put in, doubled or moved."""
    fields = [
        *draw(st.sampled_from([[], [], IN_A_TRANSACTION, [*IN_A_TRANSACTION[:1], ("lsid", draw(documents))]])),
        ("_id", {"_data": draw(tokens), **draw(st.sampled_from([{}, {}, {"_typeBits": b"\x40"}]))}),
        ("operationType", draw(operations)),
        ("clusterTime", draw(st.builds(Timestamp, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))),
        *draw(st.sampled_from([[], [], EXPANDED])),
        ("wallTime", BSON_VALUES["datetime"]),
        ("fullDocument", draw(documents | st.none())),
        ("ns", draw(places_of_changes | documents)),
        ("documentKey", draw(st.just({"_id": KEY}) | documents)),
        ("updateDescription", draw(documents)),
        *draw(st.sampled_from([[], [(LAST, draw(documents))]])),
    ]
    left_out = draw(st.sampled_from(["", "", "wallTime", "fullDocument", "updateDescription"]))
    elements = [bson.encode({name: value})[4:-1] for name, value in fields if name != left_out]
    how, at = draw(st.sampled_from(["", "", "left out", "put in", "doubled", "moved"])), draw(st.integers(0, 6))
    if how == "left out":
        del elements[at]
    elif how == "put in":
        elements.insert(at, bson.encode({draw(names | st.sampled_from(FIELDS)): draw(values)})[4:-1])
    elif how == "doubled":
        elements.insert(at, draw(st.sampled_from(elements)))
    elif how == "moved":
        elements.insert(at, elements.pop(draw(st.integers(0, len(elements) - 1))))
    return join(*elements)


def decoded_event(raw: bytes) -> RawEvent:
    event = RawEvent(raw)
    event.plain = None
    return event


@settings(max_examples=400)
@given(raws | usual() | spoilt(usual()))
@example(bson.encode({"_id": [[None, None]]}))
def test_an_event_looks_as_if_it_were_decoded_whole(raw: bytes) -> None:
    """P12, P2: whatever bytes it has, whether it is recognised or not, and however nearly it is of the usual form."""
    looks_decoded(raw)


def looks_decoded(raw: bytes) -> None:
    try:
        decoded = RawBSONDocument(raw, EVENT_TYPES)
    except Exception as error:  # noqa: BLE001 - no document at all
        with pytest.raises(type(error)):
            RawEvent(raw)
        return
    same(RawEvent(raw), decoded)
    same(RawEvent(memoryview(raw)), decoded)
    for name in ("_id", "ns", "documentKey"):
        if said(lambda name=name: decoded[name])[0] == "RawBSONDocument":
            same(RawEvent(raw)[name], decoded[name])
    if read_plain(raw) is not None:
        slow = decoded_event(raw)
        assert (RawEvent(raw).origin, RawEvent(raw).object_id) == (slow.origin, slow.object_id)
        assert document_hash(RawEvent(raw)) == document_hash(decoded)


def make_usual(operation: str, left_out: tuple[str, ...], more: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {
        **dict(IN_A_TRANSACTION),
        "_id": {"_data": "826553F1A4000000012B022C0100296E5A1004"},
        "operationType": operation,
        "clusterTime": Timestamp(1700000164, 1),
        **dict(EXPANDED),
        "wallTime": BSON_VALUES["datetime"],
        "fullDocument": {"_id": KEY} if operation != "delete" else None,
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": KEY},
        "updateDescription": {"updatedFields": {"a": 1}, "removedFields": []},
        LAST: {"_id": KEY},
    }
    absent = {*left_out, *dict(EXPANDED + IN_A_TRANSACTION)} - dict(more).keys()
    if operation != "update":
        absent.add("updateDescription")
    return {name: value for name, value in fields.items() if name not in absent}


def document(fields: dict[str, Any]) -> bytes:
    """A document whose fields stay in this order: `encode` moves `_id`."""
    return join(*(bson.encode({name: value})[4:-1] for name, value in fields.items()))


def join(*elements: bytes) -> bytes:
    body = b"".join(elements) + b"\0"
    return (len(body) + 4).to_bytes(4, "little") + body


@pytest.mark.parametrize("operation", ["insert", "update", "replace", "delete"])
@pytest.mark.parametrize("more", [[], EXPANDED, IN_A_TRANSACTION], ids=["plain", "expanded", "in a transaction"])
@pytest.mark.parametrize(
    "left_out",
    [("wallTime", "fullDocument", LAST), ("fullDocument",), ("wallTime",), ()],
    ids=len,
)
def test_the_usual_form_is_recognised(left_out: tuple[str, ...], more: list[tuple[str, Any]], operation: str) -> None:
    """As servers send inserts, updates with and without a look-up, replaces and deletes."""
    whole = make_usual(operation, left_out, more)
    raw, longer = document(whole), document({**whole, "number": 7})
    event = RawEvent(raw)
    assert event.token == whole["_id"]
    assert event.plain is not None
    assert (event.plain.token, event.plain.cluster_time) == (whole["_id"]["_data"], whole["clusterTime"])
    assert event.object_id == (bson.encode(whole["ns"]), KEY.binary)
    looks_decoded(raw)
    assert read_plain(longer) is None
    looks_decoded(longer)
