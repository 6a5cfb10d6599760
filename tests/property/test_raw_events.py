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
from mongo_celery.bridge.raw_event import EVENT_TYPES, RawEvent, places, read_plain
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.filter import Filter
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.stream.source import Selector, Source
from mongo_celery.bridge.window import Mark
from tests.fixtures.samples import BSON_VALUES, mark, raw_event
from tests.property.test_events import documents, names, raws, valid, values

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


def same(one: RawBSONDocument, other: RawBSONDocument) -> None:
    """Both look alike from everywhere."""
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
        if one.place is not None:
            place = Mark(None, *one.place)
            assert (place.token, place.cluster_time) == (dict(other["_id"]), other["clusterTime"])
    assert one == other
    assert one.raw == other.raw


@settings(max_examples=200)
@given(raws)
@example(bson.encode({"_id": [[None, None]]}))
def test_an_event_looks_as_if_it_were_decoded_whole(raw: bytes) -> None:
    """P12, P2: whatever bytes it has; documents in it too."""
    try:
        decoded = RawBSONDocument(raw, EVENT_TYPES)
    except Exception as error:  # noqa: BLE001 - no document at all
        with pytest.raises(type(error)):
            RawEvent(raw)
        return
    same(RawEvent(raw), decoded)
    same(RawEvent(memoryview(raw)), decoded)
    for name in ("_id", "ns", "documentKey"):
        kind, _ = said(lambda name=name: decoded[name])
        if kind == "RawBSONDocument":
            same(RawEvent(raw)[name], decoded[name])


@settings(max_examples=200)
@given(raws)
def test_what_is_walked_is_what_a_decoder_takes(raw: bytes) -> None:
    """Every element is found, in order and to the byte; and what is walked has no error that a decoder would find."""
    found = places(raw)
    if found is None:
        return
    inflated = dict(RawBSONDocument(raw, EVENT_TYPES))
    assert list(found) == list(inflated)
    body = b"".join(
        bytes([kind]) + name.encode() + b"\0" + raw[start:stop] for name, (kind, start, stop) in found.items()
    )
    assert raw == len(raw).to_bytes(4, "little") + body + b"\0"


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


@given(
    places_of_changes | values,
    st.binary(min_size=12, max_size=12).map(ObjectId) | values,
    st.dictionaries(st.just("region"), names, max_size=1),
)
def test_the_partition_of_a_key_is_that_of_its_hash(ns: Any, key: Any, more: dict[str, Any]) -> None:
    """P1, P2: stored positions depend on it; an ObjectId takes a shorter way to the same number."""
    raw = bson.encode({"ns": ns, "documentKey": {"_id": key, **more}})
    for _ in range(2):
        assert document_hash(RawEvent(raw)) == document_hash(RawBSONDocument(raw, EVENT_TYPES))


def test_the_short_way_to_a_partition_is_taken() -> None:
    """By an event whose key is an ObjectId and nothing else."""
    assert RawEvent(raw_event(documentKey={"_id": KEY})).plain_key is not None
    for key in ({"_id": 1}, {"_id": KEY, "region": 1}, {"id_": KEY}, {}, KEY):
        assert RawEvent(raw_event(documentKey=key)).plain_key is None


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


@st.composite
def usual(draw: st.DrawFn) -> bytes:
    """An event of the usual form, or nearly: something left out, put in, doubled or moved."""
    fields = [
        ("_id", {"_data": draw(tokens), **draw(st.sampled_from([{}, {}, {"_typeBits": b"\x40"}]))}),
        ("operationType", draw(operations)),
        ("clusterTime", draw(st.builds(Timestamp, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))),
        ("wallTime", BSON_VALUES["datetime"]),
        ("fullDocument", draw(documents)),
        ("ns", draw(places_of_changes | documents)),
        ("documentKey", draw(st.just({"_id": KEY}) | documents)),
        ("updateDescription", draw(documents)),
    ]
    elements = [bson.encode({name: value})[4:-1] for name, value in fields]
    if draw(st.booleans()):
        del elements[draw(st.sampled_from([3, 4, 7]))]
    how, at = draw(st.sampled_from(["", "", "left out", "put in", "doubled", "moved"])), draw(st.integers(0, 6))
    if how == "left out":
        del elements[at]
    elif how == "put in":
        elements.insert(at, bson.encode({draw(names | st.sampled_from(FIELDS)): draw(values)})[4:-1])
    elif how == "doubled":
        elements.insert(at, draw(st.sampled_from(elements)))
    elif how == "moved":
        elements.insert(at, elements.pop(draw(st.integers(0, len(elements) - 1))))
    return document(*elements)


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """An event of the usual form with some bytes that are others, more or fewer, and mostly a length that fits."""
    data = bytearray(draw(usual()))
    for _ in range(draw(st.integers(1, 2))):
        at, how = draw(st.integers(4, len(data) - 2)), draw(st.sampled_from(["changed", "by one", "cut", "put in"]))
        if how == "changed":
            data[at] = draw(st.integers(0, 255))
        elif how == "by one":
            data[at] = (data[at] + draw(st.sampled_from([1, 255]))) % 256
        elif how == "cut" and len(data) > 20:
            del data[at : at + draw(st.integers(1, 5))]
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=5))
    if draw(st.booleans()):
        data[:4] = len(data).to_bytes(4, "little")
    return bytes(data)


def walked(raw: bytes) -> RawEvent:
    """The same event, but walked field by field."""
    event = RawEvent(raw)
    event._plain = None
    return event


@settings(max_examples=200)
@given(usual() | bent())
def test_an_event_of_the_usual_form_looks_as_if_it_were_decoded_whole(raw: bytes) -> None:
    """P12, P2: whether it is recognised at one look or not, and however nearly it is of that form."""
    try:
        decoded = RawBSONDocument(raw, EVENT_TYPES)
    except Exception as error:  # noqa: BLE001 - no document at all
        assert read_plain(raw) is None
        with pytest.raises(type(error)):
            RawEvent(raw)
        return
    same(RawEvent(raw), decoded)
    if read_plain(raw) is None:
        return
    assert places(raw) is not None, "what is recognised is walked too"
    assert (RawEvent(raw).origin, RawEvent(raw).plain_key) == (walked(raw).origin, walked(raw).plain_key)
    assert document_hash(RawEvent(raw)) == document_hash(decoded)


@pytest.mark.parametrize("optional", [("wallTime", "fullDocument"), ("fullDocument",), ("wallTime",), ()], ids=len)
@pytest.mark.parametrize("is_update", [True, False])
def test_the_usual_form_is_recognised(optional: tuple[str, ...], is_update: bool) -> None:
    """As servers send inserts, updates with and without a look-up, replaces and deletes."""
    whole = {
        "_id": {"_data": "826553F1A4000000012B022C0100296E5A1004"},
        "operationType": "update" if is_update else "insert",
        "clusterTime": Timestamp(1700000164, 1),
        **{name: {"wallTime": BSON_VALUES["datetime"], "fullDocument": {"_id": KEY}}[name] for name in optional},
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": KEY},
        **({"updateDescription": {"updatedFields": {"a": 1}, "removedFields": []}} if is_update else {}),
    }
    raw = bson.encode(whole)
    assert read_plain(raw) is not None
    event = RawEvent(raw)
    assert event.token == whole["_id"]
    assert event.place is not None
    assert Mark(None, *event.place) == Mark(whole["_id"], whole["_id"]["_data"], whole["clusterTime"])
    assert event.plain_key == (bson.encode(whole["ns"]), KEY.binary)
    same(event, RawBSONDocument(raw, EVENT_TYPES))


def element(kind: int, name: bytes, value: bytes) -> bytes:
    """One element of a document."""
    return bytes([kind]) + name + b"\0" + value


def document(*elements: bytes) -> bytes:
    """A document of these."""
    body = b"".join(elements) + b"\0"
    return (len(body) + 4).to_bytes(4, "little") + body


TEXT = b"\x02\0\0\0a\0"
ODD = {
    "a name twice": document(element(2, b"ns", TEXT), element(2, b"ns", b"\x02\0\0\0b\0")),
    "an array": bson.encode({"ns": [1]}),
    "a decimal": bson.encode({"ns": BSON_VALUES["decimal"]}),
    "binary of the old kind": document(element(5, b"ns", b"\x05\0\0\0\x02\x01\0\0\0x")),
    "a truth that is neither": document(element(8, b"ns", b"\x02")),
    "a text without an end": document(element(2, b"ns", b"\x02\0\0\0ab")),
    "a text of length 0": document(element(2, b"ns", b"\0\0\0\0")),
    "a text of negative length": document(element(2, b"ns", b"\xff\xff\xff\xffa\0")),
    "a text longer than the document": document(element(2, b"ns", b"\x50\0\0\0a\0")),
    "a document of 4 bytes": document(element(3, b"ns", b"\x04\0\0\0")),
    "a document without an end": document(element(3, b"ns", b"\x05\0\0\0\x01")),
    "binary of negative length": document(element(5, b"ns", b"\xf0\xff\xff\xff\0")),
    "no value": document(element(18, b"ns", b"\x01")),
    "no end of a name": b"\x08\0\0\0\x02ns\0",
    "a name that is no text": document(element(10, b"\xff", b"")),
    "an end within": document(element(10, b"ns", b""), b"\0", element(10, b"to", b"")),
    "an unknown kind": document(element(0x42, b"ns", TEXT)),
}


@pytest.mark.parametrize("raw", ODD.values(), ids=ODD)
def test_what_is_odd_is_left_to_the_decoder(raw: bytes) -> None:
    """It says what it is, as ever."""
    assert places(raw) is None
    same(RawEvent(raw), RawBSONDocument(raw, EVENT_TYPES))


@pytest.mark.parametrize("length", range(len(raw_event())))
def test_an_event_that_is_cut_is_none(length: int) -> None:
    """At whatever byte, with its old length or that of what is left."""
    cut = raw_event()[:length]
    assert places(cut) is None
    assert places(len(cut).to_bytes(4, "little") + cut[4:]) is None or length < 4


def test_an_event_of_a_server_is_walked() -> None:
    """All kinds of values that events have at their top, embedded NULs in texts and keys of all kinds among them."""
    whole = {
        "_id": {"_data": "8200"},
        "operationType": "update",
        "clusterTime": Timestamp(4294967295, 1),
        "wallTime": BSON_VALUES["datetime"],
        "fullDocument": {**BSON_VALUES, "_id": 1, "ns": {"db": "other"}, "text": "a\0ns\0"},
        "fullDocumentBeforeChange": None,
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": KEY, "region": "a\0b"},
        "updateDescription": {"updatedFields": {"documentKey._id": 2}, "removedFields": [], "truncatedArrays": []},
        "collectionUUID": BSON_VALUES["uuid"],
        "txnNumber": Int64(7),
        "lsid": {"id": BSON_VALUES["uuid"]},
        "number": 7,
        "double": 0.5,
        "flag": True,
    }
    raw = bson.encode(whole)
    assert list(places(raw) or ()) == list(whole)
    same(RawEvent(raw), RawBSONDocument(raw, EVENT_TYPES))
    same(RawEvent(raw)["documentKey"], RawBSONDocument(raw, EVENT_TYPES)["documentKey"])
    assert RawEvent(raw)["documentKey"]["_id"] == KEY
